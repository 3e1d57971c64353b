/* session.c - the Session type: one timeline.
 *
 * Every call looks at `busy` first: a forward() of another thread may be at work on the session
 * with the GIL released.
 */
#include "binding.h"

#include <stdlib.h>

static PyObject *session_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"model", "kv_dtype", NULL};
    py_state *state = PyType_GetModuleState(type);
    py_model *model;
    const char *dtype_name = "f32";
    kvc_dtype dtype;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!|$s:Session", names, state->model_type,
                                     &model, &dtype_name))
        return NULL;
    if (!py_dtype("kv_dtype", dtype_name, &dtype) || !py_idle(model->busy, "model")) return NULL;
    py_session *self = (py_session *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    Py_IncRef((PyObject *)model);
    self->model = model;
    kvc_error err;
    kvc_status status = kvc_session_create(&self->session, model->model, dtype, &err);
    if (!status) return (PyObject *)self;
    Py_DecRef((PyObject *)self);
    return py_raise(state, status, &err);
}

static void session_dealloc(PyObject *object) {
    py_session *self = (py_session *)object;
    kvc_session_free(self->session);
    Py_DecRef((PyObject *)self->model);
    py_free(object);
}

/* The session when no other thread uses it, else NULL with an exception. */
static kvc_session *idle(PyObject *self) {
    return py_idle(((py_session *)self)->busy, "session") ? ((py_session *)self)->session : NULL;
}

static PyObject *finish(PyObject *self, kvc_status status, const kvc_error *err) {
    return status ? py_raise(py_state_of(self), status, err) : Py_BuildValue("");
}

static int n_layers(PyObject *self) {
    return kvc_model_config(((py_session *)self)->model->model)->n_layers;
}

static PyObject *session_give(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"kv", "layer_map", NULL};
    py_state *state = py_state_of(self);
    py_kv *kv;
    PyObject *map_object = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!|O:give", names, state->kv_type, &kv,
                                     &map_object))
        return NULL;
    py_ids map = {0};
    if (map_object != Py_None) {
        if (!py_ids_of(state, &map, map_object, n_layers(self), -1, "receiver layer")) return NULL;
        int wanted = kvc_kv_layers(kv->kv);
        if (map.n != (size_t)wanted) {
            PyErr_Format(PyExc_ValueError, "layer_map has %zu entries, the KV has %d layers", map.n,
                         wanted);
            free(map.id);
            return NULL;
        }
    }
    kvc_session *session = idle(self);
    kvc_error err;
    kvc_status status = session ? kvc_session_give(session, kv->kv, map.id, &err) : KVC_OK;
    free(map.id);
    return session ? finish(self, status, &err) : NULL;
}

static PyObject *session_reserve(PyObject *self, PyObject *tokens) {
    int64_t n;
    kvc_error err;
    if (!py_integer(tokens, "n", 0, INT64_MAX, &n)) return NULL;
    kvc_session *session = idle(self);
    if (!session) return NULL;
    return finish(self, kvc_session_reserve(session, (size_t)n, &err), &err);
}

static PyObject *session_set_position(PyObject *self, PyObject *value) {
    int64_t position;
    kvc_error err;
    if (!py_integer(value, "position", 0, INT64_MAX, &position)) return NULL;
    kvc_session *session = idle(self);
    if (!session) return NULL;
    return finish(self, kvc_session_set_position(session, position, &err), &err);
}

static PyObject *session_set_shift(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"shift", "layers", NULL};
    PyObject *shift_object, *layers;
    int64_t shift;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:set_shift", names, &shift_object, &layers))
        return NULL;
    if (!py_integer(shift_object, "shift", INT32_MIN, INT32_MAX, &shift)) return NULL;
    uint8_t *shifted = py_layer_mask(layers, n_layers(self), "layers");
    if (!shifted) return NULL;
    kvc_session *session = idle(self);
    kvc_error err;
    kvc_status status = session ? kvc_session_set_shift(session, shift, shifted, &err) : KVC_OK;
    free(shifted);
    return session ? finish(self, status, &err) : NULL;
}

static PyObject *session_truncate(PyObject *self, PyObject *tokens) {
    int64_t n;
    if (!py_integer(tokens, "n", 0, INT64_MAX, &n)) return NULL;
    kvc_session *session = idle(self);
    if (!session) return NULL;
    kvc_session_truncate(session, (size_t)n);
    return Py_BuildValue("");
}

static PyObject *session_freeze(PyObject *self, PyObject *unused) {
    (void)unused;
    kvc_session *session = idle(self);
    if (!session) return NULL;
    kvc_kv *kv;
    kvc_error err;
    kvc_status status = kvc_session_freeze(session, &kv, &err);
    if (status) return finish(self, status, &err);
    const kvc_model *model = ((py_session *)self)->model->model;
    return py_kv_wrap(py_state_of(self), kv, kvc_device_name(kvc_model_device(model)));
}

static PyObject *session_resume(PyObject *self, PyObject *tail) {
    py_state *state = py_state_of(self);
    if (Py_TYPE(tail) != state->kv_type) {
        py_wrong_type("tail", "a KV", tail);
        return NULL;
    }
    kvc_session *session = idle(self);
    if (!session) return NULL;
    kvc_error err;
    return finish(self, kvc_session_resume(session, ((py_kv *)tail)->kv, &err), &err);
}

static PyObject *per_layer(PyObject *self, size_t (*count)(const kvc_session *, int)) {
    kvc_session *session = idle(self);
    PyObject *list = session ? PyList_New(n_layers(self)) : NULL;
    for (int l = 0; list && l < n_layers(self); l++) {
        PyList_SetItem(list, l, PyLong_FromSize_t(count(session, l)));
    }
    return list;
}

static PyObject *get_given(PyObject *self, void *closure) {
    (void)closure;
    return per_layer(self, kvc_session_given);
}

static PyObject *get_lengths(PyObject *self, void *closure) {
    (void)closure;
    return per_layer(self, kvc_session_length);
}

static PyObject *get_next_position(PyObject *self, void *closure) {
    (void)closure;
    kvc_session *session = idle(self);
    return session ? PyLong_FromLongLong(kvc_session_next_position(session)) : NULL;
}

#define KEYWORDS(function) (PyCFunction)(void (*)(void))(function)

static PyMethodDef methods[] = {
    {"give", KEYWORDS(session_give), METH_VARARGS | METH_KEYWORDS,
     "give(kv, layer_map=None)\n--\n\nHand over a message; it comes before every own token."},
    {"reserve", session_reserve, METH_O, "reserve(n)\n--\n\nRoom for n tokens in one block."},
    {"set_position", session_set_position, METH_O,
     "set_position(position)\n--\n\nThe position of the first own token."},
    {"set_shift", KEYWORDS(session_set_shift), METH_VARARGS | METH_KEYWORDS,
     "set_shift(shift, layers)\n--\n\nMove positions by shift in these layers."},
    {"truncate", session_truncate, METH_O,
     "truncate(n)\n--\n\nForget own tokens beyond the first n."},
    {"freeze", session_freeze, METH_NOARGS, "freeze()\n--\n\nThe own tokens as a message."},
    {"resume", session_resume, METH_O,
     "resume(tail)\n--\n\nBegin with a copy of another session's own tokens."},
    {0}};

static PyGetSetDef getset[] = {
    {"given", get_given, NULL, "Tokens given per layer.", NULL},
    {"lengths", get_lengths, NULL, "Own tokens per layer.", NULL},
    {"next_position", get_next_position, NULL, "Position of the next token.", NULL},
    {0}};

static PyType_Slot slots[] = {
    {Py_tp_new, (void *)session_new},
    {Py_tp_dealloc, (void *)session_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {Py_tp_doc, "Session(model, *, kv_dtype='f32')\n--\n\nOne timeline: given keys, own tokens."},
    {0, NULL}};

PyType_Spec py_session_spec = {"kvcomm._core.Session", sizeof(py_session), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, slots};
