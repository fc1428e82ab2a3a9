/* SPDX-License-Identifier: MIT
 *
 * The methods of clattn._core.Cache for clattn.KVCache; _core.pyi has their arguments.
 */
#ifndef CLATTN_PYTHON_KV_CACHE_H
#define CLATTN_PYTHON_KV_CACHE_H

#include "python/arguments.h"

/* The arguments of `attend`, as rows of python/arguments.h. */
#define CA_PY_CACHE_ATTEND_TAKEN(ROW, STAR)                                                        \
    ROW(QUERY, "query")                                                                            \
    STAR()                                                                                         \
    ROW(ATTN_MASK, "attn_mask")                                                                    \
    ROW(IS_CAUSAL, "is_causal")                                                                    \
    ROW(SCALE, "scale")                                                                            \
    ROW(WINDOW, "window")                                                                          \
    ROW(SOFTCAP, "softcap")                                                                        \
    ROW(RETURN_LSE, "return_lse")                                                                  \
    ROW(OUT, "out")                                                                                \
    ROW(MODS, "mods")

PyObject *ca_py_cache_append(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *ca_py_cache_attend(PyObject *self, PyObject *const *given, Py_ssize_t count,
                             PyObject *names);
PyObject *ca_py_cache_truncate(PyObject *self, PyObject *n);
PyObject *ca_py_cache_reorder(PyObject *self, PyObject *indices);
PyObject *ca_py_cache_copy_from(PyObject *self, PyObject *cache);

#endif
