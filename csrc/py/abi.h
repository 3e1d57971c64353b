/* abi.h - the part of CPython's stable ABI that the binding uses, declared by hand.
 *
 * The stable ABI (abi3, CPython 3.10 on) is a promise about symbols and layouts, so a program may
 * declare them itself. That is what lets the package build where CPython's headers are not
 * installed: a distribution's python3 without its -dev package. There is one path only: this
 * header is used where Python.h exists, too. tests/c/abi_check.c includes both after one another,
 * and a declaration that differs does not compile.
 *
 * PyObject_GetBuffer, PyBuffer_Release and Py_buffer joined the stable ABI in 3.11; 3.10 has the
 * same symbols with the same layout. Nothing else here is younger than 3.10.
 */
#ifndef KVC_PY_ABI_H
#define KVC_PY_ABI_H

#include <stddef.h>
#include <stdint.h>

#ifndef Py_PYTHON_H

typedef ptrdiff_t Py_ssize_t;
typedef struct _object PyObject;
typedef struct _typeobject PyTypeObject;
typedef struct _ts PyThreadState;

struct _object {
    Py_ssize_t ob_refcnt;
    PyTypeObject *ob_type;
};

typedef PyObject *(*PyCFunction)(PyObject *, PyObject *);
typedef PyObject *(*PyCFunctionWithKeywords)(PyObject *, PyObject *, PyObject *);
typedef PyObject *(*getter)(PyObject *, void *);
typedef int (*setter)(PyObject *, PyObject *, void *);
typedef int (*visitproc)(PyObject *, void *);
typedef int (*traverseproc)(PyObject *, visitproc, void *);
typedef int (*inquiry)(PyObject *);
typedef void (*freefunc)(void *);

typedef struct PyMethodDef {
    const char *ml_name;
    PyCFunction ml_meth;
    int ml_flags;
    const char *ml_doc;
} PyMethodDef;

enum { METH_VARARGS = 1, METH_KEYWORDS = 2, METH_NOARGS = 4, METH_O = 8, METH_CLASS = 16 };

typedef struct PyGetSetDef {
    const char *name;
    getter get;
    setter set;
    const char *doc;
    void *closure;
} PyGetSetDef;

typedef struct PyType_Slot {
    int slot;
    void *pfunc;
} PyType_Slot;

typedef struct PyType_Spec {
    const char *name;
    int basicsize;
    int itemsize;
    unsigned int flags;
    PyType_Slot *slots;
} PyType_Spec;

enum { Py_tp_dealloc = 52, Py_tp_doc = 56, Py_tp_methods = 64, Py_tp_new = 65, Py_tp_getset = 73 };

#define Py_TPFLAGS_DISALLOW_INSTANTIATION (1UL << 7)
#define Py_TPFLAGS_IMMUTABLETYPE (1UL << 8)
#define Py_TPFLAGS_DEFAULT (1UL << 18)
#define Py_TPFLAGS_UNICODE_SUBCLASS (1UL << 28)

typedef struct PyModuleDef_Base {
    PyObject ob_base;
    PyObject *(*m_init)(void);
    Py_ssize_t m_index;
    PyObject *m_copy;
} PyModuleDef_Base;

typedef struct PyModuleDef_Slot {
    int slot;
    void *value;
} PyModuleDef_Slot;

typedef struct PyModuleDef {
    PyModuleDef_Base m_base;
    const char *m_name;
    const char *m_doc;
    Py_ssize_t m_size;
    PyMethodDef *m_methods;
    PyModuleDef_Slot *m_slots;
    traverseproc m_traverse;
    inquiry m_clear;
    freefunc m_free;
} PyModuleDef;

#define PyModuleDef_HEAD_INIT {{1, NULL}, NULL, 0, NULL}
#define Py_mod_exec 2

typedef struct Py_buffer {
    void *buf;
    PyObject *obj;
    Py_ssize_t len;
    Py_ssize_t itemsize;
    int readonly;
    int ndim;
    char *format;
    Py_ssize_t *shape;
    Py_ssize_t *strides;
    Py_ssize_t *suboffsets;
    void *internal;
} Py_buffer;

#define PyBUF_WRITABLE 0x0001
#define PyBUF_ND 0x0008
#define PyBUF_STRIDES (0x0010 | PyBUF_ND)
#define PyBUF_C_CONTIGUOUS (0x0020 | PyBUF_STRIDES)

#define Py_None (&_Py_NoneStruct)
#define Py_TYPE(object) (((PyObject *)(object))->ob_type)

#endif /* Py_PYTHON_H */

/* objects */
extern PyObject _Py_NoneStruct;
extern PyTypeObject PyBool_Type;
void Py_IncRef(PyObject *);
void Py_DecRef(PyObject *);
void PyObject_Free(void *);
PyObject *PyObject_GetAttrString(PyObject *, const char *);
int PyObject_HasAttrString(PyObject *, const char *);
PyObject *PyObject_CallMethod(PyObject *, const char *, const char *, ...);
PyObject *PyObject_GetIter(PyObject *);
PyObject *PyIter_Next(PyObject *);
int PyObject_IsTrue(PyObject *);

/* numbers and text */
PyObject *PyBool_FromLong(long);
PyObject *PyLong_FromLong(long);
PyObject *PyLong_FromLongLong(long long);
PyObject *PyLong_FromSize_t(size_t);
PyObject *PyLong_FromUnsignedLongLong(unsigned long long);
long long PyLong_AsLongLongAndOverflow(PyObject *, int *);
PyObject *PyNumber_Index(PyObject *);
PyObject *PyFloat_FromDouble(double);
double PyFloat_AsDouble(PyObject *);
PyObject *PyUnicode_FromString(const char *);
const char *PyUnicode_AsUTF8AndSize(PyObject *, Py_ssize_t *);

/* containers */
Py_ssize_t PyTuple_Size(PyObject *);
PyObject *PyTuple_GetItem(PyObject *, Py_ssize_t);
PyObject *PyTuple_New(Py_ssize_t);
int PyTuple_SetItem(PyObject *, Py_ssize_t, PyObject *);
PyObject *PyList_New(Py_ssize_t);
int PyList_SetItem(PyObject *, Py_ssize_t, PyObject *);
int PyList_Append(PyObject *, PyObject *);
PyObject *PyDict_New(void);
int PyDict_SetItemString(PyObject *, const char *, PyObject *);
PyObject *PySequence_Tuple(PyObject *);
PyObject *PyMapping_Items(PyObject *);
PyObject *PyMapping_GetItemString(PyObject *, const char *);
PyObject *Py_BuildValue(const char *, ...);

/* arguments and errors */
int PyArg_ParseTuple(PyObject *, const char *, ...);
int PyArg_ParseTupleAndKeywords(PyObject *, PyObject *, const char *, char **, ...);
extern PyObject *PyExc_KeyError;
extern PyObject *PyExc_MemoryError;
extern PyObject *PyExc_OSError;
extern PyObject *PyExc_RuntimeError;
extern PyObject *PyExc_TypeError;
extern PyObject *PyExc_ValueError;
void PyErr_SetString(PyObject *, const char *);
PyObject *PyErr_Format(PyObject *, const char *, ...);
PyObject *PyErr_NoMemory(void);
PyObject *PyErr_Occurred(void);
int PyErr_ExceptionMatches(PyObject *);
void PyErr_Clear(void);
int PyErr_CheckSignals(void);

/* types and modules */
PyObject *PyType_FromModuleAndSpec(PyObject *, PyType_Spec *, PyObject *);
PyObject *PyType_GenericAlloc(PyTypeObject *, Py_ssize_t);
unsigned long PyType_GetFlags(PyTypeObject *);
void *PyType_GetModuleState(PyTypeObject *);
PyObject *PyModuleDef_Init(PyModuleDef *);
void *PyModule_GetState(PyObject *);
int PyModule_AddType(PyObject *, PyTypeObject *);
int PyModule_AddStringConstant(PyObject *, const char *, const char *);
PyObject *PyImport_ImportModule(const char *);

/* buffers and threads */
int PyObject_GetBuffer(PyObject *, Py_buffer *, int);
void PyBuffer_Release(Py_buffer *);
PyThreadState *PyEval_SaveThread(void);
void PyEval_RestoreThread(PyThreadState *);

#endif
