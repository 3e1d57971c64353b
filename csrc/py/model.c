/* model.c - the Model type: configuration and weights on one device. */
#define _POSIX_C_SOURCE 200809L /* pread */
#include "config.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* dtypes [KVC_MATRICES(n_layers)], to be freed, out of a name for all or a sequence of names. */
static kvc_dtype *dtypes_of(PyObject *source, int n_layers, unsigned *seen) {
    Py_ssize_t n = KVC_MATRICES((Py_ssize_t)n_layers);
    bool one = PyType_GetFlags(Py_TYPE(source)) & Py_TPFLAGS_UNICODE_SUBCLASS;
    PyObject *tuple = one ? NULL : py_tuple(source, "dtype", n);
    if (!one && !tuple) return NULL;
    kvc_dtype *dtypes = malloc((size_t)n * sizeof *dtypes);
    bool good = dtypes != NULL;
    if (!good) PyErr_NoMemory();
    for (Py_ssize_t i = 0; good && i < n; i++) {
        PyObject *name = one ? source : PyTuple_GetItem(tuple, i);
        const char *text = PyUnicode_AsUTF8AndSize(name, NULL);
        good = text && py_matrix_dtype("dtype", text, &dtypes[i]);
        if (good) *seen |= 1u << dtypes[i];
    }
    Py_DecRef(tuple);
    if (good) return dtypes;
    free(dtypes);
    return NULL;
}

static PyObject *model_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"config", "device", "dtype", NULL};
    py_state *state = PyType_GetModuleState(type);
    PyObject *mapping, *dtype = NULL;
    const char *device_name = "cpu";
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$sO:Model", names, &mapping, &device_name,
                                     &dtype))
        return NULL;
    kvc_dtype *dtypes = NULL;
    unsigned seen = 1u << KVC_F32;
    py_config config;
    py_model *self = NULL;
    if (!py_config_parse(&config, mapping)) goto done;
    if (dtype) {
        seen = 0;
        dtypes = dtypes_of(dtype, config.config.n_layers, &seen);
        if (!dtypes) goto done;
    }
    kvc_device *device = py_device(state, device_name);
    if (!device) goto done;
    self = (py_model *)PyType_GenericAlloc(type, 0);
    if (!self) goto done;
    self->dtypes = seen;
    kvc_error err;
    PyThreadState *thread = PyEval_SaveThread(); /* memory is cleared: a tokenizer may be read */
    kvc_status status =
        dtypes ? kvc_model_create_mixed(&self->model, device, &config.config, dtypes, &err)
               : kvc_model_create(&self->model, device, &config.config, KVC_F32, &err);
    PyEval_RestoreThread(thread);
    if (status) {
        py_raise(state, status, &err);
        Py_DecRef((PyObject *)self);
        self = NULL;
    }
done:
    free(dtypes);
    py_config_release(&config);
    return (PyObject *)self;
}

static void model_dealloc(PyObject *self) {
    kvc_model_free(((py_model *)self)->model);
    py_free(self);
}

static int weight_of(const char *name) {
    const char *weights[KVC_W_COUNT];
    for (int i = 0; i < KVC_W_COUNT; i++) weights[i] = kvc_weight_name((kvc_weight)i);
    return py_choice("weight", name, weights, KVC_W_COUNT);
}

static PyObject *model_set(PyObject *object, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"weight", "layer", "array", "dtype", NULL};
    py_model *self = (py_model *)object;
    py_state *state = py_state_of(object);
    const char *weight_name, *dtype_name;
    PyObject *layer_object, *source;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sOOs:set", names, &weight_name, &layer_object,
                                     &source, &dtype_name))
        return NULL;
    int weight = weight_of(weight_name);
    int64_t layer;
    kvc_dtype dtype;
    if (weight < 0 || !py_matrix_dtype("dtype", dtype_name, &dtype)) return NULL;
    if (!py_integer(layer_object, "layer", 0, kvc_model_config(self->model)->n_layers - 1, &layer))
        return NULL;
    char what[64];
    snprintf(what, sizeof what, "weight %s of layer %d", weight_name, (int)layer);
    py_array array;
    if (!py_array_of(state, &array, source, dtype, false, 1, 2, what)) return NULL;
    bool matrix = array.view.ndim == 2;
    size_t rows = matrix ? (size_t)array.view.shape[0] : 1;
    size_t cols = (size_t)array.view.shape[matrix ? 1 : 0], block = kvc_dtype_bytes(dtype);
    if (dtype >= KVC_DTYPE_COUNT) {
        if (cols % block) {
            PyErr_Format(PyExc_ValueError, "%s: rows of %zd bytes are not whole %s blocks of %zd",
                         what, (Py_ssize_t)cols, dtype_name, (Py_ssize_t)block);
            py_array_release(&array);
            return NULL;
        }
        cols = cols / block * KVC_BLOCK;
    }
    kvc_error err;
    kvc_status status = KVC_OK;
    bool idle = py_idle(self->busy, "model");
    if (idle) {
        self->busy = true;
        PyThreadState *thread = PyEval_SaveThread();
        status = kvc_model_set(self->model, (kvc_weight)weight, (int)layer, array.view.buf, dtype,
                               rows, cols, &err);
        PyEval_RestoreThread(thread);
        self->busy = false;
    }
    py_array_release(&array);
    if (!idle) return NULL;
    return status ? py_raise(state, status, &err) : Py_BuildValue("");
}

/* ---- tensors of a file ---- */

typedef struct stored {
    char name[160]; /* in the file, for messages */
    kvc_weight weight;
    int layer;
    kvc_dtype dtype;
    int64_t begin;
    size_t rows, cols;
} stored;

typedef struct place {
    int file;
    int64_t begin;
} place;

static bool read_file(void *context, void *dst, size_t at, size_t n) {
    const place *p = context;
    while (n) {
        ssize_t got = pread(p->file, dst, n, (off_t)p->begin + (off_t)at);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        dst = (char *)dst + got;
        at += (size_t)got;
        n -= (size_t)got;
    }
    return true;
}

static bool parse_stored(stored *out, PyObject *entry) {
    const char *name, *weight_name, *dtype_name;
    long long begin;
    Py_ssize_t rows, cols;
    int weight = -1;
    PyObject *fields = py_tuple(entry, "an entry of tensors", 7);
    if (!fields) return false;
    if (PyArg_ParseTuple(fields, "ssisLnn", &name, &weight_name, &out->layer, &dtype_name, &begin,
                         &rows, &cols)) {
        snprintf(out->name, sizeof out->name, "%s", name);
        if (py_matrix_dtype("dtype", dtype_name, &out->dtype)) weight = weight_of(weight_name);
    }
    Py_DecRef(fields);
    if (weight < 0) return false;
    if (begin < 0 || rows < 0 || cols < 0) {
        PyErr_Format(PyExc_ValueError, "%s: a place or size below zero", out->name);
        return false;
    }
    out->weight = (kvc_weight)weight;
    out->begin = begin;
    out->rows = (size_t)rows;
    out->cols = (size_t)cols;
    return true;
}

static kvc_status read_all(kvc_model *model, int file, const stored *tensors, Py_ssize_t n,
                           kvc_error *err) {
    for (const stored *t = tensors; t < tensors + n; t++) {
        place place = {file, t->begin};
        kvc_source source = {read_file, &place};
        kvc_error cause;
        kvc_status status =
            kvc_model_read(model, t->weight, t->layer, &source, t->dtype, t->rows, t->cols, &cause);
        if (!status) continue;
        err->code = status;
        snprintf(err->message, sizeof err->message, "%s: %.300s", t->name, cause.message);
        return status;
    }
    return KVC_OK;
}

static PyObject *model_read(PyObject *object, PyObject *args) {
    py_model *self = (py_model *)object;
    int file;
    PyObject *sequence;
    if (!PyArg_ParseTuple(args, "iO:read", &file, &sequence)) return NULL;
    PyObject *tuple = py_tuple(sequence, "tensors", -1);
    if (!tuple) return NULL;
    Py_ssize_t n = PyTuple_Size(tuple);
    stored *tensors = malloc((size_t)n * sizeof *tensors + 1);
    bool good = tensors != NULL;
    if (!good) PyErr_NoMemory();
    for (Py_ssize_t i = 0; good && i < n; i++) {
        good = parse_stored(&tensors[i], PyTuple_GetItem(tuple, i));
    }
    kvc_error err;
    kvc_status status = KVC_OK;
    if (good && (good = py_idle(self->busy, "model"))) {
        self->busy = true;
        PyThreadState *thread = PyEval_SaveThread();
        status = read_all(self->model, file, tensors, n, &err);
        PyEval_RestoreThread(thread);
        self->busy = false;
    }
    free(tensors);
    Py_DecRef(tuple);
    if (!good) return NULL;
    return status ? py_raise(py_state_of(object), status, &err) : Py_BuildValue("");
}

static PyObject *model_seal(PyObject *object, PyObject *unused) {
    (void)unused;
    py_model *self = (py_model *)object;
    if (!py_idle(self->busy, "model")) return NULL;
    kvc_error err;
    kvc_status status = kvc_model_seal(self->model, &err);
    return status ? py_raise(py_state_of(object), status, &err) : Py_BuildValue("");
}

static PyObject *model_inv_freq(PyObject *object, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"rope", NULL};
    py_state *state = py_state_of(object);
    const kvc_model *model = ((py_model *)object)->model;
    PyObject *which_object = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O:inv_freq", names, &which_object))
        return NULL;
    int64_t which = 0;
    if (which_object && !py_integer(which_object, "rope", 0, 1, &which)) return NULL;
    size_t shape[1] = {(size_t)kvc_model_config(model)->rope[which].rotary_dim / 2};
    py_array out;
    if (!py_array_new(state, &out, 1, shape, "f8", sizeof(double), "frequencies")) return NULL;
    kvc_error err;
    kvc_status status = kvc_model_inv_freq(model, (int)which, out.view.buf, &err);
    PyObject *array = py_array_take(&out);
    if (!status) return array;
    Py_DecRef(array);
    return py_raise(state, status, &err);
}

static PyObject *get_config(PyObject *self, void *closure) {
    (void)closure;
    return py_config_dict(kvc_model_config(((py_model *)self)->model));
}

static PyObject *get_device(PyObject *self, void *closure) {
    (void)closure;
    return PyUnicode_FromString(kvc_device_name(kvc_model_device(((py_model *)self)->model)));
}

static PyObject *get_dtype(PyObject *self, void *closure) {
    (void)closure;
    char text[64] = "";
    unsigned dtypes = ((py_model *)self)->dtypes;
    if (dtypes & (dtypes - 1)) snprintf(text, sizeof text, "mixed: ");
    for (int i = KVC_MATRIX_DTYPE_COUNT - 1; i >= 0; i--) {
        size_t used = strlen(text);
        if (!(dtypes >> i & 1)) continue;
        dtypes &= ~(1u << i);
        snprintf(text + used, sizeof text - used, "%s%s", kvc_dtype_name((kvc_dtype)i),
                 dtypes ? ", " : "");
    }
    return PyUnicode_FromString(text);
}

static PyObject *get_nbytes(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromSize_t(kvc_model_bytes(((py_model *)self)->model));
}

static PyMethodDef methods[] = {
    {"set", (PyCFunction)(void (*)(void))model_set, METH_VARARGS | METH_KEYWORDS,
     "set(weight, layer, array, dtype)\n--\n\nCopy one tensor in."},
    {"read", model_read, METH_VARARGS, "read(file, tensors)\n--\n\nRead tensors of an open file."},
    {"seal", model_seal, METH_NOARGS, "seal()\n--\n\nCheck that no tensor is missing."},
    {"inv_freq", (PyCFunction)(void (*)(void))model_inv_freq, METH_VARARGS | METH_KEYWORDS,
     "inv_freq(rope=0)\n--\n\nInverse frequencies, float64 [rotary_dim / 2]."},
    {0}};

static PyGetSetDef getset[] = {
    {"config", get_config, NULL, "The fields by name.", NULL},
    {"device", get_device, NULL, "Name of the device.", NULL},
    {"dtype", get_dtype, NULL, "dtype of the matrices; 'mixed: ...'.", NULL},
    {"nbytes", get_nbytes, NULL, "Bytes of weights.", NULL},
    {0}};

static PyType_Slot slots[] = {{Py_tp_new, (void *)model_new},
                              {Py_tp_dealloc, (void *)model_dealloc},
                              {Py_tp_methods, methods},
                              {Py_tp_getset, getset},
                              {Py_tp_doc,
                               "Model(config, *, device='cpu', dtype='f32')\n--\n\n"
                               "Configuration and weights; filled with set, usable after seal.\n"
                               "dtype: of all matrices, or of embed, head and each layer's qkv, o, "
                               "gate_up, down."},
                              {0, NULL}};

PyType_Spec py_model_spec = {"kvcomm._core.Model", sizeof(py_model), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, slots};
