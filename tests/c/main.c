/* main.c - runs the tables of tests: all of them, or those of the suites named.
 *
 *     tests [--device guard] [suite ...]
 */
#include "check.h"
#include "tiny.h"

int check_failures;

extern const test forward_tests[], kv_tests[], error_tests[], memory_tests[], thread_tests[],
    fork_tests[], choose_tests[], kernel_tests[], session_tests[], block_tests[];

static const struct {
    const char *name;
    const test *tests;
} suites[] = {{"forward", forward_tests}, {"kv", kv_tests},          {"errors", error_tests},
              {"memory", memory_tests},   {"threads", thread_tests}, {"fork", fork_tests},
              {"choose", choose_tests},   {"kernels", kernel_tests}, {"session", session_tests},
              {"blocks", block_tests}};

static int wanted(const char *name, int argc, char **argv, int first) {
    for (int i = first; i < argc; i++) {
        if (strcmp(argv[i], name) == 0) return 1;
    }
    return first >= argc;
}

int main(int argc, char **argv) {
    int first = 1, n = 0;
    if (argc > 2 && strcmp(argv[1], "--device") == 0) {
        tiny_device = argv[2];
        first = 3;
    }
    for (size_t s = 0; s < sizeof suites / sizeof *suites; s++) {
        if (!wanted(suites[s].name, argc, argv, first)) continue;
        for (const test *t = suites[s].tests; t->name; t++, n++) {
            int before = check_failures;
            t->run();
            if (check_failures > before)
                fprintf(stderr, "FAILED %s: %s\n", suites[s].name, t->name);
        }
    }
    printf("%d C tests on %s, %d checks failed\n", n, tiny_device, check_failures);
    return check_failures || n == 0;
}
