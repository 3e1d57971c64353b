/* arrays.c - everything that touches NumPy: arrays in, arrays out, views of the core's memory.
 *
 * NumPy is reached through Python calls (asarray, require, zeros), memory through the buffer
 * protocol. Whatever comes in - strided, reversed, read-only, misaligned, big-endian, a memory
 * map, a list - goes through NumPy's own conversion first, so the core only ever sees C order and
 * native bytes. Nothing is cast between kinds: a float is not an id.
 */
#include "binding.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#define NATIVE ">"
#else
#define NATIVE "<"
#endif

/* What NumPy calls the dtypes of kvc_dtype; bf16 travels as its 16 bits, blocks as bytes. */
static const struct {
    char kind;
    int item;
    const char *native, *name;
} dtypes[KVC_MATRIX_DTYPE_COUNT] = {
    {'f', 4, NATIVE "f4", "float32"}, {'f', 2, NATIVE "f2", "float16"},
    {'u', 2, NATIVE "u2", "uint16"},  {'u', 1, "|u1", "uint8"},
    {'u', 1, "|u1", "uint8"},         {'u', 1, "|u1", "uint8"}};

/* Kind ('f', 'i', 'u', 'b', 'O', ...), item size and dimensions of an array. */
typedef struct array_kind {
    char kind;
    int64_t item, ndim;
} array_kind;

static bool kind_of(PyObject *array, array_kind *out) {
    PyObject *dtype = PyObject_GetAttrString(array, "dtype");
    PyObject *kind = dtype ? PyObject_GetAttrString(dtype, "kind") : NULL;
    PyObject *item = kind ? PyObject_GetAttrString(dtype, "itemsize") : NULL;
    PyObject *ndim = item ? PyObject_GetAttrString(array, "ndim") : NULL;
    const char *text = ndim ? PyUnicode_AsUTF8AndSize(kind, NULL) : NULL;
    bool good = text && py_integer(item, "itemsize", 0, INT64_MAX, &out->item) &&
                py_integer(ndim, "ndim", 0, INT64_MAX, &out->ndim);
    if (good) out->kind = text[0];
    PyObject *held[] = {dtype, kind, item, ndim};
    for (int i = 0; i < 4; i++) Py_DecRef(held[i]);
    return good;
}

/* TypeError that names the dtype found. */
static bool wrong_dtype(PyObject *array, const char *what, const char *wanted) {
    PyObject *dtype = PyObject_GetAttrString(array, "dtype");
    if (!dtype) return false;
    PyErr_Format(PyExc_TypeError, "%s: dtype is %S, expected %s", what, dtype, wanted);
    Py_DecRef(dtype);
    return false;
}

/* The buffer of a->object, which this takes over. */
static bool open_buffer(py_array *a, PyObject *object, int flags) {
    a->object = object;
    if (!object) return false;
    if (PyObject_GetBuffer(object, &a->view, flags) == 0) return true;
    Py_DecRef(object);
    a->object = NULL;
    return false;
}

bool py_array_new(py_state *state, py_array *a, int ndim, const size_t *shape, const char *dtype,
                  size_t item, const char *what) {
    *a = (py_array){0};
    size_t bytes = item;
    char text[96] = "";
    bool fits = true;
    for (int i = 0; i < ndim; i++) {
        size_t used = strlen(text);
        snprintf(text + used, sizeof text - used, "%s%zu", i ? ", " : "", shape[i]);
        if (shape[i] && bytes > (size_t)PTRDIFF_MAX / shape[i]) fits = false;
        if (fits) bytes *= shape[i];
    }
    PyObject *array = NULL, *sizes = fits ? PyTuple_New(ndim) : NULL;
    for (int i = 0; sizes && i < ndim; i++) {
        PyTuple_SetItem(sizes, i, PyLong_FromSize_t(shape[i]));
    }
    if (sizes) {
        array = PyObject_CallMethod(state->numpy, "zeros", "(Os)", sizes, dtype);
        Py_DecRef(sizes);
    }
    if (array) return open_buffer(a, array, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE);
    if (!fits || PyErr_ExceptionMatches(PyExc_MemoryError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_MemoryError, "out of memory: %s [%s] of %zu bytes each", what, text,
                     item);
    }
    return false;
}

/* source as an array of one dtype; aligned in memory when asked for. */
static PyObject *converted(py_state *state, PyObject *array, const char *dtype, bool aligned) {
    if (!aligned)
        return PyObject_CallMethod(state->numpy, "ascontiguousarray", "(Os)", array, dtype);
    return PyObject_CallMethod(state->numpy, "require", "(Oss)", array, dtype, "CA");
}

bool py_array_of(py_state *state, py_array *a, PyObject *source, kvc_dtype dtype, bool aligned,
                 int min_dim, int max_dim, const char *what) {
    *a = (py_array){0};
    array_kind found;
    PyObject *array = PyObject_CallMethod(state->numpy, "asarray", "(O)", source);
    if (!array) return false;
    bool good = kind_of(array, &found);
    if (good && (found.kind != dtypes[dtype].kind || found.item != dtypes[dtype].item))
        good = wrong_dtype(array, what, dtypes[dtype].name);
    if (good && (found.ndim < min_dim || found.ndim > max_dim)) {
        char expected[32];
        snprintf(expected, sizeof expected, max_dim > min_dim ? "%d to %d" : "%d", min_dim,
                 max_dim);
        PyErr_Format(PyExc_ValueError, "%s has %lld dimensions, expected %s", what,
                     (long long)found.ndim, expected);
        good = false;
    }
    PyObject *native = good ? converted(state, array, dtypes[dtype].native, aligned) : NULL;
    Py_DecRef(array);
    return open_buffer(a, native, PyBUF_C_CONTIGUOUS);
}

bool py_array_doubles(py_state *state, py_array *a, PyObject *source, const char *what) {
    *a = (py_array){0};
    array_kind found;
    PyObject *array = PyObject_CallMethod(state->numpy, "asarray", "(O)", source);
    if (!array) return false;
    bool good = kind_of(array, &found);
    if (good && !strchr("fiu", found.kind)) good = wrong_dtype(array, what, "float64");
    if (good && found.ndim != 1) {
        PyErr_Format(PyExc_ValueError, "%s has %lld dimensions, expected 1", what,
                     (long long)found.ndim);
        good = false;
    }
    PyObject *native = good ? converted(state, array, NATIVE "f8", true) : NULL;
    Py_DecRef(array);
    return open_buffer(a, native, PyBUF_C_CONTIGUOUS);
}

bool py_array_is_hidden(PyObject *source) {
    array_kind found;
    if (!PyObject_HasAttrString(source, "dtype") || !kind_of(source, &found)) {
        PyErr_Clear();
        return false;
    }
    return found.kind == 'f' && found.item == 4 && found.ndim == 2;
}

void py_array_release(py_array *a) {
    if (!a->object) return;
    PyBuffer_Release(&a->view);
    Py_DecRef(a->object);
    a->object = NULL;
}

PyObject *py_array_take(py_array *a) {
    PyObject *object = a->object;
    if (object) PyBuffer_Release(&a->view);
    a->object = NULL;
    return object;
}

/* ---- ids ---- */

/* An array of any kind from what may also speak DLPack only; "row 2: ids" for messages. */
static PyObject *id_array(py_state *state, PyObject *source) {
    if (!PyObject_HasAttrString(source, "__array__") &&
        PyObject_HasAttrString(source, "__dlpack__")) {
        return PyObject_CallMethod(state->numpy, "from_dlpack", "(O)", source);
    }
    return PyObject_CallMethod(state->numpy, "asarray", "(O)", source);
}

static bool bad_id(const char *label, const char *noun, PyObject *value, size_t place,
                   int64_t limit) {
    if (!value) return false;
    PyErr_Format(PyExc_ValueError, "%s%s %S at place %zu is not in 0 .. %lld", label, noun, value,
                 place, (long long)limit - 1);
    Py_DecRef(value);
    return false;
}

/* Narrows 64-bit integers to ids; signed ones are read as their bits and tell by `is_signed`. */
static bool narrow(py_ids *ids, const py_array *wide, bool is_signed, int64_t limit,
                   const char *label, const char *noun) {
    const uint64_t *from = wide->view.buf;
    for (size_t i = 0; i < ids->n; i++) {
        /* a negative number is a huge unsigned one, so one comparison serves both kinds */
        if (from[i] < (uint64_t)limit) {
            ids->id[i] = (int32_t)from[i];
            continue;
        }
        return bad_id(label, noun,
                      is_signed ? PyLong_FromLongLong((long long)from[i])
                                : PyLong_FromUnsignedLongLong(from[i]),
                      i, limit);
    }
    return true;
}

bool py_ids_of(py_state *state, py_ids *ids, PyObject *source, int64_t limit, Py_ssize_t row,
               const char *noun) {
    *ids = (py_ids){0};
    char label[32] = "", what[64];
    if (row >= 0) snprintf(label, sizeof label, "row %zd: ", row);
    snprintf(what, sizeof what, "%s%ss", label, noun);
    PyObject *array = id_array(state, source);
    if (!array) return false;
    array_kind found;
    py_array wide = {0};
    int64_t n = 0;
    PyObject *size = kind_of(array, &found) ? PyObject_GetAttrString(array, "size") : NULL;
    bool good = size && py_integer(size, "size", 0, INT64_MAX, &n);
    bool is_signed = good && found.kind == 'i';
    Py_DecRef(size);
    if (good && n > 0 && !is_signed && found.kind != 'u') {
        good = wrong_dtype(array, what, "integers"); /* [] is float64 to NumPy: n > 0 */
    }
    if (good && found.ndim != 1) {
        PyErr_Format(PyExc_ValueError, "%s have %lld dimensions, expected 1", what,
                     (long long)found.ndim);
        good = false;
    }
    if (good && n > 0) {
        const char *dtype = is_signed ? NATIVE "i8" : NATIVE "u8";
        good = open_buffer(&wide, converted(state, array, dtype, true), PyBUF_C_CONTIGUOUS);
    }
    if (good) {
        ids->n = (size_t)n;
        ids->id = malloc((ids->n + 1) * sizeof *ids->id);
        if (!ids->id) PyErr_Format(PyExc_MemoryError, "out of memory: %zu ids", ids->n);
        good = ids->id && (n == 0 || narrow(ids, &wide, is_signed, limit, label, noun));
    }
    if (!good) {
        free(ids->id);
        *ids = (py_ids){0};
    }
    py_array_release(&wide);
    Py_DecRef(array);
    return good;
}

/* ---- views ---- */

/* What NumPy's array interface is told: the view is the base of the array, the owner of the
 * memory stays alive behind it. */
typedef struct py_view {
    PyObject head;
    PyObject *interface; /* dict */
    PyObject *owner;
} py_view;

static void view_dealloc(PyObject *self) {
    Py_DecRef(((py_view *)self)->interface);
    Py_DecRef(((py_view *)self)->owner);
    py_free(self);
}

static PyObject *view_interface(PyObject *self, void *closure) {
    (void)closure;
    Py_IncRef(((py_view *)self)->interface);
    return ((py_view *)self)->interface;
}

static PyGetSetDef view_getset[] = {{"__array_interface__", view_interface, NULL, NULL, NULL}, {0}};
static PyType_Slot view_slots[] = {{Py_tp_dealloc, (void *)view_dealloc},
                                   {Py_tp_getset, view_getset},
                                   {Py_tp_doc, "Memory of a KV, as the base of arrays."},
                                   {0, NULL}};
PyType_Spec py_view_spec = {
    "kvcomm._core.View", sizeof(py_view), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION, view_slots};

PyObject *py_array_view(py_state *state, PyObject *owner, const void *data, kvc_dtype dtype,
                        const size_t *shape, size_t head_stride) {
    py_view *view = (py_view *)PyType_GenericAlloc(state->view_type, 0);
    if (!view) return NULL;
    Py_IncRef(owner);
    view->owner = owner;
    size_t item = kvc_dtype_bytes(dtype);
    view->interface = Py_BuildValue(
        "{s:i,s:s,s:(NN),s:(nnn),s:(nnn)}", "version", 3, "typestr", dtypes[dtype].native, "data",
        PyLong_FromUnsignedLongLong((uintptr_t)data), PyBool_FromLong(1), "shape",
        (Py_ssize_t)shape[0], (Py_ssize_t)shape[1], (Py_ssize_t)shape[2], "strides",
        (Py_ssize_t)(head_stride * item), (Py_ssize_t)(shape[2] * item), (Py_ssize_t)item);
    PyObject *array = NULL;
    if (view->interface) {
        array = PyObject_CallMethod(state->numpy, "asarray", "(O)", (PyObject *)view);
    }
    Py_DecRef((PyObject *)view);
    return array;
}
