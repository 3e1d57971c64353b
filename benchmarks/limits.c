/* limits.c - what the memory of this machine gives to a thread that only reads.
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
