/* test_kv.c - messages share blocks, and every owner may go in any order. */
#include "../../csrc/core/core.h"
#include "check.h"
#include "tiny.h"

#include <stdlib.h>

enum { N = 9 };

/* A frozen run of N tokens. */
static kvc_kv *message(kvc_model *model, unsigned seed) {
    kvc_error error = {0};
    kvc_workspace *ws = NULL;
    kvc_session *session = NULL;
    kvc_kv *kv = NULL;
    int32_t ids[N];
    tiny_ids(ids, N, seed);
    GOOD(kvc_workspace_create(&ws, model, NULL, NULL, &error));
    GOOD(kvc_session_create(&session, model, KVC_F32, &error));
    GOOD(tiny_run(ws, session, ids, N, NULL, &error));
    GOOD(kvc_session_freeze(session, &kv, &error));
    kvc_session_free(session);
    kvc_workspace_free(ws);
    return kv;
}

static void selecting(void) {
    kvc_error error = {0};
    kvc_model *model = tiny_model(TINY_PLAIN, KVC_F32, 1, &error);
    REQUIRE(model);
    kvc_kv *kv = message(model, 1), *part = NULL, *sink = NULL;
    REQUIRE(kv);
    const uint8_t keep[TINY_LAYERS] = {0, 1, 0, 1};
    GOOD(kvc_kv_select(&part, kv, keep, false, &error));
    GOOD(kvc_kv_select(&sink, kv, keep, true, &error));
    CHECK(kvc_kv_length(part, 0) == 0 && kvc_kv_length(part, 1) == N);
    CHECK(kvc_kv_length(sink, 0) == 1 && kvc_kv_length(sink, 3) == N);
    CHECK(kvc_kv_next_position(part) == N);
    CHECK(kvc_kv_bytes(part) == 2 * 2 * N * 2 * 8 * sizeof(float)); /* K and V of two layers */
    CHECK(kvc_kv_bytes(sink) == kvc_kv_bytes(part) + 2 * 2 * 2 * 8 * sizeof(float));
    kvc_kv_part whole, shared, first;
    GOOD(kvc_kv_part_view(kv, 1, 0, &whole, &error));
    GOOD(kvc_kv_part_view(part, 1, 0, &shared, &error));
    GOOD(kvc_kv_part_view(sink, 0, 0, &first, &error));
    CHECK(whole.k == shared.k && whole.v == shared.v); /* not a copy */
    CHECK(first.n == 1 && first.position == 0);
    const float *k = whole.k;
    float value = k ? k[0] : 0;
    kvc_kv_free(kv); /* the block lives on in part, and the device with it */
    kvc_model_free(model);
    GOOD(kvc_kv_part_view(part, 1, 0, &shared, &error));
    CHECK(!k || ((const float *)shared.k)[0] == value);
    kvc_kv_free(part);
    kvc_kv_free(sink);
}

static void joining(void) {
    kvc_error error = {0};
    kvc_model *model = tiny_model(TINY_PLAIN, KVC_F32, 1, &error);
    REQUIRE(model);
    kvc_kv *kvs[3] = {message(model, 1), message(model, 2), message(model, 3)}, *joined = NULL;
    REQUIRE(kvs[0] && kvs[1] && kvs[2]);
    const uint8_t whole[TINY_LAYERS] = {1, 1, 0, 1};
    GOOD(kvc_kv_concat(&joined, (const kvc_kv *const *)kvs, 3, true, whole, &error));
    REQUIRE(joined);
    for (int i = 0; i < 3; i++) kvc_kv_free(kvs[i]);
    CHECK(kvc_kv_next_position(joined) == 3 * N);
    CHECK(kvc_kv_parts(joined, 0) == 3 && kvc_kv_parts(joined, 2) == 1);
    for (size_t i = 0; i < 3; i++) {
        kvc_kv_part part;
        GOOD(kvc_kv_part_view(joined, 0, i, &part, &error));
        CHECK(part.position == 0 && part.offset == (int64_t)i * N && part.n == N);
    }
    kvc_kv *trimmed = NULL;
    const uint8_t windowed[TINY_LAYERS] = {0, 1, 0, 0};
    GOOD(kvc_kv_trim(&trimmed, joined, windowed, 5, &error));
    CHECK(kvc_kv_length(trimmed, 0) == 3 * N && kvc_kv_length(trimmed, 1) == 4);
    kvc_kv_free(joined);
    kvc_kv_part tail;
    GOOD(kvc_kv_part_view(trimmed, 1, 0, &tail, &error));
    CHECK(tail.n == 4 && tail.position == N - 4 && tail.offset == 2 * N);
    kvc_kv_free(trimmed);
    kvc_model_free(model);
}

/* All layers of the same model = one prompt read in one go. */
static void giving_everything(void) {
    kvc_error error = {0};
    kvc_model *model = tiny_model(TINY_FULL, KVC_F32, 5, &error);
    REQUIRE(model);
    kvc_kv *kv = message(model, 4);
    kvc_workspace *ws = NULL;
    kvc_session *one = NULL, *other = NULL;
    GOOD(kvc_workspace_create(&ws, model, NULL, NULL, &error));
    GOOD(kvc_session_create(&one, model, KVC_F32, &error));
    GOOD(kvc_session_create(&other, model, KVC_F32, &error));
    REQUIRE(kv && ws && one && other);
    int32_t ids[N + 3];
    float whole[TINY_VOCAB], given[TINY_VOCAB];
    tiny_ids(ids, N, 4);
    tiny_ids(ids + N, 3, 9);
    GOOD(tiny_run(ws, one, ids, N + 3, whole, &error));
    GOOD(kvc_session_give(other, kv, NULL, &error));
    kvc_kv_free(kv); /* the session holds the blocks */
    GOOD(tiny_run(ws, other, ids + N, 3, given, &error));
    CHECK(kvc_session_next_position(other) == N + 3);
    CHECK(kvc_session_given(other, 0) == N && kvc_session_length(other, 0) == 3);
    for (int t = 0; t < TINY_VOCAB; t++) {
        float difference = whole[t] - given[t];
        CHECK(difference < 1e-4f && difference > -1e-4f);
    }
    kvc_session_free(one);
    kvc_session_free(other);
    kvc_workspace_free(ws);
    kvc_model_free(model);
}

/* What was frozen never changes, whatever the session does next. */
static void frozen_stays(void) {
    kvc_error error = {0};
    kvc_model *model = tiny_model(TINY_PLAIN, KVC_F32, 2, &error);
    REQUIRE(model);
    kvc_workspace *ws = NULL;
    kvc_session *session = NULL;
    kvc_kv *kv = NULL, *longer = NULL;
    int32_t ids[N];
    tiny_ids(ids, N, 6);
    GOOD(kvc_workspace_create(&ws, model, NULL, NULL, &error));
    GOOD(kvc_session_create(&session, model, KVC_F32, &error));
    GOOD(kvc_session_reserve(session, 64, &error));
    GOOD(tiny_run(ws, session, ids, 5, NULL, &error));
    GOOD(kvc_session_freeze(session, &kv, &error));
    CHECK(kvc_kv_parts(kv, 0) == 1);
    kvc_kv_part part;
    GOOD(kvc_kv_part_view(kv, 0, 0, &part, &error));
    float before[8];
    if (part.k) memcpy(before, (const float *)part.k + 4 * 8, sizeof before);
    kvc_session_truncate(session, 4);
    GOOD(tiny_run(ws, session, ids + 5, 4, NULL, &error));
    GOOD(kvc_session_freeze(session, &longer, &error));
    CHECK(kvc_kv_length(kv, 0) == 5 && kvc_kv_length(longer, 0) == 8);
    if (part.k) CHECK(memcmp(before, (const float *)part.k + 4 * 8, sizeof before) == 0);
    kvc_kv_free(kv);
    kvc_kv_free(longer);
    kvc_session_free(session);
    kvc_workspace_free(ws);
    kvc_model_free(model);
}

static void from_memory(void) {
    kvc_error error = {0};
    kvc_device *device = NULL;
    kvc_kv *kv = NULL;
    GOOD(kvc_device_open(&device, tiny_device, &error));
    GOOD(kvc_kv_create(&kv, device, 2, 2, 3, KVC_F32, 11, &error));
    kvc_device_close(device);
    REQUIRE(kv);
    float k[2][4][3], v[2][4][3];
    for (int i = 0; i < 24; i++) {
        ((float *)k)[i] = (float)i;
        ((float *)v)[i] = (float)-i;
    }
    GOOD(kvc_kv_add(kv, 1, k, v, 4, 7, 2, &error));
    memset(k, 0, sizeof k); /* it was copied */
    kvc_kv_part part;
    GOOD(kvc_kv_part_view(kv, 1, 0, &part, &error));
    CHECK(part.n == 4 && part.position == 7 && part.offset == 2);
    for (size_t h = 0; part.k && h < 2; h++) {
        for (size_t i = 0; i < 12; i++) {
            CHECK(((const float *)part.k)[h * part.head_stride + i] == (float)(h * 12 + i));
            CHECK(((const float *)part.v)[h * part.head_stride + i] == -(float)(h * 12 + i));
        }
    }
    kvc_kv_free(kv);
}

/* A KV of one layer with n tokens, each value of K and V being x. */
static kvc_kv *constant(kvc_device *device, size_t n, float x) {
    enum { MOST = 4000 };
    static float values[MOST * 8];
    kvc_error error = {0};
    kvc_kv *kv = NULL;
    for (size_t i = 0; i < n * 8; i++) values[i] = x;
    GOOD(kvc_kv_create(&kv, device, 1, 2, 4, KVC_F32, 0, &error));
    GOOD(kvc_kv_add(kv, 0, values, values, n, 0, 0, &error));
    return kv;
}

/* Released buffers serve again, never hold more than live ones once did, and go with the device. */
static void spares(void) {
    kvc_error error = {0};
    kvc_device *device = NULL;
    GOOD(kvc_device_open(&device, tiny_device, &error));
    REQUIRE(device);
    const kvc_spares *s = &device->spares;
    enum { TOKEN = 2 * 2 * 4 * sizeof(float) }; /* K and V */
    kvc_kv *a = constant(device, 1000, 1), *b = constant(device, 2000, 2);
    CHECK(s->live == 3000 * TOKEN && s->most == 3000 * TOKEN && s->bytes == 0);
    kvc_kv_part first, second;
    GOOD(kvc_kv_part_view(a, 0, 0, &first, &error));
    kvc_kv_free(a);
    bool kept = s->bytes == 1000 * TOKEN; /* not so under the address sanitizer */
    CHECK(s->live == 2000 * TOKEN && (kept || s->bytes == 0));
    a = constant(device, 990, 3); /* fits with 1 % of waste */
    GOOD(kvc_kv_part_view(a, 0, 0, &second, &error));
    CHECK(!kept || (first.k == second.k && s->live == 3000 * TOKEN && s->bytes == 0));
    CHECK(second.n == 990 && second.head_stride == 990 * 4);
    for (size_t i = 0; second.k && i < 990 * 8; i++) {
        CHECK(((const float *)second.k)[i] == 3 && ((const float *)second.v)[i] == 3);
    }
    kvc_kv_free(a);
    kvc_kv_free(b);
    CHECK(s->live == 0 && s->bytes == (kept ? 3000 * TOKEN : 0));
    a = constant(device, 1500,
                 4); /* fits none: 1000 is too small, 2000 too large; both cannot stay */
    CHECK(s->live == 1500 * TOKEN && s->live + s->bytes <= s->most);
    b = constant(device, 4000, 5);
    CHECK(s->live == 5500 * TOKEN && s->most == 5500 * TOKEN && s->bytes == 0);
    kvc_kv_free(a);
    kvc_kv_free(b);
    kvc_device_close(device);
}

const test kv_tests[] = {{"selecting shares", selecting},
                         {"joining and trimming", joining},
                         {"giving everything is one prompt", giving_everything},
                         {"frozen stays", frozen_stays},
                         {"from memory", from_memory},
                         {"spares", spares},
                         {NULL, NULL}};
