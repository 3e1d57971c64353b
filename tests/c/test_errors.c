/* test_errors.c - every status, with a message that names the thing; nothing changes on the way. */
#include "check.h"
#include "tiny.h"

#include <math.h>

static int stop_at_once(void *context) {
    ++*(int *)context;
    return 1;
}

static void bad_models(void) {
    kvc_error error = {0};
    kvc_device *device = NULL;
    kvc_model *model = NULL;
    FAILS(kvc_device_open(&device, "abacus", &error), KVC_ERROR_DEVICE, "abacus");
    FAILS(kvc_device_open(&device, "cuda", &error), KVC_ERROR_DEVICE, "cuda");
    GOOD(kvc_device_open(&device, tiny_device, &error));
    REQUIRE(device);
    kvc_config config = tiny_config(TINY_PLAIN);
    config.n_kv_heads = 3;
    FAILS(kvc_model_create(&model, device, &config, KVC_F32, &error), KVC_ERROR_VALUE, "3");
    config = tiny_config(TINY_PLAIN);
    config.rope[0].kind = (kvc_rope_kind)9;
    FAILS(kvc_model_create(&model, device, &config, KVC_F32, &error), KVC_ERROR_UNSUPPORTED, "9");
    config = tiny_config(TINY_PLAIN);
    config.vocab_size = config.dim = config.hidden_dim = 0x7fffffff;
    FAILS(kvc_model_create(&model, device, &config, KVC_F32, &error), KVC_ERROR_MEMORY, "");
    config = tiny_config(TINY_PLAIN);
    GOOD(kvc_model_create(&model, device, &config, KVC_F32, &error));
    kvc_device_close(device);
    REQUIRE(model);
    float x[TINY_DIM] = {0};
    FAILS(kvc_model_set(model, KVC_W_FINAL_NORM, 0, x, KVC_F32, 1, 5, &error), KVC_ERROR_MISMATCH,
          "final_norm");
    FAILS(kvc_model_set(model, KVC_W_Q_BIAS, 0, x, KVC_F32, 1, TINY_DIM, &error),
          KVC_ERROR_MISMATCH, "q_bias");
    FAILS(kvc_model_set(model, KVC_W_ATTN_NORM, 4, x, KVC_F32, 1, TINY_DIM, &error),
          KVC_ERROR_VALUE, "4");
    x[3] = NAN;
    FAILS(kvc_model_set(model, KVC_W_ATTN_NORM, 1, x, KVC_F32, 1, TINY_DIM, &error),
          KVC_ERROR_NUMERIC, "attn_norm");
    x[3] = 0;
    GOOD(kvc_model_set(model, KVC_W_ATTN_NORM, 1, x, KVC_F32, 1, TINY_DIM, &error));
    FAILS(kvc_model_set(model, KVC_W_ATTN_NORM, 1, x, KVC_F32, 1, TINY_DIM, &error),
          KVC_ERROR_VALUE, "attn_norm of layer 1");
    FAILS(kvc_model_seal(model, &error), KVC_ERROR_VALUE, "missing");
    kvc_session *session = NULL;
    FAILS(kvc_session_create(&session, model, KVC_F32, &error), KVC_ERROR_VALUE, "sealed");
    kvc_model_free(model);
}

static bool read_some(void *context, void *dst, size_t at, size_t n) {
    memset(dst, 0, n);
    return at + n <= *(size_t *)context;
}

/* A source that ends too early: said by the weight's name, and the weight may be set again. */
static void bad_sources(void) {
    kvc_config config = tiny_config(TINY_PLAIN);
    kvc_error error = {0};
    kvc_device *device = NULL;
    kvc_model *model = NULL;
    GOOD(kvc_device_open(&device, tiny_device, &error));
    GOOD(kvc_model_create(&model, device, &config, KVC_BF16, &error));
    kvc_device_close(device);
    REQUIRE(model);
    size_t whole = (size_t)TINY_VOCAB * TINY_DIM * 4, most = whole - 1;
    kvc_source source = {read_some, &most};
    FAILS(kvc_model_read(model, KVC_W_EMBED, 0, &source, KVC_F32, TINY_VOCAB, TINY_DIM, &error),
          KVC_ERROR_READ, "embed of layer 0: cannot be read");
    most = TINY_DIM * 2 - 1;
    FAILS(kvc_model_read(model, KVC_W_ATTN_NORM, 1, &source, KVC_F16, 1, TINY_DIM, &error),
          KVC_ERROR_READ, "attn_norm of layer 1");
    most = whole;
    GOOD(kvc_model_read(model, KVC_W_EMBED, 0, &source, KVC_F32, TINY_VOCAB, TINY_DIM, &error));
    GOOD(kvc_model_read(model, KVC_W_ATTN_NORM, 1, &source, KVC_F16, 1, TINY_DIM, &error));
    kvc_model_free(model);
}

static void bad_batches(void) {
    kvc_error error = {0};
    kvc_model *model = tiny_model(TINY_PLAIN, KVC_F32, 1, &error);
    kvc_model *stranger = tiny_model(TINY_PLAIN, KVC_F32, 2, &error);
    REQUIRE(model && stranger);
    kvc_workspace *ws = NULL;
    kvc_session *s = NULL, *foreign = NULL;
    GOOD(kvc_workspace_create(&ws, model, NULL, NULL, &error));
    GOOD(kvc_session_create(&s, model, KVC_F32, &error));
    GOOD(kvc_session_create(&foreign, stranger, KVC_F32, &error));
    REQUIRE(ws && s && foreign);
    const int32_t good[2] = {1, 2}, high[2] = {1, TINY_VOCAB}, negative[2] = {-1, 1};
    float before[TINY_VOCAB], after[TINY_VOCAB];
    GOOD(tiny_run(ws, s, good, 2, before, &error));
    FAILS(tiny_run(ws, s, high, 2, after, &error), KVC_ERROR_VALUE, "83");
    FAILS(tiny_run(ws, s, negative, 2, after, &error), KVC_ERROR_VALUE, "-1");
    FAILS(tiny_run(ws, s, good, 0, NULL, &error), KVC_ERROR_VALUE, "no tokens");
    FAILS(tiny_run(ws, foreign, good, 2, after, &error), KVC_ERROR_MISMATCH, "model");
    kvc_row rows[2] = {{.session = s, .tokens = good, .n = 2},
                       {.session = s, .tokens = good, .n = 2}};
    kvc_batch batch = {.rows = rows, .n_rows = 2, .layer_end = TINY_LAYERS};
    FAILS(kvc_forward(ws, &batch, &error), KVC_ERROR_VALUE, "row 1");
    batch.n_rows = 1;
    batch.layer_end = TINY_LAYERS + 1;
    FAILS(kvc_forward(ws, &batch, &error), KVC_ERROR_VALUE, "5");
    const int32_t outside[1] = {2};
    batch.layer_end = TINY_LAYERS;
    batch.output = KVC_OUT_LOGITS;
    batch.out = after;
    rows[0].outputs = outside;
    rows[0].n_outputs = 1;
    FAILS(kvc_forward(ws, &batch, &error), KVC_ERROR_VALUE, "2");
    CHECK(kvc_session_length(s, 0) == 2);
    kvc_session_truncate(s, 0);
    GOOD(tiny_run(ws, s, good, 2, after, &error));
    CHECK(memcmp(before, after, sizeof before) == 0);
    kvc_session_free(s);
    kvc_session_free(foreign);
    kvc_workspace_free(ws);
    kvc_model_free(model);
    kvc_model_free(stranger);
}

static void bad_messages(void) {
    kvc_error error = {0};
    kvc_model *model = tiny_model(TINY_PLAIN, KVC_F32, 1, &error);
    REQUIRE(model);
    kvc_device *device = kvc_model_device(model);
    kvc_kv *narrow = NULL, *shallow = NULL, *out = NULL;
    kvc_session *s = NULL;
    GOOD(kvc_session_create(&s, model, KVC_F32, &error));
    GOOD(kvc_kv_create(&narrow, device, TINY_LAYERS, 1, 8, KVC_F32, 3, &error));
    GOOD(kvc_kv_create(&shallow, device, 3, 2, 8, KVC_F32, 3, &error));
    REQUIRE(s && narrow && shallow);
    FAILS(kvc_session_give(s, narrow, NULL, &error), KVC_ERROR_MISMATCH, "1");
    FAILS(kvc_session_give(s, shallow, NULL, &error), KVC_ERROR_MISMATCH, "3");
    const float x[2 * 1 * 8] = {0};
    for (int l = 0; l < 3; l++) GOOD(kvc_kv_add(shallow, l, x, x, 1, 0, 0, &error));
    const int32_t twice[3] = {0, 1, 1}, outside[3] = {0, 1, 4}, fits[3] = {0, 1, 3};
    FAILS(kvc_session_give(s, shallow, twice, &error), KVC_ERROR_MISMATCH, "1");
    FAILS(kvc_session_give(s, shallow, outside, &error), KVC_ERROR_VALUE, "4");
    GOOD(kvc_session_give(s, shallow, fits, &error));
    FAILS(kvc_session_give(s, shallow, fits, &error), KVC_ERROR_VALUE, "before");
    const kvc_kv *both[2] = {narrow, shallow};
    FAILS(kvc_kv_concat(&out, both, 2, false, NULL, &error), KVC_ERROR_MISMATCH, "KV 1");
    FAILS(kvc_kv_concat(&out, both, 0, false, NULL, &error), KVC_ERROR_VALUE, "");
    FAILS(kvc_kv_add(narrow, 9, both, both, 1, 0, 0, &error), KVC_ERROR_VALUE, "9");
    FAILS(kvc_session_reserve(s, SIZE_MAX / 2, &error), KVC_ERROR_MEMORY, "");
    kvc_session_free(s);
    kvc_kv_free(narrow);
    kvc_kv_free(shallow);
    kvc_model_free(model);
}

/* A stopped call leaves the session as it was, and the next one works. */
static void interrupted(void) {
    kvc_error error = {0};
    kvc_model *model = tiny_model(TINY_PLAIN, KVC_F32, 1, &error);
    REQUIRE(model);
    int asked = 0;
    kvc_workspace *stopping = NULL, *ws = NULL;
    kvc_session *s = NULL, *fresh = NULL;
    GOOD(kvc_workspace_create(&stopping, model, stop_at_once, &asked, &error));
    GOOD(kvc_workspace_create(&ws, model, NULL, NULL, &error));
    GOOD(kvc_session_create(&s, model, KVC_F32, &error));
    GOOD(kvc_session_create(&fresh, model, KVC_F32, &error));
    REQUIRE(stopping && ws && s && fresh);
    int32_t ids[30];
    float wanted[TINY_VOCAB], got[TINY_VOCAB];
    tiny_ids(ids, 30, 2);
    GOOD(tiny_run(ws, s, ids, 5, NULL, &error));
    FAILS(tiny_run(stopping, s, ids + 5, 25, got, &error), KVC_ERROR_INTERRUPTED, "");
    CHECK(asked > 0 && kvc_session_length(s, 0) == 5);
    GOOD(tiny_run(ws, s, ids + 5, 25, got, &error));
    GOOD(tiny_run(ws, fresh, ids, 5, NULL, &error));
    GOOD(tiny_run(ws, fresh, ids + 5, 25, wanted, &error));
    CHECK(memcmp(wanted, got, sizeof got) == 0);
    kvc_session_free(s);
    kvc_session_free(fresh);
    kvc_workspace_free(ws);
    kvc_workspace_free(stopping);
    kvc_model_free(model);
}

/* err may be NULL, free takes NULL. */
static void nothing_at_all(void) {
    kvc_device *device = NULL;
    CHECK(kvc_device_open(&device, "abacus", NULL) == KVC_ERROR_DEVICE);
    kvc_device_close(NULL);
    kvc_model_free(NULL);
    kvc_kv_free(NULL);
    kvc_session_free(NULL);
    kvc_workspace_free(NULL);
    CHECK(kvc_set_num_threads(-1, NULL) == KVC_ERROR_VALUE);
}

const test error_tests[] = {{"models", bad_models},
                            {"sources", bad_sources},
                            {"batches", bad_batches},
                            {"messages", bad_messages},
                            {"interrupted", interrupted},
                            {"nothing at all", nothing_at_all},
                            {NULL, NULL}};
