/* SPDX-License-Identifier: MIT
 *
 * The interpreter's end while daemon threads are in calls. Exit handlers of drivers tear down what
 * such a thread uses: so the interpreter first waits until no thread uses OpenCL.
 */
#ifndef CLATTN_PYTHON_END_H
#define CLATTN_PYTHON_END_H

#include "python/state.h"

/* Adds to the module what the interpreter destroys when it ends. Returns -1 with an exception. */
int ca_py_end_init(PyObject *module);

/* The module is freed: no thread is in a call. */
void ca_py_end_free(ca_state *state);

#endif
