/* kernels_rows.h - the part of kernels_body.h that works on rows: exponentials, softmax, norms, gates.
 *
 * Included once by kernels_body.h, whose vectors and transposition it uses.
 */

/* a > b ? a : b, hence b when one is not a number. */
INLINE vf larger(vf a, vf b) {
#if defined(__x86_64__) && KERNELS_LANES == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__x86_64__) && KERNELS_LANES == 8
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return choose(a > b, a, b);
#endif
}

/* x >= bound ? yes : no */
INLINE vf where_at_least(vf x, vf bound, vf yes, vf no) {
#if defined(__x86_64__) && KERNELS_LANES == 16
    __mmask16 mask = _mm512_cmp_ps_mask((__m512)x, (__m512)bound, _CMP_GE_OQ);
    return (vf)_mm512_mask_blend_ps(mask, (__m512)no, (__m512)yes);
#else
    return choose(x >= bound, yes, no);
#endif
}

/* e^x to about one unit in the last place: x = n ln 2 + r, |r| <= ln 2 / 2, a polynomial in r (the
 * smallest largest error of degree 6, 4e-9), and n added to the exponent. Below -87 (and for -inf)
 * exactly 0, above 88 held at e^88; NaN stays NaN. */
INLINE vf exp_vector(vf x) {
    vf zero = (vf){0};
    vf held = -larger(-88.0f + zero, -larger(x, -87.0f + zero));
    const float magic = 0x1.8p23f; /* adding it leaves the nearest integer in the low bits */
    vf shifted = held * 1.44269504f + magic;
    vf n = shifted - magic;
    vf r = held - n * 0x1.62e4p-1f;
    r = r - n * 0x1.7f7d1cp-20f;
    vf p = 0x1.6a2436p-10f + zero;
    p = p * r + 0x1.1239e2p-7f;
    p = p * r + 0x1.5558f2p-5f;
    p = p * r + 0x1.555492p-3f;
    p = p * r + 0x1.fffffcp-2f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    vf y = (vf)((vi)p + ((vi)shifted << 23));
    return where_at_least(x, -87.0f + zero, y, larger(zero, x));
}

static float row_max(const float *x, size_t n) {
    vf best = splat(-INFINITY);
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vf v = load(x + i);
        best = choose(v > best, v, best);
    }
    float lanes[LANES], most = -INFINITY;
    store(lanes, best);
    for (int j = 0; j < LANES; j++) most = lanes[j] > most ? lanes[j] : most;
    for (; i < n; i++) most = x[i] > most ? x[i] : most;
    return most;
}

static float row_sum(const float *x, size_t n) {
    vf total = (vf){0};
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) total += load(x + i);
    if (i < n) total += load_part(x + i, n - i, 0);
    return sum_lanes(total);
}

static float row_exp_sum(float *x, size_t n, float shift) {
    vf total = (vf){0};
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vf e = exp_vector(load(x + i) - shift);
        store(x + i, e);
        total += e;
    }
    if (i < n) {
        vf e = exp_vector(load_part(x + i, n - i, -INFINITY) - shift);
        store_part(x + i, e, n - i);
        total += e;
    }
    return sum_lanes(total);
}

static float row_exp_sum_const(const float *x, size_t n, float shift) {
    vf total = (vf){0};
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) total += exp_vector(load(x + i) - shift);
    if (i < n) total += exp_vector(load_part(x + i, n - i, -INFINITY) - shift);
    return sum_lanes(total);
}

/* Of LANES vectors, each a row's partial results, the whole result of every row: transposed, and
 * then halved in the order of sum_lanes. */
INLINE vf fold_max(vf x[LANES]) {
    transpose_square(x);
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2) {
        for (int i = 0; i < half; i++) x[i] = larger(x[i + half], x[i]);
    }
    return x[0];
}

INLINE vf fold_sum(vf x[LANES]) {
    transpose_square(x);
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2) {
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    }
    return x[0];
}

/* Up to LANES rows of soften. A row that has seen nothing yet keeps a maximum of -inf, but
 * exponents are then taken from the lowest float: all of them vanish. */
INLINE void soften_rows(float *s, size_t lds, size_t rows, size_t n, bool counted, float *most,
                        float *sum, float *mass, float *shrink) {
    vf x[LANES];
    for (size_t i = 0; i < LANES; i++) {
        x[i] = splat(-INFINITY);
        for (size_t j = 0; i < rows && j < n; j += LANES)
            x[i] = larger(load(s + i * lds + j), x[i]);
    }
    vf before = load(most), now = larger(fold_max(x), before);
    vf from = larger(now, splat(-FLT_MAX));
    vf factor = exp_vector(before - from);
    float shift[LANES];
    store(shift, from);
    for (size_t i = 0; i < LANES; i++) {
        x[i] = (vf){0};
        for (size_t j = 0; i < rows && j < n; j += LANES) {
            vf e = exp_vector(load(s + i * lds + j) - shift[i]);
            store(s + i * lds + j, e);
            x[i] += e;
        }
    }
    vf total = fold_sum(x);
    store(most, now);
    store(shrink, factor);
    store(sum, load(sum) * factor + total);
    store(mass, load(mass) * factor + (counted ? total : (vf){0}));
}

static void soften(float *s, size_t lds, size_t m, size_t n, bool counted, float *most, float *sum,
                   float *mass, float *shrink) {
    for (size_t r = 0; r < m; r += LANES) {
        size_t rows = m - r < LANES ? m - r : LANES;
        soften_rows(s + r * lds, lds, rows, n, counted, most + r, sum + r, mass + r, shrink + r);
    }
}

static void row_scale(float *x, size_t n, float factor) {
    for (size_t i = 0; i < n; i++) x[i] *= factor;
}

static void row_add(float *dst, const float *src, size_t n) {
    for (size_t i = 0; i < n; i++) dst[i] += src[i];
}

static void row_scaled_copy(float *dst, const float *src, size_t n, float factor) {
    for (size_t i = 0; i < n; i++) dst[i] = factor * src[i];
}

static void row_blend(float *dst, float keep, const float *src, float factor, size_t n) {
    for (size_t i = 0; i < n; i++) dst[i] = keep * dst[i] + factor * src[i];
}

static void row_rotate(float *restrict x, float *restrict y, const float *cos, const float *sin,
                       size_t n) {
    for (size_t i = 0; i < n; i++) {
        float a = x[i], b = y[i];
        x[i] = a * cos[i] - b * sin[i];
        y[i] = b * cos[i] + a * sin[i];
    }
}

static void row_rms_norm(float *dst, const float *src, const float *weight, size_t n, float eps,
                         float offset) {
    vf squares = (vf){0};
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) squares += load(src + i) * load(src + i);
    if (i < n) {
        vf v = load_part(src + i, n - i, 0);
        squares += v * v;
    }
    float factor = 1.0f / sqrtf(sum_lanes(squares) / (float)n + eps);
    for (i = 0; i < n; i++) dst[i] = src[i] * factor * (weight[i] + offset);
}

INLINE vf activate(vf x, kvc_activation kind) {
    vf one = splat(1.0f);
    if (kind == KVC_SILU) return x / (one + exp_vector(-x));
    /* 0.5 x (1 + tanh(y)) = x / (1 + e^(-2y)), y = sqrt(2 / pi) (x + 0.044715 x^3) */
    vf y2 = x * (x * x * 0.044715f + one) * 1.5957691216f;
    return x / (one + exp_vector(-y2));
}

INLINE void gated(float *dst, const float *gate, const float *up, size_t n, kvc_activation kind) {
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        store(dst + i, activate(load(gate + i), kind) * load(up + i));
    }
    if (i < n) {
        vf v = activate(load_part(gate + i, n - i, 0), kind) * load_part(up + i, n - i, 0);
        store_part(dst + i, v, n - i);
    }
}

static void gated_silu(float *dst, const float *gate, const float *up, size_t n) {
    gated(dst, gate, up, n, KVC_SILU);
}

static void gated_gelu(float *dst, const float *gate, const float *up, size_t n) {
    gated(dst, gate, up, n, KVC_GELU_TANH);
}
