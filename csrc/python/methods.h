/* SPDX-License-Identifier: MIT
 *
 * Tables of Python methods: those that python/module.c adds to the module, and macros for
 * the rows of any table. Signatures and docstrings of module functions are Python's.
 */
#ifndef CLATTN_PYTHON_METHODS_H
#define CLATTN_PYTHON_METHODS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyMethodDef ca_py_runtime_methods[];  /* python/runtime.c */
extern PyMethodDef ca_py_memory_methods[];   /* python/memory.c */
extern PyMethodDef ca_py_torch_methods[];    /* python/torch.c */
extern PyMethodDef ca_py_diagonal_methods[]; /* python/diagonal.c */
extern PyMethodDef ca_py_onnx_methods[];     /* python/onnx.c */
extern PyMethodDef ca_py_openvino_methods[]; /* python/openvino.c */
extern PyMethodDef ca_py_directml_methods[]; /* python/directml.c */
extern PyMethodDef ca_py_forced_methods[];   /* python/forced.c */

/* Function and flags of a row. FASTCALL: (self, args, nargs). KEYWORDS: (self, args,
   kwargs). */
#define CA_PY_FASTCALL(function) (PyCFunction)(void (*)(void))(function), METH_FASTCALL
#define CA_PY_KEYWORDS(function)                                                                   \
    (PyCFunction)(void (*)(void))(function), METH_VARARGS | METH_KEYWORDS

#endif
