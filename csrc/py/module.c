/* module.c - the module kvcomm._core: its state, types and plain functions.
 *
 * No Python object is static: everything hangs on the module's state, so each interpreter that
 * imports the module has its own.
 */
#include "binding.h"

#include <limits.h>
#include <string.h>

const char *const py_device_names[PY_DEVICES] = {"cpu", "cuda", "guard"};

void py_free(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_Free(self);
    Py_DecRef((PyObject *)type); /* an instance holds a reference to its heap type */
}

bool py_idle(bool busy, const char *what) {
    if (busy) PyErr_Format(PyExc_ValueError, "the %s is in use by another thread", what);
    return !busy;
}

kvc_device *py_device(py_state *state, const char *name) {
    int i = 0;
    while (i < PY_DEVICES && strcmp(name, py_device_names[i]) != 0) i++;
    if (i < PY_DEVICES && state->devices[i]) return state->devices[i];
    kvc_device *device;
    kvc_error err;
    kvc_status status = kvc_device_open(&device, name, &err);
    if (status) {
        py_raise(state, status, &err);
        return NULL;
    }
    state->devices[i] = device;
    return device;
}

/* ---- functions ---- */

static PyObject *set_num_threads(PyObject *module, PyObject *value) {
    int64_t n;
    kvc_error err;
    if (!py_integer(value, "n", 0, INT_MAX, &n)) return NULL;
    PyThreadState *thread = PyEval_SaveThread(); /* a running region may want the GIL to end */
    kvc_status status = kvc_set_num_threads((int)n, &err);
    PyEval_RestoreThread(thread);
    return status ? py_raise(PyModule_GetState(module), status, &err) : Py_BuildValue("");
}

static PyObject *get_num_threads(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    return PyLong_FromLong(kvc_get_num_threads());
}

static PyObject *devices(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    PyObject *list = PyList_New(PY_DEVICES);
    for (int i = 0; list && i < PY_DEVICES; i++) {
        kvc_device *device = NULL;
        kvc_error err;
        kvc_status status = kvc_device_open(&device, py_device_names[i], &err);
        PyObject *entry = Py_BuildValue("{s:s,s:N,s:s}", "name", py_device_names[i], "available",
                                        PyBool_FromLong(status == KVC_OK), "description",
                                        status ? err.message : kvc_device_description(device));
        kvc_device_close(device);
        if (!entry) {
            Py_DecRef(list);
            return NULL;
        }
        PyList_SetItem(list, i, entry);
    }
    return list;
}

#define KEYWORDS(function) (PyCFunction)(void (*)(void))(function)

static PyMethodDef functions[] = {
    {"set_num_threads", set_num_threads, METH_O,
     "set_num_threads(n)\n--\n\nSet the threads of the one pool; 0 goes back to the default."},
    {"get_num_threads", get_num_threads, METH_NOARGS, "get_num_threads()\n--\n\nThreads in use."},
    {"devices", devices, METH_NOARGS,
     "devices()\n--\n\nname, available and description of every known device."},
    {"score", KEYWORDS(py_score), METH_VARARGS | METH_KEYWORDS,
     "score(mass, *, alpha, sigma=10.0, mu=None, preset='paper')\n--\n\nLayer scores."},
    {"rank", KEYWORDS(py_rank), METH_VARARGS | METH_KEYWORDS,
     "rank(scores, *, preset='paper')\n--\n\nLayer indices, best first."},
    {0}};

/* ---- the module ---- */

static int module_exec(PyObject *module) {
    py_state *state = PyModule_GetState(module);
    const struct {
        PyTypeObject **type;
        PyType_Spec *spec;
    } types[] = {
        {&state->model_type, &py_model_spec},         {&state->kv_type, &py_kv_spec},
        {&state->view_type, &py_view_spec},           {&state->session_type, &py_session_spec},
        {&state->workspace_type, &py_workspace_spec}, {&state->sampler_type, &py_sampler_spec}};
    state->numpy = PyImport_ImportModule("numpy");
    if (!state->numpy || !py_errors_load(state)) return -1;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        *types[i].type = (PyTypeObject *)PyType_FromModuleAndSpec(module, types[i].spec, NULL);
        if (!*types[i].type) return -1;
        if (PyModule_AddType(module, *types[i].type) < 0) return -1;
    }
    return PyModule_AddStringConstant(module, "__version__", KVCOMM_VERSION);
}

/* Calls visit on everything the state holds; stops at the first that answers. */
static int module_traverse(PyObject *module, visitproc visit, void *context) {
    py_state *s = PyModule_GetState(module);
    PyObject *held[] = {s->numpy,
                        (PyObject *)s->model_type,
                        (PyObject *)s->kv_type,
                        (PyObject *)s->view_type,
                        (PyObject *)s->session_type,
                        (PyObject *)s->workspace_type,
                        (PyObject *)s->sampler_type};
    int status = 0;
    for (size_t i = 0; !status && i < sizeof held / sizeof *held; i++) {
        if (held[i]) status = visit(held[i], context);
    }
    for (int i = 0; !status && i <= KVC_ERROR_INTERRUPTED; i++) {
        if (s->exceptions[i]) status = visit(s->exceptions[i], context);
    }
    return status;
}

static int module_clear(PyObject *module) {
    py_state *s = PyModule_GetState(module);
    py_state held = *s; /* emptied first: dropping a reference may run Python code */
    memset(s, 0, sizeof *s);
    PyTypeObject *types[] = {held.model_type,   held.kv_type,        held.view_type,
                             held.session_type, held.workspace_type, held.sampler_type};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) Py_DecRef((PyObject *)types[i]);
    for (int i = 0; i <= KVC_ERROR_INTERRUPTED; i++) Py_DecRef(held.exceptions[i]);
    for (int i = 0; i < PY_DEVICES; i++) kvc_device_close(held.devices[i]);
    Py_DecRef(held.numpy);
    return 0;
}

static void module_free(void *module) {
    module_clear(module);
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, (void *)module_exec}, {0, NULL}};

static PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "kvcomm._core",
    .m_doc = "The compiled core of kvcomm; types are in _core.pyi.",
    .m_size = sizeof(py_state),
    .m_methods = functions,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

__attribute__((visibility("default"))) PyObject *PyInit__core(void);
PyObject *PyInit__core(void) {
    return PyModuleDef_Init(&definition);
}
