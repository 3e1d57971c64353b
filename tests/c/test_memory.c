/* test_memory.c - every allocation may fail: an error, no crash, no leak, and life goes on.
 *
 * A scenario runs again and again, its 1st, 2nd, 3rd ... allocation failing, until it gets through
 * untouched. The address sanitizer's leak check at exit covers what the failures left behind.
 */
#include "check.h"
#include "tiny.h"

enum { N = 20, ENOUGH = 20000 };

typedef kvc_status (*scenario)(kvc_error *error);

static kvc_status load(kvc_error *error) {
    kvc_model *model = tiny_model(TINY_FULL, KVC_F16, 1, error);
    if (!model) return error->code;
    kvc_model_free(model);
    return KVC_OK;
}

/* Sender, message, receiver; each step only when the ones before it worked. */
static kvc_status exchange_with(kvc_model *model, kvc_error *error) {
    static const uint8_t keep[TINY_LAYERS] = {1, 0, 1, 1}, windowed[TINY_LAYERS] = {1, 0, 1, 0};
    kvc_workspace *ws = NULL;
    kvc_session *sender = NULL, *receiver = NULL, *second = NULL;
    kvc_kv *kv = NULL, *part = NULL, *joined = NULL, *trimmed = NULL;
    int32_t ids[N];
    float logits[TINY_VOCAB];
    tiny_ids(ids, N, 3);
    kvc_status status = kvc_workspace_create(&ws, model, NULL, NULL, error);
    if (!status) status = kvc_session_create(&sender, model, KVC_BF16, error);
    if (!status) status = kvc_session_create(&receiver, model, KVC_F32, error);
    if (!status) status = kvc_session_reserve(sender, 4, error);
    if (!status) status = tiny_run(ws, sender, ids, N, NULL, error);
    if (!status) status = kvc_session_freeze(sender, &kv, error);
    if (!status) status = kvc_session_create(&second, model, KVC_BF16, error);
    if (!status) status = kvc_session_resume(second, kv, error);
    if (!status) status = kvc_kv_select(&part, kv, keep, true, error);
    const kvc_kv *two[2] = {kv, part};
    if (!status) status = kvc_kv_concat(&joined, two, 2, true, keep, error);
    if (!status) status = kvc_kv_trim(&trimmed, joined, windowed, 6, error);
    if (!status) status = kvc_session_give(receiver, part, NULL, error);
    if (!status) status = tiny_run(ws, receiver, ids, N, logits, error);
    kvc_kv_free(trimmed);
    kvc_kv_free(joined);
    kvc_kv_free(part);
    kvc_kv_free(kv);
    kvc_session_free(second);
    kvc_session_free(receiver);
    kvc_session_free(sender);
    kvc_workspace_free(ws);
    return status;
}

static kvc_model *lasting; /* loaded once; the scenario starts behind it */

static kvc_status exchange(kvc_error *error) {
    return exchange_with(lasting, error);
}

static kvc_status from_memory(kvc_error *error) {
    static const float x[2 * 3 * 4];
    kvc_device *device = NULL;
    kvc_kv *kv = NULL;
    kvc_status status = kvc_device_open(&device, tiny_device, error);
    if (!status) status = kvc_kv_create(&kv, device, 2, 2, 4, KVC_F32, 3, error);
    for (int i = 0; !status && i < 5; i++) {
        status = kvc_kv_add(kv, i % 2, x, x, 3, 3 * i, 0, error);
    }
    kvc_kv_free(kv);
    kvc_device_close(device);
    return status;
}

static kvc_status choose(kvc_error *error) {
    static const float logits[5] = {0, 1, 2, 1, 0};
    static const double mass[3] = {0.1, 0.3, 0.2};
    kvc_sampler sampler = {.temperature = 1, .top_p = 0.9};
    float scores[3];
    int32_t id;
    kvc_sampler_seed(&sampler, 1);
    kvc_status status = kvc_sample(&id, &sampler, logits, 5, error);
    if (!status) status = kvc_score(scores, mass, 3, 0.5, 1, 10, KVC_REFERENCE, error);
    return status;
}

static void inject(scenario run) {
    long n = 1;
    for (; n < ENOUGH; n++) {
        kvc_error error = {0};
        allocations_fail_at(n);
        kvc_status status = run(&error);
        int failed = allocations_failed();
        allocations_fail_at(0);
        if (!failed) {
            GOOD(status);
            break;
        }
        /* a refused allocation may be got by without (a pool with fewer threads) */
        if (!status) continue;
        CHECK(status == KVC_ERROR_MEMORY);
        CHECK(error.code == KVC_ERROR_MEMORY && error.message[0]);
    }
    CHECK(n > 1 && n < ENOUGH);
}

static void loading(void) {
    inject(load);
}

static void exchanging(void) {
    kvc_error error = {0};
    lasting = tiny_model(TINY_FULL, KVC_F32, 1, &error);
    REQUIRE(lasting);
    inject(exchange);
    kvc_model_free(lasting);
}

static void adding(void) {
    inject(from_memory);
}

static void choosing(void) {
    inject(choose);
}

/* A session that saw an allocation fail goes on to the same bits. */
static void session_survives(void) {
    kvc_error error = {0};
    kvc_model *model = tiny_model(TINY_PLAIN, KVC_F32, 1, &error);
    kvc_workspace *ws = NULL;
    kvc_session *untouched = NULL, *session = NULL;
    REQUIRE(model);
    GOOD(kvc_workspace_create(&ws, model, NULL, NULL, &error));
    GOOD(kvc_session_create(&untouched, model, KVC_F32, &error));
    GOOD(kvc_session_create(&session, model, KVC_F32, &error));
    REQUIRE(ws && untouched && session);
    static int32_t ids[600];
    float wanted[TINY_VOCAB], got[TINY_VOCAB];
    tiny_ids(ids, 600, 1);
    GOOD(tiny_run(ws, untouched, ids, 5, NULL, &error));
    GOOD(tiny_run(ws, untouched, ids + 5, 595, wanted, &error));
    GOOD(tiny_run(ws, session, ids, 5, NULL, &error));
    kvc_workspace_free(ws);
    for (long n = 1; n < ENOUGH; n++) {
        allocations_fail_at(n);
        kvc_status status = kvc_workspace_create(&ws, model, NULL, NULL, &error);
        if (!status) status = tiny_run(ws, session, ids + 5, 595, got, &error);
        allocations_fail_at(0);
        kvc_workspace_free(ws);
        ws = NULL;
        if (!status) break;
        CHECK(status == KVC_ERROR_MEMORY && kvc_session_length(session, 0) == 5);
    }
    CHECK(memcmp(wanted, got, sizeof got) == 0);
    kvc_session_free(untouched);
    kvc_session_free(session);
    kvc_model_free(model);
}

const test memory_tests[] = {{"loading", loading},
                             {"exchanging", exchanging},
                             {"adding parts", adding},
                             {"choosing", choosing},
                             {"session survives", session_survives},
                             {NULL, NULL}};
