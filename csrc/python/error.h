/* SPDX-License-Identifier: MIT
 *
 * Exceptions: the one place that turns a ca_error into one.
 */
#ifndef CLATTN_PYTHON_ERROR_H
#define CLATTN_PYTHON_ERROR_H

#include "base/status.h"
#include "python/state.h"

/* Creates clattn.DeviceError and adds it to the module. Returns -1 with an exception. */
int ca_py_error_init(PyObject *module);

/* Returns 0 for CA_OK. For another status: raises its exception with the error's words, clears the
   error and returns -1. */
int ca_py_error_check(const ca_state *state, ca_status status, ca_error *error);

/* Raises an exception with a message that PyErr_Format makes. Returns -1. */
int ca_py_raise(PyObject *type, const char *format, ...);

#endif
