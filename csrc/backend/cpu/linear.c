/* linear.c - weights on the CPU: their layout, and products with them.
 *
 * A matrix [n_out, n_in] is held in panels of 16 output rows, depth-major: element (o, k) stands
 * at (o / 16 * n_in + k) * 16 + o % 16. One tile of a product then reads whole vectors of 16
 * outputs, needs no packing per call and no reduction across lanes, and the same kernel serves
 * one row or thousands with the same bits. Depth runs in blocks of DEPTH, so that a panel block
 * stays in the first-level cache and a long chain of roundings is cut.
 *
 * In the block types (q8_0, q4_0, q4_1) 32 columns of a panel are one run of bytes, which
 * kernels_blocks.h describes. Each value is the scale times the integer in f32, as in GGUF, and the
 * product is that of these values, with the same bits as if they were held in f32.
 */
#include "../dtype.h"
#include "cpu.h"

#include <math.h>
#include <string.h>

enum {
    DEPTH = 512,     /* of one chain of sums */
    GROUP = 4,       /* panels per chunk */
    ROWS = 128,      /* rows per chunk */
    WIDEN_ROWS = 24, /* from here on a 16-bit block is widened once, not once per tile of rows */
    PACK_DEPTH = 256 /* columns that packing holds at a time */
};

size_t cpu_matrix_bytes(size_t n_out, size_t n_in, kvc_dtype dtype) {
    size_t bytes;
    if (n_in > SIZE_MAX / sizeof(float)) return 0;
    return kvc_mul(&bytes, kvc_panel_round(n_out), kvc_row_bytes(dtype, n_in)) ? bytes : 0;
}

/* ---- packing ---- */

typedef struct pack_job {
    const cpu_kernels *kernels;
    float *scratch; /* per worker, scratch_floats apart: the rows of a panel as they were read */
    size_t scratch_floats;
    char *panels;
    kvc_dtype dtype, src_dtype;
    const kvc_source *src;
    size_t n_rows, n_in;
    _Atomic bool finite, readable;
} pack_job;

/* Where columns from k on of a panel stand. */
static char *panel_at(const pack_job *job, size_t panel, size_t k) {
    return job->panels + KVC_PANEL * (panel * kvc_row_bytes(job->dtype, job->n_in) +
                                      kvc_row_bytes(job->dtype, k));
}

/* One block of row r of a panel into the panel's block. False: a scale that is not finite. */
static bool place_block(const pack_job *job, char *panel_block, const unsigned char *block,
                        size_t r) {
    kvc_dtype dtype = job->dtype;
    size_t head = dtype == KVC_Q4_1 ? 2 : 1; /* the scale, and the minimum */
    bool finite = true;
    for (size_t h = 0; h < head; h++) {
        memcpy(panel_block + (h * KVC_PANEL + r) * 2, block + 2 * h, 2);
        finite = finite && (block[2 * h + 1] & 0x7c) != 0x7c;
    }
    unsigned char *to = (unsigned char *)panel_block + head * KVC_PANEL * 2;
    const unsigned char *from = block + 2 * head;
    if (dtype == KVC_Q8_0) {
        for (size_t i = 0; i < KVC_BLOCK; i++) {
            to[i * KVC_PANEL + r] = (unsigned char)(from[i] + job->kernels->q8_bias);
        }
        return finite;
    }
    /* columns 0 .. 15 are the low nibbles of 16 bytes, 16 .. 31 the high ones */
    for (size_t half = 0; half < 2; half++) {
        for (size_t i = 0; i < KVC_BLOCK / 2; i += 2) {
            unsigned low = from[i] >> 4 * half & 15, high = from[i + 1] >> 4 * half & 15;
            size_t column = half * KVC_BLOCK / 2 + i;
            to[(column / 8 * KVC_PANEL + r) * 4 + column % 8 / 2] =
                (unsigned char)(low | high << 4);
        }
    }
    return finite;
}

/* GGUF's rule: the largest magnitude becomes 127, halves go away from zero. */
static void quantize_block(unsigned char *block, const float *x) {
    float most = 0;
    for (size_t i = 0; i < KVC_BLOCK; i++) most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
    float scale = most / 127;
    uint16_t half = kvc_f16_of_f32(scale);
    float inverse =
        half ? 1 / scale : 0; /* a scale too small for f16 leaves nothing of the block */
    memcpy(block, &half, 2);
    for (size_t i = 0; i < KVC_BLOCK; i++) {
        float y = x[i] * inverse;
        int q = (int)y;
        block[2 + i] = (unsigned char)(q + (y >= (float)q + 0.5f) - (y <= (float)q - 0.5f));
    }
}

static bool pack_quantized(const pack_job *job, char *to, const float *wide, size_t n,
                           size_t rows) {
    bool finite = true;
    for (size_t k = 0; k < n; k += KVC_BLOCK, to += KVC_PANEL * 34) {
        for (size_t r = 0; r < rows; r++) {
            const float *x = wide + r * PACK_DEPTH + k;
            unsigned char block[34];
            for (size_t i = 0; i < KVC_BLOCK; i++) finite = finite && isfinite(x[i]);
            if (!finite) return false;
            quantize_block(block, x);
            finite = place_block(job, to, block, r);
        }
    }
    return finite;
}

/* Blocks of the panel's own type: no value is looked at. */
static bool pack_blocks(const pack_job *job, size_t panel, const char *read, size_t rows) {
    size_t block = kvc_dtype_bytes(job->dtype), row_bytes = kvc_row_bytes(job->dtype, job->n_in);
    bool finite = true;
    for (size_t at = 0; at < row_bytes; at += block) {
        char *to = panel_at(job, panel, 0) + KVC_PANEL * at;
        for (size_t r = 0; r < rows; r++) {
            const char *from = read + r * row_bytes + at;
            finite &= place_block(job, to, (const unsigned char *)from, r);
        }
    }
    return finite;
}

/* Columns k to k + n of some rows as f32 [rows, PACK_DEPTH]. */
static void widen_rows(const pack_job *job, float *wide, const char *read, size_t rows, size_t k,
                       size_t n) {
    size_t row_bytes = kvc_row_bytes(job->src_dtype, job->n_in);
    const char *from = read + kvc_row_bytes(job->src_dtype, k);
    for (size_t r = 0; r < rows; r++, from += row_bytes, wide += PACK_DEPTH) {
        if (job->src_dtype < KVC_DTYPE_COUNT) {
            job->kernels->to_f32[job->src_dtype](wide, from, n);
            continue;
        }
        const unsigned char *block = (const unsigned char *)from;
        for (size_t i = 0; i < n; i += KVC_BLOCK, block += kvc_dtype_bytes(job->src_dtype)) {
            kvc_block_values(wide + i, block, job->src_dtype);
        }
    }
}

/* PACK_DEPTH columns at a time are turned and narrowed, widened first where blocks are concerned. */
static bool pack_values(const pack_job *job, size_t panel, const char *read, size_t rows) {
    const cpu_kernels *kernels = job->kernels;
    bool blocks = job->dtype >= KVC_DTYPE_COUNT || job->src_dtype >= KVC_DTYPE_COUNT, finite = true;
    float wide[KVC_PANEL * PACK_DEPTH], turned[PACK_DEPTH * KVC_PANEL];
    for (size_t k = 0; k < job->n_in; k += PACK_DEPTH) {
        size_t n = job->n_in - k < PACK_DEPTH ? job->n_in - k : PACK_DEPTH;
        char *to = panel_at(job, panel, k);
        if (blocks) widen_rows(job, wide, read, rows, k, n);
        if (job->dtype == KVC_Q8_0) {
            finite &= pack_quantized(job, to, wide, n, rows);
            continue;
        }
        if (blocks) {
            kernels->transpose[KVC_F32](turned, KVC_PANEL, wide, PACK_DEPTH, rows, n, NULL);
        } else {
            const char *from = read + kvc_row_bytes(job->src_dtype, k);
            kernels->transpose[job->src_dtype](turned, KVC_PANEL, from, job->n_in, rows, n, NULL);
        }
        finite &= kernels->from_f32[job->dtype](to, turned, n * KVC_PANEL);
    }
    return finite;
}

/* One panel: its rows are read as they are and packed. Reading here, not before, keeps the rows in
 * this core's cache and every thread busy. */
static void pack_panel(void *context, size_t panel, int worker) {
    pack_job *job = context;
    size_t first = panel * KVC_PANEL, row_bytes = kvc_row_bytes(job->src_dtype, job->n_in);
    size_t rows = job->n_rows - first < KVC_PANEL ? job->n_rows - first : KVC_PANEL;
    char *read = (char *)(job->scratch + (size_t)worker * job->scratch_floats);
    if (!job->src->read(job->src->context, read, first * row_bytes, rows * row_bytes)) {
        job->readable = false;
        return;
    }
    bool carried = job->dtype == job->src_dtype && job->dtype >= KVC_DTYPE_COUNT;
    bool finite =
        carried ? pack_blocks(job, panel, read, rows) : pack_values(job, panel, read, rows);
    if (!finite) job->finite = false;
}

kvc_status cpu_matrix_pack(kvc_stream *s, const kvc_matrix *m, size_t row, const kvc_source *src,
                           kvc_dtype src_dtype, size_t n_rows, kvc_error *err) {
    if (m->dtype > KVC_Q8_0 && src_dtype != m->dtype) {
        return kvc_fail(err, KVC_ERROR_UNSUPPORTED, "%s cannot be made of %s, only carried over",
                        kvc_dtype_name(m->dtype), kvc_dtype_name(src_dtype));
    }
    size_t floats = KVC_PANEL * kvc_row_bytes(src_dtype, m->n_in) / sizeof(float);
    kvc_status status = cpu_scratch(s, floats, err);
    if (status) return status;
    pack_job job = {.kernels = s->kernels,
                    .scratch = s->scratch,
                    .scratch_floats = s->scratch_floats,
                    .panels =
                        (char *)cpu_address(s, m->mem) + row * kvc_row_bytes(m->dtype, m->n_in),
                    .dtype = m->dtype,
                    .src_dtype = src_dtype,
                    .src = src,
                    .n_rows = n_rows,
                    .n_in = m->n_in,
                    .finite = true,
                    .readable = true};
    status = cpu_parallel(s, pack_panel, &job, kvc_panel_round(n_rows) / KVC_PANEL, err);
    if (status) return status;
    if (!job.readable) return kvc_fail(err, KVC_ERROR_READ, "cannot be read");
    if (!job.finite) {
        return kvc_fail(err, KVC_ERROR_NUMERIC, "values that are not finite (as %s)",
                        kvc_dtype_name(m->dtype));
    }
    return KVC_OK;
}

/* ---- products ---- */

typedef struct linear_job {
    const cpu_kernels *kernels;
    float *scratch; /* per worker, scratch_floats apart: a widened block; NULL: not wanted */
    size_t scratch_floats;
    float *dst;
    const float *src, *bias;
    const char *panels;
    size_t dst_ld, src_ld, n_in, n, n_panels, n_groups, n_threads;
    kvc_dtype dtype;
    bool add;
} linear_job;

/* A block of panels as f32: the same values, hence the same bits of the product. */
static const float *widen_block(const linear_job *job, const char *b, size_t n_panels, size_t depth,
                                int worker) {
    float *wide = job->scratch + (size_t)worker * job->scratch_floats;
    for (size_t p = 0; p < n_panels; p++) {
        const char *from = b + p * KVC_PANEL * kvc_row_bytes(job->dtype, job->n_in);
        job->kernels->to_f32[job->dtype](wide + p * DEPTH * KVC_PANEL, from, depth * KVC_PANEL);
    }
    return wide;
}

static void linear_chunk(void *context, size_t chunk, int worker) {
    const linear_job *job = context;
    size_t panel = chunk % job->n_groups * GROUP, row = chunk / job->n_groups * ROWS;
    size_t n_panels = job->n_panels - panel < GROUP ? job->n_panels - panel : GROUP;
    size_t rows = job->n - row < ROWS ? job->n - row : ROWS;
    float *dst = job->dst + row * job->dst_ld + panel * KVC_PANEL;
    const float *src = job->src + row * job->src_ld;
    bool widen = job->scratch && rows >= WIDEN_ROWS;
    size_t panel_bytes = KVC_PANEL * kvc_row_bytes(job->dtype, job->n_in);
    /* Threads take chunks in turn, so that this one's next is known well enough to ask for. */
    size_t then = (chunk + job->n_threads) % job->n_groups * GROUP;
    for (size_t k = 0; k < job->n_in; k += DEPTH) {
        size_t depth = job->n_in - k < DEPTH ? job->n_in - k : DEPTH;
        size_t at = KVC_PANEL * kvc_row_bytes(job->dtype, k);
        const void *b = job->panels + panel * panel_bytes + at;
        if (widen) b = widen_block(job, b, n_panels, depth, worker);
        kvc_dtype dtype = widen ? KVC_F32 : job->dtype;
        size_t apart = (widen ? DEPTH : job->n_in) * KVC_PANEL;
        cpu_next next = {job->panels + then * panel_bytes + at, panel_bytes,
                         KVC_PANEL * kvc_row_bytes(job->dtype, depth)};
        job->kernels->gemm[dtype](dst, job->dst_ld, src + k, job->src_ld, b, KVC_PANEL, apart, rows,
                                  n_panels, depth, job->add || k > 0, &next);
    }
    if (!job->bias) return;
    for (size_t r = 0; r < rows; r++) {
        job->kernels->add(dst + r * job->dst_ld, job->bias + panel * KVC_PANEL,
                          n_panels * KVC_PANEL);
    }
}

kvc_status cpu_linear(kvc_stream *s, kvc_mem dst, size_t dst_ld, kvc_mem src, size_t src_ld,
                      const kvc_matrix *m, size_t out_begin, size_t out_end, kvc_mem bias, bool add,
                      size_t n, kvc_error *err) {
    linear_job job = {.kernels = s->kernels,
                      .dst = cpu_address(s, dst),
                      .src = cpu_address(s, src),
                      .bias = bias.buffer ? cpu_address(s, bias) : NULL,
                      .panels = (char *)cpu_address(s, m->mem) +
                                out_begin * kvc_row_bytes(m->dtype, m->n_in),
                      .dst_ld = dst_ld,
                      .src_ld = src_ld,
                      .n_in = m->n_in,
                      .n = n,
                      .n_panels = (out_end - out_begin) / KVC_PANEL,
                      .dtype = m->dtype,
                      .add = add};
    job.n_groups = (job.n_panels + GROUP - 1) / GROUP;
    job.n_threads = (size_t)cpu_threads();
    if (m->dtype != KVC_F32 && n >= WIDEN_ROWS) {
        kvc_status status = cpu_scratch(s, GROUP * DEPTH * KVC_PANEL, err);
        if (status) return status;
        job.scratch = s->scratch;
        job.scratch_floats = s->scratch_floats;
    }
    return cpu_parallel(s, linear_chunk, &job, job.n_groups * ((n + ROWS - 1) / ROWS), err);
}

kvc_status cpu_embed(kvc_stream *s, kvc_mem dst, size_t dst_ld, const kvc_matrix *m, kvc_mem ids,
                     size_t n, float scale, kvc_error *err) {
    (void)err;
    float *to = cpu_address(s, dst), wide[KVC_BLOCK * KVC_PANEL];
    const int32_t *id = cpu_address(s, ids);
    const char *panels = cpu_address(s, m->mem);
    for (size_t r = 0; r < n; r++, to += dst_ld) {
        size_t panel = (size_t)id[r] / KVC_PANEL, lane = (size_t)id[r] % KVC_PANEL;
        const char *from = panels + KVC_PANEL * panel * kvc_row_bytes(m->dtype, m->n_in);
        for (size_t k = 0; k < m->n_in; k += KVC_BLOCK) {
            size_t depth = m->n_in - k < KVC_BLOCK ? m->n_in - k : KVC_BLOCK;
            s->kernels->to_f32[m->dtype](wide, from, depth * KVC_PANEL);
            for (size_t i = 0; i < depth; i++) to[k + i] = wide[i * KVC_PANEL + lane];
            from += KVC_PANEL * kvc_row_bytes(m->dtype, KVC_BLOCK);
        }
        s->kernels->scale(to, m->n_in, scale);
    }
    return KVC_OK;
}
