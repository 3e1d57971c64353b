/* failing_malloc.c - allocations that fail on demand.
 *
 * The linker sends every allocation of the code under test here (--wrap); the C library's own are
 * not touched. Counting is off until a test asks for it, and each failure happens once.
 */
#include "tiny.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>

void *__real_malloc(size_t size);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *old, size_t size);
void *__real_aligned_alloc(size_t alignment, size_t size);
int __real_posix_memalign(void **out, size_t alignment, size_t size);

static atomic_long countdown; /* 0: off */
static atomic_int failed;

void allocations_fail_at(long n) {
    atomic_store(&failed, 0);
    atomic_store(&countdown, n);
}

int allocations_failed(void) {
    return atomic_load(&failed);
}

static int refuse(void) {
    if (atomic_load(&countdown) <= 0 || atomic_fetch_sub(&countdown, 1) != 1) return 0;
    atomic_store(&failed, 1);
    errno = ENOMEM;
    return 1;
}

void *__wrap_malloc(size_t size) {
    return refuse() ? NULL : __real_malloc(size);
}

void *__wrap_calloc(size_t n, size_t size) {
    return refuse() ? NULL : __real_calloc(n, size);
}

void *__wrap_realloc(void *old, size_t size) {
    return refuse() ? NULL : __real_realloc(old, size);
}

void *__wrap_aligned_alloc(size_t alignment, size_t size) {
    return refuse() ? NULL : __real_aligned_alloc(alignment, size);
}

int __wrap_posix_memalign(void **out, size_t alignment, size_t size) {
    return refuse() ? ENOMEM : __real_posix_memalign(out, alignment, size);
}
