/* test_forward.c - a row's bits depend on its own session and tokens only. */
#include "check.h"
#include "tiny.h"

enum { ROWS = 5, MOST = 40 };
static const size_t lengths[ROWS] = {1, 17, 3, 40, 8};

/* Logits [ROWS, vocab] of rows that run alone, each in its own call. */
static void run_alone(kvc_model *model, int32_t ids[ROWS][MOST], float logits[ROWS][TINY_VOCAB]) {
    kvc_error error = {0};
    kvc_workspace *ws = NULL;
    GOOD(kvc_workspace_create(&ws, model, NULL, NULL, &error));
    for (int i = 0; i < ROWS; i++) {
        kvc_session *session = NULL;
        GOOD(kvc_session_create(&session, model, KVC_F32, &error));
        GOOD(tiny_run(ws, session, ids[i], lengths[i], logits[i], &error));
        kvc_session_free(session);
    }
    kvc_workspace_free(ws);
}

static void check_batch(tiny_kind kind, kvc_dtype dtype) {
    kvc_error error = {0};
    kvc_model *model = tiny_model(kind, dtype, 7, &error);
    REQUIRE(model);
    static int32_t ids[ROWS][MOST];
    static float alone[ROWS][TINY_VOCAB], together[ROWS][TINY_VOCAB];
    for (int i = 0; i < ROWS; i++) tiny_ids(ids[i], lengths[i], (unsigned)i);
    GOOD(kvc_set_num_threads(1, &error));
    run_alone(model, ids, alone);
    for (int threads = 1; threads <= 3; threads++) {
        GOOD(kvc_set_num_threads(threads, &error));
        kvc_workspace *ws = NULL;
        GOOD(kvc_workspace_create(&ws, model, NULL, NULL, &error));
        kvc_session *sessions[ROWS] = {NULL};
        kvc_row rows[ROWS] = {0};
        int32_t last[ROWS];
        for (int i = 0; i < ROWS; i++) {
            GOOD(kvc_session_create(&sessions[i], model, KVC_F32, &error));
            last[i] = (int32_t)lengths[i] - 1;
            rows[i] = (kvc_row){.session = sessions[i], .tokens = ids[i], .n = lengths[i]};
            rows[i].outputs = &last[i];
            rows[i].n_outputs = 1;
        }
        kvc_batch batch = {.rows = rows,
                           .n_rows = ROWS,
                           .layer_end = TINY_LAYERS,
                           .output = KVC_OUT_LOGITS,
                           .out = together};
        memset(together, 0, sizeof together);
        GOOD(kvc_forward(ws, &batch, &error));
        CHECK(memcmp(alone, together, sizeof alone) == 0);
        for (int i = 0; i < ROWS; i++) {
            CHECK(kvc_session_length(sessions[i], 0) == lengths[i]);
            kvc_session_free(sessions[i]);
        }
        kvc_workspace_free(ws);
    }
    GOOD(kvc_set_num_threads(0, &error));
    kvc_model_free(model);
}

static void batch_plain(void) {
    check_batch(TINY_PLAIN, KVC_F32);
}

static void batch_full(void) {
    check_batch(TINY_FULL, KVC_F32);
}

static void batch_f16(void) {
    check_batch(TINY_FULL, KVC_F16);
}

static void batch_bf16(void) {
    check_batch(TINY_PLAIN, KVC_BF16);
}

/* Each output kind says the same about the same row. */
static void outputs_agree(void) {
    kvc_error error = {0};
    kvc_model *model = tiny_model(TINY_PLAIN, KVC_F32, 3, &error);
    REQUIRE(model);
    kvc_workspace *ws = NULL;
    kvc_session *session = NULL;
    GOOD(kvc_workspace_create(&ws, model, NULL, NULL, &error));
    GOOD(kvc_session_create(&session, model, KVC_F32, &error));
    int32_t ids[6], where[2] = {2, 5}, best[2], target[2];
    float logits[2][TINY_VOCAB], logprob[2];
    tiny_ids(ids, 6, 1);
    kvc_row row = {.session = session, .tokens = ids, .n = 6, .outputs = where, .n_outputs = 2};
    kvc_batch batch = {.rows = &row,
                       .n_rows = 1,
                       .layer_end = TINY_LAYERS,
                       .output = KVC_OUT_LOGITS,
                       .out = logits};
    GOOD(kvc_forward(ws, &batch, &error));
    kvc_session_truncate(session, 0);
    batch.output = KVC_OUT_ARGMAX;
    batch.out = best;
    GOOD(kvc_forward(ws, &batch, &error));
    kvc_session_truncate(session, 0);
    for (int i = 0; i < 2; i++) {
        for (int t = 0; t < TINY_VOCAB; t++) CHECK(logits[i][t] <= logits[i][best[i]]);
        target[i] = best[i];
    }
    batch.output = KVC_OUT_LOGPROB;
    batch.out = logprob;
    row.targets = target;
    GOOD(kvc_forward(ws, &batch, &error));
    for (int i = 0; i < 2; i++) {
        CHECK(logprob[i] < 0 && logprob[i] > -4.42f); /* the best of 83 is above 1 / 83 */
    }
    CHECK(kvc_workspace_counts(ws).tokens == 18);
    kvc_session_free(session);
    kvc_workspace_free(ws);
    kvc_model_free(model);
}

/* A token that comes alone has the bits that it has among all: a prompt of n tokens on one thread
 * against its first n - 2 tokens and two steps on three, in blocks of the same room. The lengths
 * cross tiles of keys and of queries, and the last one whatever else long contexts are cut into. */
static void check_steps(tiny_kind kind, kvc_dtype kv_dtype) {
    enum { N = 1300 };
    static const size_t some[] = {3, 64, 65, 100, 128, 149, N};
    kvc_error error = {0};
    kvc_model *model = tiny_model(kind, KVC_F32, 11, &error);
    kvc_workspace *ws = NULL;
    REQUIRE(model);
    static int32_t ids[N];
    float whole[TINY_VOCAB], stepped[TINY_VOCAB];
    tiny_ids(ids, N, 5);
    for (size_t i = 0; i < sizeof some / sizeof *some; i++) {
        kvc_session *one = NULL, *many = NULL;
        GOOD(kvc_session_create(&one, model, kv_dtype, &error));
        GOOD(kvc_session_create(&many, model, kv_dtype, &error));
        GOOD(kvc_session_reserve(one, N, &error));
        GOOD(kvc_session_reserve(many, N, &error));
        GOOD(kvc_set_num_threads(1, &error));
        GOOD(kvc_workspace_create(&ws, model, NULL, NULL, &error));
        GOOD(tiny_run(ws, one, ids, some[i], whole, &error));
        GOOD(kvc_set_num_threads(3, &error));
        GOOD(tiny_run(ws, many, ids, some[i] - 2, NULL, &error));
        GOOD(tiny_run(ws, many, ids + some[i] - 2, 1, NULL, &error));
        GOOD(tiny_run(ws, many, ids + some[i] - 1, 1, stepped, &error));
        CHECK(memcmp(whole, stepped, sizeof whole) == 0);
        kvc_workspace_free(ws);
        kvc_session_free(one);
        kvc_session_free(many);
    }
    GOOD(kvc_set_num_threads(0, &error));
    kvc_model_free(model);
}

static void steps_plain(void) {
    check_steps(TINY_PLAIN, KVC_F32);
}

static void steps_full(void) {
    check_steps(TINY_FULL, KVC_F32);
}

static void steps_f16(void) {
    check_steps(TINY_PLAIN, KVC_F16);
}

const test forward_tests[] = {{"steps equal a prompt, plain", steps_plain},
                              {"steps equal a prompt, every option", steps_full},
                              {"steps equal a prompt, f16 keys", steps_f16},
                              {"batch equals alone, plain", batch_plain},
                              {"batch equals alone, every option", batch_full},
                              {"batch equals alone, f16", batch_f16},
                              {"batch equals alone, bf16", batch_bf16},
                              {"outputs agree", outputs_agree},
                              {NULL, NULL}};
