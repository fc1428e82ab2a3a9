/* SPDX-License-Identifier: MIT
 *
 * The module's OpenCL runtime, opened at first use, and how a call finds its device.
 */
#ifndef CLATTN_PYTHON_RUNTIME_H
#define CLATTN_PYTHON_RUNTIME_H

#include "python/state.h"

/* Creates the context variable of use_device and adds it to the module. Returns -1 with an
   exception. */
int ca_py_runtime_init(PyObject *module);

/* Checks that `argument` may name a device, without opening OpenCL. Returns -1 with a TypeError. */
int ca_py_check_device(ca_state *state, PyObject *argument);

/* Finds the device of a `device=` argument: a Device, words, or None for the default. Opens OpenCL
   at the first call. Returns -1 with an exception. */
int ca_py_find_device(ca_state *state, PyObject *argument, ca_device **device);

#endif
