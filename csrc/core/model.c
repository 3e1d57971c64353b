/* model.c - weights by name into the backend's matrices.
 *
 * All weights of a model live in one buffer. q, k and v are parts of one fused matrix, gate and
 * up of another, so that a forward pass runs over each in one product; a part starts at a
 * multiple of KVC_PANEL. Vectors are f32 and padded likewise.
 */
#include "../backend/dtype.h"
#include "core.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- what a weight is ---- */

typedef enum { IN_EMBED, IN_HEAD, IN_QKV, IN_O, IN_GATE_UP, IN_DOWN, VECTOR } holder;

static const struct {
    const char *name;
    bool layered;
    holder holder;
} weights[KVC_W_COUNT] = {
    [KVC_W_EMBED] = {"embed", false, IN_EMBED},
    [KVC_W_HEAD] = {"head", false, IN_HEAD},
    [KVC_W_FINAL_NORM] = {"final_norm", false, VECTOR},
    [KVC_W_ATTN_NORM] = {"attn_norm", true, VECTOR},
    [KVC_W_Q] = {"q", true, IN_QKV},
    [KVC_W_K] = {"k", true, IN_QKV},
    [KVC_W_V] = {"v", true, IN_QKV},
    [KVC_W_O] = {"o", true, IN_O},
    [KVC_W_Q_BIAS] = {"q_bias", true, VECTOR},
    [KVC_W_K_BIAS] = {"k_bias", true, VECTOR},
    [KVC_W_V_BIAS] = {"v_bias", true, VECTOR},
    [KVC_W_O_BIAS] = {"o_bias", true, VECTOR},
    [KVC_W_Q_NORM] = {"q_norm", true, VECTOR},
    [KVC_W_K_NORM] = {"k_norm", true, VECTOR},
    [KVC_W_POST_ATTN_NORM] = {"post_attn_norm", true, VECTOR},
    [KVC_W_MLP_NORM] = {"mlp_norm", true, VECTOR},
    [KVC_W_GATE] = {"gate", true, IN_GATE_UP},
    [KVC_W_UP] = {"up", true, IN_GATE_UP},
    [KVC_W_DOWN] = {"down", true, IN_DOWN},
    [KVC_W_GATE_BIAS] = {"gate_bias", true, VECTOR},
    [KVC_W_UP_BIAS] = {"up_bias", true, VECTOR},
    [KVC_W_DOWN_BIAS] = {"down_bias", true, VECTOR},
    [KVC_W_POST_MLP_NORM] = {"post_mlp_norm", true, VECTOR},
};

const char *kvc_weight_name(kvc_weight weight) {
    return (unsigned)weight < KVC_W_COUNT ? weights[weight].name : "?";
}

static bool wanted(const kvc_config *c, kvc_weight weight) {
    switch (weight) {
    case KVC_W_HEAD: return !c->tied_head;
    case KVC_W_Q_BIAS:
    case KVC_W_K_BIAS:
    case KVC_W_V_BIAS: return c->qkv_bias;
    case KVC_W_O_BIAS: return c->o_bias;
    case KVC_W_Q_NORM:
    case KVC_W_K_NORM: return c->qk_norm;
    case KVC_W_POST_ATTN_NORM:
    case KVC_W_POST_MLP_NORM: return c->post_norms;
    case KVC_W_GATE_BIAS:
    case KVC_W_UP_BIAS:
    case KVC_W_DOWN_BIAS: return c->mlp_bias;
    default: return true;
    }
}

static void expected_shape(const kvc_model *m, kvc_weight weight, size_t *rows, size_t *cols) {
    const kvc_shape *s = &m->shape;
    *rows = 1;
    *cols = s->dim;
    switch (weight) {
    case KVC_W_EMBED:
    case KVC_W_HEAD: *rows = s->vocab; break;
    case KVC_W_Q: *rows = s->q; break;
    case KVC_W_K:
    case KVC_W_V: *rows = s->kv; break;
    case KVC_W_O: *rows = s->dim, *cols = s->q; break;
    case KVC_W_GATE:
    case KVC_W_UP: *rows = s->hidden; break;
    case KVC_W_DOWN: *rows = s->dim, *cols = s->hidden; break;
    case KVC_W_Q_BIAS: *cols = s->q; break;
    case KVC_W_K_BIAS:
    case KVC_W_V_BIAS: *cols = s->kv; break;
    case KVC_W_Q_NORM:
    case KVC_W_K_NORM: *cols = (size_t)m->config.head_dim; break;
    case KVC_W_GATE_BIAS:
    case KVC_W_UP_BIAS: *cols = s->hidden; break;
    default: break;
    }
}

static kvc_matrix *matrix_of(kvc_model *m, kvc_weight weight, int layer) {
    kvc_layer *l = &m->layers[layer];
    switch (weights[weight].holder) {
    case IN_EMBED: return &m->embed;
    case IN_HEAD: return &m->head;
    case IN_QKV: return &l->qkv;
    case IN_O: return &l->o;
    case IN_GATE_UP: return &l->gate_up;
    case IN_DOWN: return &l->down;
    case VECTOR: break;
    }
    return NULL;
}

/* First row of a part within its fused matrix, or first element within its fused vector. */
static size_t part_start(const kvc_model *m, kvc_weight weight) {
    switch (weight) {
    case KVC_W_K:
    case KVC_W_K_BIAS: return m->shape.k_at;
    case KVC_W_V:
    case KVC_W_V_BIAS: return m->shape.v_at;
    case KVC_W_UP:
    case KVC_W_UP_BIAS: return m->shape.hidden_ld;
    default: return 0;
    }
}

static kvc_mem vector_of(const kvc_model *m, kvc_weight weight, int layer) {
    const kvc_layer *l = &m->layers[layer];
    switch (weight) {
    case KVC_W_FINAL_NORM: return m->final_norm;
    case KVC_W_ATTN_NORM: return l->attn_norm;
    case KVC_W_Q_BIAS:
    case KVC_W_K_BIAS:
    case KVC_W_V_BIAS: return l->qkv_bias;
    case KVC_W_O_BIAS: return l->o_bias;
    case KVC_W_Q_NORM: return l->q_norm;
    case KVC_W_K_NORM: return l->k_norm;
    case KVC_W_POST_ATTN_NORM: return l->post_attn_norm;
    case KVC_W_MLP_NORM: return l->mlp_norm;
    case KVC_W_GATE_BIAS:
    case KVC_W_UP_BIAS: return l->gate_up_bias;
    case KVC_W_DOWN_BIAS: return l->down_bias;
    case KVC_W_POST_MLP_NORM: return l->post_mlp_norm;
    default: return (kvc_mem){0};
    }
}

/* ---- the configuration ---- */

static kvc_status check_config(const kvc_config *c, kvc_error *err) {
    const struct {
        const char *name;
        int value;
    } sizes[] = {{"n_layers", c->n_layers},     {"dim", c->dim},
                 {"hidden_dim", c->hidden_dim}, {"n_heads", c->n_heads},
                 {"n_kv_heads", c->n_kv_heads}, {"head_dim", c->head_dim},
                 {"vocab_size", c->vocab_size}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        if (sizes[i].value < 1) {
            return kvc_fail(err, KVC_ERROR_VALUE, "config: %s must be positive, not %d",
                            sizes[i].name, sizes[i].value);
        }
    }
    if (c->n_heads % c->n_kv_heads) {
        return kvc_fail(err, KVC_ERROR_VALUE,
                        "config: n_heads %d is not a multiple of n_kv_heads %d", c->n_heads,
                        c->n_kv_heads);
    }
    if (!(c->norm_eps >= 0) || !isfinite(c->norm_eps) || !isfinite(c->norm_offset) ||
        !isfinite(c->embed_scale) || !(c->attention_scale > 0) || !isfinite(c->attention_scale)) {
        return kvc_fail(
            err, KVC_ERROR_VALUE,
            "config: norm_eps, norm_offset, embed_scale or attention_scale is out of range");
    }
    if ((unsigned)c->activation > KVC_GELU_TANH) {
        return kvc_fail(err, KVC_ERROR_UNSUPPORTED, "config: unknown activation %d", c->activation);
    }
    for (int l = 0; l < c->n_layers; l++) {
        if (c->window > 0 || (c->window == 0 && !(c->windowed && c->windowed[l]))) continue;
        return kvc_fail(err, KVC_ERROR_VALUE, "config: window must be positive, not %d", c->window);
    }
    bool used[2] = {!c->rope_of_layer, false};
    for (int l = 0; c->rope_of_layer && l < c->n_layers; l++) {
        if (c->rope_of_layer[l] > 1) {
            return kvc_fail(err, KVC_ERROR_VALUE,
                            "config: rope_of_layer[%d] must be 0 or 1, not %d", l,
                            c->rope_of_layer[l]);
        }
        used[c->rope_of_layer[l]] = true;
    }
    for (int i = 0; i < 2; i++) {
        if (used[i]) TRY(kvc_rope_check(&c->rope[i], c->head_dim, i, err));
    }
    return KVC_OK;
}

static kvc_shape shape_of(const kvc_config *c) {
    kvc_shape s = {.dim = (size_t)c->dim,
                   .q = (size_t)c->n_heads * (size_t)c->head_dim,
                   .kv = (size_t)c->n_kv_heads * (size_t)c->head_dim,
                   .hidden = (size_t)c->hidden_dim,
                   .vocab = (size_t)c->vocab_size};
    s.dim_ld = kvc_panel_round(s.dim);
    s.q_ld = kvc_panel_round(s.q);
    s.k_at = s.q_ld;
    s.v_at = s.k_at + kvc_panel_round(s.kv);
    s.qkv_ld = s.v_at + kvc_panel_round(s.kv);
    s.hidden_ld = kvc_panel_round(s.hidden);
    s.vocab_ld = kvc_panel_round(s.vocab);
    return s;
}

static kvc_status copy_bytes(const uint8_t **out, const uint8_t *src, size_t n, kvc_error *err) {
    uint8_t *copy = NULL;
    *out = NULL;
    if (!src) return KVC_OK;
    TRY(kvc_host_alloc(&copy, n, 1, "the configuration", err));
    memcpy(copy, src, n);
    *out = copy;
    return KVC_OK;
}

/* ---- placing everything in one buffer ---- */

typedef struct placer {
    const kvc_backend *backend;
    kvc_buffer *buffer;      /* NULL in the first round, which only measures */
    const kvc_dtype *dtypes; /* of the next matrix and those after it, or NULL: all of dtype */
    kvc_dtype dtype;
    size_t at;
    bool fits;
} placer;

static kvc_mem place(placer *p, size_t bytes) {
    kvc_mem mem = {p->buffer, p->at};
    if (bytes > SIZE_MAX / 2 - p->at) p->fits = false;
    else p->at += (bytes + 63) / 64 * 64;
    return mem;
}

static kvc_mem place_vector(placer *p, size_t n, bool wanted_here) {
    if (!wanted_here) return (kvc_mem){0};
    return place(p, kvc_panel_round(n) * sizeof(float));
}

static kvc_matrix place_matrix(placer *p, size_t n_out, size_t n_in) {
    kvc_dtype dtype = p->dtypes ? *p->dtypes++ : p->dtype;
    size_t bytes = p->backend->matrix_bytes(n_out, n_in, dtype);
    if (!bytes) p->fits = false;
    return (kvc_matrix){place(p, bytes), kvc_panel_round(n_out), n_in, dtype};
}

static void place_all(kvc_model *m, placer *p) {
    const kvc_config *c = &m->config;
    const kvc_shape *s = &m->shape;
    m->embed = place_matrix(p, s->vocab, s->dim);
    if (!c->tied_head) m->head = place_matrix(p, s->vocab, s->dim);
    else {
        m->head = m->embed;
        if (p->dtypes) p->dtypes++;
    }
    m->final_norm = place_vector(p, s->dim, true);
    for (int i = 0; i < c->n_layers; i++) {
        kvc_layer *l = &m->layers[i];
        l->qkv = place_matrix(p, s->qkv_ld, s->dim);
        l->o = place_matrix(p, s->dim, s->q);
        l->gate_up = place_matrix(p, 2 * s->hidden_ld, s->dim);
        l->down = place_matrix(p, s->dim, s->hidden);
        l->attn_norm = place_vector(p, s->dim, true);
        l->mlp_norm = place_vector(p, s->dim, true);
        l->post_attn_norm = place_vector(p, s->dim, c->post_norms);
        l->post_mlp_norm = place_vector(p, s->dim, c->post_norms);
        l->qkv_bias = place_vector(p, s->qkv_ld, c->qkv_bias);
        l->gate_up_bias = place_vector(p, 2 * s->hidden_ld, c->mlp_bias);
        l->o_bias = place_vector(p, s->dim, c->o_bias);
        l->down_bias = place_vector(p, s->dim, c->mlp_bias);
        l->q_norm = place_vector(p, (size_t)c->head_dim, c->qk_norm);
        l->k_norm = place_vector(p, (size_t)c->head_dim, c->qk_norm);
    }
}

/* The columns of a matrix in a block type are whole blocks. */
static kvc_status check_blocks(const kvc_matrix *m, const char *name, int layer, kvc_error *err) {
    if (m->dtype < KVC_DTYPE_COUNT || m->n_in % KVC_BLOCK == 0) return KVC_OK;
    return kvc_fail(err, KVC_ERROR_UNSUPPORTED,
                    "%s of layer %d: %zu columns are not whole blocks of %d, as %s has", name,
                    layer, m->n_in, KVC_BLOCK, kvc_dtype_name(m->dtype));
}

static kvc_status allocate(kvc_model *m, kvc_dtype dtype, const kvc_dtype *dtypes, kvc_error *err) {
    kvc_backend *b = m->device->backend;
    placer measure = {.backend = b, .dtype = dtype, .dtypes = dtypes, .fits = true};
    place_all(m, &measure);
    TRY(check_blocks(&m->embed, "embed", 0, err));
    TRY(check_blocks(&m->head, "head", 0, err));
    for (int i = 0; i < m->config.n_layers; i++) {
        TRY(check_blocks(&m->layers[i].qkv, "q, k and v", i, err));
        TRY(check_blocks(&m->layers[i].o, "o", i, err));
        TRY(check_blocks(&m->layers[i].gate_up, "gate and up", i, err));
        TRY(check_blocks(&m->layers[i].down, "down", i, err));
    }
    if (!measure.fits) {
        return kvc_fail(err, KVC_ERROR_MEMORY, "the model's size overflows the address space");
    }
    TRY(b->alloc(b, &m->weights, measure.at, err));
    m->weights_bytes = measure.at;
    placer final = {
        .backend = b, .buffer = m->weights, .dtype = dtype, .dtypes = dtypes, .fits = true};
    place_all(m, &final);
    return KVC_OK;
}

static kvc_status make_ropes(kvc_model *m, kvc_error *err) {
    for (int i = 0; i < 2; i++) {
        const kvc_rope *rope = &m->config.rope[i];
        if (rope->rotary_dim < 2) continue;
        TRY(kvc_host_alloc(&m->inv_freq[i], (size_t)rope->rotary_dim / 2, sizeof(double),
                           "inverse frequencies", err));
        kvc_rope_inv_freq(m->inv_freq[i], rope);
    }
    return KVC_OK;
}

static kvc_status create(kvc_model **model, kvc_device *device, const kvc_config *config,
                         kvc_dtype dtype, const kvc_dtype *dtypes, kvc_error *err) {
    *model = NULL;
    TRY(check_config(config, err));
    for (int i = 0; i < (dtypes ? KVC_MATRICES(config->n_layers) : 1); i++) {
        if ((unsigned)(dtypes ? dtypes[i] : dtype) < KVC_MATRIX_DTYPE_COUNT) continue;
        return kvc_fail(err, KVC_ERROR_VALUE, "unknown dtype %d", dtypes ? dtypes[i] : dtype);
    }
    kvc_model *m = NULL;
    TRY(kvc_host_alloc(&m, 1, sizeof *m, "a model", err));
    size_t n_layers = (size_t)config->n_layers;
    kvc_backend *b = device->backend;
    atomic_init(&m->n_refs, 1);
    m->device = kvc_device_retain(device);
    m->config = *config;
    m->config.windowed = m->config.rope_of_layer = NULL;
    m->shape = shape_of(config);
    kvc_status status = copy_bytes(&m->config.windowed, config->windowed, n_layers, err);
    if (!status)
        status = copy_bytes(&m->config.rope_of_layer, config->rope_of_layer, n_layers, err);
    if (!status) status = kvc_host_alloc(&m->layers, n_layers, sizeof *m->layers, "layers", err);
    if (!status) status = kvc_host_alloc(&m->present, n_layers, KVC_W_COUNT, "layers", err);
    if (!status) status = make_ropes(m, err);
    if (!status) status = b->stream_open(b, &m->stream, NULL, NULL, err);
    if (!status) status = allocate(m, dtype, dtypes, err);
    if (status) {
        kvc_model_free(m);
        return status;
    }
    *model = m;
    return KVC_OK;
}

kvc_status kvc_model_create(kvc_model **model, kvc_device *device, const kvc_config *config,
                            kvc_dtype dtype, kvc_error *err) {
    return create(model, device, config, dtype, NULL, err);
}

kvc_status kvc_model_create_mixed(kvc_model **model, kvc_device *device, const kvc_config *config,
                                  const kvc_dtype *dtypes, kvc_error *err) {
    return create(model, device, config, KVC_F32, dtypes, err);
}

/* ---- filling ---- */

/* The elements are read to the upper end of their floats and widened towards the lower. */
static kvc_status set_vector(kvc_model *m, kvc_weight weight, int layer, const kvc_source *source,
                             kvc_dtype dtype, size_t n, kvc_error *err) {
    kvc_mem to = kvc_mem_at(vector_of(m, weight, layer), part_start(m, weight) * sizeof(float));
    float *wide = NULL;
    TRY(kvc_host_alloc(&wide, n, sizeof *wide, kvc_weight_name(weight), err));
    size_t bytes = n * kvc_dtype_bytes(dtype);
    char *stored = (char *)wide + n * sizeof *wide - bytes;
    bool readable = source->read(source->context, stored, 0, bytes), finite = true;
    for (size_t i = 0; readable && i < n; i++) {
        wide[i] = kvc_element(stored, i, dtype);
        finite = finite && isfinite(wide[i]);
    }
    kvc_status status;
    if (!readable) status = kvc_fail(err, KVC_ERROR_READ, "cannot be read");
    else if (!finite) status = kvc_fail(err, KVC_ERROR_NUMERIC, "values that are not finite");
    else status = m->device->backend->upload(m->stream, to, wide, n * sizeof *wide, err);
    free(wide);
    return status;
}

kvc_status kvc_model_read(kvc_model *model, kvc_weight weight, int layer, const kvc_source *source,
                          kvc_dtype dtype, size_t rows, size_t cols, kvc_error *err) {
    if ((unsigned)weight >= KVC_W_COUNT || (unsigned)dtype >= KVC_MATRIX_DTYPE_COUNT) {
        return kvc_fail(err, KVC_ERROR_VALUE, "unknown weight %d or dtype %d", weight, dtype);
    }
    const char *name = weights[weight].name;
    int n_layers = weights[weight].layered ? model->config.n_layers : 1;
    if (layer < 0 || layer >= n_layers) {
        return kvc_fail(err, KVC_ERROR_VALUE, "%s: layer %d is not in 0 .. %d", name, layer,
                        n_layers - 1);
    }
    if (model->sealed) return kvc_fail(err, KVC_ERROR_VALUE, "%s: the model is sealed", name);
    if (!wanted(&model->config, weight)) {
        return kvc_fail(err, KVC_ERROR_MISMATCH, "%s of layer %d: the configuration has none", name,
                        layer);
    }
    uint8_t *present = &model->present[(size_t)layer * KVC_W_COUNT + (size_t)weight];
    if (*present) {
        return kvc_fail(err, KVC_ERROR_VALUE, "%s of layer %d was set before", name, layer);
    }
    size_t want_rows, want_cols;
    expected_shape(model, weight, &want_rows, &want_cols);
    if (rows != want_rows || cols != want_cols) {
        return kvc_fail(err, KVC_ERROR_MISMATCH,
                        "%s of layer %d: shape [%zu, %zu] where [%zu, %zu] is expected", name,
                        layer, rows, cols, want_rows, want_cols);
    }
    kvc_error cause = {0};
    const kvc_matrix *m = matrix_of(model, weight, layer);
    if (dtype >= KVC_DTYPE_COUNT && (!m || cols % KVC_BLOCK)) {
        return kvc_fail(err, KVC_ERROR_UNSUPPORTED, "%s of layer %d: %zu columns cannot be %s",
                        name, layer, cols, kvc_dtype_name(dtype));
    }
    kvc_status status =
        m ? model->device->backend->matrix_pack(model->stream, m, part_start(model, weight), source,
                                                dtype, rows, &cause)
          : set_vector(model, weight, layer, source, dtype, cols, &cause);
    if (status) return kvc_fail(err, status, "%s of layer %d: %s", name, layer, cause.message);
    *present = 1;
    return KVC_OK;
}

static bool read_memory(void *context, void *dst, size_t at, size_t n) {
    memcpy(dst, (const char *)context + at, n);
    return true;
}

kvc_status kvc_model_set(kvc_model *model, kvc_weight weight, int layer, const void *data,
                         kvc_dtype dtype, size_t rows, size_t cols, kvc_error *err) {
    kvc_source memory = {read_memory, (void *)data};
    return kvc_model_read(model, weight, layer, &memory, dtype, rows, cols, err);
}

kvc_status kvc_model_seal(kvc_model *model, kvc_error *err) {
    for (int w = 0; w < KVC_W_COUNT; w++) {
        if (!wanted(&model->config, (kvc_weight)w)) continue;
        int n = weights[w].layered ? model->config.n_layers : 1;
        for (int l = 0; l < n; l++) {
            if (model->present[(size_t)l * KVC_W_COUNT + (size_t)w]) continue;
            return kvc_fail(err, KVC_ERROR_VALUE, "%s of layer %d is missing", weights[w].name, l);
        }
    }
    model->sealed = true;
    return KVC_OK;
}

kvc_model *kvc_model_retain(kvc_model *model) {
    atomic_fetch_add(&model->n_refs, 1);
    return model;
}

void kvc_model_free(kvc_model *model) {
    if (!model || atomic_fetch_sub(&model->n_refs, 1) != 1) return;
    kvc_backend *b = model->device->backend;
    b->free(b, model->weights, model->weights_bytes);
    b->stream_close(model->stream);
    free((void *)model->config.windowed);
    free((void *)model->config.rope_of_layer);
    free(model->layers);
    free(model->present);
    free(model->inv_freq[0]);
    free(model->inv_freq[1]);
    kvc_device_close(model->device);
    free(model);
}

const kvc_config *kvc_model_config(const kvc_model *model) {
    return &model->config;
}

kvc_device *kvc_model_device(const kvc_model *model) {
    return model->device;
}

size_t kvc_model_bytes(const kvc_model *model) {
    return model->weights_bytes;
}

kvc_status kvc_model_inv_freq(const kvc_model *model, int rope, double *out, kvc_error *err) {
    if (rope < 0 || rope > 1 || !model->inv_freq[rope]) {
        return kvc_fail(err, KVC_ERROR_VALUE, "the model has no rope %d", rope);
    }
    memcpy(out, model->inv_freq[rope],
           (size_t)model->config.rope[rope].rotary_dim / 2 * sizeof *out);
    return KVC_OK;
}
