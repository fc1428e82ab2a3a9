/* SPDX-License-Identifier: MIT
 *
 * The methods of clattn._core.Cache for clattn.PagedKVCache; _core.pyi has their arguments.
 */
#ifndef CLATTN_PYTHON_PAGES_H
#define CLATTN_PYTHON_PAGES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

PyObject *ca_py_cache_count_rows(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *ca_py_cache_write_rows(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *ca_py_cache_copy_rows(PyObject *self, PyObject *moves);
PyObject *ca_py_cache_hold(PyObject *self, PyObject *const *args, Py_ssize_t nargs);

#endif
