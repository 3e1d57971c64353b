/* workspace.c - scratch of forward calls: device buffers by name, and one block of host memory.
 *
 * Both grow to the largest block that was run and stay. Of what a session has already seen only the
 * list of its blocks is here; a backend may hold sums per chunk of keys while it attends to them.
 */
#include "forward.h"

#include <stdlib.h>
#include <string.h>

kvc_status kvc_workspace_create(kvc_workspace **ws, kvc_model *model, kvc_interrupt interrupt,
                                void *context, kvc_error *err) {
    *ws = NULL;
    if (!model->sealed) return kvc_fail(err, KVC_ERROR_VALUE, "the model is not sealed");
    kvc_workspace *w = NULL;
    TRY(kvc_host_alloc(&w, 1, sizeof *w, "a workspace", err));
    kvc_backend *b = model->device->backend;
    kvc_status status = b->stream_open(b, &w->stream, interrupt, context, err);
    if (status) {
        free(w);
        return status;
    }
    w->model = kvc_model_retain(model);
    *ws = w;
    return KVC_OK;
}

void kvc_workspace_free(kvc_workspace *ws) {
    if (!ws) return;
    kvc_backend *b = ws->model->device->backend;
    for (int i = 0; i < N_BUFFERS; i++) b->free(b, ws->buffers[i], ws->bytes[i]);
    b->stream_close(ws->stream);
    free(ws->host);
    kvc_model_free(ws->model);
    free(ws);
}

kvc_counts kvc_workspace_counts(const kvc_workspace *ws) {
    return ws->counts;
}

kvc_status kvc_workspace_need(kvc_workspace *ws, buffer_name name, size_t rows, size_t row_bytes,
                              kvc_error *err) {
    kvc_backend *b = ws->model->device->backend;
    size_t bytes;
    if (!kvc_mul(&bytes, rows, row_bytes)) {
        return kvc_fail(err, KVC_ERROR_MEMORY, "%zu rows of %zu bytes overflow", rows, row_bytes);
    }
    if (bytes <= ws->bytes[name]) return KVC_OK;
    b->free(b, ws->buffers[name], ws->bytes[name]);
    ws->buffers[name] = NULL;
    ws->bytes[name] = 0;
    TRY(b->alloc(b, &ws->buffers[name], bytes, err));
    ws->bytes[name] = bytes;
    return KVC_OK;
}

kvc_status kvc_workspace_host(kvc_workspace *ws, size_t n, size_t size, void *out, kvc_error *err) {
    size_t bytes;
    if (!kvc_mul(&bytes, n ? n : 1, size)) return kvc_fail(err, KVC_ERROR_MEMORY, "size overflow");
    if (bytes > ws->host_bytes) {
        free(ws->host);
        ws->host_bytes = 0;
        TRY(kvc_host_alloc(&ws->host, bytes, 1, "a workspace", err));
        ws->host_bytes = bytes;
    }
    memcpy(out, &ws->host, sizeof ws->host);
    return KVC_OK;
}
