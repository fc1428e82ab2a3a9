/* SPDX-License-Identifier: MIT
 *
 * The operators as module functions; signatures and docstrings are Python's.
 */
#ifndef CLATTN_PY_OPS_H
#define CLATTN_PY_OPS_H

#include "py_state.h"

extern PyMethodDef ca_py_ops_methods[];      /* py_ops.c */
extern PyMethodDef ca_py_diagonal_methods[]; /* py_diagonal.c */
extern PyMethodDef ca_py_onnx_methods[];     /* py_onnx.c */
extern PyMethodDef ca_py_openvino_methods[]; /* py_openvino.c */
extern PyMethodDef ca_py_directml_methods[]; /* py_directml.c */
extern PyMethodDef ca_py_peak_methods[];     /* py_peak.c */
extern PyMethodDef ca_py_memory_methods[];   /* py_memory.c */

#endif
