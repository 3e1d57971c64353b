/* cpu.h - what the files of the CPU backend share.
 *
 *   cpu.c        the table, memory, streams
 *   pool.c       the thread pool
 *   kernels.h    arithmetic on rows and tiles, one table per instruction set
 *   linear.c     weights: packing and matrix products
 *   table.c      the embedding table from its other side: mixing its rows, finding the nearest
 *   append.c     new K and V into their blocks
 *   attention.c  attention over spans
 *   rows.c       everything that works on one row at a time
 *
 * Threads share out chunks whose borders depend on shapes only. A chunk is computed by exactly
 * one thread in a fixed order, so who computed it leaves no trace in the bits.
 */
#ifndef KVC_CPU_H
#define KVC_CPU_H

#include "../backend.h"
#include "kernels.h"

typedef struct cpu_context {
    uintptr_t mask; /* 0, or the bit that guard flips in every handle */
    const cpu_kernels *kernels;
    char description[96];
} cpu_context;

struct kvc_stream {
    uintptr_t mask;
    const cpu_kernels *kernels;
    kvc_interrupt interrupt;
    void *interrupt_context;
    float *scratch; /* [scratch_workers, scratch_floats], grown by cpu_scratch */
    size_t scratch_floats;
    int scratch_workers;
    float *parts; /* [n_parts], what tasks leave for others, grown by cpu_parts */
    size_t n_parts;
};

/* The only place where a handle becomes an address. */
static inline void *cpu_address(const kvc_stream *s, kvc_mem mem) {
    return (char *)((uintptr_t)mem.buffer ^ s->mask) + mem.offset;
}

/* Room for `floats` per worker of the pool; later calls see the same memory, undefined contents. */
kvc_status cpu_scratch(kvc_stream *s, size_t floats, kvc_error *err);

/* Room for `floats` that all workers see, likewise. */
kvc_status cpu_parts(kvc_stream *s, size_t floats, kvc_error *err);

/* Runs work(context, chunk, worker) for every chunk in 0 .. n_chunks - 1; worker is below
 * cpu_threads(). Returns KVC_ERROR_INTERRUPTED when the stream's hook says stop. */
typedef void (*cpu_work)(void *context, size_t chunk, int worker);
kvc_status cpu_parallel(kvc_stream *s, cpu_work work, void *context, size_t n_chunks,
                        kvc_error *err);
int cpu_threads(void);

/* slots, by file */
size_t cpu_matrix_bytes(size_t n_out, size_t n_in, kvc_dtype dtype);
kvc_status cpu_matrix_pack(kvc_stream *s, const kvc_matrix *m, size_t row, const kvc_source *src,
                           kvc_dtype src_dtype, size_t n_rows, kvc_error *err);
kvc_status cpu_linear(kvc_stream *s, kvc_mem dst, size_t dst_ld, kvc_mem src, size_t src_ld,
                      const kvc_matrix *m, size_t out_begin, size_t out_end, kvc_mem bias, bool add,
                      size_t n, kvc_error *err);
kvc_status cpu_embed(kvc_stream *s, kvc_mem dst, size_t dst_ld, const kvc_matrix *m, kvc_mem ids,
                     size_t n, float scale, kvc_error *err);
kvc_status cpu_mix(kvc_stream *s, kvc_mem dst, size_t dst_ld, kvc_mem logits, size_t ld,
                   const kvc_matrix *m, size_t n, size_t vocab_size, float temperature, float scale,
                   kvc_error *err);
kvc_status cpu_nearest(kvc_stream *s, kvc_mem best, kvc_mem src, size_t src_ld, const kvc_matrix *m,
                       size_t n, size_t vocab_size, kvc_error *err);
kvc_status cpu_kv_append(kvc_stream *s, kvc_mem k, kvc_mem v, size_t ld, int n_kv_heads,
                         int head_dim, const kvc_append *items, size_t n_items, kvc_error *err);
kvc_status cpu_attention(kvc_stream *s, const kvc_attention *a, kvc_error *err);
kvc_status cpu_rms_norm(kvc_stream *s, kvc_mem dst, size_t dst_ld, kvc_mem src, size_t src_ld,
                        kvc_mem weight, size_t n, size_t groups, size_t dim, float eps,
                        float offset, kvc_error *err);
kvc_status cpu_rope(kvc_stream *s, kvc_mem x, size_t ld, size_t n, int n_heads, int head_dim,
                    int rotary_dim, kvc_mem cos_sin, kvc_error *err);
kvc_status cpu_gated_activation(kvc_stream *s, kvc_mem dst, size_t dst_ld, kvc_mem src,
                                size_t src_ld, size_t up_at, size_t dim, kvc_activation act,
                                size_t n, kvc_error *err);
kvc_status cpu_add(kvc_stream *s, kvc_mem dst, kvc_mem src, size_t n, size_t dim, kvc_error *err);
kvc_status cpu_gather(kvc_stream *s, kvc_mem dst, kvc_mem src, size_t src_ld, kvc_mem index,
                      size_t n, size_t dim, kvc_error *err);
kvc_status cpu_argmax(kvc_stream *s, kvc_mem best, kvc_mem logits, size_t ld, size_t n,
                      size_t vocab_size, kvc_error *err);
kvc_status cpu_logprob(kvc_stream *s, kvc_mem out, kvc_mem logits, size_t ld, kvc_mem targets,
                       size_t n, size_t vocab_size, kvc_error *err);

#endif
