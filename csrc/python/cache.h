/* SPDX-License-Identifier: MIT
 *
 * What clattn.KVCache is made of:
 *
 *     class Cache(key, value):                       two Tensors (B, Hk, capacity, size)
 *         append(key, value, counts)
 *         attend(query, attn_mask, is_causal, scale, window, softcap)
 *         truncate(n)                                python/cache_call.c
 *         renew_lock()
 *         key, value: Tensor
 *         length: int, lengths: tuple[int, …]        python/cache.c
 */
#ifndef CLATTN_PY_CACHE_H
#define CLATTN_PY_CACHE_H

#include "base/platform.h"
#include "doors/cache.h"
#include "python/state.h"

/* Changes of `cache` wait for each other; each shows at once, when it is complete. */
typedef struct {
    PyObject_HEAD
    PyObject *module;
    PyObject *key; /* Tensors, never replaced */
    PyObject *value;
    PyThread_type_lock changing; /* held from a change's check to its end */
    ca_mutex guard;              /* of `cache` and `lengths`, for an instant */
    ca_cache cache;
    int64_t *lengths; /* B of them; cache.lengths is this or NULL */
} ca_py_cache;

/* Create the type and add it to the module. -1 with an exception set. */
int ca_py_cache_init(PyObject *module);

/* The cache as it is now. Unequal lengths are copied, for PyMem_RawFree. -1 with an
   exception. */
int ca_py_cache_look(ca_py_cache *self, ca_cache *cache, int64_t **lengths);

PyObject *ca_py_cache_append(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *ca_py_cache_attend(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *ca_py_cache_truncate(PyObject *self, PyObject *n);

#endif
