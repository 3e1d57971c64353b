/* batch.c - a batch from its checks to its blocks.
 *
 * Every row is checked before anything runs. Rows are then cut into pieces (up to PIECE tokens,
 * counted from the row's start) and pieces pooled into blocks. Where a piece starts depends on its
 * own row only, so a row's bits do not depend on the batch. On an error every session gets back
 * the lengths it had.
 */
#include "forward.h"

#include <stdlib.h>
#include <string.h>

enum { PIECE = 512 };

/* ---- checking a batch ---- */

static kvc_status check_ids(const int32_t *ids, size_t n, size_t row, const char *what, int vocab,
                            kvc_error *err) {
    for (size_t i = 0; i < n; i++) {
        if (ids[i] >= 0 && ids[i] < vocab) continue;
        return kvc_fail(err, KVC_ERROR_VALUE, "row %zu, %s %zu: id %d is not in 0 .. %d", row, what,
                        i, ids[i], vocab - 1);
    }
    return KVC_OK;
}

static kvc_status check_row(const kvc_batch *batch, size_t i, const kvc_model *m, kvc_error *err) {
    const kvc_row *row = &batch->rows[i];
    if (!row->session || row->session->model != m) {
        return kvc_fail(err, KVC_ERROR_MISMATCH, "row %zu: the session is of another model", i);
    }
    if (row->n == 0) return kvc_fail(err, KVC_ERROR_VALUE, "row %zu: no tokens", i);
    if (!row->tokens == !row->hidden) {
        return kvc_fail(err, KVC_ERROR_VALUE, "row %zu: tokens or hidden states, one of them", i);
    }
    if (row->tokens && batch->layer_begin > 0) {
        return kvc_fail(err, KVC_ERROR_VALUE, "row %zu: layer %d is entered by hidden states", i,
                        batch->layer_begin);
    }
    if (row->tokens) TRY(check_ids(row->tokens, row->n, i, "token", m->config.vocab_size, err));
    for (int l = 0; row->slack && l < m->config.n_layers; l++) {
        if (row->slack[l] >= 0) continue;
        return kvc_fail(err, KVC_ERROR_VALUE, "row %zu: slack %d in layer %d", i, row->slack[l], l);
    }
    for (int l = batch->layer_begin; l < batch->layer_end; l++) {
        size_t len = row->session->tracks[l].own_len;
        if (len == row->session->tracks[batch->layer_begin].own_len) continue;
        return kvc_fail(err, KVC_ERROR_VALUE,
                        "row %zu: layer %d holds %zu own tokens, layer %d %zu", i, l, len,
                        batch->layer_begin, row->session->tracks[batch->layer_begin].own_len);
    }
    if (batch->output == KVC_OUT_NONE) return KVC_OK;
    for (size_t o = 0; o < row->n_outputs; o++) {
        int32_t at = row->outputs[o];
        if (at < 0 || (size_t)at >= row->n || (o && at <= row->outputs[o - 1])) {
            return kvc_fail(err, KVC_ERROR_VALUE,
                            "row %zu: output %d must be in 0 .. %zu and ascend", i, at, row->n - 1);
        }
    }
    if (batch->output != KVC_OUT_LOGPROB) return KVC_OK;
    if (!row->targets && row->n_outputs) {
        return kvc_fail(err, KVC_ERROR_VALUE, "row %zu: no targets", i);
    }
    return check_ids(row->targets, row->n_outputs, i, "target", m->config.vocab_size, err);
}

static kvc_status check_batch(const kvc_batch *batch, const kvc_model *m, kvc_error *err) {
    if ((unsigned)batch->output > KVC_OUT_LOGPROB) {
        return kvc_fail(err, KVC_ERROR_VALUE, "output %d is not one of 0 .. %d", (int)batch->output,
                        KVC_OUT_LOGPROB);
    }
    if (batch->output != KVC_OUT_NONE && batch->n_rows && !batch->out) {
        return kvc_fail(err, KVC_ERROR_VALUE, "no room for the output");
    }
    if (batch->layer_begin >= batch->layer_end) {
        return kvc_fail(err, KVC_ERROR_VALUE,
                        "layers %d .. %d: the end must be above the beginning", batch->layer_begin,
                        batch->layer_end);
    }
    if (batch->layer_begin < 0 || batch->layer_end > m->config.n_layers) {
        return kvc_fail(err, KVC_ERROR_VALUE, "layers %d .. %d are not within 0 .. %d",
                        batch->layer_begin, batch->layer_end, m->config.n_layers);
    }
    if (batch->output > KVC_OUT_HIDDEN && batch->layer_end != m->config.n_layers) {
        return kvc_fail(err, KVC_ERROR_VALUE,
                        "this output needs the last layer, but layers end at %d of %d",
                        batch->layer_end, m->config.n_layers);
    }
    kvc_status status = KVC_OK;
    size_t i = 0;
    for (; i < batch->n_rows; i++) {
        if ((status = check_row(batch, i, m, err))) break;
        if (batch->rows[i].session->in_batch) {
            status =
                kvc_fail(err, KVC_ERROR_VALUE, "row %zu: the session stands in the batch twice", i);
            break;
        }
        batch->rows[i].session->in_batch = true;
    }
    while (i--) batch->rows[i].session->in_batch = false;
    return status;
}

/* ---- cutting ---- */

/* Rows whose queries see later ones cannot be cut. */
static size_t piece_size(const kvc_batch *batch, const kvc_row *row) {
    return row->slack || (batch->mass && batch->mass->published) ? row->n : PIECE;
}

/* Cuts row i from token `first` on; the outputs before out_first are done. */
static piece cut_piece(const kvc_batch *batch, size_t i, size_t first, size_t out_first,
                       size_t out_at) {
    const kvc_row *row = &batch->rows[i];
    size_t n = piece_size(batch, row);
    if (n > row->n - first) n = row->n - first;
    piece p = {.row = row,
               .row_index = i,
               .first = first,
               .n = n,
               .own_first = row->session->tracks[batch->layer_begin].own_len,
               .out_first = out_first,
               .out_at = out_at + out_first};
    if (batch->output == KVC_OUT_NONE) return p;
    while (out_first + p.n_out < row->n_outputs &&
           (size_t)row->outputs[out_first + p.n_out] < first + n) {
        p.n_out++;
    }
    return p;
}

static kvc_status run_pieces(kvc_workspace *ws, const kvc_batch *batch, piece *pieces,
                             kvc_error *err) {
    block b = {.ws = ws, .batch = batch, .pieces = pieces};
    size_t out_at = 0;
    for (size_t i = 0; i < batch->n_rows; i++) {
        size_t first = 0, out_first = 0;
        while (first < batch->rows[i].n) {
            piece p = cut_piece(batch, i, first, out_first, out_at);
            if (b.n_pieces && b.n + p.n > PIECE) {
                TRY(kvc_block_run(&b, err));
                b = (block){.ws = ws, .batch = batch, .pieces = pieces};
                p = cut_piece(batch, i, first, out_first, out_at); /* the tail may have grown */
            }
            p.at = b.n;
            pieces[b.n_pieces++] = p;
            b.n += p.n;
            b.n_out += p.n_out;
            first += p.n;
            out_first += p.n_out;
        }
        if (batch->output != KVC_OUT_NONE) out_at += batch->rows[i].n_outputs;
    }
    return b.n_pieces ? kvc_block_run(&b, err) : KVC_OK;
}

static kvc_status run_rows(kvc_workspace *ws, const kvc_batch *batch, piece *pieces,
                           kvc_error *err) {
    for (size_t i = 0; i < batch->n_rows; i++) {
        TRY(kvc_session_make_room(batch->rows[i].session, batch->layer_begin, batch->layer_end,
                                  batch->rows[i].n, err));
    }
    if (batch->mass) {
        size_t per_row = (size_t)ws->model->config.n_layers * (size_t)ws->model->config.n_heads;
        memset(batch->mass->mass, 0, batch->n_rows * per_row * sizeof(double));
    }
    return run_pieces(ws, batch, pieces, err);
}

kvc_status kvc_forward(kvc_workspace *ws, const kvc_batch *batch, kvc_error *err) {
    TRY(check_batch(batch, ws->model, err));
    size_t n_layers = (size_t)ws->model->config.n_layers;
    kvc_mark *marks = NULL;
    piece *pieces = NULL;
    kvc_status status = kvc_host_alloc(&pieces, batch->n_rows, sizeof *pieces, "a batch", err);
    if (status) goto done;
    status = kvc_host_alloc(&marks, batch->n_rows, n_layers * sizeof *marks, "a batch", err);
    if (status) goto done;
    for (size_t i = 0; i < batch->n_rows; i++) {
        kvc_session_mark(batch->rows[i].session, marks + i * n_layers);
    }
    status = run_rows(ws, batch, pieces, err);
    for (size_t i = 0; status && i < batch->n_rows; i++) {
        kvc_session_rewind(batch->rows[i].session, marks + i * n_layers);
    }
done:
    free(pieces);
    free(marks);
    return status;
}
