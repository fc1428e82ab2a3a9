/* SPDX-License-Identifier: MIT
 *
 * Exceptions. Only this file turns a ca_error into an exception.
 */
#ifndef CLATTN_PYTHON_ERROR_H
#define CLATTN_PYTHON_ERROR_H

#include "base/status.h"
#include "python/state.h"

/* Creates clattn.DeviceError and clattn._core.SettingError and adds them to the module. Returns -1
   with an exception. */
int ca_py_error_init(PyObject *module);

/* Returns 0 for CA_OK. Else raises the exception of the status, clears the error and returns -1.
   The exception of CA_ERROR_STOPPED is raised already. */
int ca_py_error_check(const ca_state *state, ca_status status, ca_error *error);

/* Work without the GIL. Long work looks for signals now and then. The handler of a signal may raise,
   as that of Ctrl-C does: the work then ends with CA_ERROR_STOPPED. A handler runs any code, so the
   calling thread must not hold a lock that a handler may wait for. */
typedef struct {
    PyThreadState *thread;
    ca_py_workers *workers;
    ca_error *error;
} ca_py_work;

/* Releases the GIL. The functions that do the work are given `error`. */
void ca_py_work_begin(ca_py_work *work, const ca_state *state, ca_error *error);

/* Takes the GIL again. When the interpreter ends, a thread other than the one that ends it does not
   return from here. */
void ca_py_work_end(ca_py_work *work);

/* Raises an exception with a message that PyErr_Format makes. Returns -1. */
int ca_py_raise(PyObject *type, const char *format, ...);

/* Returns repr(object) for a message, cut to fit, a new reference; NULL with an exception. Python
   refuses to print very long numbers: a text stands for them. */
PyObject *ca_py_repr(PyObject *object);

/* Raises "<name> is <repr of the object>; expected <expected>". Returns -1. */
int ca_py_refuse(PyObject *type, const char *name, PyObject *object, const char *expected);

#endif
