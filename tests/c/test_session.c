/* test_session.c - a session's blocks: what is shared stays, what fails leaves no trace. */
#include "check.h"
#include "tiny.h"

#include <float.h>
#include <math.h>

typedef struct stage {
    kvc_model *model;
    kvc_workspace *ws;
    kvc_session *session;
} stage;

static stage set_stage(void) {
    kvc_error error = {0};
    stage s = {.model = tiny_model(TINY_PLAIN, KVC_F32, 5, &error)};
    if (!s.model) return s;
    GOOD(kvc_workspace_create(&s.ws, s.model, NULL, NULL, &error));
    GOOD(kvc_session_create(&s.session, s.model, KVC_F32, &error));
    return s;
}

static void clear_stage(stage *s) {
    kvc_session_free(s->session);
    kvc_workspace_free(s->ws);
    kvc_model_free(s->model);
}

/* A message that was frozen, taken back from the session and frozen past is not written again. */
static void frozen_twice(void) {
    kvc_error error = {0};
    stage s = set_stage();
    REQUIRE(s.session);
    int32_t first[10], second[10];
    tiny_ids(first, 10, 1);
    tiny_ids(second, 10, 2);
    CHECK(first[0] != second[0]);
    kvc_kv *kv = NULL, *nothing = NULL;
    kvc_kv_part part;
    GOOD(tiny_run(s.ws, s.session, first, 10, NULL, &error));
    GOOD(kvc_session_freeze(s.session, &kv, &error));
    GOOD(kvc_kv_part_view(kv, 1, 0, &part, &error));
    kvc_session_truncate(s.session, 0);
    GOOD(kvc_session_freeze(s.session, &nothing, &error));
    CHECK(kvc_kv_length(nothing, 1) == 0);
    const float before = part.k ? ((const float *)part.k)[0] : 0;
    GOOD(tiny_run(s.ws, s.session, second, 10, NULL, &error));
    CHECK(!part.k || ((const float *)part.k)[0] == before);
    kvc_kv_free(kv);
    kvc_kv_free(nothing);
    clear_stage(&s);
}

static int stop_at_once(void *context) {
    (void)context;
    return 1;
}

/* After a call that was stopped, the next tokens have the bits that they have without it. */
static void stopped_call(void) {
    kvc_error error = {0};
    stage s = set_stage();
    REQUIRE(s.session);
    kvc_workspace *stopping = NULL;
    kvc_session *calm = NULL;
    GOOD(kvc_workspace_create(&stopping, s.model, stop_at_once, NULL, &error));
    GOOD(kvc_session_create(&calm, s.model, KVC_F32, &error));
    int32_t ids[200];
    float disturbed[TINY_VOCAB], wanted[TINY_VOCAB];
    tiny_ids(ids, 200, 1);
    GOOD(tiny_run(s.ws, s.session, ids, 5, NULL, &error));
    GOOD(tiny_run(s.ws, calm, ids, 5, NULL, &error));
    FAILS(tiny_run(stopping, s.session, ids, 150, NULL, &error), KVC_ERROR_INTERRUPTED, "");
    CHECK(kvc_session_length(s.session, 0) == 5);
    for (int i = 0; i < 200; i++) {
        GOOD(tiny_run(s.ws, s.session, ids + i, 1, disturbed, &error));
        GOOD(tiny_run(s.ws, calm, ids + i, 1, wanted, &error));
        CHECK(memcmp(disturbed, wanted, sizeof wanted) == 0);
    }
    kvc_session_free(calm);
    kvc_workspace_free(stopping);
    clear_stage(&s);
}

static void reserving(void) {
    kvc_error error = {0};
    stage s = set_stage();
    REQUIRE(s.session);
    int32_t ids[200];
    tiny_ids(ids, 200, 1);
    GOOD(kvc_session_reserve(s.session, 10, &error));
    GOOD(kvc_session_reserve(s.session, 200, &error));
    FAILS(kvc_session_reserve(s.session, SIZE_MAX / 64, &error), KVC_ERROR_MEMORY, "");
    GOOD(kvc_session_reserve(s.session, 200, &error));
    GOOD(tiny_run(s.ws, s.session, ids, 200, NULL, &error));
    kvc_kv *kv = NULL;
    GOOD(kvc_session_freeze(s.session, &kv, &error));
    for (int l = 0; l < TINY_LAYERS; l++) CHECK(kvc_kv_parts(kv, l) == 1);
    kvc_kv_free(kv);
    clear_stage(&s);
}

/* A session that goes on from another's tail has the bits of one that ran all of it; a tail at
 * another position leaves it as it was. */
static void resuming(void) {
    kvc_error error = {0};
    stage s = set_stage();
    REQUIRE(s.session);
    enum { ALL = 150, FIRST = 70 };
    int32_t ids[ALL];
    float wanted[TINY_VOCAB], found[TINY_VOCAB];
    tiny_ids(ids, ALL, 1);
    kvc_session *first = NULL, *resumed = NULL;
    kvc_kv *tail = NULL;
    GOOD(kvc_session_create(&first, s.model, KVC_F32, &error));
    GOOD(kvc_session_create(&resumed, s.model, KVC_F32, &error));
    GOOD(tiny_run(s.ws, s.session, ids, ALL, wanted, &error));
    GOOD(tiny_run(s.ws, first, ids, FIRST, NULL, &error));
    GOOD(kvc_session_freeze(first, &tail, &error));
    GOOD(kvc_session_set_position(resumed, 1, &error));
    FAILS(kvc_session_resume(resumed, tail, &error), KVC_ERROR_MISMATCH, "position 0");
    CHECK(kvc_session_length(resumed, 0) == 0);
    GOOD(kvc_session_set_position(resumed, 0, &error));
    GOOD(kvc_session_reserve(resumed, ALL, &error));
    GOOD(kvc_session_resume(resumed, tail, &error));
    CHECK(kvc_session_length(resumed, TINY_LAYERS - 1) == FIRST);
    FAILS(kvc_session_resume(resumed, tail, &error), KVC_ERROR_VALUE, "tokens of its own");
    GOOD(tiny_run(s.ws, resumed, ids + FIRST, ALL - FIRST, found, &error));
    CHECK(memcmp(found, wanted, sizeof wanted) == 0);
    kvc_kv_free(tail);
    kvc_session_free(resumed);
    kvc_session_free(first);
    clear_stage(&s);
}

/* Positions that would overflow or fall below 0 are refused where they are given. */
static void positions(void) {
    kvc_error error = {0};
    stage s = set_stage();
    REQUIRE(s.session);
    const uint8_t all[TINY_LAYERS] = {1, 1, 1, 1};
    FAILS(kvc_session_set_position(s.session, INT64_MAX, &error), KVC_ERROR_VALUE, "out of range");
    FAILS(kvc_session_set_shift(s.session, -1, all, &error), KVC_ERROR_VALUE, "below position 0");
    GOOD(kvc_session_set_position(s.session, 10, &error));
    GOOD(kvc_session_set_shift(s.session, -10, all, &error));
    kvc_kv *kv = NULL;
    kvc_device *device = kvc_model_device(s.model);
    const float zeros[2 * 8 * 3] = {0};
    FAILS(kvc_kv_create(&kv, device, TINY_LAYERS, 2, 8, KVC_F32, INT64_MAX, &error),
          KVC_ERROR_VALUE, "next position");
    GOOD(kvc_kv_create(&kv, device, TINY_LAYERS, 2, 8, KVC_F32, 3, &error));
    FAILS(kvc_kv_add(kv, 0, zeros, zeros, 3, INT64_MAX, 0, &error), KVC_ERROR_VALUE, "position");
    GOOD(kvc_kv_add(kv, 0, zeros, zeros, 3, 0, 0, &error));
    FAILS(kvc_session_give(s.session, kv, NULL, &error), KVC_ERROR_VALUE, "below position 0");
    kvc_kv_free(kv);
    clear_stage(&s);
}

/* A given key that is no number is refused; one whose products are none is not skipped: the run says
 * so. */
static void nan_key(void) {
    kvc_error error = {0};
    stage s = set_stage();
    REQUIRE(s.session);
    float key[2 * 8];
    for (size_t i = 0; i < sizeof key / sizeof *key; i++) key[i] = NAN;
    kvc_kv *kv = NULL;
    GOOD(kvc_kv_create(&kv, kvc_model_device(s.model), TINY_LAYERS, 2, 8, KVC_F32, 1, &error));
    FAILS(kvc_kv_add(kv, 0, key, key, 1, 0, 0, &error), KVC_ERROR_NUMERIC, "layer 0");
    for (size_t i = 0; i < sizeof key / sizeof *key; i++) key[i] = FLT_MAX;
    GOOD(kvc_kv_add(kv, 0, key, key, 1, 0, 0, &error));
    GOOD(kvc_session_give(s.session, kv, NULL, &error));
    const int32_t ids[2] = {1, 2};
    float logits[TINY_VOCAB];
    FAILS(tiny_run(s.ws, s.session, ids, 2, logits, &error), KVC_ERROR_NUMERIC, "layer 1");
    kvc_kv_free(kv);
    clear_stage(&s);
}

const test session_tests[] = {{"frozen twice", frozen_twice},
                              {"stopped call", stopped_call},
                              {"reserving", reserving},
                              {"resuming", resuming},
                              {"positions", positions},
                              {"NaN key", nan_key},
                              {NULL, NULL}};
