/* test_blocks.c - matrices in the block types against the same values held in f32, bit for bit, on
 * every instruction set: all numbers of rows, several of threads, the embedding table's uses, and
 * what packing refuses. Blocks are taken apart here by GGUF's formulas, one value at a time.
 */
#define _POSIX_C_SOURCE 200112L /* setenv */
#include "../../csrc/backend/backend.h"
#include "../../csrc/backend/cpu/kernels.h"
#include "../../csrc/backend/dtype.h"
#include "check.h"

#include <math.h>
#include <stdlib.h>

enum { OUT = 77, IN = 608, ROWS = 40 }; /* padding rows, a depth of 512 and some, widened or not */

static const kvc_dtype types[] = {KVC_Q8_0, KVC_Q4_0, KVC_Q4_1};
static unsigned char blocks[OUT * IN / 32 * 34];
static float values[OUT * IN], x[ROWS * IN];
static unsigned draw_state = 7;

static unsigned draw(void) {
    draw_state = draw_state * 1664525u + 1013904223u;
    return draw_state >> 16;
}

/* Random blocks of a type, and what they mean. Scales have all their bits, both signs, and some are
 * 0 or subnormal. */
static void fill(kvc_dtype dtype) {
    size_t size = kvc_dtype_bytes(dtype), head = dtype == KVC_Q4_1 ? 4 : 2;
    for (size_t b = 0; b < OUT * IN / 32; b++) {
        unsigned char *block = blocks + b * size;
        for (size_t i = 0; i < size; i++) block[i] = (unsigned char)draw();
        for (size_t i = 0; i < head; i += 2) {
            unsigned half = (draw() & 0x83ff) | (draw() % 8 + 6) << 10; /* 2^-9 .. 2^-1 */
            if (draw() % 50 == 0) half = draw() & 0x83ff;
            if (draw() % 50 == 0) half = 0;
            block[i] = (unsigned char)half;
            block[i + 1] = (unsigned char)(half >> 8);
        }
        float scale = kvc_f32_of_f16((uint16_t)(block[0] | block[1] << 8));
        float least = kvc_f32_of_f16((uint16_t)(block[2] | block[3] << 8));
        for (size_t i = 0; i < 32; i++) {
            unsigned char nibbles = block[head + i % 16];
            int q = i < 16 ? nibbles & 15 : nibbles >> 4;
            values[b * 32 + i] = dtype == KVC_Q8_0   ? scale * (float)(signed char)block[2 + i]
                                 : dtype == KVC_Q4_0 ? scale * (float)(q - 8)
                                                     : scale * (float)q + least;
        }
    }
}

typedef struct bench {
    kvc_backend *b;
    kvc_stream *s;
    kvc_buffer *held[8];
    size_t bytes[8], n;
} bench;

static kvc_mem take(bench *t, size_t bytes) {
    kvc_error error;
    kvc_buffer *buffer = NULL;
    GOOD(t->b->alloc(t->b, &buffer, bytes, &error));
    t->held[t->n] = buffer;
    t->bytes[t->n++] = bytes;
    return (kvc_mem){buffer, 0};
}

static bool open_bench(bench *t, const cpu_kernels *kernels) {
    kvc_error error;
    *t = (bench){0};
    if (!kernels) return false;
    setenv("KVCOMM_CPU", kernels->name, 1);
    if (kvc_cpu_open(&t->b, &error)) return false;
    return !t->b->stream_open(t->b, &t->s, NULL, NULL, &error);
}

static void close_bench(bench *t) {
    for (size_t i = 0; i < t->n; i++) t->b->free(t->b, t->held[i], t->bytes[i]);
    t->b->stream_close(t->s);
    t->b->close(t->b);
    unsetenv("KVCOMM_CPU");
}

static bool read_memory(void *context, void *dst, size_t at, size_t n) {
    memcpy(dst, (const char *)context + at, n);
    return true;
}

static kvc_status pack(bench *t, const kvc_matrix *m, const void *src, kvc_dtype src_dtype,
                       kvc_error *err) {
    kvc_source source = {read_memory, (void *)src};
    return t->b->matrix_pack(t->s, m, 0, &source, src_dtype, OUT, err);
}

static kvc_matrix matrix(bench *t, const void *src, kvc_dtype src_dtype, kvc_dtype dtype) {
    kvc_error error;
    kvc_matrix m = {take(t, t->b->matrix_bytes(OUT, IN, dtype)), kvc_panel_round(OUT), IN, dtype};
    GOOD(pack(t, &m, src, src_dtype, &error));
    return m;
}

static void same_products(bench *t, const kvc_matrix *m, const kvc_matrix *f32, size_t most,
                          size_t step) {
    enum { LD = (OUT + 15) / 16 * 16 };
    static float got[ROWS * LD], want[ROWS * LD];
    kvc_error error;
    kvc_mem src = take(t, sizeof x), dst = take(t, sizeof got);
    GOOD(t->b->upload(t->s, src, x, sizeof x, &error));
    for (size_t n = 1; n <= most; n += step) {
        GOOD(t->b->linear(t->s, dst, LD, src, IN, f32, 0, LD, (kvc_mem){0}, false, n, &error));
        GOOD(t->b->download(t->s, want, dst, n * LD * 4, &error));
        GOOD(t->b->linear(t->s, dst, LD, src, IN, m, 0, LD, (kvc_mem){0}, false, n, &error));
        GOOD(t->b->download(t->s, got, dst, n * LD * 4, &error));
        CHECK(memcmp(got, want, n * LD * sizeof *got) == 0);
    }
    double exact = 0; /* and the f32 product is one */
    for (size_t k = 0; k < IN; k++) exact += (double)x[k] * values[3 * IN + k];
    CHECK(fabs(got[3] - exact) < 1e-3);
    t->n -= 2;
    t->b->free(t->b, src.buffer, sizeof x);
    t->b->free(t->b, dst.buffer, sizeof got);
}

static void same_table(bench *t, const kvc_matrix *m, const kvc_matrix *f32) {
    enum { N = 3, LD = 80 };
    static const int32_t ids[N] = {0, 17, OUT - 1};
    float got[N * IN], want[N * IN], logits[N * LD];
    int32_t found[N], wanted[N];
    kvc_error error;
    kvc_mem row = take(t, sizeof got), at = take(t, sizeof ids), p = take(t, sizeof logits);
    GOOD(t->b->upload(t->s, at, ids, sizeof ids, &error));
    GOOD(t->b->embed(t->s, row, IN, m, at, N, 2, &error));
    GOOD(t->b->download(t->s, got, row, sizeof got, &error));
    for (size_t r = 0; r < N; r++) {
        for (size_t k = 0; k < IN; k++)
            CHECK(got[r * IN + k] == 2 * values[(size_t)ids[r] * IN + k]);
    }
    GOOD(t->b->nearest(t->s, at, row, IN, m, N, OUT, &error));
    GOOD(t->b->download(t->s, found, at, sizeof found, &error));
    GOOD(t->b->nearest(t->s, at, row, IN, f32, N, OUT, &error));
    GOOD(t->b->download(t->s, wanted, at, sizeof wanted, &error));
    CHECK(memcmp(found, wanted, sizeof found) == 0 && memcmp(found, ids, sizeof found) == 0);
    for (size_t i = 0; i < N * LD; i++) logits[i] = (float)(i % 13) / 4;
    GOOD(t->b->upload(t->s, p, logits, sizeof logits, &error));
    GOOD(t->b->mix(t->s, row, IN, p, LD, m, N, OUT, 1, 1, &error));
    GOOD(t->b->download(t->s, got, row, sizeof got, &error));
    GOOD(t->b->upload(t->s, p, logits, sizeof logits, &error));
    GOOD(t->b->mix(t->s, row, IN, p, LD, f32, N, OUT, 1, 1, &error));
    GOOD(t->b->download(t->s, want, row, sizeof want, &error));
    CHECK(memcmp(got, want, sizeof got) == 0);
    t->b->free(t->b, row.buffer, sizeof got);
    t->b->free(t->b, at.buffer, sizeof ids);
    t->b->free(t->b, p.buffer, sizeof logits);
    t->n -= 3;
}

static const cpu_kernels *(*const known[])(void) = {cpu_kernels_portable, cpu_kernels_avx2,
                                                    cpu_kernels_avx512};

static void as_in_f32(void) {
    static const int threads[] = {1, 2, 3, 7};
    kvc_error error;
    for (size_t i = 0; i < ROWS * IN; i++) x[i] = (float)((int)(draw() & 4095) - 2048) / 1000;
    for (size_t k = 0; k < 3; k++) {
        for (size_t d = 0; d < 3; d++) {
            bench t;
            if (!open_bench(&t, known[k]())) continue;
            fill(types[d]);
            kvc_matrix m = matrix(&t, blocks, types[d], types[d]);
            kvc_matrix f32 = matrix(&t, values, KVC_F32, KVC_F32);
            kvc_matrix widened = matrix(&t, blocks, types[d], KVC_F32);
            for (size_t n = 0; n < 4; n++) {
                GOOD(kvc_set_num_threads(threads[n], &error));
                same_products(&t, &m, &f32, ROWS, n ? 9 : 1);
            }
            GOOD(kvc_set_num_threads(0, &error));
            same_products(&t, &widened, &f32, 2, 1);
            same_table(&t, &m, &f32);
            close_bench(&t);
        }
    }
}

/* Quantised by hand: the largest magnitude becomes 127, halves go away from zero. */
static void quantizing(void) {
    kvc_error error;
    bench t;
    REQUIRE(open_bench(&t, cpu_kernels_portable()));
    static float src[OUT * IN], got[IN];
    for (size_t i = 0; i < 32; i++) src[i] = i == 5 ? -127 : (float)i + (i % 2 ? 0.5f : -0.5f);
    for (size_t i = 32; i < 64; i++) src[i] = i == 40 ? 0.3f : i == 41 ? 0.1f : 0;
    kvc_matrix m = matrix(&t, src, KVC_F32, KVC_Q8_0);
    const int32_t id = 0;
    kvc_mem row = take(&t, sizeof got), at = take(&t, sizeof id);
    GOOD(t.b->upload(t.s, at, &id, sizeof id, &error));
    GOOD(t.b->embed(t.s, row, IN, &m, at, 1, 1, &error));
    GOOD(t.b->download(t.s, got, row, sizeof got, &error));
    for (size_t i = 0; i < 32; i++) {
        float away = i == 0 ? -1 : i % 2 ? (float)i + 1 : (float)i; /* i - 0.5 goes up to i */
        CHECK(got[i] == (i == 5 ? -127 : away));
    }
    float scale = kvc_f32_of_f16(kvc_f16_of_f32(0.3f / 127));
    CHECK(got[40] == 127 * scale && got[41] == 42 * scale && got[42] == 0 && got[64] == 0);

    fill(KVC_Q4_0);
    kvc_matrix q4 = {take(&t, t.b->matrix_bytes(OUT, IN, KVC_Q4_0)), 80, IN, KVC_Q4_0};
    FAILS(pack(&t, &q4, src, KVC_F32, &error), KVC_ERROR_UNSUPPORTED, "q4_0 cannot be made of f32");
    blocks[18 * 3 + 1] |= 0x7c; /* a scale becomes infinite, or no number */
    FAILS(pack(&t, &q4, blocks, KVC_Q4_0, &error), KVC_ERROR_NUMERIC, "q4_0");
    src[100] = NAN;
    FAILS(pack(&t, &m, src, KVC_F32, &error), KVC_ERROR_NUMERIC, "q8_0");
    src[100] = 1e10f; /* its scale is beyond f16 */
    FAILS(pack(&t, &m, src, KVC_F32, &error), KVC_ERROR_NUMERIC, "q8_0");
    close_bench(&t);
}

const test block_tests[] = {{"as in f32", as_in_f32}, {"quantizing", quantizing}, {NULL, NULL}};
