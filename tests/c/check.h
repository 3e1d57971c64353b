/* check.h - the whole test harness.
 *
 * A test is a function named in a table of its file; main.c knows the tables. CHECK notes a
 * failure and goes on, REQUIRE leaves the test: what follows would only crash.
 */
#ifndef KVC_CHECK_H
#define KVC_CHECK_H

#include <stdio.h>
#include <string.h>

typedef struct test {
    const char *name;
    void (*run)(void);
} test;

extern int check_failures;

#define NOTE(condition)                                                                            \
    (check_failures++, fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, condition))
#define CHECK(condition) ((condition) ? (void)0 : (void)NOTE(#condition))
#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            NOTE(#condition);                                                                      \
            return;                                                                                \
        }                                                                                          \
    } while (0)
/* The call succeeds; its message is shown when it does not. */
#define GOOD(call)                                                                                 \
    do {                                                                                           \
        if (call) {                                                                                \
            NOTE(#call);                                                                           \
            fprintf(stderr, "    %s\n", error.message);                                            \
        }                                                                                          \
    } while (0)
/* The call fails with this status and a message of one line that contains `part`. */
#define FAILS(call, status, part)                                                                  \
    do {                                                                                           \
        error = (kvc_error){0};                                                                    \
        if ((call) != (status) || error.code != (status) || !strstr(error.message, part) ||        \
            strchr(error.message, '\n')) {                                                         \
            NOTE(#call);                                                                           \
            fprintf(stderr, "    wanted %d with \"%s\", got %d: %s\n", status, part, error.code,   \
                    error.message);                                                                \
        }                                                                                          \
    } while (0)

#endif
