/* limits.c - what this machine gives to threads that only read memory, or only multiply and add.
 *
 * limits.py compiles it for the machine it runs on and calls it from as many threads as the
 * product uses, each on a range of its own.
 */
#include <stddef.h>
#include <stdint.h>

typedef uint64_t lane __attribute__((vector_size(64)));

/* Reads `bytes` (a multiple of 64 * streams) in `streams` far-apart runs; returns a checksum. */
uint64_t read_streams(const void *memory, size_t bytes, size_t streams) {
    const lane *p = memory;
    size_t n = bytes / sizeof(lane) / streams;
    lane sum[8] = {0};
    for (size_t i = 0; i < n; i++) {
        for (size_t s = 0; s < streams; s++) sum[s] ^= p[s * n + i];
    }
    uint64_t all = 0;
    for (size_t s = 0; s < streams; s++) {
        for (int j = 0; j < 8; j++) all ^= sum[s][j];
    }
    return all;
}

/* As wide as the machine's registers, or the compiler would split every operation. */
#if defined(__AVX512F__)
enum { WIDTH = 16 };
#elif defined(__AVX__)
enum { WIDTH = 8 };
#else
enum { WIDTH = 4 };
#endif
typedef float floats __attribute__((vector_size(4 * WIDTH)));

/* Runs `n` steps of 12 independent multiply-adds in registers. Returns their sum; *flops is how
 * many floating-point operations that was. */
float multiply_add(size_t n, double *flops) {
    floats sum[12], factor, term;
    for (int j = 0; j < WIDTH; j++) {
        factor[j] = 0.9f;
        term[j] = 0.05f;
    }
    /* From n, so that no sum is known when this is compiled. */
    for (int i = 0; i < 12; i++) sum[i] = term * (float)(n + i);
    for (size_t step = 0; step < n; step++) {
        for (int i = 0; i < 12; i++) sum[i] = sum[i] * factor + term;
    }
    float all = 0.0f;
    for (int i = 0; i < 12; i++) {
        for (int j = 0; j < WIDTH; j++) all += sum[i][j];
    }
    *flops = (double)n * 12 * WIDTH * 2;
    return all;
}
