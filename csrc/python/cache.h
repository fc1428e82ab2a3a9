/* SPDX-License-Identifier: MIT
 *
 * The type clattn._core.Cache, of which clattn.KVCache and clattn.PagedKVCache are made: Tensors of keys and
 * values, and who reads and changes them. python/kv_cache.c has the methods of the one, python/pages.c those of
 * the other, python/cache_type.c the type.
 */
#ifndef CLATTN_PYTHON_CACHE_H
#define CLATTN_PYTHON_CACHE_H

#include "doors/cache.h"
#include "python/call.h"
#include "python/lock.h"

/* The Tensors of a cache. A cache keeps the same ones. A Tensor of scales or offsets is None if rows have none. */
typedef enum {
    CA_PY_KEY,
    CA_PY_VALUE,
    CA_PY_KEY_SCALE,
    CA_PY_VALUE_SCALE,
    CA_PY_KEY_OFFSET,
    CA_PY_VALUE_OFFSET,
    CA_PY_CACHE_TENSORS,
} ca_py_cache_tensor;

/* Readers see a change of `cache` and `lengths` only when it is complete. */
typedef struct {
    PyObject_HEAD
    PyObject *module;
    PyObject *tensors[CA_PY_CACHE_TENSORS];
    ca_py_lock lock; /* its guard is that of `cache` and `lengths`, too */
    ca_cache cache;
    int64_t *lengths; /* B of them; cache.lengths is this or NULL */
} ca_py_cache;

/* Starts a call of the method `name` on the cache's device. The caller ends it by
   ca_py_call_end, also after a failure. */
int ca_py_cache_begin(ca_py_cache *self, ca_py_call *call, const char *name);

/* Copies the state of the cache. The caller frees *lengths with PyMem_RawFree; cache->lengths is the same memory,
   or NULL if all lengths are equal. Returns -1 with an exception. */
int ca_py_cache_look(ca_py_cache *self, ca_cache *cache, int64_t **lengths);

/* Reads new keys and values and checks their dtypes and shapes, of `ndim` dimensions. Rows that a launch cannot
   read where they lie are copied. Returns -1 with an exception. */
int ca_py_cache_rows(ca_py_cache *self, ca_py_call *call, PyObject *const args[2], int ndim,
                     ca_tensor *key, ca_tensor *value);

/* Writes keys and values (entries, Hk, n, size) to places (entries, n), without the GIL. */
ca_status ca_py_cache_write(ca_py_cache *self, const ca_py_call *call, const ca_tensor *key,
                            const ca_tensor *value, const int64_t *places, ca_error *error);

/* Copies rows of all Tensors of a cache to those of one that is alike, or to itself: see ca_rows_copy. Without the
   GIL. */
ca_status ca_py_cache_move(const ca_cache *from, const ca_cache *to, const ca_py_call *call,
                           const int64_t *moves, int64_t count, ca_error *error);

#endif
