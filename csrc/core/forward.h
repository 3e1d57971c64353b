/* forward.h - what the three files of a forward call share.
 *
 *   batch.c      checks a batch, cuts it into blocks, undoes everything on an error
 *   forward.c    runs one block through the layers
 *   workspace.c  the memory it runs in
 */
#ifndef KVC_FORWARD_H
#define KVC_FORWARD_H

#include "core.h"

enum { HEAD_ROWS = 64 /* rows of logits at a time */ };

typedef enum {
    X,                /* residual stream [n, dim_ld] */
    H,                /* normalised input, or a block's output before its post-norm [n, dim_ld] */
    QKV,              /* [n, qkv_ld] */
    ATTENDED,         /* [n, q_ld] */
    GATE_UP,          /* [n, 2 * hidden_ld] */
    GATED,            /* [n, hidden_ld] */
    KEPT_X,           /* rows that go on, when only some do [n, dim_ld] */
    KEPT_A,           /* [n, q_ld] */
    LOGITS,           /* [HEAD_ROWS, vocab_ld] */
    ANGLES,           /* four tables [n, 2, rotary_dim / 2]: rope kind x shifted or not */
    IDS = ANGLES + 4, /* int32 [n] */
    INDEX,            /* int32 [n] rows to keep */
    MASS,             /* [n, n_heads] */
    RESULT,           /* [HEAD_ROWS] ids or log-probabilities, then targets */
    N_BUFFERS
} buffer_name;

struct kvc_workspace {
    kvc_model *model;
    kvc_stream *stream;
    kvc_counts counts;
    kvc_buffer *buffers[N_BUFFERS];
    size_t bytes[N_BUFFERS];
    void *host; /* scratch for host arrays of one call */
    size_t host_bytes;
};

/* Some tokens of one row within a block. */
typedef struct piece {
    const kvc_row *row;
    size_t row_index;
    size_t first, n;         /* tokens of the row */
    size_t at;               /* first pooled row of the block */
    size_t own_first;        /* own tokens of the session before this piece */
    size_t out_first, n_out; /* outputs of the row that fall into it */
    size_t out_at;           /* first of them among the outputs of the batch */
} piece;

/* Pieces that run through all layers together, their rows pooled. */
typedef struct block {
    kvc_workspace *ws;
    const kvc_batch *batch;
    const piece *pieces;
    size_t n_pieces, n, n_out;
    bool has_angles[4];
} block;

/* Room for `rows` rows of row_bytes; contents are undefined when it had to grow. */
kvc_status kvc_workspace_need(kvc_workspace *ws, buffer_name name, size_t rows, size_t row_bytes,
                              kvc_error *err);
/* Host arrays of one call; contents do not survive the next request. out: address of a pointer. */
kvc_status kvc_workspace_host(kvc_workspace *ws, size_t n, size_t size, void *out, kvc_error *err);
static inline kvc_mem buf(const kvc_workspace *ws, buffer_name name) {
    return (kvc_mem){ws->buffers[name], 0};
}

kvc_status kvc_block_run(block *b, kvc_error *err);

#endif
