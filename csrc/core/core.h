/* core.h - the structs behind the names of kvcomm.h, shared by the files of the core.
 *
 *   device.c   reference-counted devices
 *   model.c    weights by name into the backend's matrices
 *   rope.c     inverse frequencies and angles
 *   segment.c  blocks of K and V, and buffers that wait to be used again
 *   kv.c       messages: sharing, selecting, trimming, concatenating
 *   session.c  one timeline: given parts, own tail
 *   embedding.c tokens as vectors: embedded, mixed, found again
 *   forward.c  the one forward pass, for every family; batch.c and workspace.c around it
 *   score.c    attention mass to scores to an order of layers
 *   sample.c   drawing a token
 *
 * The core is plain C11. It sees buffers as kvc_mem and never an address behind one.
 */
#ifndef KVC_CORE_H
#define KVC_CORE_H

#include "../backend/backend.h"

#include <stdatomic.h>

/* Passes a failure on; for functions that hold nothing to release. */
#define TRY(call)                                                                                  \
    do {                                                                                           \
        kvc_status try_status_ = (call);                                                           \
        if (try_status_) return try_status_;                                                       \
    } while (0)

/* Released segments, kept for the buffers behind them; see segment.c. */
typedef struct kvc_spares {
    struct kvc_segment *first, *last; /* linked by `next`, oldest first */
    size_t bytes;
    size_t most;        /* bytes that live segments held at any time */
    atomic_size_t live; /* bytes that they hold now */
    atomic_flag taken;  /* guards the rest; whoever finds it set does without */
} kvc_spares;

struct kvc_device {
    kvc_backend *backend;
    atomic_int n_refs;
    kvc_spares spares;
};

kvc_device *kvc_device_retain(kvc_device *device);

/* calloc with a checked product and a message; 0 elements give a valid pointer */
kvc_status kvc_host_alloc(void *out, size_t n, size_t size, const char *what, kvc_error *err);

/* ---- model ---- */

typedef struct kvc_layer {
    kvc_matrix qkv; /* q, k, v one after another, each from a multiple of KVC_PANEL */
    kvc_matrix o;
    kvc_matrix gate_up; /* gate, up likewise */
    kvc_matrix down;
    kvc_mem attn_norm, mlp_norm;           /* f32 [dim] */
    kvc_mem post_attn_norm, post_mlp_norm; /* f32 [dim] or NULL */
    kvc_mem qkv_bias, gate_up_bias;        /* f32, laid out like the matrix rows, or NULL */
    kvc_mem o_bias, down_bias;             /* f32 [dim, padded] or NULL */
    kvc_mem q_norm, k_norm;                /* f32 [head_dim] or NULL */
} kvc_layer;

typedef struct kvc_shape {
    size_t dim, dim_ld; /* dim_ld: row stride of the residual stream */
    size_t q, kv;       /* columns: n_heads * head_dim, n_kv_heads * head_dim */
    size_t k_at, v_at;  /* first column of k and v in a fused row */
    size_t qkv_ld, q_ld;
    size_t hidden, hidden_ld; /* up starts at hidden_ld of a fused row */
    size_t vocab, vocab_ld;
} kvc_shape;

struct kvc_model {
    kvc_device *device;
    kvc_stream *stream; /* for packing only */
    kvc_config config;  /* its arrays are owned */
    kvc_shape shape;
    kvc_layer *layers; /* [n_layers] */
    kvc_matrix embed, head;
    kvc_mem final_norm;
    double *inv_freq[2]; /* [rotary_dim / 2] */
    kvc_buffer *weights; /* everything, in one buffer */
    size_t weights_bytes;
    uint8_t *present; /* [n_layers, KVC_W_COUNT] */
    bool sealed;
    atomic_int n_refs;
};

kvc_model *kvc_model_retain(kvc_model *model);
static inline bool kvc_layer_windowed(const kvc_model *m, int layer) {
    return m->config.window > 0 && m->config.windowed && m->config.windowed[layer];
}
static inline int kvc_layer_rope(const kvc_model *m, int layer) {
    return m->config.rope_of_layer ? m->config.rope_of_layer[layer] : 0;
}

/* rope.c */
kvc_status kvc_rope_check(const kvc_rope *rope, int head_dim, int which, kvc_error *err);
void kvc_rope_inv_freq(double *out, const kvc_rope *rope); /* [rotary_dim / 2] */
/* out [2, n_pairs]: cos then sin of position * inv_freq, each times factor */
void kvc_rope_angles(float *out, const double *inv_freq, size_t n_pairs, double position,
                     double factor);

/* Bound of positions, offsets and shifts: sums of a few cannot overflow, a double holds each. */
static inline bool kvc_position_fits(int64_t position) {
    return position > -((int64_t)1 << 48) && position < (int64_t)1 << 48;
}

/* ---- KV ---- */

/* A block of K and V of one layer at consecutive positions. Tokens below what a part names never
 * change; room behind them may still be filled by the one session that owns the tail. */
typedef struct kvc_segment {
    kvc_device *device;
    kvc_buffer *buffer; /* k [n_kv_heads, capacity, head_dim], then v from v_at on; what no token
                           was appended to holds anything */
    size_t bytes, v_at, capacity, head_stride;
    int64_t position; /* of token 0 */
    kvc_dtype dtype;
    atomic_int n_refs;
    struct kvc_segment *next; /* among spares */
} kvc_segment;

kvc_status kvc_segment_create(kvc_segment **out, kvc_device *device, int n_kv_heads, int head_dim,
                              kvc_dtype dtype, size_t capacity, int64_t position, kvc_error *err);
kvc_segment *kvc_segment_retain(kvc_segment *segment);
void kvc_segment_release(kvc_segment *segment);
/* Gives spare buffers back until they hold `bytes` at most. */
void kvc_spares_trim(kvc_device *device, size_t bytes);

typedef struct kvc_part {
    kvc_segment *segment; /* holds one reference */
    size_t start, n;      /* tokens of the segment */
    int64_t offset;       /* a receiver sees positions moved by this much */
} kvc_part;

typedef struct kvc_parts {
    kvc_part *part;
    size_t n, capacity;
} kvc_parts;

/* Appends a part with a reference of its own. */
kvc_status kvc_parts_add(kvc_parts *parts, kvc_part part, kvc_error *err);
void kvc_parts_clear(kvc_parts *parts);

struct kvc_kv {
    kvc_device *device;
    int n_layers, n_kv_heads, head_dim;
    kvc_dtype dtype;
    int64_t next_position;
    kvc_parts *layers; /* [n_layers] */
};

/* ---- session ---- */

typedef struct kvc_block {
    kvc_segment *segment;
    size_t n;    /* tokens used */
    bool closed; /* shared with a message: later tokens go to a new block */
} kvc_block;

typedef struct kvc_track { /* one layer of a session */
    kvc_parts given;
    float **turns; /* [given.n] for each part with an offset: its turn table, else NULL */
    kvc_block *blocks;
    size_t n_blocks, blocks_capacity;
    size_t given_len, own_len;
} kvc_track;

struct kvc_session {
    kvc_model *model;
    kvc_dtype kv_dtype;
    kvc_track *tracks;      /* [n_layers] */
    int64_t start_position; /* of own token 0 */
    int64_t shift;
    uint8_t *shifted; /* [n_layers] */
    bool in_batch;    /* seen by the check for doubles */
};

/* Room for n more tokens in layers begin .. end - 1, so that appending cannot fail. */
kvc_status kvc_session_make_room(kvc_session *s, int begin, int end, size_t n, kvc_error *err);
/* Takes up to n tokens of that room, as much as one block has, and says where they go. */
kvc_append kvc_session_append(kvc_session *s, int layer, size_t n);
void kvc_track_truncate(kvc_track *track, size_t n);

/* Where a track stood, to go back there when a call fails: its tokens and its blocks. */
typedef struct kvc_mark {
    size_t own_len, n_blocks;
} kvc_mark;

void kvc_session_mark(const kvc_session *s, kvc_mark *marks);   /* [n_layers] */
void kvc_session_rewind(kvc_session *s, const kvc_mark *marks); /* only forgets what came since */

static inline int64_t kvc_session_layer_shift(const kvc_session *s, int layer) {
    return s->shifted[layer] ? s->shift : 0;
}

#endif
