/* SPDX-License-Identifier: MIT
 *
 * The operators as module functions; signatures and docstrings are Python's.
 */
#ifndef CLATTN_PY_OPS_H
#define CLATTN_PY_OPS_H

#include "py_state.h"

extern PyMethodDef ca_py_ops_methods[];
extern PyMethodDef ca_py_openvino_methods[];

#endif
