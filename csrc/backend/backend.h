/* backend.h - the one table that stands between the core and the hardware.
 *
 * A backend owns buffers and runs operations on tensors. It knows no model, no layer and no
 * session; the core knows no address. kvc_buffer is never defined: the core passes it back with
 * a byte offset (kvc_mem) and cannot look inside. The CPU backend is complete and is the truth;
 * the others agree with it within the tolerances of the tests. "guard" is the CPU backend with
 * handles that fault when touched (see guard.c).
 *
 * Conventions. Activations are f32, row-major, [n, ld] with the row stride given where it may
 * differ from the width. A row is one token of one sequence; the rows of all sequences of a batch
 * are pooled. A row's result depends on that row's inputs only, never on its neighbours, their
 * number or the threads: every sum has one fixed order. Destination first. Sources and
 * destinations do not overlap unless a slot says "in place". Offsets are aligned to 64 bytes
 * where they begin a tensor. n = 0 is allowed everywhere and does nothing.
 */
#ifndef KVC_BACKEND_H
#define KVC_BACKEND_H

#include "kvcomm.h"

typedef struct kvc_buffer kvc_buffer; /* incomplete on purpose */

typedef struct kvc_mem {
    kvc_buffer *buffer;
    size_t offset; /* bytes */
} kvc_mem;

static inline kvc_mem kvc_mem_at(kvc_mem mem, size_t bytes) {
    return (kvc_mem){mem.buffer, mem.offset + bytes};
}

/* A weight matrix [n_out, n_in] in the backend's own layout. Output rows are grouped; groups
 * start at multiples of KVC_PANEL, and a fused matrix places each of its parts at one. */
#define KVC_PANEL 16
static inline size_t kvc_panel_round(size_t n) {
    return (n + KVC_PANEL - 1) / KVC_PANEL * KVC_PANEL;
}

typedef struct kvc_matrix {
    kvc_mem mem;
    size_t n_out; /* a multiple of KVC_PANEL; padding rows are zero */
    size_t n_in;
    kvc_dtype dtype;
} kvc_matrix;

/* An order of execution, with the caller's interrupt hook and scratch. One per workspace. */
typedef struct kvc_stream kvc_stream;

/* Keys and values of one run of tokens in one layer. */
typedef struct kvc_span {
    kvc_mem k; /* [n_kv_heads, n, head_dim] of `dtype`, heads head_stride elements apart */
    kvc_mem v;
    size_t head_stride;
    kvc_dtype dtype;
    size_t n;
    int64_t position;  /* of key 0, as queries see it: the part's offset is already added */
    const float *turn; /* host [2, rotary_dim / 2]: cos then sin of the angles by which the *query*
                          is turned back before it meets these keys; NULL: not at all */
    size_t mass_from;  /* keys from this index on count towards mass; n: none */
} kvc_span;

/* The queries of one sequence in one layer. */
typedef struct kvc_attention_item {
    size_t row;            /* first row in q, out and mass */
    size_t n;              /* queries, at consecutive positions */
    int64_t position;      /* of the first query */
    size_t own_first;      /* index among the own keys of the first query's own key */
    size_t slack;          /* own key j is visible to query i when j <= own_first + i + slack */
    const kvc_span *spans; /* host [n_given + n_own]: given keys first */
    size_t n_given;
    size_t n_own;
} kvc_attention_item;

typedef struct kvc_attention {
    kvc_mem out; /* [rows, out_ld]; a NULL buffer: only mass is wanted */
    kvc_mem q;   /* [rows, q_ld], heads side by side */
    size_t out_ld, q_ld;
    int n_heads, n_kv_heads, head_dim, rotary_dim;
    float scale;
    int window;   /* 0: none; else a key needs q_pos - k_pos < window */
    kvc_mem mass; /* [rows, n_heads] share of the softmax on counted keys; NULL buffer: none */
    bool soft;    /* own keys are never hidden: visible columns get +1 on their score, others 0 */
    const kvc_attention_item *items;
    size_t n_items;
} kvc_attention;

/* Where the K and V of rows go: n rows of src from `row` on, to tokens at .. at + n - 1 of a
 * span-shaped block. */
typedef struct kvc_append {
    size_t row, n;
    kvc_mem k, v; /* [n_kv_heads, capacity, head_dim] of `dtype` */
    size_t head_stride;
    size_t at;
    kvc_dtype dtype;
} kvc_append;

typedef struct kvc_backend kvc_backend;
struct kvc_backend {
    const char *name;
    const char *description;
    void *context; /* the backend's own */
    void (*close)(kvc_backend *b);

    /* -- memory: zero-filled, 64-byte aligned; host copies are synchronous -- */
    kvc_status (*alloc)(kvc_backend *b, kvc_buffer **out, size_t bytes, kvc_error *err);
    void (*free)(kvc_backend *b, kvc_buffer *buffer, size_t bytes);
    kvc_status (*upload)(kvc_stream *s, kvc_mem dst, const void *src, size_t bytes, kvc_error *err);
    kvc_status (*download)(kvc_stream *s, void *dst, kvc_mem src, size_t bytes, kvc_error *err);
    /* (optional) a host address of mem for reading, valid as long as the buffer; NULL: none */
    const void *(*host_view)(kvc_backend *b, kvc_mem mem);

    kvc_status (*stream_open)(kvc_backend *b, kvc_stream **out, kvc_interrupt interrupt,
                              void *context, kvc_error *err);
    void (*stream_close)(kvc_stream *s);

    /* -- weights -- */
    size_t (*matrix_bytes)(size_t n_out, size_t n_in, kvc_dtype dtype);
    /* Writes the rows that src gives, [n_rows, n_in] (row-major, src_dtype), at output rows row ..
     * of m, converting by value to nearest even; blocks of m's own type as they are, q8_0 by GGUF's
     * rule, q4_0 and q4_1 from nothing else. KVC_ERROR_NUMERIC on a value that is not finite, before
     * or after conversion; KVC_ERROR_READ when src could not be read. In a block type n_in is a
     * multiple of KVC_BLOCK. */
    kvc_status (*matrix_pack)(kvc_stream *s, const kvc_matrix *m, size_t row, const kvc_source *src,
                              kvc_dtype src_dtype, size_t n_rows, kvc_error *err);

    /* -- operations -- */
    /* dst [n, dst_ld] columns 0 .. n_in - 1 = scale * m[ids]; ids [n] int32, in range */
    kvc_status (*embed)(kvc_stream *s, kvc_mem dst, size_t dst_ld, const kvc_matrix *m, kvc_mem ids,
                        size_t n, float scale, kvc_error *err);
    /* Each row has `groups` consecutive vectors of `dim`, each normalised on its own:
     * dst = src / sqrt(mean(src^2) + eps) * (weight [dim] + offset). In place allowed. */
    kvc_status (*rms_norm)(kvc_stream *s, kvc_mem dst, size_t dst_ld, kvc_mem src, size_t src_ld,
                           kvc_mem weight, size_t n, size_t groups, size_t dim, float eps,
                           float offset, kvc_error *err);
    /* dst [n, dst_ld] columns 0 .. out_end - out_begin - 1 = src [n, src_ld] x rows out_begin ..
     * out_end - 1 of m, + bias [out_end - out_begin] unless its buffer is NULL; added to what dst
     * holds when `add`. out_begin and out_end are multiples of KVC_PANEL. */
    kvc_status (*linear)(kvc_stream *s, kvc_mem dst, size_t dst_ld, kvc_mem src, size_t src_ld,
                         const kvc_matrix *m, size_t out_begin, size_t out_end, kvc_mem bias,
                         bool add, size_t n, kvc_error *err);
    /* In place: x [n, ld] holds n_heads vectors of head_dim from column 0 on; pairs (i, i +
     * rotary_dim / 2) turn by the row's angles. cos_sin [n, 2, rotary_dim / 2]. */
    kvc_status (*rope)(kvc_stream *s, kvc_mem x, size_t ld, size_t n, int n_heads, int head_dim,
                       int rotary_dim, kvc_mem cos_sin, kvc_error *err);
    /* k, v [rows, ld] (heads side by side) into blocks, converted to the block's dtype.
     * KVC_ERROR_NUMERIC on a value that is not finite, before or after conversion. */
    kvc_status (*kv_append)(kvc_stream *s, kvc_mem k, kvc_mem v, size_t ld, int n_kv_heads,
                            int head_dim, const kvc_append *items, size_t n_items, kvc_error *err);
    kvc_status (*attention)(kvc_stream *s, const kvc_attention *a, kvc_error *err);
    /* dst [n, dst_ld] columns 0 .. n_in - 1 = scale * softmax(logits [n, ld] / temperature) x rows
     * 0 .. vocab_size - 1 of m. logits is overwritten. */
    kvc_status (*mix)(kvc_stream *s, kvc_mem dst, size_t dst_ld, kvc_mem logits, size_t ld,
                      const kvc_matrix *m, size_t n, size_t vocab_size, float temperature,
                      float scale, kvc_error *err);
    /* best [n] int32: the row of m among 0 .. vocab_size - 1 with the largest cosine to src [n,
     * src_ld], ties to the lowest; -1 for a row with a product that is not finite */
    kvc_status (*nearest)(kvc_stream *s, kvc_mem best, kvc_mem src, size_t src_ld,
                          const kvc_matrix *m, size_t n, size_t vocab_size, kvc_error *err);
    /* dst [n, dst_ld] = act(src[:, :dim]) * src[:, up_at : up_at + dim] */
    kvc_status (*gated_activation)(kvc_stream *s, kvc_mem dst, size_t dst_ld, kvc_mem src,
                                   size_t src_ld, size_t up_at, size_t dim, kvc_activation act,
                                   size_t n, kvc_error *err);
    /* dst [n, dim] += src [n, dim] */
    kvc_status (*add)(kvc_stream *s, kvc_mem dst, kvc_mem src, size_t n, size_t dim,
                      kvc_error *err);
    /* dst [n, dim] = src [rows, src_ld] at rows index [n] int32 */
    kvc_status (*gather)(kvc_stream *s, kvc_mem dst, kvc_mem src, size_t src_ld, kvc_mem index,
                         size_t n, size_t dim, kvc_error *err);
    /* best [n] int32: column of the largest of logits [n, ld], ties to the lowest; a row that holds
     * a NaN gives -1 */
    kvc_status (*argmax)(kvc_stream *s, kvc_mem best, kvc_mem logits, size_t ld, size_t n,
                         size_t vocab_size, kvc_error *err);
    /* out [n] f32: logits[target] - log(sum(exp(logits))), targets [n] int32 */
    kvc_status (*logprob)(kvc_stream *s, kvc_mem out, kvc_mem logits, size_t ld, kvc_mem targets,
                          size_t n, size_t vocab_size, kvc_error *err);
};

/* Each returns a table of its own, closed with b->close(b). */
kvc_status kvc_cpu_open(kvc_backend **out, kvc_error *err);
kvc_status kvc_guard_open(kvc_backend **out, kvc_error *err);
kvc_status kvc_cuda_open(kvc_backend **out, kvc_error *err); /* cuda_stub.c without nvcc */

/* error.c: writes code and formatted message, returns the code. err may be NULL. */
kvc_status kvc_fail(kvc_error *err, kvc_status code, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;
/* a * b, or false when it overflows */
bool kvc_mul(size_t *out, size_t a, size_t b);

#endif
