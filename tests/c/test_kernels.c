/* test_kernels.c - every kernel of every instruction set this processor has, against plain loops
 * in double: all tile heights and odd sizes, each dtype, and that a row's bits are its own.
 */
#include "../../csrc/backend/cpu/kernels.h"
#include "../../csrc/backend/dtype.h"
#include "../../csrc/core/core.h"
#include "check.h"
#include "tiny.h"

#include <math.h>
#include <stdlib.h>

static const cpu_kernels *tables[3];
static size_t n_tables;

static void find_tables(void) {
    const cpu_kernels *(*const known[])(void) = {cpu_kernels_portable, cpu_kernels_avx2,
                                                 cpu_kernels_avx512};
    n_tables = 0;
    for (size_t i = 0; i < 3; i++) {
        if (known[i]()) tables[n_tables++] = known[i]();
    }
}

/* Seeded values in -1 .. 1 that f16 and bf16 hold exactly: multiples of 1/64. */
static unsigned draw_state;

static float draw(void) {
    draw_state = draw_state * 1664525u + 1013904223u;
    return (float)((int)(draw_state >> 16 & 127) - 64) / 64;
}

static void *store_as(const float *x, size_t n, kvc_dtype dtype) {
    char *to = malloc(n * kvc_dtype_bytes(dtype) + 1);
    if (!to) return NULL;
    for (size_t i = 0; i < n; i++) {
        uint16_t h = dtype == KVC_F16 ? kvc_f16_of_f32(x[i]) : kvc_bf16_of_f32(x[i]);
        if (dtype == KVC_F32) memcpy(to + 4 * i, &x[i], 4);
        else memcpy(to + 2 * i, &h, 2);
    }
    return to;
}

enum { MOST_ROWS = 14, MOST_PANELS = 6, MOST_DEPTH = 67, STRIDE = 16 * MOST_PANELS + 3 };

static void gemm_case(const cpu_kernels *k, kvc_dtype dtype, size_t m, size_t panels,
                      size_t depth) {
    static float a[MOST_ROWS * MOST_DEPTH], b[MOST_PANELS * MOST_DEPTH * 16];
    static float c[MOST_ROWS * STRIDE], one[STRIDE], near[MOST_ROWS * STRIDE];
    for (size_t i = 0; i < m * depth; i++) a[i] = draw();
    for (size_t i = 0; i < panels * depth * 16; i++) b[i] = draw();
    for (size_t i = 0; i < m * STRIDE; i++) c[i] = 7;
    void *w = store_as(b, panels * depth * 16, dtype);
    REQUIRE(w);
    cpu_next next = {w, depth * 16, depth * 16}; /* asking changes nothing */
    k->gemm[dtype](c, STRIDE, a, depth, w, 16, depth * 16, m, panels, depth, false, NULL);
    k->gemm[dtype](c, STRIDE, a, depth, w, 16, depth * 16, m, panels, depth, true, &next);
    for (size_t r = 0; r < m; r++) {
        for (size_t o = 0; o < 16 * panels; o++) {
            double want = 0;
            for (size_t d = 0; d < depth; d++) {
                want += (double)a[r * depth + d] * b[(o / 16 * depth + d) * 16 + o % 16];
            }
            CHECK(fabs(c[r * STRIDE + o] - 2 * want) <= 1e-5 * (1 + fabs(want)));
        }
        CHECK(c[r * STRIDE + 16 * panels] == 7); /* nothing beyond the last column */
        /* the row alone has the bits that it has among the others */
        k->gemm[dtype](one, STRIDE, a + r * depth, depth, w, 16, depth * 16, 1, panels, depth,
                       false, NULL);
        k->gemm[dtype](one, STRIDE, a + r * depth, depth, w, 16, depth * 16, 1, panels, depth, true,
                       NULL);
        CHECK(memcmp(one, c + r * STRIDE, 16 * panels * sizeof *one) == 0);
    }
    for (size_t i = 0; i < m * STRIDE; i++) near[i] = 7;
    k->near[dtype](near, STRIDE, a, depth, w, 16, depth * 16, m, panels, depth, false, &next);
    k->near[dtype](near, STRIDE, a, depth, w, 16, depth * 16, m, panels, depth, true, NULL);
    CHECK(memcmp(near, c, m * STRIDE * sizeof *c) == 0);
    free(w);
}

static void products(void) {
    find_tables();
    for (size_t t = 0; t < n_tables; t++) {
        for (int dtype = 0; dtype < KVC_DTYPE_COUNT; dtype++) {
            for (size_t m = 1; m <= MOST_ROWS; m++) {
                for (size_t panels = 1; panels <= MOST_PANELS; panels++) {
                    gemm_case(tables[t], (kvc_dtype)dtype, m, panels, m % 2 ? MOST_DEPTH : 1);
                }
            }
        }
    }
}

enum { MIX_COLUMNS = 7 };

/* dst += p x panels from the other side; and sums of squares per lane */
static void mix_case(const cpu_kernels *k, kvc_dtype dtype, size_t m, size_t panels) {
    static float p[MOST_ROWS * 16 * MOST_PANELS], b[MOST_PANELS * MIX_COLUMNS * 16];
    static float c[MOST_ROWS * (MIX_COLUMNS + 1)], one[MIX_COLUMNS];
    size_t wide = 16 * panels, ld = MIX_COLUMNS + 1;
    for (size_t i = 0; i < m * wide; i++) p[i] = draw();
    for (size_t i = 0; i < panels * MIX_COLUMNS * 16; i++) b[i] = draw();
    for (size_t i = 0; i < m * ld; i++) c[i] = 7;
    void *w = store_as(b, panels * MIX_COLUMNS * 16, dtype);
    REQUIRE(w);
    k->mix[dtype](c, ld, p, wide, w, MIX_COLUMNS * 16, m, panels, MIX_COLUMNS);
    for (size_t r = 0; r < m; r++) {
        for (size_t column = 0; column < MIX_COLUMNS; column++) {
            double want = 7;
            for (size_t o = 0; o < wide; o++) {
                want += (double)p[r * wide + o] * b[(o / 16 * MIX_COLUMNS + column) * 16 + o % 16];
            }
            CHECK(fabs(c[r * ld + column] - want) <= 1e-5 * (1 + fabs(want)));
        }
        CHECK(c[r * ld + MIX_COLUMNS] == 7); /* nothing beyond the last column */
        for (size_t i = 0; i < MIX_COLUMNS; i++) one[i] = 7;
        k->mix[dtype](one, ld, p + r * wide, wide, w, MIX_COLUMNS * 16, 1, panels, MIX_COLUMNS);
        CHECK(memcmp(one, c + r * ld, sizeof one) == 0); /* alone as among the others */
    }
    float sums[16] = {0};
    k->squares[dtype](sums, w, MIX_COLUMNS);
    for (size_t lane = 0; lane < 16; lane++) {
        double want = 0;
        for (size_t d = 0; d < MIX_COLUMNS; d++)
            want += (double)b[d * 16 + lane] * b[d * 16 + lane];
        CHECK(fabs(sums[lane] - want) <= 1e-6 * (1 + want));
    }
    free(w);
}

static void mixtures(void) {
    find_tables();
    for (size_t t = 0; t < n_tables; t++) {
        for (int dtype = 0; dtype < KVC_DTYPE_COUNT; dtype++) {
            for (size_t m = 1; m <= MOST_ROWS; m++) {
                for (size_t panels = 1; panels <= MOST_PANELS; panels++) {
                    mix_case(tables[t], (kvc_dtype)dtype, m, panels);
                }
            }
        }
    }
}

static void transposing(void) {
    enum { ROWS = 37, COLS = 41 };
    static float src[ROWS * COLS], dst[COLS * 64];
    find_tables();
    for (size_t i = 0; i < ROWS * COLS; i++) src[i] = draw();
    for (size_t t = 0; t < n_tables; t++) {
        for (int dtype = 0; dtype < KVC_DTYPE_COUNT; dtype++) {
            void *x = store_as(src, ROWS * COLS, (kvc_dtype)dtype);
            REQUIRE(x);
            for (size_t n = 1; n <= ROWS; n++) {
                for (size_t i = 0; i < COLS * 64; i++) dst[i] = 9;
                tables[t]->transpose[dtype](dst, 64, x, COLS, n, COLS, n % 2 ? x : NULL);
                for (size_t d = 0; d < COLS; d++) {
                    for (size_t j = 0; j < (n + 15) / 16 * 16; j++) {
                        CHECK(dst[d * 64 + j] == (j < n ? src[j * COLS + d] : 0));
                    }
                }
            }
            free(x);
        }
    }
}

/* Every 16-bit pattern to f32 and back; and halves between two values go to the even one. */
static void conversions(void) {
    static uint16_t all[65536], back[65536];
    static float wide[65536];
    find_tables();
    for (unsigned i = 0; i < 65536; i++) all[i] = (uint16_t)i;
    for (size_t t = 0; t < n_tables; t++) {
        for (int dtype = KVC_F16; dtype <= KVC_BF16; dtype++) {
            unsigned exponent = dtype == KVC_F16 ? 0x7c00 : 0x7f80;
            tables[t]->to_f32[dtype](wide, all, 65536);
            CHECK(!tables[t]->from_f32[dtype](back, wide, 65536)); /* there are NaNs among them */
            for (unsigned i = 0; i < 65536; i++) {
                bool nan = (i & exponent) == exponent && (i & 0x7fff) != exponent;
                CHECK(nan ? isnan(wide[i]) && isnan(kvc_element(back, i, (kvc_dtype)dtype))
                          : back[i] == i);
            }
        }
        const float x[6] = {1 + 0x1p-11f, 1 + 3 * 0x1p-11f, 65504, 65519, 0x1p-24f, 0x1p-26f};
        const float wanted[6] = {1, 1 + 0x1p-9f, 65504, 65504, 0x1p-24f, 0};
        CHECK(tables[t]->from_f32[KVC_F16](back, x, 6));
        for (size_t i = 0; i < 6; i++) CHECK(kvc_f32_of_f16(back[i]) == wanted[i]);
        const float y[4] = {1 + 0x1p-8f, 1 + 3 * 0x1p-8f, -2, 1e38f};
        CHECK(tables[t]->from_f32[KVC_BF16](back, y, 4));
        CHECK(kvc_f32_of_bf16(back[0]) == 1 && kvc_f32_of_bf16(back[1]) == 1 + 0x1p-6f);
        CHECK(kvc_f32_of_bf16(back[2]) == -2 &&
              fabsf(kvc_f32_of_bf16(back[3]) - 1e38f) <= 0x1p118f);
        const float large = 70000;
        CHECK(!tables[t]->from_f32[KVC_F16](back, &large, 1)); /* no infinity without a word */
    }
}

/* Any bits, every tail: as one value at a time gives them, and nothing behind the last. */
static void narrowing(void) {
    enum { MOST = 40, GUARD = 0x55 };
    float x[MOST];
    char got[4 * MOST + 1];
    uint64_t state = 7;
    find_tables();
    for (size_t t = 0; t < n_tables; t++) {
        for (size_t n = 1; n < MOST; n++) {
            tiny_fill(x, n, &state);
            for (size_t i = 0; i < n; i++) {
                uint32_t bits = kvc_bits_of_f32(x[i]) * 2654435761u;
                bool wild = n % 2 && i == n / 2; /* else finite: no exponent of ones */
                x[i] = wild ? INFINITY : kvc_f32_of_bits(bits & 0xff7fffff);
            }
            for (int dtype = 0; dtype < KVC_DTYPE_COUNT; dtype++) {
                size_t element = kvc_dtype_bytes((kvc_dtype)dtype);
                got[n * element] = GUARD;
                bool finite = true;
                bool good = tables[t]->from_f32[dtype](got, x, n);
                for (size_t i = 0; i < n; i++) {
                    float back = kvc_element(got, i, (kvc_dtype)dtype);
                    float wanted = dtype == KVC_F32    ? x[i]
                                   : dtype == KVC_BF16 ? kvc_f32_of_bf16(kvc_bf16_of_f32(x[i]))
                                                       : kvc_f32_of_f16(kvc_f16_of_f32(x[i]));
                    CHECK(kvc_bits_of_f32(back) == kvc_bits_of_f32(wanted));
                    finite = finite && isfinite(wanted);
                }
                CHECK(good == finite && got[n * element] == GUARD);
            }
        }
    }
}

static void exponentials(void) {
    enum { N = 4003 };
    static float x[N], e[N];
    find_tables();
    for (size_t t = 0; t < n_tables; t++) {
        for (size_t i = 0; i < N; i++) x[i] = e[i] = -100 + 0.025f * (float)i;
        double sum = 0;
        float got = tables[t]->exp_sum(e, N, 0.5f);
        for (size_t i = 0; i < N; i++) {
            double want = exp((double)(x[i] - 0.5f));
            CHECK(x[i] - 0.5f < -87 ? e[i] == 0 : fabs(e[i] - want) <= 0x1.2p-23 * want);
            sum += want;
        }
        CHECK(fabs(got - sum) <= 1e-6 * sum);
        CHECK(tables[t]->exp_sum_const(x, N, 0.5f) == got);
        float edge[3] = {-INFINITY, 0, NAN};
        tables[t]->exp_sum(edge, 3, 0);
        CHECK(edge[0] == 0 && edge[1] == 1 && isnan(edge[2]));
        CHECK(tables[t]->max(x, 17) == x[16] && tables[t]->max(edge, 2) == 1);
        float ones[19];
        for (size_t i = 0; i < 19; i++) ones[i] = 1;
        for (size_t n = 1; n <= 19; n++) CHECK(tables[t]->sum(ones, n) == (float)n);
    }
}

static double silu(double x) {
    return x / (1 + exp(-x));
}

static double gelu_tanh(double x) {
    return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
}

/* Two tiles of a running softmax against one softmax over both, in doubles. Row 1 sees nothing of
 * the first tile, row 2 nothing at all; row 0 has one score so low that it vanishes. */
static void softening_case(const cpu_kernels *k, size_t m, size_t n) {
    enum { ROWS = 48, LD = 80 };
    static float s[2][ROWS * LD], p[2][ROWS * LD];
    float most[ROWS], sum[ROWS], mass[ROWS], shrink[ROWS];
    for (int tile = 0; tile < 2; tile++) {
        for (size_t i = 0; i < m * LD; i++) s[tile][i] = 12 * draw();
        for (size_t j = 0; j < n; j++) {
            if (m > 1 && tile == 0) s[tile][LD + j] = -INFINITY;
            if (m > 2) s[tile][2 * LD + j] = -INFINITY;
        }
        s[tile][3] = -400;
        memcpy(p[tile], s[tile], sizeof p[tile]);
    }
    for (size_t r = 0; r < ROWS; r++) {
        most[r] = -INFINITY;
        sum[r] = mass[r] = 0;
    }
    k->soften(p[0], LD, m, n, true, most, sum, mass, shrink);
    for (size_t r = 0; r < m; r++) CHECK(sum[r] == mass[r]);
    k->soften(p[1], LD, m, n, false, most, sum, mass, shrink);
    for (size_t r = 0; r < m; r++) {
        double top = -INFINITY, part[2] = {0, 0};
        for (size_t j = 0; j < 2 * n; j++) top = fmax(top, s[j / n][r * LD + j % n]);
        CHECK(most[r] == (float)top);
        for (size_t j = 0; j < 2 * n && top > -INFINITY; j++) {
            part[j / n] += exp((double)s[j / n][r * LD + j % n] - top);
        }
        CHECK(fabs(sum[r] - part[0] - part[1]) <= 2e-6 * (part[0] + part[1]));
        CHECK(fabs(mass[r] - part[0]) <= 2e-6 * part[0]);
        for (size_t j = 0; j < n; j++) {
            double wanted = top > -INFINITY ? exp((double)s[1][r * LD + j] - top) : 0;
            CHECK(fabs(p[1][r * LD + j] - wanted) <= 1e-6 * wanted + 1e-37);
        }
        for (size_t j = n; j < LD; j++) CHECK(p[1][r * LD + j] == s[1][r * LD + j]);
    }
    CHECK(p[1][3] == 0);
}

static void softening(void) {
    find_tables();
    for (size_t t = 0; t < n_tables; t++) {
        for (size_t m = 1; m <= 37; m++) softening_case(tables[t], m, m % 4 * 16 + 16);
        float s[16] = {1, NAN}, most[16] = {0}, sum[16] = {0}, mass[16] = {0}, shrink[16];
        tables[t]->soften(s, 16, 1, 16, true, most, sum, mass, shrink);
        CHECK(isnan(sum[0]) && isnan(mass[0]) && sum[1] == 0);
    }
}

static void rows(void) {
    enum { N = 45 };
    float x[N], up[N], y[N], weight[N];
    find_tables();
    for (size_t t = 0; t < n_tables; t++) {
        const cpu_kernels *k = tables[t];
        for (size_t n = 1; n <= N; n++) {
            double squares = 0;
            for (size_t i = 0; i < n; i++) {
                x[i] = 8 * draw();
                up[i] = draw();
                weight[i] = draw();
                squares += (double)x[i] * x[i];
            }
            k->rms_norm(y, x, weight, n, 0.5f, 1);
            double scale = 1 / sqrt(squares / (double)n + 0.5);
            for (size_t i = 0; i < n; i++) {
                CHECK(fabs(y[i] - x[i] * scale * (1 + (double)weight[i])) < 2e-6);
            }
            k->gated[KVC_SILU](y, x, up, n);
            for (size_t i = 0; i < n; i++) CHECK(fabs(y[i] - silu(x[i]) * up[i]) < 2e-6);
            k->gated[KVC_GELU_TANH](y, x, up, n);
            for (size_t i = 0; i < n; i++) CHECK(fabs(y[i] - gelu_tanh(x[i]) * up[i]) < 4e-6);
        }
        static float large[4096], flat[4096], wide[4096];
        for (size_t i = 0; i < 4096; i++) {
            large[i] = i == 7 ? 1e4f : 1e-2f;
            flat[i] = 1;
        }
        k->rms_norm(wide, large, flat, 4096, 1e-6f, 0);
        double outlier = 1 / sqrt((1e8 + 4095 * 1e-4) / 4096 + 1e-6);
        CHECK(fabs(wide[7] - 1e4 * outlier) < 1e-5 && fabs(wide[0] - 1e-2 * outlier) < 1e-11);
        for (int size = 0; size < 2; size++) {
            float level = size ? 300 : 1e-4f;
            for (size_t i = 0; i < 64; i++) large[i] = level;
            k->rms_norm(wide, large, flat, 64, 1e-12f, 0);
            CHECK(fabs(wide[0] - level / sqrt((double)level * level + 1e-12)) < 1e-6);
        }
        const float zeros[3] = {0, 0, 0}, huge[3] = {-300, 300, 0}, one[3] = {1, 1, 1};
        k->rms_norm(y, zeros, one, 3, 1e-6f, 0);
        CHECK(y[0] == 0 && y[1] == 0 && y[2] == 0);
        k->gated[KVC_SILU](y, huge, one, 3);
        CHECK(y[0] <= 0 && y[0] > -1e-30f && y[1] == 300 && y[2] == 0);
        float a[3] = {1, 0, 3}, b[3] = {0, 1, 4};
        const float cos[3] = {0, 0, 1}, sin[3] = {1, 1, 0}; /* two quarter turns and none */
        k->rotate(a, b, cos, sin, 3);
        CHECK(a[0] == 0 && b[0] == 1 && a[1] == -1 && b[1] == 0 && a[2] == 3 && b[2] == 4);
    }
}

/* Phases at far positions: no neighbours fall together at the top frequency. */
static void angles(void) {
    const int64_t at[] = {0, 255, 256, 257, 1000, 32767, 32768, 131071};
    double freq[32];
    float here[64], next[64];
    kvc_rope rope = {.kind = KVC_ROPE_DEFAULT, .theta = 5e5, .rotary_dim = 64};
    kvc_rope_inv_freq(freq, &rope);
    for (size_t p = 0; p < sizeof at / sizeof *at; p++) {
        kvc_rope_angles(here, freq, 32, (double)at[p], 1);
        kvc_rope_angles(next, freq, 32, (double)at[p] + 1, 1);
        CHECK(here[0] != next[0] && fabs(here[0] - next[0]) > 1e-3);
        for (int i = 0; i < 32; i++) {
            double angle = (double)at[p] * pow(5e5, -i / 32.0);
            CHECK(fabs(here[i] - cos(angle)) < 1e-6 && fabs(here[32 + i] - sin(angle)) < 1e-6);
        }
    }
}

const test kernel_tests[] = {{"products", products},       {"mixtures", mixtures},
                             {"transposing", transposing}, {"conversions", conversions},
                             {"narrowing", narrowing},     {"exponentials", exponentials},
                             {"softening", softening},     {"rows", rows},
                             {"angles", angles},           {NULL, NULL}};
