/* tiny.c - small seeded models. */
#include "tiny.h"

#include <stdlib.h>

const char *tiny_device = "cpu";

void tiny_fill(float *x, size_t n, uint64_t *state) {
    for (size_t i = 0; i < n; i++) {
        *state = *state * 6364136223846793005u + 1442695040888963407u;
        x[i] = (float)(*state >> 40) / (float)(1 << 24) - 0.5f;
    }
}

void tiny_ids(int32_t *ids, size_t n, unsigned seed) {
    uint64_t state = seed;
    for (size_t i = 0; i < n; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        ids[i] = (int32_t)((state >> 33) % TINY_VOCAB);
    }
}

static const uint8_t windowed[TINY_LAYERS] = {1, 0, 1, 0};
static const uint8_t second_rope[TINY_LAYERS] = {0, 1, 0, 1};

kvc_config tiny_config(tiny_kind kind) {
    bool full = kind == TINY_FULL;
    kvc_rope rope = {.kind = KVC_ROPE_DEFAULT, .theta = 10000, .rotary_dim = 8};
    kvc_rope wide = {.kind = KVC_ROPE_LINEAR, .theta = 500000, .factor = 4, .rotary_dim = 8};
    return (kvc_config){
        .n_layers = TINY_LAYERS,
        .dim = TINY_DIM,
        .hidden_dim = 40,
        .n_heads = TINY_HEADS,
        .n_kv_heads = 2,
        .head_dim = 8,
        .vocab_size = TINY_VOCAB,
        .norm_eps = 1e-5f,
        .norm_offset = full ? 1 : 0,
        .embed_scale = full ? 4.9f : 1,
        .attention_scale = 0.35f,
        .activation = full ? KVC_GELU_TANH : KVC_SILU,
        .qkv_bias = full,
        .o_bias = full,
        .mlp_bias = full,
        .qk_norm = full,
        .post_norms = full,
        .tied_head = !full,
        .window = full ? 6 : 0,
        .windowed = full ? windowed : NULL,
        .rope_of_layer = full ? second_rope : NULL,
        .rope = {rope, full ? wide : rope},
    };
}

/* Rows and columns of a weight, or false when the configuration has none. */
static bool shape_of(const kvc_config *c, kvc_weight weight, size_t *rows, size_t *cols) {
    size_t dim = (size_t)c->dim, hidden = (size_t)c->hidden_dim, head = (size_t)c->head_dim;
    size_t q = (size_t)c->n_heads * head, kv = (size_t)c->n_kv_heads * head;
    size_t vocab = (size_t)c->vocab_size;
    const struct {
        bool present;
        size_t rows, cols;
    } shapes[KVC_W_COUNT] = {
        [KVC_W_EMBED] = {true, vocab, dim},
        [KVC_W_HEAD] = {!c->tied_head, vocab, dim},
        [KVC_W_FINAL_NORM] = {true, 1, dim},
        [KVC_W_ATTN_NORM] = {true, 1, dim},
        [KVC_W_Q] = {true, q, dim},
        [KVC_W_K] = {true, kv, dim},
        [KVC_W_V] = {true, kv, dim},
        [KVC_W_O] = {true, dim, q},
        [KVC_W_Q_BIAS] = {c->qkv_bias, 1, q},
        [KVC_W_K_BIAS] = {c->qkv_bias, 1, kv},
        [KVC_W_V_BIAS] = {c->qkv_bias, 1, kv},
        [KVC_W_O_BIAS] = {c->o_bias, 1, dim},
        [KVC_W_Q_NORM] = {c->qk_norm, 1, head},
        [KVC_W_K_NORM] = {c->qk_norm, 1, head},
        [KVC_W_POST_ATTN_NORM] = {c->post_norms, 1, dim},
        [KVC_W_MLP_NORM] = {true, 1, dim},
        [KVC_W_GATE] = {true, hidden, dim},
        [KVC_W_UP] = {true, hidden, dim},
        [KVC_W_DOWN] = {true, dim, hidden},
        [KVC_W_GATE_BIAS] = {c->mlp_bias, 1, hidden},
        [KVC_W_UP_BIAS] = {c->mlp_bias, 1, hidden},
        [KVC_W_DOWN_BIAS] = {c->mlp_bias, 1, dim},
        [KVC_W_POST_MLP_NORM] = {c->post_norms, 1, dim},
    };
    *rows = shapes[weight].rows;
    *cols = shapes[weight].cols;
    return shapes[weight].present;
}

static kvc_status fill(kvc_model *model, const kvc_config *c, unsigned seed, kvc_error *err) {
    static const size_t most = TINY_VOCAB * TINY_DIM;
    float values[TINY_VOCAB * TINY_DIM];
    uint64_t state = seed;
    kvc_status status = KVC_OK;
    for (int w = 0; !status && w < KVC_W_COUNT; w++) {
        size_t rows, cols;
        if (!shape_of(c, (kvc_weight)w, &rows, &cols) || rows * cols > most) continue;
        int layers = w < KVC_W_ATTN_NORM ? 1 : c->n_layers;
        for (int l = 0; !status && l < layers; l++) {
            tiny_fill(values, rows * cols, &state);
            status = kvc_model_set(model, (kvc_weight)w, l, values, KVC_F32, rows, cols, err);
        }
    }
    return status ? status : kvc_model_seal(model, err);
}

kvc_model *tiny_model(tiny_kind kind, kvc_dtype dtype, unsigned seed, kvc_error *err) {
    kvc_config config = tiny_config(kind);
    kvc_device *device = NULL;
    kvc_model *model = NULL;
    if (kvc_device_open(&device, tiny_device, err)) return NULL;
    kvc_status status = kvc_model_create(&model, device, &config, dtype, err);
    kvc_device_close(device);
    if (!status) status = fill(model, &config, seed, err);
    if (!status) return model;
    kvc_model_free(model);
    return NULL;
}

kvc_status tiny_run(kvc_workspace *ws, kvc_session *session, const int32_t *ids, size_t n,
                    float *logits, kvc_error *err) {
    int32_t last = (int32_t)n - 1;
    kvc_row row = {.session = session,
                   .tokens = ids,
                   .n = n,
                   .outputs = logits ? &last : NULL,
                   .n_outputs = logits ? 1 : 0};
    kvc_batch batch = {.rows = &row,
                       .n_rows = 1,
                       .layer_end = TINY_LAYERS,
                       .output = logits ? KVC_OUT_LOGITS : KVC_OUT_NONE,
                       .out = logits};
    return kvc_forward(ws, &batch, err);
}
