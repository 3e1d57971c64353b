/* append.c - new K and V into the blocks that hold them, converted to the blocks' element type.
 *
 * One task per item: rows of a sequence that go into one block.
 */
#include "cpu.h"

typedef struct append_job {
    const kvc_stream *s;
    const float *k, *v;
    size_t ld, head_dim;
    int n_kv_heads;
    const kvc_append *items;
    _Atomic bool finite;
} append_job;

static void append_item(void *context, size_t chunk, int worker) {
    (void)worker;
    append_job *job = context;
    const kvc_append *item = &job->items[chunk];
    size_t element = kvc_dtype_bytes(item->dtype);
    bool (*convert)(void *, const float *, size_t) = job->s->kernels->from_f32[item->dtype];
    for (int h = 0; h < job->n_kv_heads; h++) {
        size_t to = ((size_t)h * item->head_stride + item->at * job->head_dim) * element;
        char *k = (char *)cpu_address(job->s, item->k) + to;
        char *v = (char *)cpu_address(job->s, item->v) + to;
        for (size_t i = 0; i < item->n; i++) {
            size_t from = (item->row + i) * job->ld + (size_t)h * job->head_dim;
            size_t at = i * job->head_dim * element;
            if (!convert(k + at, job->k + from, job->head_dim)) job->finite = false;
            if (!convert(v + at, job->v + from, job->head_dim)) job->finite = false;
        }
    }
}

kvc_status cpu_kv_append(kvc_stream *s, kvc_mem k, kvc_mem v, size_t ld, int n_kv_heads,
                         int head_dim, const kvc_append *items, size_t n_items, kvc_error *err) {
    append_job job = {.s = s,
                      .k = cpu_address(s, k),
                      .v = cpu_address(s, v),
                      .ld = ld,
                      .head_dim = (size_t)head_dim,
                      .n_kv_heads = n_kv_heads,
                      .items = items,
                      .finite = true};
    kvc_status status = cpu_parallel(s, append_item, &job, n_items, err);
    if (!status && !job.finite) {
        return kvc_fail(err, KVC_ERROR_NUMERIC, "keys or values that are not finite");
    }
    return status;
}
