/* SPDX-License-Identifier: MIT
 *
 * The methods and types that python/module.c makes the module of, and macros for rows of methods.
 * Signatures and docstrings of the module's functions are Python's.
 */
#ifndef CLATTN_PYTHON_METHODS_H
#define CLATTN_PYTHON_METHODS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyType_Spec ca_py_device_spec;   /* python/device.c */
extern PyType_Spec ca_py_tensor_spec;   /* python/tensor_type.c */
extern PyType_Spec ca_py_cache_spec;    /* python/cache_type.c */
extern PyType_Spec ca_py_hold_spec;     /* python/pages.c */
extern PyType_Spec ca_py_producer_spec; /* python/dlpack_export.c */

extern PyMethodDef ca_py_runtime_methods[];  /* python/runtime.c */
extern PyMethodDef ca_py_loaders_methods[];  /* python/loaders.c */
extern PyMethodDef ca_py_end_methods[];      /* python/end.c */
extern PyMethodDef ca_py_device_methods[];   /* python/device.c */
extern PyMethodDef ca_py_memory_methods[];   /* python/memory.c */
extern PyMethodDef ca_py_torch_methods[];    /* python/torch.c */
extern PyMethodDef ca_py_backward_methods[]; /* python/backward.c */
extern PyMethodDef ca_py_varlen_methods[];   /* python/varlen.c */
extern PyMethodDef ca_py_diagonal_methods[]; /* python/diagonal.c */
extern PyMethodDef ca_py_onnx_methods[];     /* python/onnx.c */
extern PyMethodDef ca_py_scatter_methods[];  /* python/onnx_scatter.c */
extern PyMethodDef ca_py_openvino_methods[]; /* python/openvino.c */
extern PyMethodDef ca_py_directml_methods[]; /* python/directml.c */
extern PyMethodDef ca_py_forced_methods[];   /* python/forced.c */
extern PyMethodDef ca_py_tuning_methods[];   /* python/tuning.c */
extern PyMethodDef ca_py_mods_methods[];     /* python/mods.c */
extern PyMethodDef ca_py_trials_methods[];   /* python/trials.c */
extern PyMethodDef ca_py_pyopencl_methods[]; /* python/pyopencl.c */

/* The arguments of functions that take them by name, as texts; see python/arguments.h. */
extern const char *const ca_py_sdpa_arguments[];         /* python/torch.c */
extern const char *const ca_py_backward_arguments[];     /* python/backward.c */
extern const char *const ca_py_varlen_arguments[];       /* python/varlen.c */
extern const char *const ca_py_cache_attend_arguments[]; /* python/kv_cache.c */
extern const char *const ca_py_onnx_arguments[];         /* python/onnx.c */
extern const char *const ca_py_openvino_arguments[];     /* python/openvino.c */
extern const char *const ca_py_multihead_arguments[];    /* python/directml.c */
extern const char *const ca_py_diagonal_arguments[];     /* python/diagonal.c */

/* Function and flags of a row. FASTCALL: (self, args, nargs). NAMED: (self, args, nargs, names).
   KEYWORDS: (self, args, kwargs). */
#define CA_PY_FASTCALL(function) (PyCFunction)(void (*)(void))(function), METH_FASTCALL
#define CA_PY_NAMED(function) (PyCFunction)(void (*)(void))(function), METH_FASTCALL | METH_KEYWORDS
#define CA_PY_KEYWORDS(function)                                                                   \
    (PyCFunction)(void (*)(void))(function), METH_VARARGS | METH_KEYWORDS

#endif
