/* kernels_avx2.c - the kernels for AVX2 with FMA and F16C. */
#include "kernels.h"
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define KERNELS_NAME "avx2"
#define KERNELS_TABLE cpu_kernels_avx2
#define KERNELS_LANES 8
#define KERNELS_ROWS 6
#define KERNELS_SUPPORTED                                                                          \
    (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&                            \
     __builtin_cpu_supports("f16c"))
#include "kernels_body.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
const cpu_kernels *cpu_kernels_avx2(void) {
    return NULL;
}
#endif
