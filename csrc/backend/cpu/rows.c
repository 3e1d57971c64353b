/* rows.c - the operations of the CPU backend that treat each row on its own.
 *
 * Rows are shared out in chunks of fixed size; the arithmetic of a row is a kernel.
 */
#include "cpu.h"

#include <math.h>
#include <string.h>

enum { CHUNK = 16 /* rows; about 20 microseconds of work for a small model */ };

/* One description serves all slots: a slot fills what its row function reads. */
typedef struct row_job row_job;
struct row_job {
    void (*row)(const row_job *job, size_t r);
    const cpu_kernels *kernels;
    float *dst;
    const float *src, *other;
    const int32_t *index;
    int32_t *ids;
    size_t dst_ld, src_ld, n, dim, groups, at;
    float eps, offset;
    kvc_activation act;
};

static void run_chunk(void *context, size_t chunk, int worker) {
    (void)worker;
    const row_job *job = context;
    size_t end = (chunk + 1) * CHUNK < job->n ? (chunk + 1) * CHUNK : job->n;
    for (size_t r = chunk * CHUNK; r < end; r++) job->row(job, r);
}

static kvc_status run_rows(kvc_stream *s, row_job *job, kvc_error *err) {
    job->kernels = s->kernels;
    return cpu_parallel(s, run_chunk, job, (job->n + CHUNK - 1) / CHUNK, err);
}

static void norm_row(const row_job *job, size_t r) {
    for (size_t g = 0; g < job->groups; g++) {
        job->kernels->rms_norm(job->dst + r * job->dst_ld + g * job->dim,
                               job->src + r * job->src_ld + g * job->dim, job->other, job->dim,
                               job->eps, job->offset);
    }
}

kvc_status cpu_rms_norm(kvc_stream *s, kvc_mem dst, size_t dst_ld, kvc_mem src, size_t src_ld,
                        kvc_mem weight, size_t n, size_t groups, size_t dim, float eps,
                        float offset, kvc_error *err) {
    row_job job = {.row = norm_row,
                   .dst = cpu_address(s, dst),
                   .src = cpu_address(s, src),
                   .other = cpu_address(s, weight),
                   .dst_ld = dst_ld,
                   .src_ld = src_ld,
                   .n = n,
                   .dim = dim,
                   .groups = groups,
                   .eps = eps,
                   .offset = offset};
    return run_rows(s, &job, err);
}

static void rope_row(const row_job *job, size_t r) {
    size_t half = job->at / 2;
    const float *cos = job->other + r * 2 * half, *sin = cos + half;
    for (size_t h = 0; h < job->groups; h++) {
        float *x = job->dst + r * job->dst_ld + h * job->dim;
        job->kernels->rotate(x, x + half, cos, sin, half);
    }
}

kvc_status cpu_rope(kvc_stream *s, kvc_mem x, size_t ld, size_t n, int n_heads, int head_dim,
                    int rotary_dim, kvc_mem cos_sin, kvc_error *err) {
    row_job job = {.row = rope_row,
                   .dst = cpu_address(s, x),
                   .other = cpu_address(s, cos_sin),
                   .dst_ld = ld,
                   .n = n,
                   .dim = (size_t)head_dim,
                   .groups = (size_t)n_heads,
                   .at = (size_t)rotary_dim};
    return run_rows(s, &job, err);
}

static void gated_row(const row_job *job, size_t r) {
    const float *gate = job->src + r * job->src_ld;
    job->kernels->gated[job->act](job->dst + r * job->dst_ld, gate, gate + job->at, job->dim);
}

kvc_status cpu_gated_activation(kvc_stream *s, kvc_mem dst, size_t dst_ld, kvc_mem src,
                                size_t src_ld, size_t up_at, size_t dim, kvc_activation act,
                                size_t n, kvc_error *err) {
    row_job job = {.row = gated_row,
                   .dst = cpu_address(s, dst),
                   .src = cpu_address(s, src),
                   .dst_ld = dst_ld,
                   .src_ld = src_ld,
                   .n = n,
                   .dim = dim,
                   .at = up_at,
                   .act = act};
    return run_rows(s, &job, err);
}

static void add_row(const row_job *job, size_t r) {
    job->kernels->add(job->dst + r * job->dim, job->src + r * job->dim, job->dim);
}

kvc_status cpu_add(kvc_stream *s, kvc_mem dst, kvc_mem src, size_t n, size_t dim, kvc_error *err) {
    row_job job = {
        .row = add_row, .dst = cpu_address(s, dst), .src = cpu_address(s, src), .n = n, .dim = dim};
    return run_rows(s, &job, err);
}

static void gather_row(const row_job *job, size_t r) {
    memcpy(job->dst + r * job->dim, job->src + (size_t)job->index[r] * job->src_ld,
           job->dim * sizeof(float));
}

kvc_status cpu_gather(kvc_stream *s, kvc_mem dst, kvc_mem src, size_t src_ld, kvc_mem index,
                      size_t n, size_t dim, kvc_error *err) {
    row_job job = {.row = gather_row,
                   .dst = cpu_address(s, dst),
                   .src = cpu_address(s, src),
                   .index = cpu_address(s, index),
                   .src_ld = src_ld,
                   .n = n,
                   .dim = dim};
    return run_rows(s, &job, err);
}

static void argmax_row(const row_job *job, size_t r) {
    const float *x = job->src + r * job->src_ld;
    size_t best = 0;
    bool nan = x[0] != x[0];
    for (size_t i = 1; i < job->dim; i++) {
        nan |= x[i] != x[i];
        if (x[i] > x[best]) best = i;
    }
    job->ids[r] = nan ? -1 : (int32_t)best;
}

kvc_status cpu_argmax(kvc_stream *s, kvc_mem best, kvc_mem logits, size_t ld, size_t n,
                      size_t vocab_size, kvc_error *err) {
    row_job job = {.row = argmax_row,
                   .ids = cpu_address(s, best),
                   .src = cpu_address(s, logits),
                   .src_ld = ld,
                   .n = n,
                   .dim = vocab_size};
    return run_rows(s, &job, err);
}

/* The sum runs in doubles over blocks, so that a large vocabulary costs no digits. */
static void logprob_row(const row_job *job, size_t r) {
    enum { BLOCK = 1024 };
    const float *x = job->src + r * job->src_ld;
    float most = job->kernels->max(x, job->dim);
    double total = 0;
    for (size_t i = 0; i < job->dim; i += BLOCK) {
        size_t n = job->dim - i < BLOCK ? job->dim - i : BLOCK;
        total += job->kernels->exp_sum_const(x + i, n, most);
    }
    job->dst[r] = (float)((double)x[job->index[r]] - most - log(total));
}

kvc_status cpu_logprob(kvc_stream *s, kvc_mem out, kvc_mem logits, size_t ld, kvc_mem targets,
                       size_t n, size_t vocab_size, kvc_error *err) {
    row_job job = {.row = logprob_row,
                   .dst = cpu_address(s, out),
                   .src = cpu_address(s, logits),
                   .index = cpu_address(s, targets),
                   .src_ld = ld,
                   .n = n,
                   .dim = vocab_size};
    return run_rows(s, &job, err);
}
