/* segment.c - blocks of K and V, counted by reference, and the buffers of those that are gone.
 *
 * A page costs more to get than to use: the system clears it, and a virtual machine may have to ask
 * its host. So a released segment waits, for the next of about its size; its contents stay as they
 * are, since nobody reads tokens that were not appended. Live and spare buffers together hold no more
 * than live ones once did, but for what threads do at the same moment. Under the address sanitizer none waits: it would hide a use after
 * release.
 */
#include "core.h"

#include <stdlib.h>

/* ---- spare buffers ---- */

#if defined(__has_feature)
#define HAS_FEATURE(name) __has_feature(name)
#else
#define HAS_FEATURE(name) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || HAS_FEATURE(address_sanitizer)
enum { SPARE_BYTES = 0 };
#else
enum { SPARE_BYTES = 256 << 20 };
#endif
enum { WASTE = 16 }; /* a spare may be larger than asked for by one part in so many */

static bool take_lock(kvc_spares *s) {
    return !atomic_flag_test_and_set(&s->taken);
}

static kvc_segment *unlink_spare(kvc_spares *s, kvc_segment *before, kvc_segment *found) {
    if (before) before->next = found->next;
    else s->first = found->next;
    if (s->last == found) s->last = before;
    s->bytes -= found->bytes;
    return found;
}

/* A spare for `bytes`, or NULL. */
static kvc_segment *take_spare(kvc_spares *s, size_t bytes) {
    if (!take_lock(s)) return NULL;
    kvc_segment *before = NULL, *found = s->first;
    while (found && (found->bytes < bytes || found->bytes - bytes > bytes / WASTE)) {
        before = found;
        found = found->next;
    }
    if (found) unlink_spare(s, before, found);
    atomic_flag_clear(&s->taken);
    return found;
}

static bool keep_spare(kvc_spares *s, kvc_segment *segment) {
    if (segment->bytes > SPARE_BYTES || !take_lock(s)) return false;
    segment->next = NULL;
    if (s->last) s->last->next = segment;
    else s->first = segment;
    s->last = segment;
    s->bytes += segment->bytes;
    atomic_flag_clear(&s->taken);
    return true;
}

static void free_segment(kvc_backend *b, kvc_segment *segment) {
    b->free(b, segment->buffer, segment->bytes);
    free(segment);
}

void kvc_spares_trim(kvc_device *device, size_t bytes) {
    kvc_spares *s = &device->spares;
    for (;;) {
        kvc_segment *oldest = NULL;
        if (!take_lock(s)) return;
        if (s->bytes > bytes) oldest = unlink_spare(s, NULL, s->first);
        atomic_flag_clear(&s->taken);
        if (!oldest) return;
        free_segment(device->backend, oldest);
    }
}

/* Counts bytes as live, and says how many spares may hold beside them. */
static size_t count_live(kvc_spares *s, size_t bytes) {
    size_t live = atomic_fetch_add(&s->live, bytes) + bytes, room = 0;
    if (!take_lock(s)) return 0;
    if (live < s->most) room = s->most - live;
    atomic_flag_clear(&s->taken);
    return room;
}

/* What is live now was really there. */
static void note_most(kvc_spares *s) {
    size_t live = atomic_load(&s->live);
    if (!take_lock(s)) return;
    if (live > s->most) s->most = live;
    atomic_flag_clear(&s->taken);
}

/* ---- segments ---- */

static kvc_status new_segment(kvc_segment **out, kvc_device *device, size_t bytes, kvc_error *err) {
    kvc_backend *b = device->backend;
    TRY(kvc_host_alloc(out, 1, sizeof **out, "a segment", err));
    kvc_status status = b->alloc(b, &(*out)->buffer, bytes, err);
    if (status) {
        free(*out);
        *out = NULL;
        return status;
    }
    (*out)->bytes = bytes;
    return KVC_OK;
}

kvc_status kvc_segment_create(kvc_segment **out, kvc_device *device, int n_kv_heads, int head_dim,
                              kvc_dtype dtype, size_t capacity, int64_t position, kvc_error *err) {
    size_t elements, half, element = kvc_dtype_bytes(dtype);
    *out = NULL;
    if (!kvc_mul(&elements, capacity, (size_t)n_kv_heads * (size_t)head_dim) ||
        !kvc_mul(&half, elements, element) || half > SIZE_MAX / 2 - 64) {
        return kvc_fail(err, KVC_ERROR_MEMORY, "K and V of %zu tokens overflow the address space",
                        capacity);
    }
    size_t v_at = (half + 63) / 64 * 64, bytes = v_at + half;
    kvc_segment *s = take_spare(&device->spares, bytes);
    size_t room = count_live(&device->spares, s ? s->bytes : bytes);
    kvc_spares_trim(device, room);
    kvc_status status = s ? KVC_OK : new_segment(&s, device, bytes, err);
    if (status) { /* what waits may be what is missing */
        kvc_spares_trim(device, 0);
        status = new_segment(&s, device, bytes, err);
    }
    if (status) {
        atomic_fetch_sub(&device->spares.live, bytes);
        return status;
    }
    note_most(&device->spares);
    s->v_at = v_at;
    s->capacity = capacity;
    s->head_stride = capacity * (size_t)head_dim;
    s->position = position;
    s->dtype = dtype;
    atomic_init(&s->n_refs, 1);
    s->device = kvc_device_retain(device);
    *out = s;
    return KVC_OK;
}

kvc_segment *kvc_segment_retain(kvc_segment *segment) {
    atomic_fetch_add(&segment->n_refs, 1);
    return segment;
}

void kvc_segment_release(kvc_segment *segment) {
    if (!segment || atomic_fetch_sub(&segment->n_refs, 1) != 1) return;
    kvc_device *device = segment->device;
    atomic_fetch_sub(&device->spares.live, segment->bytes);
    if (keep_spare(&device->spares, segment)) kvc_spares_trim(device, SPARE_BYTES);
    else free_segment(device->backend, segment);
    kvc_device_close(device);
}
