/* parse.c - small arguments: names out of a list, integers, lists of layers.
 *
 * A bool is never taken for an integer here: layers=True or a mask in place of a list is a mistake
 * worth a TypeError. Each function either fills its output or sets an exception.
 */
#include "binding.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int py_choice(const char *what, const char *value, const char *const *names, int n) {
    char known[320] = "";
    for (int i = 0; i < n; i++) {
        if (strcmp(value, names[i]) == 0) return i;
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", names[i]);
    }
    PyErr_Format(PyExc_ValueError, "%s must be one of %s, not \"%s\"", what, known, value);
    return -1;
}

static bool dtype_below(int n, const char *what, const char *value, kvc_dtype *out) {
    const char *names[KVC_MATRIX_DTYPE_COUNT];
    for (int i = 0; i < n; i++) names[i] = kvc_dtype_name((kvc_dtype)i);
    int i = py_choice(what, value, names, n);
    if (i >= 0) *out = (kvc_dtype)i;
    return i >= 0;
}

bool py_dtype(const char *what, const char *value, kvc_dtype *out) {
    return dtype_below(KVC_DTYPE_COUNT, what, value, out);
}

bool py_matrix_dtype(const char *what, const char *value, kvc_dtype *out) {
    return dtype_below(KVC_MATRIX_DTYPE_COUNT, what, value, out);
}

bool py_preset(const char *value, kvc_preset *out) {
    static const char *const names[] = {"paper", "reference"};
    int i = py_choice("preset", value, names, 2);
    if (i >= 0) *out = (kvc_preset)i;
    return i >= 0;
}

PyObject *py_wrong_type(const char *what, const char *wanted, PyObject *got) {
    PyObject *name = PyObject_GetAttrString((PyObject *)Py_TYPE(got), "__name__");
    const char *text = name ? PyUnicode_AsUTF8AndSize(name, NULL) : NULL;
    if (text) PyErr_Format(PyExc_TypeError, "%s must be %s, not %s", what, wanted, text);
    if (name) Py_DecRef(name);
    return NULL;
}

bool py_is_bool(PyObject *value) {
    if (Py_TYPE(value) == &PyBool_Type) return true;
    PyObject *name = PyObject_GetAttrString((PyObject *)Py_TYPE(value), "__name__");
    const char *text = name ? PyUnicode_AsUTF8AndSize(name, NULL) : NULL;
    bool is_bool = text && (strcmp(text, "bool") == 0 || strcmp(text, "bool_") == 0);
    Py_DecRef(name);
    PyErr_Clear();
    return is_bool;
}

bool py_integer(PyObject *value, const char *what, int64_t low, int64_t high, int64_t *out) {
    PyObject *index = py_is_bool(value) ? NULL : PyNumber_Index(value);
    if (!index) {
        if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError)) return false;
        PyErr_Clear();
        py_wrong_type(what, "an integer", value);
        return false;
    }
    int overflow;
    long long n = PyLong_AsLongLongAndOverflow(index, &overflow);
    bool good = !overflow && n >= low && n <= high;
    if (good) *out = n;
    else if (high == INT64_MAX && low == 0 && (overflow < 0 || (!overflow && n < 0)))
        PyErr_Format(PyExc_ValueError, "%s must not be negative, but is %S", what, index);
    else
        PyErr_Format(PyExc_ValueError, "%s must be in %lld .. %lld, not %S", what, (long long)low,
                     (long long)high, index);
    Py_DecRef(index);
    return good;
}

bool py_layers(PyObject *layers, int n_layers, const char *what, uint8_t *mask) {
    PyObject *iterator = PyObject_GetIter(layers), *item;
    if (!iterator) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) return false;
        PyErr_Clear();
        return py_wrong_type(what, "a list of layers", layers);
    }
    char label[64];
    snprintf(label, sizeof label, "an entry of %s", what);
    while ((item = PyIter_Next(iterator))) {
        int64_t layer;
        bool good = py_integer(item, label, 0, n_layers - 1, &layer);
        Py_DecRef(item);
        if (!good) break;
        mask[layer] = 1;
    }
    Py_DecRef(iterator);
    return !PyErr_Occurred();
}

uint8_t *py_layer_mask(PyObject *layers, int n_layers, const char *what) {
    uint8_t *mask = calloc((size_t)n_layers, 1);
    if (!mask) PyErr_NoMemory();
    else if (py_layers(layers, n_layers, what, mask)) return mask;
    free(mask);
    return NULL;
}

PyObject *py_tuple(PyObject *sequence, const char *what, Py_ssize_t n) {
    if (PyType_GetFlags(Py_TYPE(sequence)) & Py_TPFLAGS_UNICODE_SUBCLASS) {
        return py_wrong_type(what, "a sequence", sequence);
    }
    PyObject *tuple = PySequence_Tuple(sequence);
    if (!tuple) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) return NULL;
        PyErr_Clear();
        return py_wrong_type(what, "a sequence", sequence);
    }
    Py_ssize_t found = PyTuple_Size(tuple);
    if (n < 0 || found == n) return tuple;
    Py_DecRef(tuple);
    return PyErr_Format(PyExc_ValueError, "%s has %zd entries, expected %zd", what, found, n);
}
