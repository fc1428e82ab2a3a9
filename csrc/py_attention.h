/* SPDX-License-Identifier: MIT
 *
 * What the front doors do alike once their arguments are checked.
 */
#ifndef CLATTN_PY_ATTENTION_H
#define CLATTN_PY_ATTENTION_H

#include "op_attention.h"
#include "py_state.h"

/* Check that a function got as many arguments as it takes. -1 with a TypeError. */
int ca_py_check_count(Py_ssize_t given, int expected);

/* Check what can be checked before the arrays: the device argument and CLATTN_KERNEL,
   by which tests force a kernel. -1 with an exception set. */
int ca_py_check_device_and_kernel(ca_state *state, PyObject *device_argument,
                                  ca_variant *variant);

/* Find the device that `device_argument` stands for and run there; problems without
   work need no device. -1 with an exception set. */
int ca_py_run_attention(ca_state *state, PyObject *device_argument, ca_variant variant,
                        ca_attention *attention);

#endif
