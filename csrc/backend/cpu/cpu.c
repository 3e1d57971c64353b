/* cpu.c - the CPU backend's table, its memory and its streams.
 *
 * Buffers are zero-filled and aligned; large ones ask for huge pages. A stream holds the caller's
 * interrupt hook and one block of scratch per worker.
 */
#if defined(__linux__)
#define _DEFAULT_SOURCE /* madvise */
#endif
#include "cpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

enum { ALIGNMENT = 64, HUGE_PAGE = 1 << 21 };

static const cpu_kernels *choose_kernels(kvc_error *err) {
    const cpu_kernels *(*const tables[])(void) = {cpu_kernels_avx512, cpu_kernels_avx2,
                                                  cpu_kernels_portable};
    const char *wanted = getenv("KVCOMM_CPU");
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
        const cpu_kernels *k = tables[i]();
        if (k && (!wanted || !*wanted || strcmp(wanted, k->name) == 0)) return k;
    }
    char found[64] = "";
    for (size_t i = sizeof tables / sizeof *tables; i--;) {
        const cpu_kernels *k = tables[i]();
        size_t at = strlen(found);
        if (k) snprintf(found + at, sizeof found - at, "%s%s", at ? ", " : "", k->name);
    }
    kvc_fail(err, KVC_ERROR_DEVICE,
             "KVCOMM_CPU=%s is not among the kernels this processor runs (%s)", wanted, found);
    return NULL;
}

static kvc_status cpu_alloc(kvc_backend *b, kvc_buffer **out, size_t bytes, kvc_error *err) {
    size_t alignment = bytes >= HUGE_PAGE ? HUGE_PAGE : ALIGNMENT;
    void *p = NULL;
    *out = NULL;
    if (bytes > SIZE_MAX - alignment ||
        posix_memalign(&p, alignment, (bytes + alignment - 1) / alignment * alignment)) {
        return kvc_fail(err, KVC_ERROR_MEMORY, "out of memory: %zu bytes on the CPU", bytes);
    }
#if defined(__linux__)
    if (bytes >= HUGE_PAGE) madvise(p, bytes, MADV_HUGEPAGE);
#endif
    memset(p, 0, bytes);
    *out = (kvc_buffer *)((uintptr_t)p ^ ((cpu_context *)b->context)->mask);
    return KVC_OK;
}

static void cpu_free(kvc_backend *b, kvc_buffer *buffer, size_t bytes) {
    (void)bytes;
    if (buffer) free((void *)((uintptr_t)buffer ^ ((cpu_context *)b->context)->mask));
}

static kvc_status cpu_upload(kvc_stream *s, kvc_mem dst, const void *src, size_t bytes,
                             kvc_error *err) {
    (void)err;
    if (bytes) memcpy(cpu_address(s, dst), src, bytes);
    return KVC_OK;
}

static kvc_status cpu_download(kvc_stream *s, void *dst, kvc_mem src, size_t bytes,
                               kvc_error *err) {
    (void)err;
    if (bytes) memcpy(dst, cpu_address(s, src), bytes);
    return KVC_OK;
}

static const void *cpu_host_view(kvc_backend *b, kvc_mem mem) {
    return (char *)((uintptr_t)mem.buffer ^ ((cpu_context *)b->context)->mask) + mem.offset;
}

static kvc_status cpu_stream_open(kvc_backend *b, kvc_stream **out, kvc_interrupt interrupt,
                                  void *context, kvc_error *err) {
    const cpu_context *cpu = b->context;
    kvc_stream *s = calloc(1, sizeof *s);
    *out = s;
    if (!s) return kvc_fail(err, KVC_ERROR_MEMORY, "out of memory: a stream");
    s->mask = cpu->mask;
    s->kernels = cpu->kernels;
    s->interrupt = interrupt;
    s->interrupt_context = context;
    return KVC_OK;
}

static void cpu_stream_close(kvc_stream *s) {
    if (!s) return;
    free(s->scratch);
    free(s->parts);
    free(s);
}

kvc_status cpu_scratch(kvc_stream *s, size_t floats, kvc_error *err) {
    int workers = cpu_threads();
    size_t stride = (floats + 15) / 16 * 16, bytes;
    if (workers <= s->scratch_workers && stride <= s->scratch_floats) return KVC_OK;
    if (workers < s->scratch_workers) workers = s->scratch_workers;
    if (stride < s->scratch_floats) stride = s->scratch_floats;
    void *p = NULL;
    if (!kvc_mul(&bytes, stride * sizeof(float), (size_t)workers) ||
        posix_memalign(&p, ALIGNMENT, bytes)) {
        return kvc_fail(err, KVC_ERROR_MEMORY,
                        "out of memory: %zu floats of scratch for %d threads", stride, workers);
    }
    free(s->scratch);
    s->scratch = p;
    s->scratch_floats = stride;
    s->scratch_workers = workers;
    return KVC_OK;
}

kvc_status cpu_parts(kvc_stream *s, size_t floats, kvc_error *err) {
    void *p = NULL;
    if (floats <= s->n_parts) return KVC_OK;
    if (floats > SIZE_MAX / sizeof(float) ||
        posix_memalign(&p, ALIGNMENT, floats * sizeof(float))) {
        return kvc_fail(err, KVC_ERROR_MEMORY, "out of memory: %zu floats between threads", floats);
    }
    free(s->parts);
    s->parts = p;
    s->n_parts = floats;
    return KVC_OK;
}

static void cpu_close(kvc_backend *b) {
    free(b->context);
    free(b);
}

static const kvc_backend cpu_table = {
    .name = "cpu",
    .close = cpu_close,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .upload = cpu_upload,
    .download = cpu_download,
    .host_view = cpu_host_view,
    .stream_open = cpu_stream_open,
    .stream_close = cpu_stream_close,
    .matrix_bytes = cpu_matrix_bytes,
    .matrix_pack = cpu_matrix_pack,
    .embed = cpu_embed,
    .rms_norm = cpu_rms_norm,
    .linear = cpu_linear,
    .rope = cpu_rope,
    .kv_append = cpu_kv_append,
    .attention = cpu_attention,
    .mix = cpu_mix,
    .nearest = cpu_nearest,
    .gated_activation = cpu_gated_activation,
    .add = cpu_add,
    .gather = cpu_gather,
    .argmax = cpu_argmax,
    .logprob = cpu_logprob,
};

kvc_status kvc_cpu_open(kvc_backend **out, kvc_error *err) {
    *out = NULL;
    const cpu_kernels *kernels = choose_kernels(err);
    if (!kernels) return KVC_ERROR_DEVICE;
    kvc_backend *b = malloc(sizeof *b);
    cpu_context *context = calloc(1, sizeof *context);
    if (!b || !context) {
        free(b);
        free(context);
        return kvc_fail(err, KVC_ERROR_MEMORY, "out of memory: the CPU backend");
    }
    *b = cpu_table;
    context->kernels = kernels;
    snprintf(context->description, sizeof context->description, "CPU, %s kernels", kernels->name);
    b->context = context;
    b->description = context->description;
    *out = b;
    return KVC_OK;
}
