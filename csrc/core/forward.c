/* forward.c - one block of rows through the layers, once, for every family.
 *
 *     h = norm(x)        q, k, v = h Wqkv       k, v -> the session's tail
 *     x += attention(q, given parts, tail) Wo
 *     x += act(norm(x) Wgate) * (norm(x) Wup) Wdown
 *     logits = norm(x) Whead, for the rows asked for
 *
 * Families differ by the values of the configuration: biases, norms of q and k, norms before the
 * residual, windows, rope. Only lists of blocks grow with the tokens already seen.
 */
#include "forward.h"

#include <string.h>

/* ---- entering: embeddings and angles ---- */

static kvc_status enter(block *b, kvc_error *err) {
    kvc_workspace *ws = b->ws;
    const kvc_backend *be = ws->model->device->backend;
    const kvc_shape *s = &ws->model->shape;
    for (size_t i = 0; i < b->n_pieces; i++) {
        const piece *p = &b->pieces[i];
        kvc_mem x = kvc_mem_at(buf(ws, X), 4 * p->at * s->dim_ld);
        if (p->row->tokens) {
            kvc_mem ids = kvc_mem_at(buf(ws, IDS), 4 * p->at);
            TRY(be->upload(ws->stream, ids, p->row->tokens + p->first, 4 * p->n, err));
            TRY(be->embed(ws->stream, x, s->dim_ld, &ws->model->embed, ids, p->n,
                          ws->model->config.embed_scale, err));
            continue;
        }
        for (size_t r = 0; r < p->n; r++, x = kvc_mem_at(x, 4 * s->dim_ld)) {
            TRY(be->upload(ws->stream, x, p->row->hidden + (p->first + r) * s->dim, 4 * s->dim,
                           err));
        }
    }
    return KVC_OK;
}

/* Cos and sin of every row's position under rope `which`; shifted: as shifted layers see it. */
static kvc_status angles(block *b, int which, bool shifted, kvc_mem *out, kvc_error *err) {
    kvc_workspace *ws = b->ws;
    const kvc_model *m = ws->model;
    const kvc_rope *rope = &m->config.rope[which];
    size_t n_pairs = (size_t)rope->rotary_dim / 2;
    int slot = which * 2 + shifted;
    *out = buf(ws, (buffer_name)(ANGLES + slot));
    if (b->has_angles[slot]) return KVC_OK;
    TRY(kvc_workspace_need(ws, (buffer_name)(ANGLES + slot), b->n, 8 * n_pairs, err));
    *out = buf(ws, (buffer_name)(ANGLES + slot));
    float *table = NULL;
    TRY(kvc_workspace_host(ws, b->n, 8 * n_pairs, &table, err));
    double factor = rope->kind == KVC_ROPE_YARN ? rope->attention_factor : 1.0;
    for (size_t i = 0; i < b->n_pieces; i++) {
        const piece *p = &b->pieces[i];
        const kvc_session *session = p->row->session;
        int64_t position = session->start_position + (int64_t)p->own_first;
        if (shifted) position += session->shift;
        for (size_t r = 0; r < p->n; r++) {
            kvc_rope_angles(table + (p->at + r) * 2 * n_pairs, m->inv_freq[which], n_pairs,
                            (double)(position + (int64_t)r), factor);
        }
    }
    TRY(m->device->backend->upload(ws->stream, *out, table, b->n * 8 * n_pairs, err));
    b->has_angles[slot] = true;
    return KVC_OK;
}

/* ---- one layer ---- */

/* Sessions of one batch may differ in whether they shift a layer: rope runs per piece. */
static kvc_status rotate(block *b, int layer, size_t column, int n_heads, kvc_error *err) {
    kvc_workspace *ws = b->ws;
    const kvc_model *m = ws->model;
    int which = kvc_layer_rope(m, layer);
    int rotary_dim = m->config.rope[which].rotary_dim;
    for (size_t i = 0; i < b->n_pieces; i++) {
        const piece *p = &b->pieces[i];
        kvc_mem table;
        TRY(angles(b, which, p->row->session->shifted[layer], &table, err));
        kvc_mem x = kvc_mem_at(buf(ws, QKV), 4 * (p->at * m->shape.qkv_ld + column));
        table = kvc_mem_at(table, 4 * p->at * (size_t)rotary_dim);
        TRY(m->device->backend->rope(ws->stream, x, m->shape.qkv_ld, p->n, n_heads,
                                     m->config.head_dim, rotary_dim, table, err));
    }
    return KVC_OK;
}

/* q, k, v (or k, v only) of the normalised rows in H, with their norms and rotations. */
static kvc_status project(block *b, int layer, bool with_q, kvc_error *err) {
    kvc_workspace *ws = b->ws;
    const kvc_model *m = ws->model;
    const kvc_backend *be = m->device->backend;
    const kvc_config *c = &m->config;
    const kvc_shape *s = &m->shape;
    const kvc_layer *l = &m->layers[layer];
    size_t begin = with_q ? 0 : s->k_at, head_dim = (size_t)c->head_dim;
    kvc_mem q = buf(ws, QKV), k = kvc_mem_at(q, 4 * s->k_at), bias = l->qkv_bias;
    if (bias.buffer) bias = kvc_mem_at(bias, 4 * begin);
    TRY(be->linear(ws->stream, kvc_mem_at(q, 4 * begin), s->qkv_ld, buf(ws, H), s->dim_ld, &l->qkv,
                   begin, s->qkv_ld, bias, false, b->n, err));
    ws->counts.linear_flops +=
        2.0 * (double)b->n * (double)s->dim * (double)(2 * s->kv + (with_q ? s->q : 0));
    if (c->qk_norm && with_q) {
        TRY(be->rms_norm(ws->stream, q, s->qkv_ld, q, s->qkv_ld, l->q_norm, b->n,
                         (size_t)c->n_heads, head_dim, c->norm_eps, c->norm_offset, err));
    }
    if (c->qk_norm) {
        TRY(be->rms_norm(ws->stream, k, s->qkv_ld, k, s->qkv_ld, l->k_norm, b->n,
                         (size_t)c->n_kv_heads, head_dim, c->norm_eps, c->norm_offset, err));
    }
    if (with_q) TRY(rotate(b, layer, 0, c->n_heads, err));
    return rotate(b, layer, s->k_at, c->n_kv_heads, err);
}

static kvc_status append(block *b, int layer, kvc_error *err) {
    kvc_workspace *ws = b->ws;
    const kvc_model *m = ws->model;
    size_t n_items = 0, most = 0;
    for (size_t i = 0; i < b->n_pieces; i++) {
        most += b->pieces[i].row->session->tracks[layer].n_blocks;
    }
    kvc_append *items = NULL;
    TRY(kvc_workspace_host(ws, most, sizeof *items, &items, err));
    for (size_t i = 0; i < b->n_pieces; i++) {
        const piece *p = &b->pieces[i];
        for (size_t done = 0; done < p->n;) {
            kvc_append to = kvc_session_append(p->row->session, layer, p->n - done);
            to.row = p->at + done;
            done += to.n;
            items[n_items++] = to;
        }
    }
    kvc_mem k = kvc_mem_at(buf(ws, QKV), 4 * m->shape.k_at);
    kvc_mem v = kvc_mem_at(buf(ws, QKV), 4 * m->shape.v_at);
    return m->device->backend->kv_append(ws->stream, k, v, m->shape.qkv_ld, m->config.n_kv_heads,
                                         m->config.head_dim, items, n_items, err);
}

static kvc_span span_of(const kvc_segment *segment, size_t start, size_t n, int64_t offset,
                        int head_dim) {
    size_t at = start * (size_t)head_dim * kvc_dtype_bytes(segment->dtype);
    return (kvc_span){.k = {segment->buffer, at},
                      .v = {segment->buffer, segment->v_at + at},
                      .head_stride = segment->head_stride,
                      .dtype = segment->dtype,
                      .n = n,
                      .position = segment->position + (int64_t)start + offset,
                      .mass_from = n};
}

/* Spans of a piece's session in a layer; returns how many, given ones first. */
static size_t list_spans(kvc_span *spans, kvc_attention_item *item, const piece *p, int layer,
                         size_t skip, int head_dim) {
    const kvc_track *t = &p->row->session->tracks[layer];
    item->spans = spans;
    for (size_t i = 0; i < t->given.n; i++) {
        const kvc_part *part = &t->given.part[i];
        kvc_span *span = &spans[item->n_given++];
        *span = span_of(part->segment, part->start, part->n, part->offset, head_dim);
        span->turn = t->turns[i];
        span->mass_from = skip < part->n ? skip : part->n;
        skip -= span->mass_from;
    }
    for (size_t i = 0; i < t->n_blocks; i++) {
        if (!t->blocks[i].n) continue;
        spans[item->n_given + item->n_own++] =
            span_of(t->blocks[i].segment, 0, t->blocks[i].n, 0, head_dim);
    }
    return item->n_given + item->n_own;
}

/* (query, key) pairs that the mask rule lets through. */
static double visible_pairs(const kvc_attention_item *item, int window) {
    double pairs = 0;
    for (size_t i = 0; i < item->n; i++) {
        int64_t q = item->position + (int64_t)i, own = 0;
        for (size_t j = 0; j < item->n_given + item->n_own; j++) {
            const kvc_span *span = &item->spans[j];
            int64_t from = 0, to = (int64_t)span->n;
            if (j >= item->n_given) {
                int64_t last = (int64_t)(item->own_first + i + item->slack) - own;
                own += to;
                if (last + 1 < to) to = last + 1;
            }
            if (window && q - window - span->position + 1 > 0)
                from = q - window - span->position + 1;
            if (to > from) pairs += (double)(to - from);
        }
    }
    return pairs;
}

static kvc_status collect_mass(block *b, int layer, kvc_error *err) {
    kvc_workspace *ws = b->ws;
    size_t n_heads = (size_t)ws->model->config.n_heads;
    size_t n_layers = (size_t)ws->model->config.n_layers;
    float *mass = NULL;
    TRY(kvc_workspace_host(ws, b->n, 4 * n_heads, &mass, err));
    TRY(ws->model->device->backend->download(ws->stream, mass, buf(ws, MASS), 4 * b->n * n_heads,
                                             err));
    for (size_t i = 0; i < b->n_pieces; i++) {
        const piece *p = &b->pieces[i];
        double *to = b->batch->mass->mass + (p->row_index * n_layers + (size_t)layer) * n_heads;
        for (size_t r = 0; r < p->n; r++) {
            for (size_t h = 0; h < n_heads; h++) {
                to[h] += (double)mass[(p->at + r) * n_heads + h] / (double)p->row->n;
            }
        }
    }
    return KVC_OK;
}

static kvc_status attend(block *b, int layer, bool want_output, kvc_error *err) {
    kvc_workspace *ws = b->ws;
    const kvc_model *m = ws->model;
    const kvc_backend *be = m->device->backend;
    const kvc_config *c = &m->config;
    const kvc_mass *mass = b->batch->mass;
    size_t n_spans = 0;
    for (size_t i = 0; i < b->n_pieces; i++) {
        const kvc_track *t = &b->pieces[i].row->session->tracks[layer];
        n_spans += t->given.n + t->n_blocks;
    }
    char *host = NULL;
    size_t item_bytes = b->n_pieces * sizeof(kvc_attention_item);
    TRY(kvc_workspace_host(ws, item_bytes + n_spans * sizeof(kvc_span), 1, &host, err));
    kvc_attention_item *items = (kvc_attention_item *)(void *)host;
    kvc_span *spans = (kvc_span *)(void *)(host + item_bytes);
    kvc_attention a = {.q = buf(ws, QKV),
                       .q_ld = m->shape.qkv_ld,
                       .out_ld = m->shape.q_ld,
                       .n_heads = c->n_heads,
                       .n_kv_heads = c->n_kv_heads,
                       .head_dim = c->head_dim,
                       .rotary_dim = c->rope[kvc_layer_rope(m, layer)].rotary_dim,
                       .scale = c->attention_scale,
                       .window = kvc_layer_windowed(m, layer) ? c->window : 0,
                       .items = items,
                       .n_items = b->n_pieces};
    for (size_t i = 0; i < b->n_pieces; i++) {
        const piece *p = &b->pieces[i];
        const kvc_session *session = p->row->session;
        items[i] = (kvc_attention_item){.row = p->at,
                                        .n = p->n,
                                        .position = session->start_position +
                                                    kvc_session_layer_shift(session, layer) +
                                                    (int64_t)p->own_first,
                                        .own_first = p->own_first,
                                        .slack = p->row->slack ? (size_t)p->row->slack[layer] : 0};
        spans += list_spans(spans, &items[i], p, layer, mass ? mass->skip : 0, c->head_dim);
        ws->counts.attention_flops +=
            4.0 * c->head_dim * c->n_heads * visible_pairs(&items[i], a.window);
    }
    bool second = mass && mass->published;
    if (mass && !second) a.mass = buf(ws, MASS);
    if (want_output) a.out = buf(ws, ATTENDED);
    if (a.out.buffer || a.mass.buffer) TRY(be->attention(ws->stream, &a, err));
    if (second) { /* the published softmax is not the one the model runs with */
        a.soft = true;
        a.out = (kvc_mem){0};
        a.mass = buf(ws, MASS);
        TRY(be->attention(ws->stream, &a, err));
    }
    return mass ? collect_mass(b, layer, err) : KVC_OK;
}

/* x += src W, through the post-norm where the family has one */
static kvc_status residual(block *b, kvc_mem x, kvc_mem src, size_t src_ld, const kvc_matrix *w,
                           kvc_mem bias, kvc_mem post_norm, size_t n, kvc_error *err) {
    kvc_workspace *ws = b->ws;
    const kvc_backend *be = ws->model->device->backend;
    const kvc_shape *s = &ws->model->shape;
    const kvc_config *c = &ws->model->config;
    ws->counts.linear_flops += 2.0 * (double)n * (double)w->n_in * (double)s->dim;
    if (!post_norm.buffer) {
        return be->linear(ws->stream, x, s->dim_ld, src, src_ld, w, 0, w->n_out, bias, true, n,
                          err);
    }
    kvc_mem h = buf(ws, H);
    TRY(be->linear(ws->stream, h, s->dim_ld, src, src_ld, w, 0, w->n_out, bias, false, n, err));
    TRY(be->rms_norm(ws->stream, h, s->dim_ld, h, s->dim_ld, post_norm, n, 1, s->dim, c->norm_eps,
                     c->norm_offset, err));
    return be->add(ws->stream, x, h, n, s->dim_ld, err);
}

static kvc_status mlp(block *b, int layer, kvc_mem x, size_t n, kvc_error *err) {
    kvc_workspace *ws = b->ws;
    const kvc_backend *be = ws->model->device->backend;
    const kvc_shape *s = &ws->model->shape;
    const kvc_config *c = &ws->model->config;
    const kvc_layer *l = &ws->model->layers[layer];
    TRY(be->rms_norm(ws->stream, buf(ws, H), s->dim_ld, x, s->dim_ld, l->mlp_norm, n, 1, s->dim,
                     c->norm_eps, c->norm_offset, err));
    TRY(be->linear(ws->stream, buf(ws, GATE_UP), 2 * s->hidden_ld, buf(ws, H), s->dim_ld,
                   &l->gate_up, 0, 2 * s->hidden_ld, l->gate_up_bias, false, n, err));
    ws->counts.linear_flops += 2.0 * (double)n * (double)s->dim * 2.0 * (double)s->hidden;
    TRY(be->gated_activation(ws->stream, buf(ws, GATED), s->hidden_ld, buf(ws, GATE_UP),
                             2 * s->hidden_ld, s->hidden_ld, s->hidden, c->activation, n, err));
    return residual(b, x, buf(ws, GATED), s->hidden_ld, &l->down, l->down_bias, l->post_mlp_norm, n,
                    err);
}

/* Of the block's rows only those that are returned go on beyond the last attention. */
static kvc_status keep_outputs(block *b, kvc_error *err) {
    kvc_workspace *ws = b->ws;
    const kvc_backend *be = ws->model->device->backend;
    const kvc_shape *s = &ws->model->shape;
    int32_t *index = NULL;
    size_t n = 0;
    TRY(kvc_workspace_host(ws, b->n_out, sizeof *index, &index, err));
    for (size_t i = 0; i < b->n_pieces; i++) {
        const piece *p = &b->pieces[i];
        for (size_t o = 0; o < p->n_out; o++) {
            size_t token = (size_t)p->row->outputs[p->out_first + o];
            index[n++] = (int32_t)(p->at + token - p->first);
        }
    }
    TRY(be->upload(ws->stream, buf(ws, INDEX), index, 4 * n, err));
    TRY(be->gather(ws->stream, buf(ws, KEPT_X), buf(ws, X), s->dim_ld, buf(ws, INDEX), n, s->dim_ld,
                   err));
    return be->gather(ws->stream, buf(ws, KEPT_A), buf(ws, ATTENDED), s->q_ld, buf(ws, INDEX), n,
                      s->q_ld, err);
}

static kvc_status run_layer(block *b, int layer, kvc_error *err) {
    kvc_workspace *ws = b->ws;
    const kvc_shape *s = &ws->model->shape;
    const kvc_config *c = &ws->model->config;
    const kvc_layer *l = &ws->model->layers[layer];
    bool last = layer == b->batch->layer_end - 1;
    bool ends_here = last && b->n_out == 0;
    TRY(ws->model->device->backend->rms_norm(ws->stream, buf(ws, H), s->dim_ld, buf(ws, X),
                                             s->dim_ld, l->attn_norm, b->n, 1, s->dim, c->norm_eps,
                                             c->norm_offset, err));
    TRY(project(b, layer, !ends_here || b->batch->mass, err));
    TRY(append(b, layer, err));
    if (!ends_here || b->batch->mass) TRY(attend(b, layer, !ends_here, err));
    if (ends_here) return KVC_OK;
    kvc_mem x = buf(ws, X), attended = buf(ws, ATTENDED);
    size_t n = b->n;
    if (last) {
        TRY(keep_outputs(b, err));
        x = buf(ws, KEPT_X);
        attended = buf(ws, KEPT_A);
        n = b->n_out;
    }
    TRY(residual(b, x, attended, s->q_ld, &l->o, l->o_bias, l->post_attn_norm, n, err));
    return mlp(b, layer, x, n, err);
}

/* ---- leaving: hidden states, or what the head makes of them ---- */

/* Where output o of the block stands in the caller's array. */
static size_t output_place(const block *b, size_t o) {
    const piece *p = b->pieces;
    while (o >= p->n_out) o -= p++->n_out;
    return p->out_at + o;
}

static kvc_status give_hidden(block *b, buffer_name from, kvc_error *err) {
    kvc_workspace *ws = b->ws;
    const kvc_shape *s = &ws->model->shape;
    for (size_t o = 0; o < b->n_out; o++) {
        float *to = (float *)b->batch->out + output_place(b, o) * s->dim;
        TRY(ws->model->device->backend->download(
            ws->stream, to, kvc_mem_at(buf(ws, from), 4 * o * s->dim_ld), 4 * s->dim, err));
    }
    return KVC_OK;
}

static int32_t target_of(const block *b, size_t o) {
    const piece *p = b->pieces;
    while (o >= p->n_out) o -= p++->n_out;
    return p->row->targets[p->out_first + o];
}

/* Results of outputs first .. first + n - 1, whose logits stand in LOGITS. */
static kvc_status give_results(block *b, size_t first, size_t n, kvc_error *err) {
    kvc_workspace *ws = b->ws;
    const kvc_backend *be = ws->model->device->backend;
    const kvc_shape *s = &ws->model->shape;
    if (b->batch->output == KVC_OUT_LOGITS) {
        for (size_t o = 0; o < n; o++) {
            float *to = (float *)b->batch->out + output_place(b, first + o) * s->vocab;
            TRY(be->download(ws->stream, to, kvc_mem_at(buf(ws, LOGITS), 4 * o * s->vocab_ld),
                             4 * s->vocab, err));
        }
        return KVC_OK;
    }
    int32_t words[HEAD_ROWS];
    kvc_mem result = buf(ws, RESULT), targets = kvc_mem_at(result, 4 * HEAD_ROWS);
    if (b->batch->output == KVC_OUT_ARGMAX) {
        TRY(be->argmax(ws->stream, result, buf(ws, LOGITS), s->vocab_ld, n, s->vocab, err));
    } else {
        for (size_t o = 0; o < n; o++) words[o] = target_of(b, first + o);
        TRY(be->upload(ws->stream, targets, words, 4 * n, err));
        TRY(be->logprob(ws->stream, result, buf(ws, LOGITS), s->vocab_ld, targets, n, s->vocab,
                        err));
    }
    TRY(be->download(ws->stream, words, result, 4 * n, err));
    for (size_t o = 0; o < n; o++) {
        if (b->batch->output == KVC_OUT_ARGMAX && words[o] < 0) {
            return kvc_fail(err, KVC_ERROR_NUMERIC, "the logits are not finite");
        }
        memcpy((char *)b->batch->out + 4 * output_place(b, first + o), &words[o], 4);
    }
    return KVC_OK;
}

static kvc_status leave(block *b, kvc_error *err) {
    kvc_workspace *ws = b->ws;
    const kvc_backend *be = ws->model->device->backend;
    const kvc_shape *s = &ws->model->shape;
    const kvc_config *c = &ws->model->config;
    if (b->n_out == 0) return KVC_OK;
    if (b->batch->output == KVC_OUT_HIDDEN) return give_hidden(b, KEPT_X, err);
    TRY(be->rms_norm(ws->stream, buf(ws, H), s->dim_ld, buf(ws, KEPT_X), s->dim_ld,
                     ws->model->final_norm, b->n_out, 1, s->dim, c->norm_eps, c->norm_offset, err));
    if (b->batch->output == KVC_OUT_NORMED) return give_hidden(b, H, err);
    ws->counts.linear_flops += 2.0 * (double)b->n_out * (double)s->dim * (double)s->vocab;
    for (size_t first = 0; first < b->n_out; first += HEAD_ROWS) {
        size_t n = b->n_out - first < HEAD_ROWS ? b->n_out - first : HEAD_ROWS;
        TRY(be->linear(ws->stream, buf(ws, LOGITS), s->vocab_ld,
                       kvc_mem_at(buf(ws, H), 4 * first * s->dim_ld), s->dim_ld, &ws->model->head,
                       0, s->vocab_ld, (kvc_mem){0}, false, n, err));
        TRY(give_results(b, first, n, err));
    }
    return KVC_OK;
}

/* ---- a block ---- */

static kvc_status need_all(block *b, kvc_error *err) {
    const kvc_shape *s = &b->ws->model->shape;
    const struct {
        buffer_name name;
        size_t row_bytes;
    } table[] = {{X, 4 * s->dim_ld},
                 {H, 4 * s->dim_ld},
                 {QKV, 4 * s->qkv_ld},
                 {ATTENDED, 4 * s->q_ld},
                 {GATE_UP, 8 * s->hidden_ld},
                 {GATED, 4 * s->hidden_ld},
                 {KEPT_X, 4 * s->dim_ld},
                 {KEPT_A, 4 * s->q_ld},
                 {IDS, sizeof(int32_t)},
                 {INDEX, sizeof(int32_t)},
                 {MASS, 4 * (size_t)b->ws->model->config.n_heads}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        TRY(kvc_workspace_need(b->ws, table[i].name, b->n, table[i].row_bytes, err));
    }
    if (b->batch->output > KVC_OUT_NORMED) {
        TRY(kvc_workspace_need(b->ws, LOGITS, HEAD_ROWS, 4 * s->vocab_ld, err));
        TRY(kvc_workspace_need(b->ws, RESULT, 2 * HEAD_ROWS, 4, err));
    }
    return KVC_OK;
}

kvc_status kvc_block_run(block *b, kvc_error *err) {
    TRY(need_all(b, err));
    TRY(enter(b, err));
    if (b->batch->layer_begin == 0) b->ws->counts.tokens += b->n;
    for (int layer = b->batch->layer_begin; layer < b->batch->layer_end; layer++) {
        kvc_error cause = {0};
        kvc_status status = run_layer(b, layer, &cause);
        if (status == KVC_ERROR_NUMERIC) {
            return kvc_fail(err, status, "layer %d: %s", layer, cause.message);
        }
        if (status) return kvc_fail(err, status, "%s", cause.message);
    }
    return leave(b, err);
}
