/* forward.c - Workspace.forward: a batch out of Python objects, one core call, arrays back.
 *
 * A `job` holds everything that the batch points to until the call is over. Python objects are
 * held by tuples of our own: the caller's lists may change while the GIL is released. The
 * workspace and the sessions are claimed (busy) right before the call and given free after it.
 */
#include "binding.h"

#include <stdlib.h>
#include <string.h>

typedef struct job_row {
    py_ids tokens, outputs, targets, slack;
    py_array hidden;
} job_row;

typedef struct job {
    py_state *state;
    py_workspace *ws;
    const kvc_config *config;
    PyObject *sessions, *tokens; /* tuples */
    size_t n;                    /* rows */
    kvc_row *rows;               /* [n] */
    job_row *held;               /* [n] what rows point to */
    size_t n_claimed;            /* sessions marked busy by this call */
    bool claimed;                /* the workspace, too */
    py_array out, mass;
    kvc_mass mass_request;
    kvc_batch batch;
} job;

/* The call's arguments as they come. */
typedef struct arguments {
    PyObject *sessions, *tokens, *outputs, *targets, *layers, *slack, *mass_skip;
    const char *output, *mass;
} arguments;

static void release(job *j) {
    for (size_t i = 0; j->held && i < j->n; i++) {
        job_row *h = &j->held[i];
        free(h->tokens.id);
        free(h->outputs.id);
        free(h->targets.id);
        free(h->slack.id);
        py_array_release(&h->hidden);
    }
    free(j->held);
    free(j->rows);
    py_array_release(&j->out);
    py_array_release(&j->mass);
    Py_DecRef(j->sessions);
    Py_DecRef(j->tokens);
}

/* ---- rows ---- */

static bool open_rows(job *j, const arguments *a) {
    j->sessions = py_tuple(a->sessions, "sessions", -1);
    if (!j->sessions) return false;
    j->n = (size_t)PyTuple_Size(j->sessions);
    j->tokens = py_tuple(a->tokens, "tokens", (Py_ssize_t)j->n);
    if (!j->tokens) return false;
    for (size_t i = 0; i < j->n; i++) {
        PyObject *session = PyTuple_GetItem(j->sessions, (Py_ssize_t)i);
        if (Py_TYPE(session) == j->state->session_type) continue;
        return py_wrong_type("an entry of sessions", "a Session", session);
    }
    j->rows = calloc(j->n + 1, sizeof *j->rows);
    j->held = calloc(j->n + 1, sizeof *j->held);
    if (j->rows && j->held) return true;
    PyErr_NoMemory();
    return false;
}

static bool read_tokens(job *j, size_t i) {
    job_row *held = &j->held[i];
    kvc_row *row = &j->rows[i];
    PyObject *source = PyTuple_GetItem(j->tokens, (Py_ssize_t)i);
    if (py_array_is_hidden(source)) {
        if (!py_array_of(j->state, &held->hidden, source, KVC_F32, true, 2, 2, "hidden states"))
            return false;
        if (held->hidden.view.shape[1] != j->config->dim) {
            PyErr_Format(PyExc_ValueError, "row %zu: hidden states have %zd columns, expected %d",
                         i, held->hidden.view.shape[1], j->config->dim);
            return false;
        }
        row->hidden = held->hidden.view.buf;
        row->n = (size_t)held->hidden.view.shape[0];
    } else {
        if (!py_ids_of(j->state, &held->tokens, source, j->config->vocab_size, (Py_ssize_t)i, "id"))
            return false;
        row->tokens = held->tokens.id;
        row->n = held->tokens.n;
    }
    row->session = ((py_session *)PyTuple_GetItem(j->sessions, (Py_ssize_t)i))->session;
    if (row->n > 0) return true;
    PyErr_Format(PyExc_ValueError, "row %zu: no tokens", i);
    return false;
}

/* "last", "all", or one list per row. */
static bool read_outputs(job *j, const arguments *a) {
    if (j->batch.output == KVC_OUT_NONE) return true;
    int choice = -1;
    PyObject *lists = NULL;
    if (PyType_GetFlags(Py_TYPE(a->outputs)) & Py_TPFLAGS_UNICODE_SUBCLASS) {
        static const char *const names[] = {"last", "all"};
        const char *text = PyUnicode_AsUTF8AndSize(a->outputs, NULL);
        choice = text ? py_choice("outputs", text, names, 2) : -1;
        if (choice < 0) return false;
    } else if (!(lists = py_tuple(a->outputs, "outputs", (Py_ssize_t)j->n))) {
        return false;
    }
    bool good = true;
    for (size_t i = 0; good && i < j->n; i++) {
        py_ids *ids = &j->held[i].outputs;
        kvc_row *row = &j->rows[i];
        if (lists) {
            good = py_ids_of(j->state, ids, PyTuple_GetItem(lists, (Py_ssize_t)i), (int64_t)row->n,
                             (Py_ssize_t)i, "output");
        } else {
            ids->n = choice == 0 ? 1 : row->n;
            ids->id = malloc(ids->n * sizeof *ids->id);
            good = ids->id != NULL;
            if (!good) PyErr_NoMemory();
            for (size_t k = 0; good && k < ids->n; k++) {
                ids->id[k] = (int32_t)(choice == 0 ? row->n - 1 : k);
            }
        }
        row->outputs = ids->id;
        row->n_outputs = ids->n;
    }
    Py_DecRef(lists);
    return good;
}

static bool read_targets(job *j, const arguments *a) {
    if ((j->batch.output == KVC_OUT_LOGPROB) != (a->targets != Py_None)) {
        PyErr_SetString(PyExc_ValueError, "targets go with output \"logprob\", and only with it");
        return false;
    }
    if (a->targets == Py_None) return true;
    PyObject *lists = py_tuple(a->targets, "targets", (Py_ssize_t)j->n);
    bool good = lists != NULL;
    for (size_t i = 0; good && i < j->n; i++) {
        py_ids *ids = &j->held[i].targets;
        kvc_row *row = &j->rows[i];
        good = py_ids_of(j->state, ids, PyTuple_GetItem(lists, (Py_ssize_t)i),
                         j->config->vocab_size, (Py_ssize_t)i, "target");
        if (good && ids->n != row->n_outputs) {
            PyErr_Format(PyExc_ValueError, "row %zu: %zu targets for %zu outputs", i, ids->n,
                         row->n_outputs);
            good = false;
        }
        row->targets = ids->id;
    }
    Py_DecRef(lists);
    return good;
}

static bool read_slack(job *j, const arguments *a) {
    if (a->slack == Py_None) return true;
    PyObject *lists = py_tuple(a->slack, "slack", (Py_ssize_t)j->n);
    bool good = lists != NULL;
    for (size_t i = 0; good && i < j->n; i++) {
        PyObject *list = PyTuple_GetItem(lists, (Py_ssize_t)i);
        py_ids *ids = &j->held[i].slack;
        if (list == Py_None) continue;
        good = py_ids_of(j->state, ids, list, INT32_MAX, (Py_ssize_t)i, "slack");
        if (good && ids->n != (size_t)j->config->n_layers) {
            PyErr_Format(PyExc_ValueError, "row %zu: slack has %zu entries, expected %d (layers)",
                         i, ids->n, j->config->n_layers);
            good = false;
        }
        j->rows[i].slack = ids->id;
    }
    Py_DecRef(lists);
    return good;
}

/* ---- the call ---- */

static bool read_settings(job *j, const arguments *a) {
    static const char *const outputs[] = {"none",   "hidden", "normed",
                                          "logits", "argmax", "logprob"};
    static const char *const masses[] = {"paper", "published"};
    int output = py_choice("output", a->output, outputs, 6);
    if (output < 0) return false;
    j->batch.output = (kvc_output)output;
    j->batch.layer_end = j->config->n_layers;
    if (a->layers != Py_None) {
        PyObject *range = py_tuple(a->layers, "layers", 2);
        int64_t begin = 0, end = 0;
        bool good =
            range &&
            py_integer(PyTuple_GetItem(range, 0), "layers[0]", 0, j->config->n_layers, &begin) &&
            py_integer(PyTuple_GetItem(range, 1), "layers[1]", 0, j->config->n_layers, &end);
        Py_DecRef(range);
        if (!good) return false;
        j->batch.layer_begin = (int)begin;
        j->batch.layer_end = (int)end;
    }
    if (a->mass) {
        int kind = py_choice("mass", a->mass, masses, 2);
        if (kind < 0) return false;
        j->mass_request.published = kind == 1;
        j->batch.mass = &j->mass_request;
    }
    int64_t skip = 0;
    if (a->mass_skip && !py_integer(a->mass_skip, "mass_skip", 0, INT64_MAX, &skip)) return false;
    j->mass_request.skip = (size_t)skip;
    return true;
}

/* The arrays that the core writes to, before it starts. */
static bool make_arrays(job *j) {
    size_t n_out = 0;
    for (size_t i = 0; i < j->n; i++) n_out += j->rows[i].n_outputs;
    const struct {
        int ndim;
        size_t width;
        const char *dtype, *what;
    } kinds[] = {[KVC_OUT_HIDDEN] = {2, (size_t)j->config->dim, "f4", "hidden states"},
                 [KVC_OUT_NORMED] = {2, (size_t)j->config->dim, "f4", "hidden states"},
                 [KVC_OUT_LOGITS] = {2, (size_t)j->config->vocab_size, "f4", "logits"},
                 [KVC_OUT_ARGMAX] = {1, 1, "i4", "best ids"},
                 [KVC_OUT_LOGPROB] = {1, 1, "f4", "log-probabilities"}};
    kvc_output output = j->batch.output;
    if (output != KVC_OUT_NONE) {
        size_t shape[2] = {n_out, kinds[output].width};
        if (!py_array_new(j->state, &j->out, kinds[output].ndim, shape, kinds[output].dtype, 4,
                          kinds[output].what))
            return false;
        j->batch.out = j->out.view.buf;
    }
    if (j->batch.mass) {
        size_t shape[3] = {j->n, (size_t)j->config->n_layers, (size_t)j->config->n_heads};
        if (!py_array_new(j->state, &j->mass, 3, shape, "f8", sizeof(double), "attention mass"))
            return false;
        j->mass_request.mass = j->mass.view.buf;
    }
    return true;
}

static py_session *session_of(job *j, size_t i) {
    return (py_session *)PyTuple_GetItem(j->sessions, (Py_ssize_t)i);
}

/* Marks the workspace and every session; unclaim undoes as far as it came. */
static bool claim(job *j) {
    if (!py_idle(j->ws->busy, "workspace")) return false;
    j->ws->busy = j->claimed = true;
    for (size_t i = 0; i < j->n; i++) {
        py_session *session = session_of(j, i);
        for (size_t k = 0; session->busy && k < i; k++) {
            if (session_of(j, k) != session) continue;
            PyErr_Format(PyExc_ValueError, "row %zu: the session stands in row %zu already", i, k);
            return false;
        }
        if (!py_idle(session->busy, "session")) return false;
        session->busy = true;
        j->n_claimed = i + 1;
    }
    return true;
}

static void unclaim(job *j) {
    if (j->claimed) j->ws->busy = false;
    for (size_t i = 0; i < j->n_claimed; i++) session_of(j, i)->busy = false;
}

static bool run(job *j) {
    bool good = claim(j);
    if (good && j->n > 0) {
        kvc_error err = {KVC_OK, ""};
        py_poll_begin(&j->ws->poll);
        kvc_status status = kvc_forward(j->ws->ws, &j->batch, &err);
        py_poll_end(&j->ws->poll);
        if (status) py_raise(j->state, status, &err);
        good = !status;
    }
    unclaim(j);
    return good;
}

/* An array as a result, or None. */
static PyObject *result(py_array *a) {
    PyObject *array = py_array_take(a);
    return array ? array : Py_BuildValue("");
}

PyObject *py_workspace_forward(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"sessions", "tokens", "output", "outputs",   "targets",
                            "layers",   "slack",  "mass",   "mass_skip", NULL};
    arguments a = {
        .outputs = NULL, .targets = Py_None, .layers = Py_None, .slack = Py_None, .output = "none"};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$sOOOOzO:forward", names, &a.sessions,
                                     &a.tokens, &a.output, &a.outputs, &a.targets, &a.layers,
                                     &a.slack, &a.mass, &a.mass_skip))
        return NULL;
    PyObject *last = a.outputs ? NULL : PyUnicode_FromString("last");
    if (!a.outputs) a.outputs = last;
    job j = {.state = py_state_of(self), .ws = (py_workspace *)self};
    j.config = kvc_model_config(j.ws->model->model);
    bool good = a.outputs && read_settings(&j, &a) && open_rows(&j, &a);
    for (size_t i = 0; good && i < j.n; i++) good = read_tokens(&j, i);
    good = good && read_outputs(&j, &a) && read_targets(&j, &a) && read_slack(&j, &a) &&
           make_arrays(&j);
    if (good) {
        j.batch.rows = j.rows;
        j.batch.n_rows = j.n;
        good = run(&j);
    }
    PyObject *out = good ? result(&j.out) : NULL, *mass = good ? result(&j.mass) : NULL;
    Py_DecRef(last);
    release(&j);
    if (out && mass) return Py_BuildValue("(NN)", out, mass);
    Py_DecRef(out);
    Py_DecRef(mass);
    return NULL;
}
