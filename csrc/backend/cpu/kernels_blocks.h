/* kernels_blocks.h - the part of kernels_body.h that takes blocks of weights apart (q8_0, q4_0, q4_1).
 *
 * A value is its scale times its integer in f32, as GGUF has it, however it is got at: in a tile's
 * registers or widened beforehand. Included once by kernels_body.h, whose vectors it uses.
 */

/* 32 columns of a panel as one run of bytes: 16 scales (f16), for Q4_1 16 minima (f16), then the
 * integers. Q8_0: [32, 16] bytes, each an int8 plus Q8_BIAS. Q4: [4, 16] words, nibble j of word g
 * being column 8 g + j. */
typedef struct block_terms {
    vf scale, low, high; /* what is added to the scale's product: Q8_0, Q4_1: low; Q4_0: by place */
} block_terms;

/* bytes of n values of a panel; here, so that it is known when this is compiled */
INLINE size_t panel_bytes(size_t n, kvc_dtype dtype) {
    if (dtype < KVC_DTYPE_COUNT) return n * (dtype == KVC_F32 ? 4 : 2);
    return n / KVC_BLOCK * (dtype == KVC_Q8_0 ? 34 : dtype == KVC_Q4_0 ? 18 : 20);
}

INLINE const char *block_integers(const char *block, kvc_dtype dtype) {
    return block + (dtype == KVC_Q4_1 ? 64 : 32);
}

/* A nibble is moved into the mantissa of a float, to bit 12 or 16 of it, whichever is nearer: the
 * float is 2^11 + nibble or 2^7 + nibble. A scale has 11 bits, so its products with these are exact
 * in f32, and so is what is left when the power of two (and 8) is taken off again. */
#define NIBBLE_BIT(j) ((j) % 2 ? 12 : 16)
#define NIBBLE_BASE(j) ((j) % 2 ? 2048.0f : 128.0f)

/* With AVX-512 a byte too is moved into a mantissa, by one shuffle: the float is 2^15 + byte, and a
 * packed byte is the integer plus 128. The product has 27 bits and has to be fused with what is
 * taken off; the rest is exact again, but for the sign of a zero. */
#if defined(__x86_64__) && KERNELS_LANES == 16
#define Q8_BIAS 128
#else
#define Q8_BIAS 0
#endif
#define BYTE_BASE 32768.0f

INLINE block_terms block_terms_of(const char *block, int v, kvc_dtype dtype) {
    const uint16_t *scales = (const uint16_t *)block;
    block_terms t = {.scale = load_as(scales, (size_t)v * LANES, KVC_F16)};
    /* What is kept in memory here would else be fused with each of the sums it goes into. */
    if (dtype == KVC_Q8_0 && Q8_BIAS) {
        t.low = t.scale * -(BYTE_BASE + Q8_BIAS);
        __asm__("" : "+m"(t.low));
    } else if (dtype == KVC_Q4_0) {
        t.low = t.scale * -(NIBBLE_BASE(1) + 8);
        t.high = t.scale * -(NIBBLE_BASE(0) + 8);
        __asm__("" : "+m"(t.low), "+m"(t.high));
    } else if (dtype == KVC_Q4_1) {
        t.low = load_as(scales, PANEL + (size_t)v * LANES, KVC_F16);
    }
    return t;
}

/* LANES bytes of Q8_0 times their scales */
INLINE vf scaled_bytes(const char *p, block_terms t) {
#if defined(__x86_64__) && KERNELS_LANES == 16
    const __m512i order =
        _mm512_set_epi32(15 << 8, 14 << 8, 13 << 8, 12 << 8, 11 << 8, 10 << 8, 9 << 8, 8 << 8,
                         7 << 8, 6 << 8, 5 << 8, 4 << 8, 3 << 8, 2 << 8, 1 << 8, 0);
    const __mmask64 second = 0x2222222222222222; /* byte of each word */
    __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p));
    __m512i base = _mm512_set1_epi32((int)kvc_bits_of_f32(BYTE_BASE));
    __m512i x = _mm512_mask_shuffle_epi8(base, second, bytes, order);
    return (vf)_mm512_fmadd_ps((__m512)t.scale, (__m512)x, (__m512)t.low);
#elif defined(__x86_64__) && KERNELS_LANES == 8
    return t.scale *
           (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    vi q;
    for (int i = 0; i < LANES; i++) q[i] = (signed char)p[i];
    return t.scale * __builtin_convertvector(q, vf);
#endif
}

/* Column `column` of a block, LANES rows from v * LANES on. */
INLINE vf block_column(const char *integers, int column, int v, block_terms t, kvc_dtype dtype) {
    if (dtype == KVC_Q8_0) return scaled_bytes(integers + column * PANEL + v * LANES, t);
    int j = column % 8, from = 4 * j, to = NIBBLE_BIT(j);
    vu word;
    memcpy(&word, integers + (column / 8 * PANEL + v * LANES) * 4, sizeof word);
    word = from < to ? word << (to - from) : word >> (from - to);
    float base = NIBBLE_BASE(j);
    vf x = (vf)((word & 15u << to) | kvc_bits_of_f32(base));
    if (dtype == KVC_Q4_0) return t.scale * x + (j % 2 ? t.low : t.high);
    return t.scale * (x - base) + t.low;
}

/* n values, a multiple of 512: whole blocks of a panel, as f32 [n / 16, 16] */
INLINE void blocks_to_f32(float *dst, const void *src, size_t n, kvc_dtype dtype) {
    const char *block = src;
    for (size_t done = 0; done < n; done += KVC_BLOCK * PANEL) {
        for (int v = 0; v < VECTORS; v++) {
            block_terms t = block_terms_of(block, v, dtype);
            float *to = dst + done + (size_t)v * LANES;
#pragma GCC unroll 32
            for (int i = 0; i < KVC_BLOCK; i++, to += PANEL) {
                store(to, block_column(block_integers(block, dtype), i, v, t, dtype));
            }
        }
        block += panel_bytes(KVC_BLOCK * PANEL, dtype);
    }
}
