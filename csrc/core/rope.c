/* rope.c - rotary position embedding: inverse frequencies of each kind, and angles.
 *
 * Formulas as in transformers' modeling_rope_utils and the papers they come from (linear position
 * interpolation; Llama 3.1's three bands; YaRN, arXiv 2309.00071). Angles are formed in double:
 * a phase at position 131071 keeps all the digits that a float can hold.
 */
#include "core.h"

#include <math.h>

static const double PI = 3.14159265358979323846;

static bool positive(double x) {
    return x > 0 && isfinite(x);
}

kvc_status kvc_rope_check(const kvc_rope *rope, int head_dim, int which, kvc_error *err) {
    if ((unsigned)rope->kind > KVC_ROPE_YARN) {
        return kvc_fail(err, KVC_ERROR_UNSUPPORTED, "rope %d: unknown kind %d", which, rope->kind);
    }
    if (rope->rotary_dim < 2 || rope->rotary_dim % 2 || rope->rotary_dim > head_dim) {
        return kvc_fail(err, KVC_ERROR_VALUE,
                        "rope %d: rotary_dim must be even and in 2 .. head_dim %d, not %d", which,
                        head_dim, rope->rotary_dim);
    }
    bool ok = positive(rope->theta);
    if (rope->kind != KVC_ROPE_DEFAULT) ok = ok && positive(rope->factor);
    if (rope->kind == KVC_ROPE_LLAMA3) {
        ok = ok && positive(rope->original_length) && positive(rope->low_freq_factor) &&
             rope->high_freq_factor > rope->low_freq_factor;
    }
    if (rope->kind == KVC_ROPE_YARN) {
        ok = ok && positive(rope->original_length) && positive(rope->beta_fast) &&
             positive(rope->beta_slow) && positive(rope->attention_factor) && rope->theta != 1;
    }
    if (ok) return KVC_OK;
    return kvc_fail(err, KVC_ERROR_VALUE, "rope %d: a parameter is missing or out of range", which);
}

static double llama3(const kvc_rope *rope, double freq) {
    double turns = rope->original_length * freq / (2 * PI); /* over the trained length */
    if (turns < rope->low_freq_factor) return freq / rope->factor;
    if (turns > rope->high_freq_factor) return freq;
    double smooth =
        (turns - rope->low_freq_factor) / (rope->high_freq_factor - rope->low_freq_factor);
    return (1 - smooth) * freq / rope->factor + smooth * freq;
}

/* The dimension pair whose wave turns `turns` times over the trained length. */
static double yarn_pair(const kvc_rope *rope, double turns) {
    return rope->rotary_dim * log(rope->original_length / (turns * 2 * PI)) /
           (2 * log(rope->theta));
}

static double yarn(const kvc_rope *rope, double freq, int pair) {
    double low = yarn_pair(rope, rope->beta_fast), high = yarn_pair(rope, rope->beta_slow);
    if (rope->truncate) {
        low = floor(low);
        high = ceil(high);
    }
    if (low < 0) low = 0;
    if (high > rope->rotary_dim - 1) high = rope->rotary_dim - 1;
    if (low == high) high += 0.001;
    double ramp = (pair - low) / (high - low);
    ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
    return ramp * freq / rope->factor + (1 - ramp) * freq;
}

void kvc_rope_inv_freq(double *out, const kvc_rope *rope) {
    for (int i = 0; i < rope->rotary_dim / 2; i++) {
        double freq = pow(rope->theta, -2.0 * i / rope->rotary_dim);
        switch (rope->kind) {
        case KVC_ROPE_DEFAULT: out[i] = freq; break;
        case KVC_ROPE_LINEAR: out[i] = freq / rope->factor; break;
        case KVC_ROPE_LLAMA3: out[i] = llama3(rope, freq); break;
        case KVC_ROPE_YARN: out[i] = yarn(rope, freq, i); break;
        }
    }
}

void kvc_rope_angles(float *out, const double *inv_freq, size_t n_pairs, double position,
                     double factor) {
    for (size_t i = 0; i < n_pairs; i++) {
        double angle = position * inv_freq[i];
        out[i] = (float)(factor * cos(angle));
        out[n_pairs + i] = (float)(factor * sin(angle));
    }
}
