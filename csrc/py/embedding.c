/* embedding.c - Workspace.embed, mix and nearest: tokens as vectors, NumPy arrays in and out. */
#include "binding.h"

#include <stdlib.h>

/* One call of the core; exactly one of ids and rows is its input. */
typedef struct job {
    py_state *state;
    py_workspace *ws;
    const kvc_config *config;
    py_ids ids;
    py_array rows, out;
    size_t n;
    double temperature;
    kvc_status (*call)(struct job *job, kvc_error *err);
} job;

static kvc_status call_embed(job *j, kvc_error *err) {
    return kvc_embed(j->ws->ws, j->out.view.buf, j->ids.id, j->n, err);
}

static kvc_status call_mix(job *j, kvc_error *err) {
    return kvc_mix(j->ws->ws, j->out.view.buf, j->rows.view.buf, j->n, j->temperature, err);
}

static kvc_status call_nearest(job *j, kvc_error *err) {
    return kvc_nearest(j->ws->ws, j->out.view.buf, j->rows.view.buf, j->n, err);
}

static job begin(PyObject *self, kvc_status (*call)(job *, kvc_error *)) {
    job j = {.state = py_state_of(self), .ws = (py_workspace *)self, .call = call};
    j.config = kvc_model_config(j.ws->model->model);
    return j;
}

static bool read_rows(job *j, PyObject *source, int width, const char *what) {
    if (!py_array_of(j->state, &j->rows, source, KVC_F32, true, 2, 2, what)) return false;
    j->n = (size_t)j->rows.view.shape[0];
    if (j->rows.view.shape[1] == width) return true;
    PyErr_Format(PyExc_ValueError, "%s have %zd columns, expected %d", what, j->rows.view.shape[1],
                 width);
    return false;
}

static bool make_vectors(job *j) {
    size_t shape[2] = {j->n, (size_t)j->config->dim};
    return py_array_new(j->state, &j->out, 2, shape, "f4", 4, "vectors");
}

/* Runs the call when all is well so far, and lets everything go but the result. */
static PyObject *end(job *j, bool good) {
    good = good && py_idle(j->ws->busy, "workspace");
    if (good && j->n > 0) {
        kvc_error err = {KVC_OK, ""};
        j->ws->busy = true;
        py_poll_begin(&j->ws->poll);
        kvc_status status = j->call(j, &err);
        py_poll_end(&j->ws->poll);
        j->ws->busy = false;
        if (status) py_raise(j->state, status, &err);
        good = !status;
    }
    PyObject *out = good ? py_array_take(&j->out) : NULL;
    free(j->ids.id);
    py_array_release(&j->rows);
    py_array_release(&j->out);
    return out;
}

PyObject *py_workspace_embed(PyObject *self, PyObject *ids) {
    job j = begin(self, call_embed);
    bool good = py_ids_of(j.state, &j.ids, ids, j.config->vocab_size, -1, "id");
    j.n = j.ids.n;
    return end(&j, good && make_vectors(&j));
}

PyObject *py_workspace_mix(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"logits", "temperature", NULL};
    job j = begin(self, call_mix);
    PyObject *logits;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Od:mix", names, &logits, &j.temperature))
        return NULL;
    bool good = read_rows(&j, logits, j.config->vocab_size, "logits");
    return end(&j, good && make_vectors(&j));
}

PyObject *py_workspace_nearest(PyObject *self, PyObject *vectors) {
    job j = begin(self, call_nearest);
    bool good = read_rows(&j, vectors, j.config->dim, "vectors");
    return end(&j, good && py_array_new(j.state, &j.out, 1, &j.n, "i4", 4, "ids"));
}
