/* score.c - from attention mass to an order of layers.
 *
 *     A[l] = (mass[l] - min) / (max - min)            P[l] = exp(-(l - mu)^2 / (2 sigma^2))
 *     score[l] = alpha A[l] + (1 - alpha) P[l]
 *
 * KVC_REFERENCE follows the published code to the rounding: float32, 1e-9 in the denominator, the
 * same normalisation for the Gaussian, centre (L - 1) / 2 instead of L / 2 - 1.
 */
#include "core.h"

#include <math.h>
#include <stdlib.h>

static const float TINY = 1e-9f;

static void min_max(float *out, const float *x, int n, kvc_preset preset) {
    float low = x[0], high = x[0];
    for (int l = 1; l < n; l++) {
        if (x[l] < low) low = x[l];
        if (x[l] > high) high = x[l];
    }
    float span = high - low;
    bool flat = preset == KVC_REFERENCE ? span < TINY : span == 0;
    if (preset == KVC_REFERENCE) span += TINY;
    for (int l = 0; l < n; l++) out[l] = flat ? 0 : (x[l] - low) / span;
}

kvc_status kvc_score(float *scores, const double *mass, int n, double alpha, double mu,
                     double sigma, kvc_preset preset, kvc_error *err) {
    if (n < 1) return kvc_fail(err, KVC_ERROR_VALUE, "no layers to score");
    if (!(alpha >= 0 && alpha <= 1)) {
        return kvc_fail(err, KVC_ERROR_VALUE, "alpha must be in 0 .. 1, not %g", alpha);
    }
    if (!(sigma > 0) || isinf(mu)) {
        return kvc_fail(err, KVC_ERROR_VALUE, "sigma must be positive and mu finite, not %g and %g",
                        sigma, mu);
    }
    for (int l = 0; l < n; l++) {
        if (isfinite(mass[l])) continue;
        return kvc_fail(err, KVC_ERROR_NUMERIC, "the mass of layer %d is %g", l, mass[l]);
    }
    if (isnan(mu)) mu = preset == KVC_REFERENCE ? 0.5 * (n - 1) : 0.5 * n - 1;
    float *prior = NULL;
    TRY(kvc_host_alloc(&prior, 2 * (size_t)n, sizeof *prior, "scores", err));
    float *wide = prior + n;
    for (int l = 0; l < n; l++) {
        float z = (float)((l - mu) / sigma);
        prior[l] = expf(-0.5f * z * z);
        wide[l] = (float)mass[l];
    }
    min_max(scores, wide, n, preset);
    if (preset == KVC_REFERENCE) min_max(prior, prior, n, preset);
    for (int l = 0; l < n; l++) {
        scores[l] = (float)alpha * scores[l] + (float)(1 - alpha) * prior[l];
    }
    free(prior);
    return KVC_OK;
}

/* Does layer a come before layer b? */
static bool precedes(const float *scores, int a, int b, kvc_preset preset) {
    if (scores[a] != scores[b]) return scores[a] > scores[b];
    return preset == KVC_REFERENCE ? a > b : a < b;
}

void kvc_rank(int32_t *order, const float *scores, int n, kvc_preset preset) {
    for (int l = 0; l < n; l++) {
        int at = l;
        for (; at > 0 && precedes(scores, l, order[at - 1], preset); at--)
            order[at] = order[at - 1];
        order[at] = l;
    }
}
