/* sample.c - drawing a token: temperature, then top-k, then top-p on what is left.
 *
 * The generator is xoshiro256** seeded by splitmix64 (Blackman and Vigna), so a seed gives the
 * same tokens on every machine. Candidates are ordered by logit, ties by the lower id.
 */
#include "core.h"

#include <math.h>
#include <stdlib.h>

void kvc_sampler_seed(kvc_sampler *sampler, uint64_t seed) {
    for (int i = 0; i < 4; i++) {
        uint64_t z = (seed += 0x9e3779b97f4a7c15u);
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        sampler->state[i] = z ^ z >> 31;
    }
}

static uint64_t rotate_left(uint64_t x, int k) {
    return x << k | x >> (64 - k);
}

/* Uniform in [0, 1) with 53 bits. */
static double next_uniform(uint64_t s[4]) {
    uint64_t result = rotate_left(s[1] * 5, 7) * 9, t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotate_left(s[3], 45);
    return (double)(result >> 11) * 0x1p-53;
}

typedef struct candidate {
    double p; /* unnormalised: e^((logit - best) / temperature) */
    float logit;
    int32_t id;
} candidate;

static int by_logit(const void *a, const void *b) {
    const candidate *x = a, *y = b;
    if (x->logit != y->logit) return x->logit > y->logit ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

static kvc_status check(const kvc_sampler *s, const float *logits, size_t n, kvc_error *err) {
    if (!(s->temperature >= 0) || isinf(s->temperature)) {
        return kvc_fail(err, KVC_ERROR_VALUE, "temperature must be finite and not negative, not %g",
                        s->temperature);
    }
    if (s->top_k < 0) {
        return kvc_fail(err, KVC_ERROR_VALUE, "top_k must not be negative, but is %d", s->top_k);
    }
    if (!(s->top_p > 0 && s->top_p <= 1)) {
        return kvc_fail(err, KVC_ERROR_VALUE, "top_p must be in (0, 1], not %g", s->top_p);
    }
    if (n == 0) return kvc_fail(err, KVC_ERROR_VALUE, "no logits to sample from");
    bool any = false;
    for (size_t i = 0; i < n; i++) {
        if (isnan(logits[i]) || logits[i] == INFINITY) {
            return kvc_fail(err, KVC_ERROR_NUMERIC, "logit %zu is %g", i, (double)logits[i]);
        }
        any = any || logits[i] > -INFINITY;
    }
    if (!any) return kvc_fail(err, KVC_ERROR_NUMERIC, "every logit is -inf");
    return KVC_OK;
}

/* How many of the sorted candidates stay, and their total. */
static size_t keep_nucleus(const candidate *c, size_t n, double top_p, double *total) {
    double all = 0, sum = 0;
    for (size_t i = 0; i < n; i++) all += c[i].p;
    size_t kept = 0;
    while (kept < n && (kept == 0 || sum < top_p * all)) sum += c[kept++].p;
    *total = sum;
    return kept;
}

kvc_status kvc_sample(int32_t *id, kvc_sampler *sampler, const float *logits, size_t n,
                      kvc_error *err) {
    TRY(check(sampler, logits, n, err));
    size_t best = 0;
    for (size_t i = 1; i < n; i++) best = logits[i] > logits[best] ? i : best;
    *id = (int32_t)best;
    if (sampler->temperature == 0) return KVC_OK;
    candidate *c = NULL;
    TRY(kvc_host_alloc(&c, n, sizeof *c, "candidates", err));
    for (size_t i = 0; i < n; i++) {
        double p = exp(((double)logits[i] - (double)logits[best]) / sampler->temperature);
        c[i] = (candidate){p, logits[i], (int32_t)i};
    }
    size_t kept = n;
    bool ordered = sampler->top_k > 0 || sampler->top_p < 1;
    if (ordered) qsort(c, n, sizeof *c, by_logit);
    if (sampler->top_k > 0 && (size_t)sampler->top_k < n) kept = (size_t)sampler->top_k;
    double total;
    kept = keep_nucleus(c, kept, sampler->top_p, &total);
    double u = next_uniform(sampler->state) * total;
    size_t pick = 0; /* the same sums in the same order as in `total`: never past the last p > 0 */
    for (double below = c[0].p; pick + 1 < kept && u >= below; below += c[pick].p) pick++;
    *id = c[pick].id;
    free(c);
    return KVC_OK;
}
