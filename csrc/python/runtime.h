/* SPDX-License-Identifier: MIT
 *
 * The module's OpenCL runtime, opened at first use, and how a call finds its device.
 */
#ifndef CLATTN_PY_RUNTIME_H
#define CLATTN_PY_RUNTIME_H

#include "python/state.h"

/* Create the context variable of use_device and add it. -1 with an exception set. */
int ca_py_runtime_init(PyObject *module);

/* Check that `argument` may name a device, without opening anything. -1 with a
   TypeError. */
int ca_py_check_device(ca_state *state, PyObject *argument);

/* The device that a `device=` argument stands for: a Device, words, or None for the
   default. Opens OpenCL at the first call. -1 with an exception set. */
int ca_py_find_device(ca_state *state, PyObject *argument, ca_device **device);

#endif
