/* errors.c - the one place where a kvc_status becomes a Python exception, and where a thread that
 * waits in the core looks for Ctrl-C.
 *
 * The classes come from kvcomm.errors; built-in ones are used where they say enough. The hook
 * takes the GIL every 20 ms at most: signal handlers run in the waiting thread (the main one, by
 * Python's rules), and the exception that a handler raised is the one the caller sees.
 */
#define _POSIX_C_SOURCE 200809L
#include "binding.h"

#include <time.h>

static const int64_t POLL_NS = 20 * 1000 * 1000;

bool py_errors_load(py_state *state) {
    static const struct {
        kvc_status status;
        const char *name;
    } named[] = {{KVC_ERROR_MISMATCH, "MismatchError"},
                 {KVC_ERROR_UNSUPPORTED, "UnsupportedError"},
                 {KVC_ERROR_NUMERIC, "NumericError"},
                 {KVC_ERROR_DEVICE, "DeviceError"}};
    PyObject *module = PyImport_ImportModule("kvcomm.errors");
    if (!module) return false;
    bool good = true;
    for (size_t i = 0; good && i < sizeof named / sizeof *named; i++) {
        PyObject *class = PyObject_GetAttrString(module, named[i].name);
        state->exceptions[named[i].status] = class;
        good = class != NULL;
    }
    Py_DecRef(module);
    const struct {
        kvc_status status;
        PyObject *class;
    } builtin[] = {{KVC_ERROR_VALUE, PyExc_ValueError},
                   {KVC_ERROR_MEMORY, PyExc_MemoryError},
                   {KVC_ERROR_READ, PyExc_OSError},
                   {KVC_ERROR_INTERRUPTED, PyExc_RuntimeError}};
    for (size_t i = 0; i < sizeof builtin / sizeof *builtin; i++) {
        Py_IncRef(builtin[i].class);
        state->exceptions[builtin[i].status] = builtin[i].class;
    }
    return good;
}

PyObject *py_raise(const py_state *state, kvc_status status, const kvc_error *err) {
    /* An interrupted call has its exception already: the hook's signal handler raised it. */
    if (!PyErr_Occurred()) PyErr_SetString(state->exceptions[status], err->message);
    return NULL;
}

static int64_t monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

int py_interrupt(void *context) {
    py_poll *poll = context;
    int64_t now = monotonic_ns();
    if (!poll->thread || now < poll->next_ns) return 0;
    PyEval_RestoreThread(poll->thread);
    int stop = PyErr_CheckSignals();
    poll->thread = PyEval_SaveThread();
    poll->next_ns = monotonic_ns() + POLL_NS; /* from here: the wait for the GIL may be long */
    return stop;
}

void py_poll_begin(py_poll *poll) {
    poll->next_ns = monotonic_ns() + POLL_NS;
    poll->thread = PyEval_SaveThread();
}

void py_poll_end(py_poll *poll) {
    PyEval_RestoreThread(poll->thread);
    poll->thread = NULL;
}
