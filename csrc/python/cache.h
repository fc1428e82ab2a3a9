/* SPDX-License-Identifier: MIT
 *
 * The type clattn._core.Cache, of which clattn.KVCache is made.
 */
#ifndef CLATTN_PYTHON_CACHE_H
#define CLATTN_PYTHON_CACHE_H

#include "python/state.h"

/* Creates the type and adds it to the module. Returns -1 with an exception. */
int ca_py_cache_init(PyObject *module);

#endif
