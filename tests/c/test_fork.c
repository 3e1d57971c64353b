/* test_fork.c - a child of a process whose pool is running works, too, and to the same bits. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"
#include "tiny.h"

#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { CHILDREN = 4, N = 40, SECONDS = 30 };

static kvc_status run(kvc_model *model, float *logits) {
    kvc_error error = {0};
    kvc_workspace *ws = NULL;
    kvc_session *session = NULL;
    int32_t ids[N];
    tiny_ids(ids, N, 5);
    kvc_status status = kvc_workspace_create(&ws, model, NULL, NULL, &error);
    if (!status) status = kvc_session_create(&session, model, KVC_F32, &error);
    if (!status) status = tiny_run(ws, session, ids, N, logits, &error);
    kvc_session_free(session);
    kvc_workspace_free(ws);
    return status;
}

static void children(void) {
    kvc_error error = {0};
    kvc_model *model = tiny_model(TINY_PLAIN, KVC_F32, 1, &error);
    REQUIRE(model);
    float wanted[TINY_VOCAB], got[TINY_VOCAB];
    GOOD(kvc_set_num_threads(3, &error));
    CHECK(run(model, wanted) == KVC_OK);
    pid_t child[CHILDREN];
    for (int i = 0; i < CHILDREN; i++) {
        child[i] = fork();
        if (child[i] == 0) {
            alarm(SECONDS); /* a hang ends by signal */
            kvc_status status = run(model, got);
            _exit(status == KVC_OK && memcmp(wanted, got, sizeof got) == 0 ? 0 : 1);
        }
        CHECK(child[i] > 0);
    }
    for (int i = 0; i < CHILDREN; i++) {
        int status = -1;
        CHECK(waitpid(child[i], &status, 0) == child[i]);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    CHECK(run(model, got) == KVC_OK); /* the parent goes on */
    CHECK(memcmp(wanted, got, sizeof got) == 0);
    kvc_model_free(model);
    GOOD(kvc_set_num_threads(0, &error));
}

const test fork_tests[] = {{"children", children}, {NULL, NULL}};
