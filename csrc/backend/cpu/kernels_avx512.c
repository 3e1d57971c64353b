/* kernels_avx512.c - the kernels for AVX-512 (F, BW, DQ, VL). */
#include "kernels.h"
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(                                                                      \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")
#endif
#define KERNELS_NAME "avx512"
#define KERNELS_TABLE cpu_kernels_avx512
#define KERNELS_LANES 16
#define KERNELS_ROWS 6
#define KERNELS_SUPPORTED                                                                          \
    (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&                    \
     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
#include "kernels_body.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
const cpu_kernels *cpu_kernels_avx512(void) {
    return NULL;
}
#endif
