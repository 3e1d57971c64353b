/* guard.c - a backend for tests: the CPU's operations behind handles that fault when touched.
 *
 * The core must treat a kvc_buffer as a token. Here each handle is an address with bit 55
 * flipped, which no process can map: a load, a store or a memcpy through it faults at once, at no
 * cost to the rest. The operations flip the bit back in cpu_address and nowhere else. A suite
 * that passes on "guard" proves that the core would run on a device whose memory it cannot see.
 */
#include "cpu/cpu.h"

kvc_status kvc_guard_open(kvc_backend **out, kvc_error *err) {
    kvc_status status = kvc_cpu_open(out, err);
    if (status) return status;
    (*out)->name = "guard";
    (*out)->description = "for tests: the CPU behind handles that fault when touched";
    ((cpu_context *)(*out)->context)->mask = (uintptr_t)1 << 55;
    return KVC_OK;
}
