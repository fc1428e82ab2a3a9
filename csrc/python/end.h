/* SPDX-License-Identifier: MIT
 *
 * Daemon threads may be in calls when the interpreter ends. Drivers then run exit handlers, which
 * free what these threads use. So the interpreter first waits until no thread uses OpenCL.
 */
#ifndef CLATTN_PYTHON_END_H
#define CLATTN_PYTHON_END_H

#include "python/state.h"

/* Adds to the module what the interpreter destroys when it ends. Returns -1 with an exception. */
int ca_py_end_init(PyObject *module);

/* Frees what ca_py_end_init has made. Called when the module is freed, and no thread is in a call. */
void ca_py_end_free(ca_state *state);

#endif
