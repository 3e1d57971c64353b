/* test_choose.c - scores, orders and draws, against values worked out by hand. */
#include "check.h"
#include "tiny.h"

#include <math.h>

static void scoring(void) {
    kvc_error error = {0};
    const double mass[4] = {0.2, 0.6, 0.4, 0.2};
    float s[4];
    /* alpha 1: min-max alone */
    GOOD(kvc_score(s, mass, 4, 1, NAN, 10, KVC_PAPER, &error));
    CHECK(s[0] == 0 && s[1] == 1 && fabsf(s[2] - 0.5f) < 1e-6f && s[3] == 0);
    /* alpha 0: e^(-(l - mu)^2 / (2 sigma^2)), mu = 4 / 2 - 1 */
    GOOD(kvc_score(s, mass, 4, 0, NAN, 1, KVC_PAPER, &error));
    CHECK(s[1] == 1 && fabsf(s[0] - 0.60653066f) < 1e-6f && fabsf(s[3] - 0.13533528f) < 1e-6f);
    /* half and half, mu given */
    GOOD(kvc_score(s, mass, 4, 0.5, 2, 1, KVC_PAPER, &error));
    CHECK(fabsf(s[1] - (0.5f + 0.5f * 0.60653066f)) < 1e-6f && fabsf(s[2] - 0.75f) < 1e-6f);
    /* the reference normalises the gaussian, around (4 - 1) / 2 */
    GOOD(kvc_score(s, mass, 4, 0, NAN, 1, KVC_REFERENCE, &error));
    CHECK(fabsf(s[1] - 1) < 1e-6f && fabsf(s[2] - 1) < 1e-6f && s[0] == 0 && s[3] == 0);
    FAILS(kvc_score(s, mass, 0, 1, NAN, 10, KVC_PAPER, &error), KVC_ERROR_VALUE, "");
    FAILS(kvc_score(s, mass, 4, 1.5, NAN, 10, KVC_PAPER, &error), KVC_ERROR_VALUE, "1.5");
    FAILS(kvc_score(s, mass, 4, 1, NAN, 0, KVC_PAPER, &error), KVC_ERROR_VALUE, "sigma");
    const double broken[2] = {1, NAN};
    FAILS(kvc_score(s, broken, 2, 1, NAN, 10, KVC_PAPER, &error), KVC_ERROR_NUMERIC, "layer 1");
}

static void ranking(void) {
    const float scores[5] = {1, 3, 1, 3, 2};
    const int32_t paper[5] = {1, 3, 4, 0, 2}, reference[5] = {3, 1, 4, 2, 0};
    int32_t order[5];
    kvc_rank(order, scores, 5, KVC_PAPER);
    CHECK(memcmp(order, paper, sizeof order) == 0);
    kvc_rank(order, scores, 5, KVC_REFERENCE);
    CHECK(memcmp(order, reference, sizeof order) == 0);
}

/* Draws `n` times and counts. */
static void draw(kvc_sampler *sampler, const float *logits, size_t width, int n, int *counts) {
    kvc_error error = {0};
    for (size_t i = 0; i < width; i++) counts[i] = 0;
    for (int i = 0; i < n; i++) {
        int32_t id = -1;
        GOOD(kvc_sample(&id, sampler, logits, width, &error));
        REQUIRE(id >= 0 && (size_t)id < width);
        counts[id]++;
    }
}

static void sampling(void) {
    const float logits[4] = {0, 2, 2, -INFINITY}; /* p: 1 : e^2 : e^2 : 0 */
    int counts[4];
    kvc_sampler s = {.temperature = 0, .top_p = 1};
    kvc_sampler_seed(&s, 1);
    draw(&s, logits, 4, 3, counts);
    CHECK(counts[1] == 3); /* greedy, the tie to the lower id */
    s.temperature = 1e-8;
    draw(&s, logits, 4, 100, counts);
    CHECK(counts[0] == 0 && counts[3] == 0);
    s.temperature = 1;
    draw(&s, logits, 4, 4000, counts);
    CHECK(counts[3] == 0 && counts[0] > 180 && counts[0] < 330); /* 253 expected, sd 15 */
    CHECK(counts[1] > 1700 && counts[2] > 1700);
    s.top_k = 1;
    draw(&s, logits, 4, 50, counts);
    CHECK(counts[1] == 50);
    s.top_k = 10000; /* more than there are: all */
    s.top_p = 1e-9;  /* one candidate stays */
    draw(&s, logits, 4, 50, counts);
    CHECK(counts[1] == 50);
    const float one[1] = {3};
    s.top_p = 1;
    draw(&s, one, 1, 3, counts);
    CHECK(counts[0] == 3);
}

static void repeating(void) {
    kvc_error error = {0};
    float logits[50];
    uint64_t state = 3;
    int32_t a[20], b[20], other[20];
    tiny_fill(logits, 50, &state);
    for (int run = 0; run < 3; run++) {
        kvc_sampler s = {.temperature = 1, .top_p = 0.95, .top_k = 40};
        kvc_sampler_seed(&s, run == 2 ? 8 : 7);
        int32_t *ids = run == 0 ? a : run == 1 ? b : other;
        for (int i = 0; i < 20; i++) GOOD(kvc_sample(&ids[i], &s, logits, 50, &error));
    }
    CHECK(memcmp(a, b, sizeof a) == 0 && memcmp(a, other, sizeof a) != 0);
}

static void limits(void) {
    kvc_error error = {0};
    const float logits[2] = {0, 1}, broken[2] = {0, NAN}, closed[2] = {-INFINITY, -INFINITY};
    int32_t id;
    const struct {
        kvc_sampler sampler;
        const char *name;
    } bad[] = {{{.temperature = -1, .top_p = 1}, "temperature"},
               {{.temperature = NAN, .top_p = 1}, "temperature"},
               {{.temperature = INFINITY, .top_p = 1}, "temperature"},
               {{.top_k = -1, .top_p = 1}, "top_k"},
               {{.top_p = 0}, "top_p"},
               {{.top_p = 1.5}, "top_p"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        kvc_sampler s = bad[i].sampler;
        FAILS(kvc_sample(&id, &s, logits, 2, &error), KVC_ERROR_VALUE, bad[i].name);
    }
    kvc_sampler s = {.temperature = 1, .top_p = 1};
    kvc_sampler_seed(&s, 1);
    FAILS(kvc_sample(&id, &s, logits, 0, &error), KVC_ERROR_VALUE, "");
    FAILS(kvc_sample(&id, &s, broken, 2, &error), KVC_ERROR_NUMERIC, "1");
    FAILS(kvc_sample(&id, &s, closed, 2, &error), KVC_ERROR_NUMERIC, "");
}

const test choose_tests[] = {{"scoring", scoring},     {"ranking", ranking}, {"sampling", sampling},
                             {"repeating", repeating}, {"limits", limits},   {NULL, NULL}};
