/* kv.c - the KV type: an immutable message, made from arrays or from other messages. */
#include "binding.h"

#include <stdio.h>
#include <stdlib.h>

PyObject *py_kv_wrap(py_state *state, kvc_kv *kv, const char *device) {
    py_kv *self = (py_kv *)PyType_GenericAlloc(state->kv_type, 0);
    if (!self) {
        kvc_kv_free(kv);
        return NULL;
    }
    self->kv = kv;
    self->device = device;
    return (PyObject *)self;
}

static void kv_dealloc(PyObject *self) {
    kvc_kv_free(((py_kv *)self)->kv);
    py_free(self);
}

/* ---- from arrays ---- */

/* k or v of one part: [n_kv_heads, n, head_dim], the n of both equal. */
static bool check_part(const kvc_kv *kv, const py_array *a, Py_ssize_t n, const char *what) {
    const Py_ssize_t *s = a->view.shape;
    int heads = kvc_kv_heads(kv), head_dim = kvc_kv_head_dim(kv);
    if (s[0] == heads && s[1] == n && s[2] == head_dim) return true;
    PyErr_Format(PyExc_ValueError, "%s is [%zd, %zd, %zd], expected [%d, %zd, %d]", what, s[0],
                 s[1], s[2], heads, n, head_dim);
    return false;
}

static bool add_part(py_state *state, kvc_kv *kv, int layer, Py_ssize_t index, PyObject *part) {
    char what[2][48];
    for (int i = 0; i < 2; i++) {
        snprintf(what[i], sizeof what[i], "%c of layer %d, part %zd", "kv"[i], layer, index);
    }
    PyObject *source[2];
    long long position, offset;
    PyObject *entries = py_tuple(part, "a part", 4);
    py_array k = {0}, v = {0};
    bool good = entries && PyArg_ParseTuple(entries, "OOLL;a part is (k, v, position, offset)",
                                            &source[0], &source[1], &position, &offset);
    good = good && py_array_of(state, &k, source[0], kvc_kv_dtype(kv), false, 3, 3, what[0]);
    good = good && py_array_of(state, &v, source[1], kvc_kv_dtype(kv), false, 3, 3, what[1]);
    good = good && check_part(kv, &k, k.view.shape[1], what[0]) &&
           check_part(kv, &v, k.view.shape[1], what[1]);
    if (good) {
        kvc_error err;
        kvc_status status = kvc_kv_add(kv, layer, k.view.buf, v.view.buf, (size_t)k.view.shape[1],
                                       position, offset, &err);
        if (status) py_raise(state, status, &err);
        good = !status;
    }
    py_array_release(&k);
    py_array_release(&v);
    Py_DecRef(entries);
    return good;
}

/* item: (layer, parts) */
static bool add_layer(py_state *state, kvc_kv *kv, PyObject *item) {
    PyObject *key, *value;
    int64_t layer;
    if (!PyArg_ParseTuple(item, "OO", &key, &value)) return false;
    if (!py_integer(key, "a key of layers", 0, kvc_kv_layers(kv) - 1, &layer)) return false;
    PyObject *parts = py_tuple(value, "the parts of a layer", -1);
    if (!parts) return false;
    bool good = true;
    for (Py_ssize_t i = 0, n = PyTuple_Size(parts); good && i < n; i++) {
        good = add_part(state, kv, (int)layer, i, PyTuple_GetItem(parts, i));
    }
    Py_DecRef(parts);
    return good;
}

static bool add_layers(py_state *state, kvc_kv *kv, PyObject *layers) {
    PyObject *items = PyMapping_Items(layers);
    if (!items) {
        PyErr_Clear();
        return py_wrong_type("layers", "a dict of lists of parts", layers);
    }
    PyObject *iterator = PyObject_GetIter(items), *item;
    Py_DecRef(items);
    bool good = iterator != NULL;
    while (good && (item = PyIter_Next(iterator))) {
        good = add_layer(state, kv, item);
        Py_DecRef(item);
    }
    Py_DecRef(iterator);
    return good && !PyErr_Occurred();
}

static PyObject *kv_from_arrays(PyObject *class, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"layers", "n_layers",      "n_kv_heads", "head_dim",
                            "dtype",  "next_position", "device",     NULL};
    py_state *state = PyType_GetModuleState((PyTypeObject *)class);
    PyObject *layers;
    int n_layers, n_kv_heads, head_dim;
    const char *dtype_name, *device_name = "cpu";
    long long next_position;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OiiisL|$s:from_arrays", names, &layers,
                                     &n_layers, &n_kv_heads, &head_dim, &dtype_name, &next_position,
                                     &device_name))
        return NULL;
    kvc_dtype dtype;
    if (!py_dtype("dtype", dtype_name, &dtype)) return NULL;
    kvc_device *device = py_device(state, device_name);
    if (!device) return NULL;
    kvc_kv *kv;
    kvc_error err;
    kvc_status status =
        kvc_kv_create(&kv, device, n_layers, n_kv_heads, head_dim, dtype, next_position, &err);
    if (status) return py_raise(state, status, &err);
    if (add_layers(state, kv, layers)) return py_kv_wrap(state, kv, kvc_device_name(device));
    kvc_kv_free(kv);
    return NULL;
}

/* ---- to arrays ---- */

static PyObject *view_part(py_state *state, py_kv *self, int layer, size_t index) {
    kvc_kv_part part;
    kvc_error err;
    kvc_status status = kvc_kv_part_view(self->kv, layer, index, &part, &err);
    if (status) return py_raise(state, status, &err);
    if (!part.k) {
        return PyErr_Format(state->exceptions[KVC_ERROR_UNSUPPORTED],
                            "the host cannot read keys and values on device %s", self->device);
    }
    size_t shape[3] = {(size_t)kvc_kv_heads(self->kv), part.n, (size_t)kvc_kv_head_dim(self->kv)};
    const void *data[2] = {part.k, part.v};
    PyObject *arrays[2] = {NULL, NULL};
    for (int i = 0; i < 2; i++) {
        arrays[i] = py_array_view(state, (PyObject *)self, data[i], kvc_kv_dtype(self->kv), shape,
                                  part.head_stride);
        if (!arrays[i]) {
            Py_DecRef(arrays[0]);
            return NULL;
        }
    }
    return Py_BuildValue("(NNLL)", arrays[0], arrays[1], (long long)part.position,
                         (long long)part.offset);
}

static PyObject *kv_parts(PyObject *object, PyObject *layer_object) {
    py_kv *self = (py_kv *)object;
    int64_t layer;
    if (!py_integer(layer_object, "layer", 0, kvc_kv_layers(self->kv) - 1, &layer)) return NULL;
    size_t n = kvc_kv_parts(self->kv, (int)layer);
    PyObject *list = PyList_New((Py_ssize_t)n);
    for (size_t i = 0; list && i < n; i++) {
        PyObject *part = view_part(py_state_of(object), self, (int)layer, i);
        if (!part) {
            Py_DecRef(list);
            return NULL;
        }
        PyList_SetItem(list, (Py_ssize_t)i, part);
    }
    return list;
}

/* ---- from other messages ---- */

static PyObject *kv_select(PyObject *object, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"layers", "sink", NULL};
    py_kv *self = (py_kv *)object;
    py_state *state = py_state_of(object);
    PyObject *layers;
    int sink = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$p:select", names, &layers, &sink))
        return NULL;
    uint8_t *keep = py_layer_mask(layers, kvc_kv_layers(self->kv), "layers");
    if (!keep) return NULL;
    kvc_kv *out;
    kvc_error err;
    kvc_status status = kvc_kv_select(&out, self->kv, keep, sink != 0, &err);
    free(keep);
    return status ? py_raise(state, status, &err) : py_kv_wrap(state, out, self->device);
}

static PyObject *kv_trim(PyObject *object, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"windowed", "window", NULL};
    py_kv *self = (py_kv *)object;
    py_state *state = py_state_of(object);
    int n = kvc_kv_layers(self->kv), window;
    PyObject *sequence;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Oi:trim", names, &sequence, &window))
        return NULL;
    PyObject *flags = py_tuple(sequence, "windowed", n);
    if (!flags) return NULL;
    uint8_t *windowed = calloc((size_t)n, 1);
    if (!windowed) PyErr_NoMemory();
    for (int l = 0; windowed && l < n; l++) {
        int truth = PyObject_IsTrue(PyTuple_GetItem(flags, l));
        windowed[l] = truth == 1;
        if (truth < 0) break;
    }
    Py_DecRef(flags);
    kvc_kv *out;
    kvc_error err;
    kvc_status status = KVC_OK;
    bool good = !PyErr_Occurred();
    if (good) status = kvc_kv_trim(&out, self->kv, windowed, window, &err);
    free(windowed);
    if (!good) return NULL;
    return status ? py_raise(state, status, &err) : py_kv_wrap(state, out, self->device);
}

/* kvs: a tuple whose entries become kv [n]. */
static bool read_kvs(py_state *state, PyObject *kvs, const kvc_kv **kv) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(kvs); i++) {
        PyObject *item = PyTuple_GetItem(kvs, i);
        if (Py_TYPE(item) != state->kv_type) return py_wrong_type("an entry of kvs", "a KV", item);
        kv[i] = ((py_kv *)item)->kv;
    }
    return true;
}

static PyObject *kv_concat(PyObject *class, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"kvs", "sequential", "whole", NULL};
    py_state *state = PyType_GetModuleState((PyTypeObject *)class);
    PyObject *sequence, *layers = Py_None, *result = NULL;
    int sequential = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$pO:concat", names, &sequence, &sequential,
                                     &layers))
        return NULL;
    PyObject *kvs = py_tuple(sequence, "kvs", -1);
    if (!kvs) return NULL;
    size_t n = (size_t)PyTuple_Size(kvs);
    uint8_t *whole = NULL;
    const kvc_kv **kv = calloc(n + 1, sizeof *kv);
    if (!kv) PyErr_NoMemory();
    bool good = kv && read_kvs(state, kvs, kv);
    if (good && n > 0 && layers != Py_None) {
        whole = py_layer_mask(layers, kvc_kv_layers(kv[0]), "whole");
        good = whole != NULL;
    }
    if (good) {
        kvc_kv *out;
        kvc_error err;
        kvc_status status = kvc_kv_concat(&out, kv, n, sequential != 0, whole, &err);
        if (status) py_raise(state, status, &err);
        else result = py_kv_wrap(state, out, ((py_kv *)PyTuple_GetItem(kvs, 0))->device);
    }
    free(whole);
    free(kv);
    Py_DecRef(kvs);
    return result;
}

/* ---- asking ---- */

static PyObject *get_int(PyObject *self, void *closure) {
    const kvc_kv *kv = ((py_kv *)self)->kv;
    const char *name = closure;
    switch (name[0]) {
    case 'l': return PyLong_FromLong(kvc_kv_layers(kv));
    case 'h': return PyLong_FromLong(kvc_kv_heads(kv));
    case 'd': return PyLong_FromLong(kvc_kv_head_dim(kv));
    case 'p': return PyLong_FromLongLong(kvc_kv_next_position(kv));
    default: return PyLong_FromSize_t(kvc_kv_bytes(kv));
    }
}

static PyObject *get_dtype(PyObject *self, void *closure) {
    (void)closure;
    return PyUnicode_FromString(kvc_dtype_name(kvc_kv_dtype(((py_kv *)self)->kv)));
}

static PyObject *get_device(PyObject *self, void *closure) {
    (void)closure;
    return PyUnicode_FromString(((py_kv *)self)->device);
}

static PyObject *get_lengths(PyObject *self, void *closure) {
    (void)closure;
    const kvc_kv *kv = ((py_kv *)self)->kv;
    PyObject *list = PyList_New(kvc_kv_layers(kv));
    for (int l = 0; list && l < kvc_kv_layers(kv); l++) {
        PyList_SetItem(list, l, PyLong_FromSize_t(kvc_kv_length(kv, l)));
    }
    return list;
}

#define KEYWORDS(function) (PyCFunction)(void (*)(void))(function)

static PyMethodDef methods[] = {
    {"from_arrays", KEYWORDS(kv_from_arrays), METH_VARARGS | METH_KEYWORDS | METH_CLASS,
     "A KV from parts (k, v, position, offset) per layer; the arrays are copied."},
    {"concat", KEYWORDS(kv_concat), METH_VARARGS | METH_KEYWORDS | METH_CLASS,
     "Several senders into one message."},
    {"parts", kv_parts, METH_O,
     "parts(layer)\n--\n\n(k, v, position, offset) of each part; k and v are read-only views."},
    {"select", KEYWORDS(kv_select), METH_VARARGS | METH_KEYWORDS,
     "select(layers, *, sink=False)\n--\n\nOnly these layers, sharing the blocks."},
    {"trim", KEYWORDS(kv_trim), METH_VARARGS | METH_KEYWORDS,
     "trim(windowed, window)\n--\n\nWithout the keys that a windowed layer can never show."},
    {0}};

static PyGetSetDef getset[] = {
    {"n_layers", get_int, NULL, NULL, "layers"},
    {"n_kv_heads", get_int, NULL, NULL, "heads"},
    {"head_dim", get_int, NULL, NULL, "dim"},
    {"next_position", get_int, NULL, "Position of a receiver's first token.", "position"},
    {"nbytes", get_int, NULL, "Bytes of K and V that a transfer carries.", "bytes"},
    {"dtype", get_dtype, NULL, NULL, NULL},
    {"device", get_device, NULL, NULL, NULL},
    {"lengths", get_lengths, NULL, "Tokens held per layer.", NULL},
    {0}};

static PyType_Slot slots[] = {{Py_tp_dealloc, (void *)kv_dealloc},
                              {Py_tp_methods, methods},
                              {Py_tp_getset, getset},
                              {Py_tp_doc, "An immutable message: per layer a list of parts."},
                              {0, NULL}};

PyType_Spec py_kv_spec = {
    "kvcomm._core.KV", sizeof(py_kv), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
