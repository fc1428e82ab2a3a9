/* SPDX-License-Identifier: MIT
 *
 * Functions and classes of Python modules, which are imported when they are needed.
 */
#ifndef CLATTN_PYTHON_IMPORTS_H
#define CLATTN_PYTHON_IMPORTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Returns module.name, a new reference; NULL with an exception. */
PyObject *ca_py_import_from(const char *module, const char *name);

/* Calls module.name. The arguments are those of Py_BuildValue, whose `format` makes a tuple: "(Os)".
   Returns the result, a new reference; NULL with an exception. */
PyObject *ca_py_call_from(const char *module, const char *name, const char *format, ...);

#endif
