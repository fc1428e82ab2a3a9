/* SPDX-License-Identifier: MIT
 *
 * What tests force, by the environment variables CLATTN_KERNEL and CLATTN_LOCAL_MEMORY, or by a function in a running process.
 */
#ifndef CLATTN_PYTHON_FORCED_H
#define CLATTN_PYTHON_FORCED_H

#include "python/state.h"

/* Reads the variables. Returns -1 with a ValueError for unknown words. */
int ca_py_forced_by_environment(const ca_state *state, ca_forced *forced);

#endif
