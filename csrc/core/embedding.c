/* embedding.c - tokens as vectors: what enters layer 0 for ids, for a distribution over ids, and the
 * id that a vector is nearest to.
 *
 * Rows go through in groups of HEAD_ROWS, as they do in the head.
 */
#include "forward.h"

#include <math.h>

#define LEAST_TEMPERATURE 1e-30 /* logits over less may overflow */

static kvc_status need(kvc_workspace *ws, kvc_error *err) {
    const kvc_shape *s = &ws->model->shape;
    TRY(kvc_workspace_need(ws, X, HEAD_ROWS, 4 * s->dim_ld, err));
    TRY(kvc_workspace_need(ws, IDS, HEAD_ROWS, 4, err));
    return kvc_workspace_need(ws, LOGITS, HEAD_ROWS, 4 * s->vocab_ld, err);
}

static size_t group_of(size_t n, size_t first) {
    return n - first < HEAD_ROWS ? n - first : HEAD_ROWS;
}

/* The first n rows of X into out [n, dim]. */
static kvc_status give(kvc_workspace *ws, float *out, size_t n, kvc_error *err) {
    const kvc_shape *s = &ws->model->shape;
    for (size_t r = 0; r < n; r++) {
        TRY(ws->model->device->backend->download(ws->stream, out + r * s->dim,
                                                 kvc_mem_at(buf(ws, X), 4 * r * s->dim_ld),
                                                 4 * s->dim, err));
    }
    return KVC_OK;
}

/* rows [n, width] of the host into a buffer with row stride ld */
static kvc_status take(kvc_workspace *ws, buffer_name name, size_t ld, const float *rows,
                       size_t width, size_t n, kvc_error *err) {
    for (size_t r = 0; r < n; r++) {
        TRY(ws->model->device->backend->upload(ws->stream, kvc_mem_at(buf(ws, name), 4 * r * ld),
                                               rows + r * width, 4 * width, err));
    }
    return KVC_OK;
}

kvc_status kvc_embed(kvc_workspace *ws, float *out, const int32_t *ids, size_t n, kvc_error *err) {
    const kvc_model *m = ws->model;
    for (size_t i = 0; i < n; i++) {
        if (ids[i] >= 0 && ids[i] < m->config.vocab_size) continue;
        return kvc_fail(err, KVC_ERROR_VALUE, "id %d at place %zu is not in 0 .. %d", ids[i], i,
                        m->config.vocab_size - 1);
    }
    TRY(need(ws, err));
    for (size_t first = 0; first < n; first += HEAD_ROWS) {
        size_t rows = group_of(n, first);
        TRY(m->device->backend->upload(ws->stream, buf(ws, IDS), ids + first, 4 * rows, err));
        TRY(m->device->backend->embed(ws->stream, buf(ws, X), m->shape.dim_ld, &m->embed,
                                      buf(ws, IDS), rows, m->config.embed_scale, err));
        TRY(give(ws, out + first * m->shape.dim, rows, err));
    }
    return KVC_OK;
}

static kvc_status check_finite(const float *x, size_t n, size_t width, const char *what,
                               kvc_error *err) {
    for (size_t i = 0; i < n * width; i++) {
        if (isfinite(x[i])) continue;
        return kvc_fail(err, KVC_ERROR_NUMERIC, "%s: row %zu is not finite at place %zu", what,
                        i / width, i % width);
    }
    return KVC_OK;
}

kvc_status kvc_mix(kvc_workspace *ws, float *out, const float *logits, size_t n, double temperature,
                   kvc_error *err) {
    const kvc_model *m = ws->model;
    const kvc_shape *s = &m->shape;
    if (!(temperature > 0) || !isfinite(temperature) || temperature < LEAST_TEMPERATURE) {
        return kvc_fail(err, KVC_ERROR_VALUE, "temperature %g, expected a number above 0",
                        temperature);
    }
    TRY(check_finite(logits, n, s->vocab, "logits", err));
    TRY(need(ws, err));
    for (size_t first = 0; first < n; first += HEAD_ROWS) {
        size_t rows = group_of(n, first);
        TRY(take(ws, LOGITS, s->vocab_ld, logits + first * s->vocab, s->vocab, rows, err));
        TRY(m->device->backend->mix(ws->stream, buf(ws, X), s->dim_ld, buf(ws, LOGITS), s->vocab_ld,
                                    &m->embed, rows, s->vocab, (float)temperature,
                                    m->config.embed_scale, err));
        TRY(give(ws, out + first * s->dim, rows, err));
        ws->counts.linear_flops += 2.0 * (double)rows * (double)s->dim * (double)s->vocab;
    }
    return KVC_OK;
}

kvc_status kvc_nearest(kvc_workspace *ws, int32_t *ids, const float *vectors, size_t n,
                       kvc_error *err) {
    const kvc_model *m = ws->model;
    const kvc_shape *s = &m->shape;
    TRY(check_finite(vectors, n, s->dim, "vectors", err));
    TRY(need(ws, err));
    for (size_t first = 0; first < n; first += HEAD_ROWS) {
        size_t rows = group_of(n, first);
        TRY(take(ws, X, s->dim_ld, vectors + first * s->dim, s->dim, rows, err));
        TRY(m->device->backend->nearest(ws->stream, buf(ws, IDS), buf(ws, X), s->dim_ld, &m->embed,
                                        rows, s->vocab, err));
        TRY(m->device->backend->download(ws->stream, ids + first, buf(ws, IDS), 4 * rows, err));
        ws->counts.linear_flops += 2.0 * (double)rows * (double)s->dim * (double)s->vocab;
    }
    for (size_t i = 0; i < n; i++) {
        if (ids[i] >= 0) continue;
        return kvc_fail(err, KVC_ERROR_NUMERIC, "vectors: row %zu overflows", i);
    }
    return KVC_OK;
}
