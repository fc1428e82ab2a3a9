/* SPDX-License-Identifier: MIT
 *
 * The operators as module functions; signatures and docstrings are Python's.
 */
#ifndef CLATTN_PY_OPS_H
#define CLATTN_PY_OPS_H

#include "python/state.h"

extern PyMethodDef ca_py_ops_methods[];      /* python/torch.c */
extern PyMethodDef ca_py_diagonal_methods[]; /* python/diagonal.c */
extern PyMethodDef ca_py_onnx_methods[];     /* python/onnx.c */
extern PyMethodDef ca_py_openvino_methods[]; /* python/openvino.c */
extern PyMethodDef ca_py_directml_methods[]; /* python/directml.c */
extern PyMethodDef ca_py_memory_methods[];   /* python/memory.c */

#endif
