/* SPDX-License-Identifier: MIT
 *
 * DirectML's operators as module functions.
 */
#ifndef CLATTN_PY_DIRECTML_H
#define CLATTN_PY_DIRECTML_H

#include "py_state.h"

extern PyMethodDef ca_py_directml_methods[];

#endif
