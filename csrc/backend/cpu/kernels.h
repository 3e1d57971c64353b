/* kernels.h - the arithmetic of the CPU backend: one table of functions per instruction set.
 *
 * kernels_body.h holds the one source of them, written in the compiler's portable vectors; it is
 * compiled once plain, once for AVX2 and once for AVX-512 (kernels_*.c), and the best table the
 * processor supports is taken at run time. KVCOMM_CPU=portable|avx2|avx512 asks for a lesser one.
 * Functions here know no stream and no thread; every sum has an order fixed by its length alone.
 */
#ifndef KVC_CPU_KERNELS_H
#define KVC_CPU_KERNELS_H

#include "kvcomm.h"

/* Memory that will be read soon: as many runs of `bytes` as the product at hand has panels, the
 * first at `from`, each `apart` bytes after the one before. */
typedef struct cpu_next {
    const char *from;
    size_t apart, bytes;
} cpu_next;

typedef void (*cpu_gemm)(float *c, size_t ldc, const float *a, size_t lda, const void *b,
                         size_t b_step, size_t b_panel, size_t m, size_t n_panels, size_t k,
                         bool add, const cpu_next *next);

typedef struct cpu_kernels {
    const char *name;
    unsigned char q8_bias; /* added (modulo 256) to the integers of packed q8_0 blocks */
    /* c [m, 16 * n_panels] (row stride ldc) = a [m, k] (row stride lda) x b, or += when add.
     * Element (depth, panel, lane) of b stands at panel * b_panel + depth * b_step + lane. Each
     * output is one chain over k from zero, then one addition to c. One entry per dtype of b. A
     * block type's panels are runs of blocks of 32 depths (kernels_blocks.h), b_panel values apart;
     * k is a multiple of 32 and the bits are those of the f32 product of the same values. next:
     * what to ask the memory for meanwhile, or NULL; few rows and block types ask for nothing. */
    cpu_gemm gemm[KVC_MATRIX_DTYPE_COUNT];
    /* The same for a b that lies in the caches and is not asked for; next, with any number of rows,
     * comes into the second-level one. */
    cpu_gemm near[KVC_DTYPE_COUNT];
    /* dst [dim, dst_ld] = transposed src [n, dim] (row stride src_ld), columns n .. n16 - 1 zero
     * where n16 is n rounded up to 16. One entry per dtype of src. next: as many bytes to ask the
     * memory for meanwhile, into the second-level cache, or NULL. */
    void (*transpose[KVC_DTYPE_COUNT])(float *dst, size_t dst_ld, const void *src, size_t src_ld,
                                       size_t n, size_t dim, const void *next);
    /* dst [m, n_columns] (row stride ldd) += p [m, 16 * n_panels] (row stride ldp) x the panels of
     * b, element (column, panel, lane) at panel * b_panel + column * 16 + lane: the product with a
     * weight matrix from its other side. One chain per lane over the panels, then over lanes. */
    void (*mix[KVC_DTYPE_COUNT])(float *dst, size_t ldd, const float *p, size_t ldp, const void *b,
                                 size_t b_panel, size_t m, size_t n_panels, size_t n_columns);
    /* sum [16] += per lane the squares of a panel of k columns, one after the other */
    void (*squares[KVC_DTYPE_COUNT])(float *sum, const void *panel, size_t k);
    /* n values; a block type: whole blocks of a panel, n a multiple of 512, depth-major */
    void (*to_f32[KVC_MATRIX_DTYPE_COUNT])(float *dst, const void *src, size_t n);
    /* To nearest even; NaN stays NaN. Returns false when a result is not finite. */
    bool (*from_f32[KVC_DTYPE_COUNT])(void *dst, const float *src, size_t n);

    float (*max)(const float *x, size_t n);
    /* x = exp(x - shift) in place, exactly 0 for -inf; returns the sum. shift is finite. */
    float (*exp_sum)(float *x, size_t n, float shift);
    float (*exp_sum_const)(const float *x, size_t n, float shift); /* the sum only */
    float (*sum)(const float *x, size_t n);
    void (*scale)(float *x, size_t n, float factor);
    void (*add)(float *dst, const float *src, size_t n);
    /* dst = factor * src */
    void (*scaled_copy)(float *dst, const float *src, size_t n, float factor);
    /* x and y (n values each) turn as pairs: x' = x cos - y sin, y' = y cos + x sin */
    void (*rotate)(float *x, float *y, const float *cos, const float *sin, size_t n);
    void (*rms_norm)(float *dst, const float *src, const float *weight, size_t n, float eps,
                     float offset);
    void (*gated[2])(float *dst, const float *gate, const float *up, size_t n); /* kvc_activation */
    /* One tile of a running softmax: s [m, n] (row stride lds, n a multiple of 16, hidden columns
     * -inf) becomes e^(s - most), most being raised to the row's maximum first. shrink = e^(most
     * before - most after); sum and mass, [m rounded up to 16] like most and shrink, shrink and take
     * in the row's sum, mass only when `counted`. */
    void (*soften)(float *s, size_t lds, size_t m, size_t n, bool counted, float *most, float *sum,
                   float *mass, float *shrink);
    /* dst = keep * dst + factor * src */
    void (*blend)(float *dst, float keep, const float *src, float factor, size_t n);
} cpu_kernels;

const cpu_kernels *cpu_kernels_portable(void);
const cpu_kernels *cpu_kernels_avx2(void);   /* NULL when not compiled in or not supported */
const cpu_kernels *cpu_kernels_avx512(void); /* NULL likewise */

#endif
