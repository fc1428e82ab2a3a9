/* SPDX-License-Identifier: MIT
 *
 * The one place that turns a ca_error into a Python exception.
 */
#ifndef CLATTN_PY_ERROR_H
#define CLATTN_PY_ERROR_H

#include "base/status.h"
#include "python/state.h"

/* Create clattn.DeviceError and add it to the module. -1 with an exception set. */
int ca_py_error_init(PyObject *module);

/* 0 for CA_OK; else raise what `status` stands for with the error's words, clear the
   error and return -1. */
int ca_py_error_check(const ca_state *state, ca_status status, ca_error *error);

#endif
