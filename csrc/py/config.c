/* config.c - a dict to kvc_config and back, by two tables of fields.
 *
 * Ranges are the core's business; here every field is there once, has the right type, and nothing
 * unknown stands beside it.
 */
#include "config.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum field_kind { INT, FLOAT, DOUBLE, BOOL } field_kind;

typedef struct field {
    const char *name;
    size_t offset;
    field_kind kind;
    unsigned ropes; /* rope fields: the kinds that have it, as bits */
} field;

#define CONFIG(name, kind) {#name, offsetof(kvc_config, name), kind, 0}
static const field config_fields[] = {
    CONFIG(n_layers, INT),      CONFIG(dim, INT),        CONFIG(hidden_dim, INT),
    CONFIG(n_heads, INT),       CONFIG(n_kv_heads, INT), CONFIG(head_dim, INT),
    CONFIG(vocab_size, INT),    CONFIG(norm_eps, FLOAT), CONFIG(norm_offset, FLOAT),
    CONFIG(embed_scale, FLOAT), CONFIG(qkv_bias, BOOL),  CONFIG(attention_scale, FLOAT),
    CONFIG(o_bias, BOOL),       CONFIG(mlp_bias, BOOL),  CONFIG(qk_norm, BOOL),
    CONFIG(post_norms, BOOL),   CONFIG(tied_head, BOOL), CONFIG(window, INT),
};

#define ALL (1u << KVC_ROPE_DEFAULT | 1u << KVC_ROPE_LINEAR | 1u << KVC_ROPE_LLAMA3 | YARN)
#define LLAMA3 (1u << KVC_ROPE_LLAMA3)
#define YARN (1u << KVC_ROPE_YARN)
#define ROPE(name, kind, ropes) {#name, offsetof(kvc_rope, name), kind, ropes}
static const field rope_fields[] = {
    ROPE(theta, DOUBLE, ALL),
    ROPE(rotary_dim, INT, ALL),
    ROPE(factor, DOUBLE, ALL & ~(1u << KVC_ROPE_DEFAULT)),
    ROPE(low_freq_factor, DOUBLE, LLAMA3),
    ROPE(high_freq_factor, DOUBLE, LLAMA3),
    ROPE(original_length, DOUBLE, LLAMA3 | YARN),
    ROPE(beta_fast, DOUBLE, YARN),
    ROPE(beta_slow, DOUBLE, YARN),
    ROPE(attention_factor, DOUBLE, YARN),
    ROPE(truncate, BOOL, YARN),
};

#define COUNT(array) (sizeof(array) / sizeof *(array))

static const char *const activations[] = {"silu", "gelu_tanh"};
static const char *const rope_kinds[] = {"default", "linear", "llama3", "yarn"};
/* Keys that are no plain fields. */
static const char *const config_others[] = {"activation", "rope", "windowed", "rope_of_layer"};
static const char *const rope_others[] = {"kind"};

/* ---- reading ---- */

static bool read_bool(PyObject *value, const char *what, bool *out) {
    if (!py_is_bool(value)) return py_wrong_type(what, "a bool", value);
    int truth = PyObject_IsTrue(value);
    *out = truth > 0;
    return truth >= 0;
}

static bool read_double(PyObject *value, const char *what, double *out) {
    if (py_is_bool(value)) return py_wrong_type(what, "a number", value);
    *out = PyFloat_AsDouble(value);
    if (!PyErr_Occurred()) return true;
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) return false;
    PyErr_Clear();
    return py_wrong_type(what, "a number", value);
}

static bool read_field(void *base, const field *f, PyObject *value, const char *prefix) {
    char what[64], *at = (char *)base + f->offset;
    snprintf(what, sizeof what, "%s%s", prefix, f->name);
    int64_t integer = 0;
    double number = 0;
    switch (f->kind) {
    case INT:
        if (!py_integer(value, what, INT_MIN, INT_MAX, &integer)) return false;
        *(int *)(void *)at = (int)integer;
        return true;
    case FLOAT:
        if (!read_double(value, what, &number)) return false;
        *(float *)(void *)at = (float)number;
        return true;
    case DOUBLE: return read_double(value, what, (double *)(void *)at);
    default: return read_bool(value, what, (bool *)(void *)at);
    }
}

/* New reference; a missing key is NULL without an exception unless `required`. */
static PyObject *item_of(PyObject *mapping, const char *key, const char *prefix, bool required) {
    PyObject *value = PyMapping_GetItemString(mapping, key);
    if (value || !PyErr_ExceptionMatches(PyExc_KeyError)) return value;
    PyErr_Clear();
    if (required) PyErr_Format(PyExc_ValueError, "%s%s is missing", prefix, key);
    return NULL;
}

static bool read_fields(void *base, const field *fields, size_t n, unsigned rope, PyObject *mapping,
                        const char *prefix) {
    for (size_t i = 0; i < n; i++) {
        if (fields[i].ropes && !(fields[i].ropes & rope)) continue;
        PyObject *value = item_of(mapping, fields[i].name, prefix, true);
        bool good = value && read_field(base, &fields[i], value, prefix);
        Py_DecRef(value);
        if (!good) return false;
    }
    return true;
}

static bool known_key(const char *key, const field *fields, size_t n, const char *const *others,
                      size_t n_others) {
    for (size_t i = 0; i < n; i++) {
        if (strcmp(key, fields[i].name) == 0) return true;
    }
    for (size_t i = 0; i < n_others; i++) {
        if (strcmp(key, others[i]) == 0) return true;
    }
    return false;
}

static bool check_keys(PyObject *mapping, const field *fields, size_t n, const char *const *others,
                       size_t n_others, const char *prefix) {
    PyObject *items = PyMapping_Items(mapping), *iterator = NULL, *item;
    if (items) iterator = PyObject_GetIter(items);
    Py_DecRef(items);
    if (!iterator) {
        PyErr_Clear();
        return py_wrong_type(prefix, "a dict", mapping);
    }
    while ((item = PyIter_Next(iterator))) {
        const char *key;
        PyObject *value;
        if (PyArg_ParseTuple(item, "sO;keys must be strings", &key, &value) &&
            !known_key(key, fields, n, others, n_others)) {
            PyErr_Format(PyExc_ValueError, "%s: unknown field \"%s\"", prefix, key);
        }
        Py_DecRef(item);
        if (PyErr_Occurred()) break;
    }
    Py_DecRef(iterator);
    return !PyErr_Occurred();
}

static int read_choice(PyObject *mapping, const char *key, const char *prefix,
                       const char *const *names, size_t n) {
    char what[64];
    snprintf(what, sizeof what, "%s%s", prefix, key);
    PyObject *value = item_of(mapping, key, prefix, true);
    if (!value) return -1;
    int found = -1;
    const char *text = NULL;
    if (PyType_GetFlags(Py_TYPE(value)) & Py_TPFLAGS_UNICODE_SUBCLASS) {
        text = PyUnicode_AsUTF8AndSize(value, NULL);
    } else {
        py_wrong_type(what, "a string", value);
    }
    if (text) found = py_choice(what, text, names, (int)n);
    Py_DecRef(value);
    return found;
}

static bool read_rope(kvc_rope *rope, PyObject *mapping, int which) {
    char prefix[40], name[32];
    snprintf(name, sizeof name, "config.rope[%d]", which);
    snprintf(prefix, sizeof prefix, "%s.", name);
    if (!check_keys(mapping, rope_fields, COUNT(rope_fields), rope_others, COUNT(rope_others),
                    name))
        return false;
    int kind = read_choice(mapping, "kind", prefix, rope_kinds, COUNT(rope_kinds));
    if (kind < 0) return false;
    rope->kind = (kvc_rope_kind)kind;
    return read_fields(rope, rope_fields, COUNT(rope_fields), 1u << kind, mapping, prefix);
}

static bool read_ropes(kvc_config *config, PyObject *mapping) {
    PyObject *value = item_of(mapping, "rope", "config.", true);
    if (!value) return false;
    PyObject *ropes = py_tuple(value, "config.rope", -1);
    Py_DecRef(value);
    if (!ropes) return false;
    Py_ssize_t n = PyTuple_Size(ropes);
    bool good = n == 1 || n == 2;
    if (!good) PyErr_Format(PyExc_ValueError, "config.rope has %zd entries, expected 1 or 2", n);
    for (int i = 0; good && i < n; i++) {
        good = read_rope(&config->rope[i], PyTuple_GetItem(ropes, i), i);
    }
    if (good && n == 1) config->rope[1] = config->rope[0];
    Py_DecRef(ropes);
    return good;
}

/* An optional list of one small number or bool per layer into new memory [n_layers]. */
static bool read_per_layer(uint8_t **out, PyObject *mapping, const char *key, int n_layers,
                           bool bools) {
    char what[64];
    snprintf(what, sizeof what, "config.%s", key);
    PyObject *value = item_of(mapping, key, "config.", false);
    if (!value) return !PyErr_Occurred();
    if (value == Py_None) {
        Py_DecRef(value);
        return true;
    }
    PyObject *entries = py_tuple(value, what, n_layers);
    Py_DecRef(value);
    if (!entries) return false;
    *out = calloc((size_t)n_layers + 1, 1);
    bool good = *out != NULL;
    if (!good) PyErr_NoMemory();
    for (int l = 0; good && l < n_layers; l++) {
        PyObject *entry = PyTuple_GetItem(entries, l);
        bool set = false;
        int64_t number = 0;
        good = bools ? read_bool(entry, what, &set) : py_integer(entry, what, 0, 1, &number);
        (*out)[l] = set || number == 1;
    }
    Py_DecRef(entries);
    return good;
}

bool py_config_parse(py_config *out, PyObject *mapping) {
    *out = (py_config){0};
    kvc_config *c = &out->config;
    if (!check_keys(mapping, config_fields, COUNT(config_fields), config_others,
                    COUNT(config_others), "config"))
        return false;
    if (!read_fields(c, config_fields, COUNT(config_fields), 0, mapping, "config.")) return false;
    int activation = read_choice(mapping, "activation", "config.", activations, COUNT(activations));
    if (activation < 0) return false;
    c->activation = (kvc_activation)activation;
    if (c->n_layers < 1 || c->n_layers > 65536) { /* before anything is sized by it */
        PyErr_Format(PyExc_ValueError, "config.n_layers is %d, expected 1 .. 65536", c->n_layers);
        return false;
    }
    if (!read_ropes(c, mapping)) return false;
    if (!read_per_layer(&out->windowed, mapping, "windowed", c->n_layers, true)) return false;
    if (!read_per_layer(&out->rope_of_layer, mapping, "rope_of_layer", c->n_layers, false))
        return false;
    c->windowed = out->windowed;
    c->rope_of_layer = out->rope_of_layer;
    return true;
}

void py_config_release(py_config *config) {
    free(config->windowed);
    free(config->rope_of_layer);
    *config = (py_config){0};
}

/* ---- writing ---- */

/* Takes over value. */
static bool put(PyObject *dict, const char *key, PyObject *value) {
    int status = value ? PyDict_SetItemString(dict, key, value) : -1;
    Py_DecRef(value);
    return status == 0;
}

static bool put_fields(PyObject *dict, const void *base, const field *fields, size_t n,
                       unsigned rope) {
    bool good = true;
    for (size_t i = 0; good && i < n; i++) {
        const void *at = (const char *)base + fields[i].offset;
        if (fields[i].ropes && !(fields[i].ropes & rope)) continue;
        PyObject *value = NULL;
        switch (fields[i].kind) {
        case INT: value = PyLong_FromLong(*(const int *)at); break;
        case FLOAT: value = PyFloat_FromDouble((double)*(const float *)at); break;
        case DOUBLE: value = PyFloat_FromDouble(*(const double *)at); break;
        case BOOL: value = PyBool_FromLong(*(const bool *)at); break;
        }
        good = put(dict, fields[i].name, value);
    }
    return good;
}

static PyObject *per_layer(const uint8_t *flags, int n_layers, bool bools) {
    PyObject *list = PyList_New(n_layers);
    for (int l = 0; list && l < n_layers; l++) {
        PyList_SetItem(list, l, bools ? PyBool_FromLong(flags[l]) : PyLong_FromLong(flags[l]));
    }
    return list;
}

static bool put_ropes(PyObject *dict, const kvc_config *c) {
    bool both = false; /* a second rope that no layer uses is not shown */
    for (int l = 0; c->rope_of_layer && l < c->n_layers; l++) both = both || c->rope_of_layer[l];
    PyObject *list = PyList_New(0);
    bool good = list != NULL;
    for (int i = 0; good && i <= (both ? 1 : 0); i++) {
        const kvc_rope *r = &c->rope[i];
        PyObject *rope = Py_BuildValue("{s:s}", "kind", rope_kinds[r->kind]);
        good = rope && put_fields(rope, r, rope_fields, COUNT(rope_fields), 1u << r->kind) &&
               PyList_Append(list, rope) == 0;
        Py_DecRef(rope);
    }
    if (good) return put(dict, "rope", list);
    Py_DecRef(list);
    return false;
}

PyObject *py_config_dict(const kvc_config *c) {
    PyObject *dict = PyDict_New();
    if (!dict) return NULL;
    bool good = put_fields(dict, c, config_fields, COUNT(config_fields), 0) &&
                put(dict, "activation", PyUnicode_FromString(activations[c->activation])) &&
                put_ropes(dict, c);
    if (good && c->windowed)
        good = put(dict, "windowed", per_layer(c->windowed, c->n_layers, true));
    if (good && c->rope_of_layer)
        good = put(dict, "rope_of_layer", per_layer(c->rope_of_layer, c->n_layers, false));
    if (good) return dict;
    Py_DecRef(dict);
    return NULL;
}
