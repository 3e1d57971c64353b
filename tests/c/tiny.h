/* tiny.h - small seeded models and the few calls that every test makes. */
#ifndef KVC_TINY_H
#define KVC_TINY_H

#include "kvcomm.h"

enum { TINY_LAYERS = 4, TINY_DIM = 24, TINY_HEADS = 4, TINY_VOCAB = 83 };

extern const char *tiny_device; /* "cpu", or what the command line says */

typedef enum tiny_kind {
    TINY_PLAIN = 0, /* llama-like: tied head, nothing optional */
    TINY_FULL       /* every option: biases, head norms, post-norms, windows, two ropes, own head */
} tiny_kind;

kvc_config tiny_config(tiny_kind kind);
/* A sealed model with weights drawn from seed; NULL and *err on failure. */
kvc_model *tiny_model(tiny_kind kind, kvc_dtype dtype, unsigned seed, kvc_error *err);
/* Ids drawn from seed. */
void tiny_ids(int32_t *ids, size_t n, unsigned seed);
/* Runs n tokens through one session; logits [vocab] of the last token, or NULL for none. */
kvc_status tiny_run(kvc_workspace *ws, kvc_session *session, const int32_t *ids, size_t n,
                    float *logits, kvc_error *err);
/* 0 .. n - 1 values in -0.5 .. 0.5 drawn from *state. */
void tiny_fill(float *x, size_t n, uint64_t *state);

/* failing_malloc.c: the n-th allocation from now on fails (1 is the next one; 0: none does). */
void allocations_fail_at(long n);
/* Did one fail since? */
int allocations_failed(void);

#endif
