/* linear.c - weights on the CPU: their layout, and products with them.
 *
 * A matrix [n_out, n_in] is held in panels of 16 output rows, depth-major: element (o, k) stands
 * at (o / 16 * n_in + k) * 16 + o % 16. One tile of a product then reads whole vectors of 16
 * outputs, needs no packing per call and no reduction across lanes, and the same kernel serves
 * one row or thousands with the same bits. Depth runs in blocks of DEPTH, so that a panel block
 * stays in the first-level cache and a long chain of roundings is cut.
 */
#include "cpu.h"

#include <string.h>

enum {
    DEPTH = 512,     /* of one chain of sums */
    GROUP = 4,       /* panels per chunk */
    ROWS = 128,      /* rows per chunk */
    WIDEN_ROWS = 24, /* from here on a 16-bit block is widened once, not once per tile of rows */
    PACK_DEPTH = 256 /* columns that packing holds at a time */
};

size_t cpu_matrix_bytes(size_t n_out, size_t n_in, kvc_dtype dtype) {
    size_t elements, bytes;
    if (!kvc_mul(&elements, kvc_panel_round(n_out), n_in)) return 0;
    return kvc_mul(&bytes, elements, kvc_dtype_bytes(dtype)) ? bytes : 0;
}

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

/* One panel: its rows are read as they are, then PACK_DEPTH columns at a time turned and narrowed.
 * Reading here, not before, keeps the rows in this core's cache and every thread busy. */
static void pack_panel(void *context, size_t panel, int worker) {
    pack_job *job = context;
    const cpu_kernels *kernels = job->kernels;
    size_t element = kvc_dtype_bytes(job->dtype), src_element = kvc_dtype_bytes(job->src_dtype);
    size_t first = panel * KVC_PANEL, row_bytes = job->n_in * src_element;
    size_t rows = job->n_rows - first < KVC_PANEL ? job->n_rows - first : KVC_PANEL;
    char *read = (char *)(job->scratch + (size_t)worker * job->scratch_floats);
    if (!job->src->read(job->src->context, read, first * row_bytes, rows * row_bytes)) {
        job->readable = false;
        return;
    }
    float turned[PACK_DEPTH * KVC_PANEL];
    for (size_t k = 0; k < job->n_in; k += PACK_DEPTH) {
        size_t n = job->n_in - k < PACK_DEPTH ? job->n_in - k : PACK_DEPTH;
        kernels->transpose[job->src_dtype](turned, KVC_PANEL, read + k * src_element, job->n_in,
                                           rows, n);
        char *to = job->panels + (panel * job->n_in + k) * KVC_PANEL * element;
        if (!kernels->from_f32[job->dtype](to, turned, n * KVC_PANEL)) job->finite = false;
    }
}

kvc_status cpu_matrix_pack(kvc_stream *s, const kvc_matrix *m, size_t row, const kvc_source *src,
                           kvc_dtype src_dtype, size_t n_rows, kvc_error *err) {
    size_t floats = KVC_PANEL * m->n_in * kvc_dtype_bytes(src_dtype) / sizeof(float);
    kvc_status status = cpu_scratch(s, floats, err);
    if (status) return status;
    pack_job job = {.kernels = s->kernels,
                    .scratch = s->scratch,
                    .scratch_floats = s->scratch_floats,
                    .panels =
                        (char *)cpu_address(s, m->mem) + row * m->n_in * kvc_dtype_bytes(m->dtype),
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

typedef struct linear_job {
    const cpu_kernels *kernels;
    float *scratch; /* per worker, scratch_floats apart: a widened block; NULL: not wanted */
    size_t scratch_floats;
    float *dst;
    const float *src, *bias;
    const char *panels;
    size_t dst_ld, src_ld, n_in, n, n_panels, n_groups;
    kvc_dtype dtype;
    bool add;
} linear_job;

/* A block of panels as f32: the same values, hence the same bits of the product. */
static const float *widen_block(const linear_job *job, const char *b, size_t n_panels, size_t depth,
                                int worker) {
    float *wide = job->scratch + (size_t)worker * job->scratch_floats;
    for (size_t p = 0; p < n_panels; p++) {
        const char *from = b + p * job->n_in * KVC_PANEL * kvc_dtype_bytes(job->dtype);
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
    for (size_t k = 0; k < job->n_in; k += DEPTH) {
        size_t depth = job->n_in - k < DEPTH ? job->n_in - k : DEPTH;
        const void *b =
            job->panels + (panel * job->n_in + k) * KVC_PANEL * kvc_dtype_bytes(job->dtype);
        if (widen) b = widen_block(job, b, n_panels, depth, worker);
        kvc_dtype dtype = widen ? KVC_F32 : job->dtype;
        size_t apart = (widen ? DEPTH : job->n_in) * KVC_PANEL;
        job->kernels->gemm[dtype](dst, job->dst_ld, src + k, job->src_ld, b, KVC_PANEL, apart, rows,
                                  n_panels, depth, job->add || k > 0);
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
                                out_begin * m->n_in * kvc_dtype_bytes(m->dtype),
                      .dst_ld = dst_ld,
                      .src_ld = src_ld,
                      .n_in = m->n_in,
                      .n = n,
                      .n_panels = (out_end - out_begin) / KVC_PANEL,
                      .dtype = m->dtype,
                      .add = add};
    job.n_groups = (job.n_panels + GROUP - 1) / GROUP;
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
    float *to = cpu_address(s, dst);
    const int32_t *id = cpu_address(s, ids);
    const char *panels = cpu_address(s, m->mem);
    size_t element = kvc_dtype_bytes(m->dtype);
    for (size_t r = 0; r < n; r++, to += dst_ld) {
        size_t panel = (size_t)id[r] / KVC_PANEL, lane = (size_t)id[r] % KVC_PANEL;
        const char *from = panels + (panel * m->n_in * KVC_PANEL + lane) * element;
        for (size_t k = 0; k < m->n_in; k++, from += KVC_PANEL * element) {
            s->kernels->to_f32[m->dtype](to + k, from, 1);
        }
        s->kernels->scale(to, m->n_in, scale);
    }
    return KVC_OK;
}
