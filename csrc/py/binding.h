/* binding.h - what the files of the binding share.
 *
 *   module.c     the module, its state, functions on threads, devices and scores
 *   errors.c     kvc_status to exceptions; the interrupt hook
 *   arrays.c     everything that touches NumPy
 *   parse.c      names, layer lists, ids
 *   config.c     a dict to kvc_config and back
 *   model.c  kv.c  session.c  sampler.c   one type each
 *   workspace.c  the Workspace type; forward.c its forward()
 *
 * The pattern everywhere: parse under the GIL into plain structs, make one core call, raise
 * afterwards. Calls that can take long release the GIL; the objects that such a call changes are
 * marked busy meanwhile, so that a second thread gets an exception and not a race. The binding
 * computes nothing.
 *
 * Memory for NumPy comes from Python calls and the buffer protocol only, never from NumPy's C
 * headers: one build serves NumPy 1 and 2.
 */
#ifndef KVC_PY_BINDING_H
#define KVC_PY_BINDING_H

#include "abi.h"
#include "kvcomm.h"

#define PY_DEVICES 3

typedef struct py_state {
    PyObject *numpy;
    PyObject *exceptions[KVC_ERROR_INTERRUPTED + 1]; /* by status */
    PyTypeObject *model_type, *kv_type, *view_type, *session_type, *workspace_type, *sampler_type;
    kvc_device *devices[PY_DEVICES]; /* opened when first asked for */
} py_state;

static inline py_state *py_state_of(PyObject *self) {
    return PyType_GetModuleState(Py_TYPE(self));
}

/* ---- objects ---- */

typedef struct py_model {
    PyObject head;
    kvc_model *model;
    unsigned dtypes; /* 1 << dtype for each that a matrix has */
    bool busy;       /* a thread fills it with the GIL released */
} py_model;

typedef struct py_kv {
    PyObject head;
    kvc_kv *kv;
    const char *device; /* its name, kept by the device that the kv holds open */
} py_kv;

typedef struct py_session {
    PyObject head;
    py_model *model; /* owned */
    kvc_session *session;
    bool busy;
} py_session;

/* What the interrupt hook needs of the thread that waits in the core. */
typedef struct py_poll {
    PyThreadState *thread; /* saved while the GIL is released */
    int64_t next_ns;       /* monotonic time of the next look at signals */
} py_poll;

typedef struct py_workspace {
    PyObject head;
    py_model *model; /* owned */
    kvc_workspace *ws;
    py_poll poll;
    bool busy;
} py_workspace;

extern PyType_Spec py_model_spec, py_kv_spec, py_view_spec, py_session_spec, py_workspace_spec,
    py_sampler_spec;

/* Takes over kv, also when it fails. */
PyObject *py_kv_wrap(py_state *state, kvc_kv *kv, const char *device);
PyObject *py_workspace_forward(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *py_workspace_embed(PyObject *self, PyObject *ids);
PyObject *py_workspace_mix(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *py_workspace_nearest(PyObject *self, PyObject *vectors);
PyObject *py_score(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *py_rank(PyObject *module, PyObject *args, PyObject *kwargs);

/* Frees an instance of one of our types after its own fields are gone. */
void py_free(PyObject *self);
/* True, or false with a ValueError, when `busy` is set. */
bool py_idle(bool busy, const char *what);
/* A device that stays open as long as the module (borrowed), or NULL with an exception. */
kvc_device *py_device(py_state *state, const char *name);
extern const char *const py_device_names[PY_DEVICES];

/* ---- errors.c ---- */

bool py_errors_load(py_state *state);
/* Raises what a status means. Returns NULL. */
PyObject *py_raise(const py_state *state, kvc_status status, const kvc_error *err);
/* The hook of every workspace: context is its py_poll. */
int py_interrupt(void *context);
void py_poll_begin(py_poll *poll); /* releases the GIL */
void py_poll_end(py_poll *poll);   /* takes it back */

/* ---- parse.c ---- */

/* Index of value in names [n], or -1 with a ValueError that lists them. */
int py_choice(const char *what, const char *value, const char *const *names, int n);
bool py_dtype(const char *what, const char *value, kvc_dtype *out); /* a float: of K, V, vectors */
bool py_matrix_dtype(const char *what, const char *value, kvc_dtype *out);
bool py_preset(const char *value, kvc_preset *out);
/* Python's bool or NumPy's, which in NumPy 1 passes for an integer. */
bool py_is_bool(PyObject *value);
/* An integer that is not a bool, within low .. high. */
bool py_integer(PyObject *value, const char *what, int64_t low, int64_t high, int64_t *out);
/* Sets mask[l] = 1 for every l in an iterable of layers: sets and arrays are fine, the order and
 * doubles do not matter. mask: [n_layers], zeroed by the caller. */
bool py_layers(PyObject *layers, int n_layers, const char *what, uint8_t *mask);
/* The same into new memory, to be freed with free(); NULL with an exception. */
uint8_t *py_layer_mask(PyObject *layers, int n_layers, const char *what);
/* sequence as a tuple of exactly n items (n < 0: any number), or NULL with an exception. */
PyObject *py_tuple(PyObject *sequence, const char *what, Py_ssize_t n);
/* TypeError: what must be a `wanted`, not whatever it is. Returns NULL. */
PyObject *py_wrong_type(const char *what, const char *wanted, PyObject *got);

/* ---- arrays.c ---- */

typedef struct py_array {
    PyObject *object; /* owned */
    Py_buffer view;   /* of its memory, C order */
} py_array;

/* A new zeroed array; dtype as NumPy spells it ("f4", "f8", "i4"), item its bytes. MemoryError
 * with the size when it cannot be had. */
bool py_array_new(py_state *state, py_array *a, int ndim, const size_t *shape, const char *dtype,
                  size_t item, const char *what);
/* Whatever NumPy takes for an array of this dtype and from min_dim to max_dim dimensions, in C
 * order and native bytes; copied only where it must be. `aligned`: to its item. */
bool py_array_of(py_state *state, py_array *a, PyObject *source, kvc_dtype dtype, bool aligned,
                 int min_dim, int max_dim, const char *what);
/* A list or 1-D array of numbers as float64. */
bool py_array_doubles(py_state *state, py_array *a, PyObject *source, const char *what);
/* Is it an array of float32 with two dimensions: hidden states, not ids? */
bool py_array_is_hidden(PyObject *source);
void py_array_release(py_array *a);
PyObject *py_array_take(py_array *a); /* releases the memory, returns the array */

typedef struct py_ids {
    int32_t *id; /* [n], owned: free() */
    size_t n;
} py_ids;

/* Integers of any dtype or a sequence of them, each in 0 .. limit - 1. Errors read "row 2: id 320
 * at place 1 is not in 0 .. 319"; row < 0 leaves the row out. */
bool py_ids_of(py_state *state, py_ids *ids, PyObject *source, int64_t limit, Py_ssize_t row,
               const char *noun);

/* A read-only array over foreign memory; owner is kept alive. shape and strides: [3]. */
PyObject *py_array_view(py_state *state, PyObject *owner, const void *data, kvc_dtype dtype,
                        const size_t *shape, size_t head_stride);

#endif
