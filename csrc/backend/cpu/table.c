/* table.c - the embedding table used as a set of vectors: a weighted mean of its rows, and the row
 * nearest to a vector.
 *
 * The table lies in the panels of linear.c, 16 rows side by side. Both operations stream it once for
 * all vectors: a chunk is a slice of columns (mixing) or some panels (nearest), so each output
 * comes from one chunk or from a comparison in the order of chunks.
 */
#include "cpu.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    COLUMNS = 32, /* per chunk of a mean */
    PANELS = 128, /* of one chain of sums; with COLUMNS a block that the second-level cache holds */
    GROUP = 4,    /* panels per chunk of a search */
    DEPTH = 512   /* of one chain of sums, as in linear.c */
};

typedef struct mix_job {
    const cpu_kernels *kernels;
    float *dst;
    const float *p; /* [n, ld] */
    const char *panels;
    float *scratch; /* per worker: a chunk's part of PANELS panels of a block type, in f32 */
    size_t scratch_floats;
    size_t dst_ld, ld, n, n_in, n_panels;
    kvc_dtype dtype;
    float scale;
} mix_job;

/* Logits become probabilities; columns that pad the vocabulary become 0. */
typedef struct softmax_job {
    const cpu_kernels *kernels;
    float *x;
    size_t ld, vocab_size;
    float temperature;
} softmax_job;

static void softmax_row(void *context, size_t row, int worker) {
    (void)worker;
    const softmax_job *job = context;
    float *x = job->x + row * job->ld;
    for (size_t i = 0; i < job->vocab_size; i++) x[i] /= job->temperature;
    float total = job->kernels->exp_sum(x, job->vocab_size, job->kernels->max(x, job->vocab_size));
    job->kernels->scale(x, job->vocab_size, 1.0f / total);
    memset(x + job->vocab_size, 0, (job->ld - job->vocab_size) * sizeof *x);
}

static void mix_chunk(void *context, size_t chunk, int worker) {
    const mix_job *job = context;
    bool blocks = job->dtype >= KVC_DTYPE_COUNT;
    float *wide = blocks ? job->scratch + (size_t)worker * job->scratch_floats : NULL;
    size_t column = chunk * COLUMNS, row_bytes = kvc_row_bytes(job->dtype, job->n_in);
    size_t n_columns = job->n_in - column < COLUMNS ? job->n_in - column : COLUMNS;
    size_t apart = (blocks ? COLUMNS : job->n_in) * KVC_PANEL;
    kvc_dtype dtype = blocks ? KVC_F32 : job->dtype;
    float *dst = job->dst + column;
    for (size_t r = 0; r < job->n; r++) memset(dst + r * job->dst_ld, 0, n_columns * sizeof *dst);
    for (size_t panel = 0; panel < job->n_panels; panel += PANELS) {
        size_t n_panels = job->n_panels - panel < PANELS ? job->n_panels - panel : PANELS;
        const char *b =
            job->panels + KVC_PANEL * (panel * row_bytes + kvc_row_bytes(job->dtype, column));
        for (size_t p = 0; blocks && p < n_panels; p++) {
            job->kernels->to_f32[job->dtype](wide + p * apart, b + p * KVC_PANEL * row_bytes,
                                             n_columns * KVC_PANEL);
        }
        job->kernels->mix[dtype](dst, job->dst_ld, job->p + panel * KVC_PANEL, job->ld,
                                 blocks ? (const char *)wide : b, apart, job->n, n_panels,
                                 n_columns);
    }
    for (size_t r = 0; r < job->n; r++) {
        job->kernels->scale(dst + r * job->dst_ld, n_columns, job->scale);
    }
}

kvc_status cpu_mix(kvc_stream *s, kvc_mem dst, size_t dst_ld, kvc_mem logits, size_t ld,
                   const kvc_matrix *m, size_t n, size_t vocab_size, float temperature, float scale,
                   kvc_error *err) {
    softmax_job softmax = {.kernels = s->kernels,
                           .x = cpu_address(s, logits),
                           .ld = ld,
                           .vocab_size = vocab_size,
                           .temperature = temperature};
    kvc_status status = cpu_parallel(s, softmax_row, &softmax, n, err);
    if (status) return status;
    mix_job job = {.kernels = s->kernels,
                   .dst = cpu_address(s, dst),
                   .p = softmax.x,
                   .panels = cpu_address(s, m->mem),
                   .dst_ld = dst_ld,
                   .ld = ld,
                   .n = n,
                   .n_in = m->n_in,
                   .n_panels = kvc_panel_round(vocab_size) / KVC_PANEL,
                   .dtype = m->dtype,
                   .scale = scale};
    if (m->dtype >= KVC_DTYPE_COUNT) {
        status = cpu_scratch(s, PANELS * COLUMNS * KVC_PANEL, err);
        if (status) return status;
        job.scratch = s->scratch;
        job.scratch_floats = s->scratch_floats;
    }
    return cpu_parallel(s, mix_chunk, &job, (m->n_in + COLUMNS - 1) / COLUMNS, err);
}

typedef struct best_row {
    float cosine;
    int32_t id; /* -1: no number */
} best_row;

typedef struct nearest_job {
    const cpu_kernels *kernels;
    const float *src;
    const char *panels;
    float *scratch; /* per worker [n, GROUP * 16], then [DEPTH, 16] */
    size_t scratch_floats;
    best_row *best; /* [n_chunks, n] */
    size_t src_ld, n, n_in, n_panels, vocab_size;
    kvc_dtype dtype;
} nearest_job;

/* dots [n, width]: the products of all vectors with the rows of n_panels panels */
static void dots_of(const nearest_job *job, float *dots, const char *b, size_t n_panels) {
    for (size_t k = 0; k < job->n_in; k += DEPTH) {
        size_t depth = job->n_in - k < DEPTH ? job->n_in - k : DEPTH;
        job->kernels->gemm[job->dtype](dots, GROUP * KVC_PANEL, job->src + k, job->src_ld,
                                       b + KVC_PANEL * kvc_row_bytes(job->dtype, k), KVC_PANEL,
                                       job->n_in * KVC_PANEL, job->n, n_panels, depth, k > 0, NULL);
    }
}

/* norms [16] = the sums of squares of a panel's rows */
static void squares_of(const nearest_job *job, float *norms, const char *panel, float *wide) {
    memset(norms, 0, KVC_PANEL * sizeof *norms);
    if (job->dtype < KVC_DTYPE_COUNT) {
        job->kernels->squares[job->dtype](norms, panel, job->n_in);
        return;
    }
    for (size_t k = 0; k < job->n_in; k += DEPTH) {
        size_t depth = job->n_in - k < DEPTH ? job->n_in - k : DEPTH;
        job->kernels->to_f32[job->dtype](wide, panel + KVC_PANEL * kvc_row_bytes(job->dtype, k),
                                         depth * KVC_PANEL);
        job->kernels->squares[KVC_F32](norms, wide, depth);
    }
}

static void nearest_chunk(void *context, size_t chunk, int worker) {
    const nearest_job *job = context;
    size_t panel = chunk * GROUP, width = GROUP * KVC_PANEL;
    size_t n_panels = job->n_panels - panel < GROUP ? job->n_panels - panel : GROUP;
    size_t apart = KVC_PANEL * kvc_row_bytes(job->dtype, job->n_in);
    const char *b = job->panels + panel * apart;
    float *dots = job->scratch + (size_t)worker * job->scratch_floats, norms[GROUP * KVC_PANEL];
    dots_of(job, dots, b, n_panels);
    for (size_t p = 0; p < n_panels; p++) {
        squares_of(job, norms + p * KVC_PANEL, b + p * apart, dots + job->n * width);
    }
    size_t first = panel * KVC_PANEL, n_rows = n_panels * KVC_PANEL;
    if (n_rows > job->vocab_size - first) n_rows = job->vocab_size - first;
    for (size_t i = 0; i < n_rows; i++) norms[i] = norms[i] > 0 ? 1.0f / sqrtf(norms[i]) : 0;
    for (size_t r = 0; r < job->n; r++) {
        best_row best = {-INFINITY, -1};
        for (size_t i = 0; i < n_rows; i++) {
            float cosine = dots[r * width + i] * norms[i];
            if (!(fabsf(cosine) <= FLT_MAX)) { /* nothing is nearer than what cannot be told */
                best = (best_row){INFINITY, -1};
                break;
            }
            if (cosine > best.cosine) best = (best_row){cosine, (int32_t)(first + i)};
        }
        job->best[chunk * job->n + r] = best;
    }
}

kvc_status cpu_nearest(kvc_stream *s, kvc_mem best, kvc_mem src, size_t src_ld, const kvc_matrix *m,
                       size_t n, size_t vocab_size, kvc_error *err) {
    nearest_job job = {.kernels = s->kernels,
                       .src = cpu_address(s, src),
                       .panels = cpu_address(s, m->mem),
                       .src_ld = src_ld,
                       .n = n,
                       .n_in = m->n_in,
                       .n_panels = kvc_panel_round(vocab_size) / KVC_PANEL,
                       .vocab_size = vocab_size,
                       .dtype = m->dtype};
    size_t n_chunks = (job.n_panels + GROUP - 1) / GROUP;
    kvc_status status = cpu_scratch(s, n * GROUP * KVC_PANEL + DEPTH * KVC_PANEL, err);
    if (status) return status;
    job.scratch = s->scratch;
    job.scratch_floats = s->scratch_floats;
    job.best = calloc(n_chunks * n + 1, sizeof *job.best);
    if (!job.best) return kvc_fail(err, KVC_ERROR_MEMORY, "out of memory: a search of %zu rows", n);
    status = cpu_parallel(s, nearest_chunk, &job, n_chunks, err);
    int32_t *ids = cpu_address(s, best);
    for (size_t r = 0; r < n && !status; r++) {
        best_row found = {-INFINITY, -1};
        for (size_t c = 0; c < n_chunks; c++) {
            if (job.best[c * n + r].cosine > found.cosine) found = job.best[c * n + r];
        }
        ids[r] = found.id;
    }
    free(job.best);
    return status;
}
