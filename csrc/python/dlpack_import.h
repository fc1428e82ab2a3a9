/* SPDX-License-Identifier: MIT
 *
 * Arrays of other libraries, taken through DLPack.
 */
#ifndef CLATTN_PYTHON_DLPACK_IMPORT_H
#define CLATTN_PYTHON_DLPACK_IMPORT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

#include "base/dlpack.h"
#include "base/tensor.h"
#include "python/state.h"

typedef struct {
    ca_tensor tensor; /* its data may be misaligned */
    PyObject *owner;  /* a new reference that gives the memory back */
    bool read_only;
} ca_py_import;

/* Makes state->names. Returns -1 with an exception. */
int ca_py_dlpack_init(ca_state *state);

/* True if the object's type has __dlpack__ and __dlpack_device__. */
bool ca_py_has_dlpack(const ca_state *state, PyObject *object);

/* Replaces the exception that `source` of argument `name` raised by one of `type`. The new
   exception says that the argument cannot be read, and has the old one as its cause. A MemoryError
   and an exception that is no Exception stay. Returns -1. */
int ca_py_raise_from(PyObject *type, const char *name, PyObject *object, const char *source);

/* Returns the exchange functions of the object's type, or NULL without an exception. */
const ca_dlpack_exchange *ca_py_dlpack_exchange(const ca_state *state, PyObject *object);

/* Takes the host memory of `object`, argument `name`. Returns -1 with a TypeError or a ValueError
   that names the argument. */
int ca_py_dlpack_import(const ca_state *state, PyObject *object, const char *name,
                        ca_py_import *import);

#endif
