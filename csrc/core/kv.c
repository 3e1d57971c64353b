/* kv.c - the messages made of segments of K and V.
 *
 * A message is per layer a list of parts; a part names tokens of a segment and shares it.
 * Selecting layers, keeping a sink, trimming to a window and joining several senders are all
 * operations on these lists: no key is ever copied.
 */
#include "../backend/dtype.h"
#include "core.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- lists of parts ---- */

kvc_status kvc_parts_add(kvc_parts *parts, kvc_part part, kvc_error *err) {
    if (parts->n == parts->capacity) {
        size_t capacity = parts->capacity ? 2 * parts->capacity : 2;
        kvc_part *grown = realloc(parts->part, capacity * sizeof *grown);
        if (!grown) return kvc_fail(err, KVC_ERROR_MEMORY, "out of memory: %zu parts", capacity);
        parts->part = grown;
        parts->capacity = capacity;
    }
    parts->part[parts->n++] = part;
    kvc_segment_retain(part.segment);
    return KVC_OK;
}

void kvc_parts_clear(kvc_parts *parts) {
    for (size_t i = 0; i < parts->n; i++) kvc_segment_release(parts->part[i].segment);
    free(parts->part);
    *parts = (kvc_parts){0};
}

static size_t length_of(const kvc_parts *parts) {
    size_t n = 0;
    for (size_t i = 0; i < parts->n; i++) n += parts->part[i].n;
    return n;
}

/* ---- messages ---- */

kvc_status kvc_kv_create(kvc_kv **kv, kvc_device *device, int n_layers, int n_kv_heads,
                         int head_dim, kvc_dtype dtype, int64_t next_position, kvc_error *err) {
    *kv = NULL;
    if (n_layers < 1 || n_kv_heads < 1 || head_dim < 1 || (unsigned)dtype >= KVC_DTYPE_COUNT ||
        next_position < 0 || !kvc_position_fits(next_position)) {
        return kvc_fail(err, KVC_ERROR_VALUE,
                        "a KV of %d layers, %d KV heads, head_dim %d, dtype %d, next position %lld",
                        n_layers, n_kv_heads, head_dim, dtype, (long long)next_position);
    }
    kvc_kv *k = NULL;
    TRY(kvc_host_alloc(&k, 1, sizeof *k, "a KV", err));
    kvc_status status =
        kvc_host_alloc(&k->layers, (size_t)n_layers, sizeof *k->layers, "a KV", err);
    if (status) {
        free(k);
        return status;
    }
    k->device = kvc_device_retain(device);
    k->n_layers = n_layers;
    k->n_kv_heads = n_kv_heads;
    k->head_dim = head_dim;
    k->dtype = dtype;
    k->next_position = next_position;
    *kv = k;
    return KVC_OK;
}

void kvc_kv_free(kvc_kv *kv) {
    if (!kv) return;
    for (int l = 0; l < kv->n_layers; l++) kvc_parts_clear(&kv->layers[l]);
    free(kv->layers);
    kvc_device_close(kv->device);
    free(kv);
}

static kvc_status create_like(kvc_kv **out, const kvc_kv *kv, int64_t next_position,
                              kvc_error *err) {
    return kvc_kv_create(out, kv->device, kv->n_layers, kv->n_kv_heads, kv->head_dim, kv->dtype,
                         next_position, err);
}

static kvc_status check_layer(const kvc_kv *kv, int layer, kvc_error *err) {
    if (layer >= 0 && layer < kv->n_layers) return KVC_OK;
    return kvc_fail(err, KVC_ERROR_VALUE, "layer %d is not in 0 .. %d", layer, kv->n_layers - 1);
}

static bool all_finite(const void *x, size_t n, kvc_dtype dtype) {
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(kvc_element(x, i, dtype))) return false;
    }
    return true;
}

kvc_status kvc_kv_add(kvc_kv *kv, int layer, const void *k, const void *v, size_t n,
                      int64_t position, int64_t offset, kvc_error *err) {
    TRY(check_layer(kv, layer, err));
    if (!kvc_position_fits(position) || !kvc_position_fits(offset)) {
        return kvc_fail(err, KVC_ERROR_VALUE, "position %lld or offset %lld is out of range",
                        (long long)position, (long long)offset);
    }
    if (n == 0) return KVC_OK;
    size_t values = (size_t)kv->n_kv_heads * (size_t)kv->head_dim * n;
    if (!all_finite(k, values, kv->dtype) || !all_finite(v, values, kv->dtype)) {
        return kvc_fail(err, KVC_ERROR_NUMERIC, "layer %d: keys or values that are not finite",
                        layer);
    }
    kvc_backend *b = kv->device->backend;
    kvc_segment *segment = NULL;
    kvc_stream *stream = NULL;
    kvc_status status = kvc_segment_create(&segment, kv->device, kv->n_kv_heads, kv->head_dim,
                                           kv->dtype, n, position, err);
    if (status) goto done;
    if ((status = b->stream_open(b, &stream, NULL, NULL, err))) goto done;
    size_t bytes = (size_t)kv->n_kv_heads * segment->head_stride * kvc_dtype_bytes(kv->dtype);
    status = b->upload(stream, (kvc_mem){segment->buffer, 0}, k, bytes, err);
    if (status) goto done;
    status = b->upload(stream, (kvc_mem){segment->buffer, segment->v_at}, v, bytes, err);
    if (status) goto done;
    status = kvc_parts_add(&kv->layers[layer], (kvc_part){segment, 0, n, offset}, err);
done:
    b->stream_close(stream);
    kvc_segment_release(segment);
    return status;
}

/* Copies a layer's list, keeping of each part what falls into tokens from .. to - 1 of the layer. */
static kvc_status add_range(kvc_parts *to, const kvc_parts *from, size_t begin, size_t end,
                            int64_t offset, kvc_error *err) {
    size_t at = 0;
    for (size_t i = 0; i < from->n; i++) {
        kvc_part part = from->part[i];
        size_t first = begin > at ? begin - at : 0;
        size_t last = end < at + part.n ? (end > at ? end - at : 0) : part.n;
        at += part.n;
        if (first >= last) continue;
        part.start += first;
        part.n = last - first;
        part.offset += offset;
        TRY(kvc_parts_add(to, part, err));
    }
    return KVC_OK;
}

kvc_status kvc_kv_select(kvc_kv **out, const kvc_kv *kv, const uint8_t *keep, bool sink,
                         kvc_error *err) {
    TRY(create_like(out, kv, kv->next_position, err));
    for (int l = 0; l < kv->n_layers; l++) {
        size_t n = keep[l] ? SIZE_MAX : sink ? 1 : 0;
        kvc_status status = add_range(&(*out)->layers[l], &kv->layers[l], 0, n, 0, err);
        if (status) {
            kvc_kv_free(*out);
            *out = NULL;
            return status;
        }
    }
    return KVC_OK;
}

kvc_status kvc_kv_trim(kvc_kv **out, const kvc_kv *kv, const uint8_t *windowed, int window,
                       kvc_error *err) {
    *out = NULL;
    if (window < 1)
        return kvc_fail(err, KVC_ERROR_VALUE, "window must be positive, not %d", window);
    TRY(create_like(out, kv, kv->next_position, err));
    for (int l = 0; l < kv->n_layers; l++) {
        size_t n = length_of(&kv->layers[l]), most = (size_t)window - 1;
        size_t begin = windowed[l] && n > most ? n - most : 0;
        kvc_status status = add_range(&(*out)->layers[l], &kv->layers[l], begin, n, 0, err);
        if (status) {
            kvc_kv_free(*out);
            *out = NULL;
            return status;
        }
    }
    return KVC_OK;
}

static kvc_status check_alike(const kvc_kv *a, const kvc_kv *b, size_t which, kvc_error *err) {
    if (a->n_layers == b->n_layers && a->n_kv_heads == b->n_kv_heads &&
        a->head_dim == b->head_dim && a->dtype == b->dtype &&
        strcmp(kvc_device_name(a->device), kvc_device_name(b->device)) == 0) {
        return KVC_OK;
    }
    return kvc_fail(
        err, KVC_ERROR_MISMATCH,
        "KV 0 has %d layers, %d KV heads of %d, %s on %s; KV %zu has %d, %d of %d, %s on %s",
        a->n_layers, a->n_kv_heads, a->head_dim, kvc_dtype_name(a->dtype),
        kvc_device_name(a->device), which, b->n_layers, b->n_kv_heads, b->head_dim,
        kvc_dtype_name(b->dtype), kvc_device_name(b->device));
}

kvc_status kvc_kv_concat(kvc_kv **out, const kvc_kv *const *kvs, size_t n_kvs, bool sequential,
                         const uint8_t *whole, kvc_error *err) {
    *out = NULL;
    if (n_kvs == 0) return kvc_fail(err, KVC_ERROR_VALUE, "no KV to join");
    int64_t total = 0;
    for (size_t i = 0; i < n_kvs; i++) {
        TRY(check_alike(kvs[0], kvs[i], i, err));
        total += kvs[i]->next_position;
        if (!kvc_position_fits(total)) {
            return kvc_fail(err, KVC_ERROR_VALUE, "the joined positions are out of range");
        }
    }
    TRY(create_like(out, kvs[0], total, err));
    int64_t before = 0;
    for (size_t i = 0; i < n_kvs; i++) {
        for (int l = 0; l < kvs[0]->n_layers; l++) {
            if (i > 0 && whole && !whole[l]) continue;
            kvc_status status = add_range(&(*out)->layers[l], &kvs[i]->layers[l], 0, SIZE_MAX,
                                          sequential ? before : 0, err);
            if (status) {
                kvc_kv_free(*out);
                *out = NULL;
                return status;
            }
        }
        before += kvs[i]->next_position;
    }
    return KVC_OK;
}

/* ---- asking ---- */

int kvc_kv_layers(const kvc_kv *kv) {
    return kv->n_layers;
}

int kvc_kv_heads(const kvc_kv *kv) {
    return kv->n_kv_heads;
}

int kvc_kv_head_dim(const kvc_kv *kv) {
    return kv->head_dim;
}

kvc_dtype kvc_kv_dtype(const kvc_kv *kv) {
    return kv->dtype;
}

int64_t kvc_kv_next_position(const kvc_kv *kv) {
    return kv->next_position;
}

size_t kvc_kv_length(const kvc_kv *kv, int layer) {
    return layer >= 0 && layer < kv->n_layers ? length_of(&kv->layers[layer]) : 0;
}

size_t kvc_kv_bytes(const kvc_kv *kv) {
    size_t tokens = 0;
    for (int l = 0; l < kv->n_layers; l++) tokens += length_of(&kv->layers[l]);
    return 2 * tokens * (size_t)kv->n_kv_heads * (size_t)kv->head_dim * kvc_dtype_bytes(kv->dtype);
}

size_t kvc_kv_parts(const kvc_kv *kv, int layer) {
    return layer >= 0 && layer < kv->n_layers ? kv->layers[layer].n : 0;
}

kvc_status kvc_kv_part_view(const kvc_kv *kv, int layer, size_t part, kvc_kv_part *view,
                            kvc_error *err) {
    TRY(check_layer(kv, layer, err));
    if (part >= kv->layers[layer].n) {
        return kvc_fail(err, KVC_ERROR_VALUE, "layer %d has %zu parts, no part %zu", layer,
                        kv->layers[layer].n, part);
    }
    const kvc_part *p = &kv->layers[layer].part[part];
    const kvc_segment *s = p->segment;
    kvc_backend *b = kv->device->backend;
    size_t at = p->start * (size_t)kv->head_dim * kvc_dtype_bytes(kv->dtype);
    *view = (kvc_kv_part){.head_stride = s->head_stride,
                          .n = p->n,
                          .position = s->position + (int64_t)p->start,
                          .offset = p->offset};
    if (b->host_view) {
        view->k = b->host_view(b, (kvc_mem){s->buffer, at});
        view->v = b->host_view(b, (kvc_mem){s->buffer, s->v_at + at});
    }
    return KVC_OK;
}
