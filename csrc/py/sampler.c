/* sampler.c - drawing tokens, and the two functions on layer scores. */
#include "binding.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>

typedef struct py_sampler {
    PyObject head;
    kvc_sampler sampler;
} py_sampler;

static PyObject *sampler_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"temperature", "top_k", "top_p", "seed", NULL};
    py_state *state = PyType_GetModuleState(type);
    kvc_sampler sampler = {.top_p = 1};
    PyObject *top_k_object = NULL, *seed_object = NULL;
    int64_t top_k = 0, seed = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$dOdO:Sampler", names, &sampler.temperature,
                                     &top_k_object, &sampler.top_p, &seed_object))
        return NULL;
    if (top_k_object && !py_integer(top_k_object, "top_k", 0, INT_MAX, &top_k)) return NULL;
    if (seed_object && !py_integer(seed_object, "seed", 0, INT64_MAX, &seed)) return NULL;
    sampler.top_k = (int)top_k;
    kvc_sampler_seed(&sampler, (uint64_t)seed);
    /* the core's own check of the settings, on a draw that is thrown away */
    kvc_sampler trial = sampler;
    const float one_logit[1] = {0};
    int32_t id;
    kvc_error err;
    kvc_status status = kvc_sample(&id, &trial, one_logit, 1, &err);
    if (status) return py_raise(state, status, &err);
    py_sampler *self = (py_sampler *)PyType_GenericAlloc(type, 0);
    if (self) self->sampler = sampler;
    return (PyObject *)self;
}

static PyObject *sampler_sample(PyObject *object, PyObject *source) {
    py_state *state = py_state_of(object);
    py_array logits;
    if (!py_array_of(state, &logits, source, KVC_F32, true, 1, 1, "logits")) return NULL;
    int32_t id;
    kvc_error err;
    kvc_status status = kvc_sample(&id, &((py_sampler *)object)->sampler, logits.view.buf,
                                   (size_t)logits.view.shape[0], &err);
    py_array_release(&logits);
    return status ? py_raise(state, status, &err) : PyLong_FromLong(id);
}

static PyMethodDef methods[] = {
    {"sample", sampler_sample, METH_O, "sample(logits)\n--\n\nDraw one id from float32 [n]."}, {0}};

static PyType_Slot slots[] = {{Py_tp_new, (void *)sampler_new},
                              {Py_tp_dealloc, (void *)py_free},
                              {Py_tp_methods, methods},
                              {Py_tp_doc,
                               "Sampler(*, temperature=0.0, top_k=0, top_p=1.0, seed=0)\n--\n\n"
                               "Temperature 0 is greedy; top_k 0 and top_p 1 keep everything."},
                              {0, NULL}};

PyType_Spec py_sampler_spec = {"kvcomm._core.Sampler", sizeof(py_sampler), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, slots};

/* ---- layer scores ---- */

PyObject *py_score(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"mass", "alpha", "sigma", "mu", "preset", NULL};
    py_state *state = PyModule_GetState(module);
    PyObject *source, *mu_object = Py_None;
    double alpha, sigma = 10, mu = NAN;
    const char *preset_name = "paper";
    kvc_preset preset;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Od|$dOs:score", names, &source, &alpha, &sigma,
                                     &mu_object, &preset_name))
        return NULL;
    if (!py_preset(preset_name, &preset)) return NULL;
    if (mu_object != Py_None) {
        mu = PyFloat_AsDouble(mu_object);
        if (PyErr_Occurred()) return NULL;
        if (isnan(mu)) {
            PyErr_SetString(PyExc_ValueError, "mu must be finite, not nan");
            return NULL;
        }
    }
    py_array mass, out = {0};
    if (!py_array_doubles(state, &mass, source, "mass")) return NULL;
    size_t n = (size_t)mass.view.shape[0];
    kvc_error err = {KVC_ERROR_VALUE, "mass has too many layers"};
    kvc_status status = KVC_ERROR_VALUE;
    bool made = py_array_new(state, &out, 1, &n, "f4", sizeof(float), "scores");
    if (made && n <= INT_MAX)
        status = kvc_score(out.view.buf, mass.view.buf, (int)n, alpha, mu, sigma, preset, &err);
    py_array_release(&mass);
    PyObject *array = py_array_take(&out);
    if (!made || !status) return array;
    Py_DecRef(array);
    return py_raise(state, status, &err);
}

PyObject *py_rank(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"scores", "preset", NULL};
    py_state *state = PyModule_GetState(module);
    PyObject *source;
    const char *preset_name = "paper";
    kvc_preset preset;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$s:rank", names, &source, &preset_name))
        return NULL;
    if (!py_preset(preset_name, &preset)) return NULL;
    py_array scores;
    if (!py_array_of(state, &scores, source, KVC_F32, true, 1, 1, "scores")) return NULL;
    Py_ssize_t n = scores.view.shape[0];
    int32_t *order = n <= INT_MAX ? malloc(((size_t)n + 1) * sizeof *order) : NULL;
    PyObject *list = NULL;
    if (order) {
        kvc_rank(order, scores.view.buf, (int)n, preset);
        list = PyList_New(n);
    } else {
        PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; list && i < n; i++) PyList_SetItem(list, i, PyLong_FromLong(order[i]));
    free(order);
    py_array_release(&scores);
    return list;
}
