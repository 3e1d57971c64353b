/* workspace.c - the Workspace type: scratch for one forward call at a time. */
#include "binding.h"

static PyObject *workspace_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"model", NULL};
    py_state *state = PyType_GetModuleState(type);
    py_model *model;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!:Workspace", names, state->model_type,
                                     &model))
        return NULL;
    if (!py_idle(model->busy, "model")) return NULL;
    py_workspace *self = (py_workspace *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    Py_IncRef((PyObject *)model);
    self->model = model;
    kvc_error err;
    kvc_status status =
        kvc_workspace_create(&self->ws, model->model, py_interrupt, &self->poll, &err);
    if (!status) return (PyObject *)self;
    Py_DecRef((PyObject *)self);
    return py_raise(state, status, &err);
}

static void workspace_dealloc(PyObject *object) {
    py_workspace *self = (py_workspace *)object;
    kvc_workspace_free(self->ws);
    Py_DecRef((PyObject *)self->model);
    py_free(object);
}

static PyObject *get_counts(PyObject *object, void *closure) {
    (void)closure;
    py_workspace *self = (py_workspace *)object;
    if (!py_idle(self->busy, "workspace")) return NULL;
    kvc_counts counts = kvc_workspace_counts(self->ws);
    return Py_BuildValue("{s:K,s:d,s:d}", "tokens", (unsigned long long)counts.tokens,
                         "linear_flops", counts.linear_flops, "attention_flops",
                         counts.attention_flops);
}

static PyMethodDef methods[] = {
    {"forward", (PyCFunction)(void (*)(void))py_workspace_forward, METH_VARARGS | METH_KEYWORDS,
     "forward(sessions, tokens, *, output='none', outputs='last', targets=None, layers=None,\n"
     "        slack=None, mass=None, mass_skip=0)\n--\n\n"
     "Run one batch; returns (out, mass)."},
    {"embed", py_workspace_embed, METH_O,
     "embed(ids, /)\n--\n\nWhat enters layer 0 for ids, [n, dim]."},
    {"mix", (PyCFunction)(void (*)(void))py_workspace_mix, METH_VARARGS | METH_KEYWORDS,
     "mix(logits, temperature)\n--\n\n"
     "What enters layer 0 for softmax(logits / temperature), [n, dim]."},
    {"nearest", py_workspace_nearest, METH_O,
     "nearest(vectors, /)\n--\n\nIds of the nearest embeddings by cosine, [n]."},
    {0}};

static PyGetSetDef getset[] = {{"counts", get_counts, NULL, "Work done so far.", NULL}, {0}};

static PyType_Slot slots[] = {
    {Py_tp_new, (void *)workspace_new},
    {Py_tp_dealloc, (void *)workspace_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {Py_tp_doc, "Workspace(model)\n--\n\nScratch for one forward call at a time."},
    {0, NULL}};

PyType_Spec py_workspace_spec = {"kvcomm._core.Workspace", sizeof(py_workspace), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, slots};
