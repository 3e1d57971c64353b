/* test_threads.c - one model, many threads, each with its own session: the bits of a lone run. */
#include "check.h"
#include "tiny.h"

#include <pthread.h>

enum { THREADS = 6, ROUNDS = 8, SHORT_LIVED = 60, N = 24 };

typedef struct job {
    kvc_model *model;
    const kvc_kv *kv; /* shared, or NULL */
    unsigned seed;
    int rounds;
    float logits[TINY_VOCAB];
    kvc_status status;
} job;

static void *work(void *argument) {
    job *j = argument;
    kvc_error error = {0};
    int32_t ids[N];
    tiny_ids(ids, N, j->seed);
    for (int r = 0; r < j->rounds && !j->status; r++) {
        kvc_workspace *ws = NULL;
        kvc_session *session = NULL;
        j->status = kvc_workspace_create(&ws, j->model, NULL, NULL, &error);
        if (!j->status) j->status = kvc_session_create(&session, j->model, KVC_F32, &error);
        if (!j->status && j->kv) j->status = kvc_session_give(session, j->kv, NULL, &error);
        if (!j->status) j->status = tiny_run(ws, session, ids, N, j->logits, &error);
        kvc_session_free(session);
        kvc_workspace_free(ws);
    }
    return NULL;
}

static void compare(int rounds, int generations) {
    kvc_error error = {0};
    kvc_model *model = tiny_model(TINY_FULL, KVC_F32, 4, &error);
    REQUIRE(model);
    kvc_kv *kv = NULL;
    kvc_session *sender = NULL;
    kvc_workspace *ws = NULL;
    int32_t ids[N];
    tiny_ids(ids, N, 99);
    GOOD(kvc_set_num_threads(3, &error));
    GOOD(kvc_workspace_create(&ws, model, NULL, NULL, &error));
    GOOD(kvc_session_create(&sender, model, KVC_F32, &error));
    GOOD(tiny_run(ws, sender, ids, N, NULL, &error));
    GOOD(kvc_session_freeze(sender, &kv, &error));
    static job alone[THREADS], jobs[THREADS];
    for (unsigned i = 0; i < THREADS; i++) {
        alone[i] = (job){.model = model, .kv = i % 2 ? kv : NULL, .seed = i, .rounds = 1};
        work(&alone[i]);
        CHECK(alone[i].status == KVC_OK);
    }
    for (int g = 0; g < generations; g++) {
        pthread_t threads[THREADS];
        for (unsigned i = 0; i < THREADS; i++) {
            jobs[i] = (job){.model = model, .kv = i % 2 ? kv : NULL, .seed = i, .rounds = rounds};
            REQUIRE(pthread_create(&threads[i], NULL, work, &jobs[i]) == 0);
        }
        for (int i = 0; i < THREADS; i++) {
            pthread_join(threads[i], NULL);
            CHECK(jobs[i].status == KVC_OK);
            CHECK(memcmp(jobs[i].logits, alone[i].logits, sizeof alone[i].logits) == 0);
        }
    }
    kvc_kv_free(kv);
    kvc_session_free(sender);
    kvc_workspace_free(ws);
    kvc_model_free(model);
    GOOD(kvc_set_num_threads(0, &error));
}

static void side_by_side(void) {
    compare(ROUNDS, 1);
}

static void short_lived(void) {
    compare(1, SHORT_LIVED / THREADS);
}

/* The number of threads may change between calls of others. */
static void *resize(void *argument) {
    (void)argument;
    kvc_error error = {0};
    for (int i = 0; i < 12; i++) {
        GOOD(kvc_set_num_threads(1 + i % 3, &error));
        CHECK(kvc_get_num_threads() == 1 + i % 3);
    }
    return NULL;
}

static void resizing(void) {
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, resize, NULL) == 0);
    pthread_join(thread, NULL);
    compare(2, 1);
}

const test thread_tests[] = {{"side by side", side_by_side},
                             {"short-lived", short_lived},
                             {"resizing the pool", resizing},
                             {NULL, NULL}};
