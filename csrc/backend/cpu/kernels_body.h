/* kernels_body.h - the one source of the CPU kernels; included by kernels_*.c, which set
 *
 *   KERNELS_NAME, KERNELS_TABLE  what the table is called
 *   KERNELS_LANES                floats in a vector (4, 8, 16)
 *   KERNELS_ROWS                 rows of the largest tile of the matrix product
 *   KERNELS_SUPPORTED            an expression: does this processor run it?
 *
 * Vectors are the compiler's own (vector_size), so the text is the same for all and the registers
 * follow from the target. A panel is 16 outputs wide: KERNELS_LANES lanes, 16 / KERNELS_LANES
 * vectors. Tails shorter than a vector go through a padded copy and the same code, so a value's
 * bits do not depend on where in a row it stands. kernels_blocks.h and kernels_rows.h are parts.
 */
#include "../dtype.h"
#include "kernels.h"

#include <float.h>
#include <math.h>
#include <string.h>
#if defined(__x86_64__) && KERNELS_LANES > 4
#include <immintrin.h>
#endif

#define LANES KERNELS_LANES
#define PANEL 16
#define VECTORS (PANEL / LANES) /* vectors in a panel */
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));

INLINE vf load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store(float *p, vf v) {
    memcpy(p, &v, sizeof v);
}

INLINE vf splat(float x) {
    return x - (vf){0}; /* x - 0 keeps the sign of zero */
}

INLINE vf choose(vi mask, vf yes, vf no) {
    return (vf)((mask & (vi)yes) | (~mask & (vi)no));
}

INLINE vf load_part(const float *p, size_t n, float fill) {
    float padded[LANES];
    for (size_t i = 0; i < LANES; i++) padded[i] = i < n ? p[i] : fill;
    return load(padded);
}

INLINE void store_part(float *p, vf v, size_t n) {
    float padded[LANES];
    store(padded, v);
    memcpy(p, padded, n * sizeof *p);
}

INLINE float sum_lanes(vf v) {
    float lanes[LANES];
    store(lanes, v);
    for (int half = LANES / 2; half; half /= 2) {
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    }
    return lanes[0];
}

/* ---- 16-bit floats ---- */

/* The conversions are named where there is an instruction: GCC splits the generic ones in halves. */
INLINE vu words_of(vh h) {
#if defined(__x86_64__) && KERNELS_LANES == 16
    return (vu)_mm512_cvtepu16_epi32((__m256i)h);
#elif defined(__x86_64__) && KERNELS_LANES == 8
    return (vu)_mm256_cvtepu16_epi32((__m128i)h);
#else
    return __builtin_convertvector(h, vu);
#endif
}

INLINE vf widen(vh h, kvc_dtype dtype) {
    if (dtype == KVC_BF16) return (vf)(words_of(h) << 16);
#if defined(__x86_64__) && KERNELS_LANES == 16
    return (vf)_mm512_cvtph_ps((__m256i)h);
#elif defined(__x86_64__) && KERNELS_LANES == 8
    return (vf)_mm256_cvtph_ps((__m128i)h);
#else
    vf v;
    for (int i = 0; i < LANES; i++) v[i] = kvc_f32_of_f16(h[i]);
    return v;
#endif
}

/* LANES values from element `at` of an array of dtype */
INLINE vf load_as(const void *p, size_t at, kvc_dtype dtype) {
    if (dtype == KVC_F32) return load((const float *)p + at);
    vh h;
    memcpy(&h, (const uint16_t *)p + at, sizeof h);
    return widen(h, dtype);
}

INLINE void to_f32(float *dst, const void *src, size_t n, kvc_dtype dtype) {
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) store(dst + i, load_as(src, i, dtype));
    for (; i < n; i++) dst[i] = kvc_element(src, i, dtype);
}

/* To nearest even; NaN stays NaN. */
INLINE vh narrow(vf v, kvc_dtype dtype) {
    if (dtype == KVC_BF16) {
        vu bits = (vu)v, nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        vu is_nan = (vu)((bits & 0x7fffffff) > 0x7f800000);
        return __builtin_convertvector((is_nan & (bits >> 16 | 0x40)) | (~is_nan & nearest), vh);
    }
#if defined(__x86_64__) && KERNELS_LANES == 16
    return (vh)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__x86_64__) && KERNELS_LANES == 8
    return (vh)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
#else
    vh h;
    for (int i = 0; i < LANES; i++) h[i] = kvc_f16_of_f32(v[i]);
    return h;
#endif
}

/* Stores LANES values as elements of dtype; returns lanes of ones where a result is not finite. */
INLINE vu store_as(void *p, vf v, kvc_dtype dtype) {
    if (dtype == KVC_F32) {
        memcpy(p, &v, sizeof v);
        return (vu)(((vu)v & 0x7f800000) == 0x7f800000);
    }
    const uint16_t exponent = dtype == KVC_BF16 ? 0x7f80 : 0x7c00;
    vh h = narrow(v, dtype);
    memcpy(p, &h, sizeof h);
    return (vu)((__builtin_convertvector(h, vu) & exponent) == exponent);
}

INLINE bool from_f32(void *dst, const float *src, size_t n, kvc_dtype dtype) {
    size_t i = 0, element = dtype == KVC_F32 ? 4 : 2;
    vu bad = (vu){0};
    for (; i + LANES <= n; i += LANES) {
        bad |= store_as((char *)dst + i * element, load(src + i), dtype);
    }
    if (i < n) {
        char padded[4 * LANES];
        bad |= store_as(padded, load_part(src + i, n - i, 0), dtype);
        memcpy((char *)dst + i * element, padded, (n - i) * element);
    }
    uint32_t any = 0;
    for (int lane = 0; lane < LANES; lane++) any |= bad[lane];
    return !any;
}

#include "kernels_blocks.h"

/* ---- matrix product ---- */

/* How far ahead a tile asks for weights, in bytes: its streams are short, and the processor's own
 * prefetch stops at the end of a page. What takes longer to take apart needs less of it. */
#define AHEAD(dtype) ((dtype) > KVC_Q8_0 ? 512 : 1024)

/* Into the second-level cache: what does not fit the first beside the work at hand. */
#define ASK_FAR(p) __builtin_prefetch(p, 0, 2)

/* sum += a x one column of weights w */
INLINE void add_column(const int rows, const int vectors, vf sum[][4 * VECTORS], const float *a,
                       size_t lda, const vf *w) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        vf x = splat(a[(size_t)r * lda]);
#pragma GCC unroll 16
        for (int v = 0; v < vectors; v++) sum[r][v] += x * w[v];
    }
}

/* What a tile asks the memory for besides its own b: in as many panels, `apart` bytes after one
 * another, `step` bytes more with every column. */
typedef struct asked {
    const char *from;
    size_t step, apart;
} asked;

/* The share of rows row .. row + rows - 1 of m in what comes next. One tile alone of what is not
 * near reads it as fast as it comes, and asks for nothing besides: for a line that it has. */
INLINE asked share_of(const cpu_next *next, const bool near, const void *b, size_t panel,
                      size_t row, size_t rows, size_t m, size_t k) {
    if (!next || !next->bytes || (!near && m <= KERNELS_ROWS)) return (asked){b, 0, 0};
    return (asked){next->from + panel * next->apart + next->bytes * row / m,
                   next->bytes * rows / (m * k), next->apart};
}

INLINE void float_sums(const int rows, const int panels, const kvc_dtype dtype, const bool near,
                       vf sum[][4 * VECTORS], const float *a, size_t lda, const void *b,
                       size_t b_step, size_t b_panel, size_t k, asked ask) {
    for (size_t d = 0; d < k; d++) {
        vf w[4 * VECTORS];
#pragma GCC unroll 16
        for (int v = 0; v < panels * VECTORS; v++) {
            size_t at =
                (size_t)(v / VECTORS) * b_panel + d * b_step + (size_t)(v % VECTORS) * LANES;
            w[v] = load_as(b, at, dtype);
            const char *asks = ask.from + d * ask.step + (size_t)(v / VECTORS) * ask.apart;
            if (!near) __builtin_prefetch((const char *)b + panel_bytes(at, dtype) + AHEAD(dtype));
            if (v % VECTORS == 0 && !near) __builtin_prefetch(asks);
            if (v % VECTORS == 0 && near) ASK_FAR(asks);
        }
        add_column(rows, panels * VECTORS, sum, a + d, lda, w);
    }
}

INLINE void block_sums(const int rows, const int panels, const kvc_dtype dtype,
                       vf sum[][4 * VECTORS], const float *a, size_t lda, const void *b,
                       size_t b_panel, size_t k) {
    const int per_line = dtype == KVC_Q8_0 ? 4 : 8; /* columns in 64 bytes of integers */
    const size_t apart = panel_bytes(b_panel, dtype);
    for (const char *block = b; k; k -= KVC_BLOCK, a += KVC_BLOCK) {
        block_terms t[4 * VECTORS];
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
            __builtin_prefetch(block + (size_t)p * apart + AHEAD(dtype));
#pragma GCC unroll 16
        for (int v = 0; v < panels * VECTORS; v++) {
            t[v] = block_terms_of(block + (size_t)(v / VECTORS) * apart, v % VECTORS, dtype);
        }
        for (int line = 0; line < KVC_BLOCK / per_line; line++) {
            const char *at = block_integers(block, dtype) + line * 64;
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++)
                __builtin_prefetch(at + (size_t)p * apart + AHEAD(dtype));
#pragma GCC unroll 8
            for (int i = 0; i < per_line; i++) {
                vf w[4 * VECTORS];
#pragma GCC unroll 16
                for (int v = 0; v < panels * VECTORS; v++) {
                    w[v] = block_column(at + (size_t)(v / VECTORS) * apart, i, v % VECTORS, t[v],
                                        dtype);
                }
                add_column(rows, panels * VECTORS, sum, a + line * per_line + i, lda, w);
            }
        }
        block += panel_bytes(KVC_BLOCK * PANEL, dtype);
    }
}

/* One tile: `rows` rows by `panels` panels, all in registers while depth runs. */
INLINE void tile(const int rows, const int panels, const kvc_dtype dtype, const bool near, float *c,
                 size_t ldc, const float *a, size_t lda, const void *b, size_t b_step,
                 size_t b_panel, size_t k, bool add, asked ask) {
    vf sum[KERNELS_ROWS][4 * VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 16
        for (int v = 0; v < panels * VECTORS; v++) sum[r][v] = (vf){0};
    }
    if (dtype < KVC_DTYPE_COUNT) {
        float_sums(rows, panels, dtype, near, sum, a, lda, b, b_step, b_panel, k, ask);
    } else {
        block_sums(rows, panels, dtype, sum, a, lda, b, b_panel, k);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 16
        for (int v = 0; v < panels * VECTORS; v++) {
            float *to = c + (size_t)r * ldc + v * LANES;
            store(to, add ? load(to) + sum[r][v] : sum[r][v]);
        }
    }
}

/* Panels per tile by tile height: as many sums as the registers hold, and several far-apart
 * streams of weights when there are few rows (a decode step reads memory and nothing else). Blocks
 * need registers of their own for what takes them apart. */
#define BLOCKS(dtype) ((dtype) >= KVC_DTYPE_COUNT)
#if LANES == 16
#define WIDTH(rows, dtype) (BLOCKS(dtype) && (rows) > 3 ? 2 : 4)
#elif LANES == 8
#define WIDTH(rows, dtype) ((rows) > 2 ? 1 : (rows) == 2 || (dtype) > KVC_Q8_0 ? 2 : 4)
#else
#define WIDTH(rows, dtype) ((rows) == 1 ? 2 : 1)
#endif

#define TILES(rows, dtype, near)                                                                   \
    for (size_t p = 0; p < n_panels;) {                                                            \
        const char *bp = (const char *)b + panel_bytes(p * b_panel, dtype);                        \
        float *cp = c + p * PANEL;                                                                 \
        asked ask = share_of(next, near, bp, p, row, rows, m, k);                                  \
        enum { W = WIDTH(rows, dtype) };                                                           \
        if (W > 1 && p + W <= n_panels) {                                                          \
            tile(rows, W, dtype, near, cp, ldc, a, lda, bp, b_step, b_panel, k, add, ask);         \
            p += W;                                                                                \
        } else {                                                                                   \
            tile(rows, 1, dtype, near, cp, ldc, a, lda, bp, b_step, b_panel, k, add, ask);         \
            p += 1;                                                                                \
        }                                                                                          \
    }

#define GEMM(name, dtype, near)                                                                    \
    static void name(float *c, size_t ldc, const float *a, size_t lda, const void *b,              \
                     size_t b_step, size_t b_panel, size_t m, size_t n_panels, size_t k, bool add, \
                     const cpu_next *next) {                                                       \
        size_t row = 0;                                                                            \
        for (; m - row >= KERNELS_ROWS; row += KERNELS_ROWS) {                                     \
            TILES(KERNELS_ROWS, dtype, near)                                                       \
            a += KERNELS_ROWS * lda;                                                               \
            c += KERNELS_ROWS * ldc;                                                               \
        }                                                                                          \
        GEMM_TAIL(dtype, near)                                                                     \
    }

#if KERNELS_ROWS == 6
#define GEMM_TAIL(dtype, near)                                                                     \
    switch (m - row) {                                                                             \
    case 5: TILES(5, dtype, near) break;                                                           \
    case 4: TILES(4, dtype, near) break;                                                           \
    case 3: TILES(3, dtype, near) break;                                                           \
    case 2: TILES(2, dtype, near) break;                                                           \
    case 1: TILES(1, dtype, near) break;                                                           \
    default: break;                                                                                \
    }
#else
#define GEMM_TAIL(dtype, near)                                                                     \
    if (m > row) TILES(1, dtype, near)
#endif

GEMM(gemm_f32, KVC_F32, false)
GEMM(gemm_f16, KVC_F16, false)
GEMM(gemm_bf16, KVC_BF16, false)
GEMM(gemm_q8_0, KVC_Q8_0, false)
GEMM(gemm_q4_0, KVC_Q4_0, false)
GEMM(gemm_q4_1, KVC_Q4_1, false)
GEMM(near_f32, KVC_F32, true)
GEMM(near_f16, KVC_F16, true)
GEMM(near_bf16, KVC_BF16, true)

/* ---- a weight matrix from its other side ---- */

INLINE void mix_tile(const int rows, const int columns, const kvc_dtype dtype, float *dst,
                     size_t ldd, const float *p, size_t ldp, const void *b, size_t b_panel,
                     size_t n_panels) {
    vf sum[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) sum[r][c] = (vf){0};
    }
    for (size_t panel = 0; panel < n_panels; panel++) {
        for (int v = 0; v < VECTORS; v++) {
            vf w[4];
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) {
                w[c] = load_as(b, panel * b_panel + (size_t)c * PANEL + (size_t)v * LANES, dtype);
            }
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                vf x = load(p + (size_t)r * ldp + panel * PANEL + (size_t)v * LANES);
#pragma GCC unroll 4
                for (int c = 0; c < columns; c++) sum[r][c] += x * w[c];
            }
        }
    }
    for (int r = 0; r < rows; r++) {
        for (int c = 0; c < columns; c++) dst[(size_t)r * ldd + c] += sum_lanes(sum[r][c]);
    }
}

INLINE void mix(float *dst, size_t ldd, const float *p, size_t ldp, const void *b, size_t b_panel,
                size_t m, size_t n_panels, size_t n_columns, const kvc_dtype dtype) {
    size_t element = dtype == KVC_F32 ? 4 : 2, column = 0;
    for (; column < n_columns; column += column + 4 <= n_columns ? 4 : 1) {
        const char *from = (const char *)b + column * PANEL * element;
        bool four = column + 4 <= n_columns;
        for (size_t r = 0; r < m; r += r + 4 <= m ? 4 : 1) {
            float *to = dst + r * ldd + column;
            const float *x = p + r * ldp;
            if (four && r + 4 <= m) {
                mix_tile(4, 4, dtype, to, ldd, x, ldp, from, b_panel, n_panels);
            } else if (four) {
                mix_tile(1, 4, dtype, to, ldd, x, ldp, from, b_panel, n_panels);
            } else if (r + 4 <= m) {
                mix_tile(4, 1, dtype, to, ldd, x, ldp, from, b_panel, n_panels);
            } else {
                mix_tile(1, 1, dtype, to, ldd, x, ldp, from, b_panel, n_panels);
            }
        }
    }
}

INLINE void squares(float *sum, const void *panel, size_t k, kvc_dtype dtype) {
    vf total[VECTORS];
    for (int v = 0; v < VECTORS; v++) total[v] = load(sum + v * LANES);
    for (size_t d = 0; d < k; d++) {
        for (int v = 0; v < VECTORS; v++) {
            vf w = load_as(panel, d * PANEL + (size_t)v * LANES, dtype);
            total[v] += w * w;
        }
    }
    for (int v = 0; v < VECTORS; v++) store(sum + v * LANES, total[v]);
}

/* ---- transposing ---- */

/* LANES x LANES values by log2(LANES) rounds of perfect shuffles: in each round the bits of an
 * element's (row, column) number rotate by one place. */
#if LANES == 16
#define ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif LANES == 8
#define ZIP_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define ZIP_LOW 0, 4, 1, 5
#define ZIP_HIGH 2, 6, 3, 7
#endif

INLINE void transpose_square(vf x[LANES]) {
    vf y[LANES];
#pragma GCC unroll 4
    for (int round = 1; round < LANES; round *= 2) {
#pragma GCC unroll 16
        for (int i = 0; i < LANES / 2; i++) {
            y[2 * i] = __builtin_shufflevector(x[i], x[i + LANES / 2], ZIP_LOW);
            y[2 * i + 1] = __builtin_shufflevector(x[i], x[i + LANES / 2], ZIP_HIGH);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) x[i] = y[i];
    }
}

INLINE void transpose(float *dst, size_t dst_ld, const void *src, size_t src_ld, size_t n,
                      size_t dim, const void *next, kvc_dtype dtype) {
    size_t n16 = (n + 15) / 16 * 16;
    const char *asks = next ? next : src;
    size_t step = next ? LANES * (dtype == KVC_F32 ? 4 : 2) : 0;
    for (size_t j = 0; j < n16; j += LANES) {
        size_t d = 0;
        for (; j + LANES <= n && d + LANES <= dim; d += LANES) {
            vf x[LANES];
#pragma GCC unroll 16
            for (size_t i = 0; i < LANES; i++, asks += step) {
                x[i] = load_as(src, (j + i) * src_ld + d, dtype);
                ASK_FAR(asks);
            }
            transpose_square(x);
#pragma GCC unroll 16
            for (size_t i = 0; i < LANES; i++) store(dst + (d + i) * dst_ld + j, x[i]);
        }
        for (; d < dim; d++) {
            for (size_t i = j; i < j + LANES; i++) {
                dst[d * dst_ld + i] = i < n ? kvc_element(src, i * src_ld + d, dtype) : 0;
            }
        }
    }
}

#define BY_DTYPE(suffix, dtype)                                                                    \
    static void mix_##suffix(float *dst, size_t ldd, const float *p, size_t ldp, const void *b,    \
                             size_t b_panel, size_t m, size_t n_panels, size_t n_columns) {        \
        mix(dst, ldd, p, ldp, b, b_panel, m, n_panels, n_columns, dtype);                          \
    }                                                                                              \
    static void squares_##suffix(float *sum, const void *panel, size_t k) {                        \
        squares(sum, panel, k, dtype);                                                             \
    }                                                                                              \
    static void transpose_##suffix(float *dst, size_t dst_ld, const void *src, size_t src_ld,      \
                                   size_t n, size_t dim, const void *next) {                       \
        transpose(dst, dst_ld, src, src_ld, n, dim, next, dtype);                                  \
    }                                                                                              \
    static void to_f32_##suffix(float *dst, const void *src, size_t n) {                           \
        to_f32(dst, src, n, dtype);                                                                \
    }                                                                                              \
    static bool from_f32_##suffix(void *dst, const float *src, size_t n) {                         \
        return from_f32(dst, src, n, dtype);                                                       \
    }

BY_DTYPE(f32, KVC_F32)
BY_DTYPE(f16, KVC_F16)
BY_DTYPE(bf16, KVC_BF16)

#define BLOCKS_TO_F32(suffix, dtype)                                                               \
    static void to_f32_##suffix(float *dst, const void *src, size_t n) {                           \
        blocks_to_f32(dst, src, n, dtype);                                                         \
    }

BLOCKS_TO_F32(q8_0, KVC_Q8_0)
BLOCKS_TO_F32(q4_0, KVC_Q4_0)
BLOCKS_TO_F32(q4_1, KVC_Q4_1)

#include "kernels_rows.h"

/* ---- the table ---- */

const cpu_kernels *KERNELS_TABLE(void) {
    static const cpu_kernels table = {
        .name = KERNELS_NAME,
        .q8_bias = Q8_BIAS,
        .gemm = {gemm_f32, gemm_f16, gemm_bf16, gemm_q8_0, gemm_q4_0, gemm_q4_1},
        .near = {near_f32, near_f16, near_bf16},
        .transpose = {transpose_f32, transpose_f16, transpose_bf16},
        .mix = {mix_f32, mix_f16, mix_bf16},
        .squares = {squares_f32, squares_f16, squares_bf16},
        .to_f32 = {to_f32_f32, to_f32_f16, to_f32_bf16, to_f32_q8_0, to_f32_q4_0, to_f32_q4_1},
        .from_f32 = {from_f32_f32, from_f32_f16, from_f32_bf16},
        .max = row_max,
        .exp_sum = row_exp_sum,
        .exp_sum_const = row_exp_sum_const,
        .sum = row_sum,
        .scale = row_scale,
        .add = row_add,
        .scaled_copy = row_scaled_copy,
        .rotate = row_rotate,
        .rms_norm = row_rms_norm,
        .gated = {gated_silu, gated_gelu},
        .soften = soften,
        .blend = row_blend,
    };
    return KERNELS_SUPPORTED ? &table : NULL;
}
