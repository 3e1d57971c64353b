/* device.c - devices by name, counted so that whatever lives on one keeps it open. */
#include "core.h"

#include <stdlib.h>
#include <string.h>

typedef kvc_status (*opener)(kvc_backend **out, kvc_error *err);

kvc_status kvc_device_open(kvc_device **device, const char *name, kvc_error *err) {
    static const struct {
        const char *name;
        opener open;
    } known[] = {{"cpu", kvc_cpu_open}, {"guard", kvc_guard_open}, {"cuda", kvc_cuda_open}};
    *device = NULL;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strcmp(name, known[i].name) != 0) continue;
        kvc_backend *backend;
        TRY(known[i].open(&backend, err));
        kvc_device *d = calloc(1, sizeof *d);
        if (!d) {
            backend->close(backend);
            return kvc_fail(err, KVC_ERROR_MEMORY, "out of memory: a device");
        }
        d->backend = backend;
        atomic_init(&d->n_refs, 1);
        atomic_init(&d->spares.live, 0);
        atomic_flag_clear(&d->spares.taken);
        *device = d;
        return KVC_OK;
    }
    return kvc_fail(err, KVC_ERROR_DEVICE, "unknown device \"%s\" (known: cpu, cuda, guard)", name);
}

kvc_device *kvc_device_retain(kvc_device *device) {
    atomic_fetch_add(&device->n_refs, 1);
    return device;
}

void kvc_device_close(kvc_device *device) {
    if (!device || atomic_fetch_sub(&device->n_refs, 1) != 1) return;
    kvc_spares_trim(device, 0);
    device->backend->close(device->backend);
    free(device);
}

const char *kvc_device_name(const kvc_device *device) {
    return device->backend->name;
}

const char *kvc_device_description(const kvc_device *device) {
    return device->backend->description;
}

kvc_status kvc_host_alloc(void *out, size_t n, size_t size, const char *what, kvc_error *err) {
    void *p = calloc(n ? n : 1, size);
    memcpy(out, &p, sizeof p);
    if (p) return KVC_OK;
    return kvc_fail(err, KVC_ERROR_MEMORY, "out of memory: %zu x %zu bytes for %s", n, size, what);
}
