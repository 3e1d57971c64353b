/* dtype.h - single values: of the 16-bit floats, by value and to nearest even, and out of the blocks
 * that GGUF calls Q8_0, Q4_0 and Q4_1. */
#ifndef KVC_DTYPE_H
#define KVC_DTYPE_H

#include "kvcomm.h"

#include <string.h>

static inline float kvc_f32_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline uint32_t kvc_bits_of_f32(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline float kvc_f32_of_bf16(uint16_t h) {
    return kvc_f32_of_bits((uint32_t)h << 16);
}

static inline uint16_t kvc_bf16_of_f32(float x) {
    uint32_t bits = kvc_bits_of_f32(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40); /* stays NaN */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float kvc_f32_of_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7fff) << 13;
    if (rest >= 0x0f800000) return kvc_f32_of_bits(sign | rest | 0x7f800000); /* inf, NaN */
    /* 2^112 moves the exponent from bias 15 to 127 and normalises subnormals on the way */
    return kvc_f32_of_bits(kvc_bits_of_f32(kvc_f32_of_bits(rest) * 0x1p112f) | sign);
}

static inline uint16_t kvc_f16_of_f32(float x) {
    uint32_t bits = kvc_bits_of_f32(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (rest >> 13 & 0x3ff));
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* rounds past 65504 */
    if (rest < 0x38800000) { /* subnormal: one float addition rounds it into place */
        uint32_t r = kvc_bits_of_f32(kvc_f32_of_bits(rest) + 0.5f);
        return (uint16_t)(sign | (r - 0x3f000000));
    }
    return (uint16_t)(sign | ((rest + 0xfff + (rest >> 13 & 1) - 0x38000000) >> 13));
}

/* The values of a block: scale and integer (and minimum) in f32, as GGUF has it. */
static inline void kvc_block_values(float to[KVC_BLOCK], const unsigned char *block,
                                    kvc_dtype dtype) {
    uint16_t half[2];
    memcpy(half, block, sizeof half);
    float scale = kvc_f32_of_f16(half[0]);
    if (dtype == KVC_Q8_0) {
        for (int i = 0; i < KVC_BLOCK; i++) to[i] = scale * (float)(signed char)block[2 + i];
        return;
    }
    /* columns 0 .. 15 are the low nibbles of 16 bytes, 16 .. 31 the high ones */
    const unsigned char *pairs = block + (dtype == KVC_Q4_1 ? 4 : 2);
    float least = dtype == KVC_Q4_1 ? kvc_f32_of_f16(half[1]) : 0;
    int zero = dtype == KVC_Q4_1 ? 0 : 8;
    for (int i = 0; i < KVC_BLOCK / 2; i++) {
        to[i] = scale * (float)((pairs[i] & 15) - zero) + least;
        to[i + KVC_BLOCK / 2] = scale * (float)((pairs[i] >> 4) - zero) + least;
    }
}

/* value `at` of an array of dtype, at any alignment */
static inline float kvc_element(const void *array, size_t at, kvc_dtype dtype) {
    float x, block[KVC_BLOCK];
    uint16_t h;
    if (dtype >= KVC_DTYPE_COUNT) {
        const unsigned char *blocks = array;
        kvc_block_values(block, blocks + at / KVC_BLOCK * kvc_dtype_bytes(dtype), dtype);
        return block[at % KVC_BLOCK];
    }
    if (dtype == KVC_F32) {
        memcpy(&x, (const char *)array + 4 * at, 4);
        return x;
    }
    memcpy(&h, (const char *)array + 2 * at, 2);
    return dtype == KVC_BF16 ? kvc_f32_of_bf16(h) : kvc_f32_of_f16(h);
}

#endif
