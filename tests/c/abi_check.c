/* abi_check.c - csrc/py/abi.h against CPython's own headers; compiled, never linked.
 *
 * With -DWITH_PYTHON_H the real headers come first and abi.h declares its functions again: one
 * that differs does not compile. The layouts below must hold either way, so that compiling the
 * file both ways compares them. 64-bit, a build with the GIL.
 */
#ifdef WITH_PYTHON_H
#include <patchlevel.h>
#if PY_VERSION_HEX >= 0x030B0000
#define Py_LIMITED_API 0x030B0000 /* 3.10 has the buffers outside it */
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#if PY_VERSION_HEX >= 0x030D0000 /* there the names are "char *const *": the same to a machine */
#define PyArg_ParseTupleAndKeywords declared_with_char_const
#endif
#endif
#include "../../csrc/py/abi.h"

#define SAME(expression, value) _Static_assert((expression) == (value), #expression)
#define AT(type, field, offset) SAME(offsetof(type, field), offset)

SAME(sizeof(PyObject), 16);
AT(PyObject, ob_type, 8);
AT(PyMethodDef, ml_meth, 8);
AT(PyMethodDef, ml_flags, 16);
AT(PyMethodDef, ml_doc, 24);
SAME(sizeof(PyMethodDef), 32);
AT(PyGetSetDef, get, 8);
AT(PyGetSetDef, set, 16);
AT(PyGetSetDef, doc, 24);
AT(PyGetSetDef, closure, 32);
SAME(sizeof(PyGetSetDef), 40);
AT(PyType_Slot, pfunc, 8);
SAME(sizeof(PyType_Slot), 16);
AT(PyType_Spec, basicsize, 8);
AT(PyType_Spec, itemsize, 12);
AT(PyType_Spec, flags, 16);
AT(PyType_Spec, slots, 24);
SAME(sizeof(PyType_Spec), 32);
AT(PyModuleDef_Base, m_init, 16);
AT(PyModuleDef_Base, m_index, 24);
AT(PyModuleDef_Base, m_copy, 32);
AT(PyModuleDef, m_name, 40);
AT(PyModuleDef, m_size, 56);
AT(PyModuleDef, m_methods, 64);
AT(PyModuleDef, m_slots, 72);
AT(PyModuleDef, m_traverse, 80);
AT(PyModuleDef, m_clear, 88);
AT(PyModuleDef, m_free, 96);
SAME(sizeof(PyModuleDef), 104);
AT(Py_buffer, obj, 8);
AT(Py_buffer, len, 16);
AT(Py_buffer, readonly, 32);
AT(Py_buffer, ndim, 36);
AT(Py_buffer, format, 40);
AT(Py_buffer, shape, 48);
AT(Py_buffer, strides, 56);
AT(Py_buffer, internal, 72);
SAME(sizeof(Py_buffer), 80);

SAME(METH_VARARGS, 1);
SAME(METH_KEYWORDS, 2);
SAME(METH_NOARGS, 4);
SAME(METH_O, 8);
SAME(METH_CLASS, 16);
SAME(Py_tp_dealloc, 52);
SAME(Py_tp_doc, 56);
SAME(Py_tp_methods, 64);
SAME(Py_tp_new, 65);
SAME(Py_tp_getset, 73);
SAME(Py_mod_exec, 2);
SAME(Py_TPFLAGS_UNICODE_SUBCLASS, 1UL << 28);
SAME(PyBUF_WRITABLE, 0x0001);
SAME(PyBUF_C_CONTIGUOUS, 0x0038);
