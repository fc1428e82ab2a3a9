/* SPDX-License-Identifier: MIT
 *
 * What scaled_dot_product_attention and KVCache.attend share: a checked call and its results.
 */
#ifndef CLATTN_PYTHON_TORCH_H
#define CLATTN_PYTHON_TORCH_H

#include "doors/cache.h"
#include "doors/torch.h"
#include "python/call.h"

/* Runs the checked call, whose result has this shape, for arrays or for what the `cache` holds, which
   is NULL for arrays. `query` and `out` are the arguments; `out` NULL: none. Returns the output, or a
   tuple of output, log-sum-exp and weights, of which the last two may be missing; NULL with an
   exception. */
PyObject *ca_py_sdpa_run(const ca_py_call *call, const ca_torch_sdpa *sdpa, const ca_cache *cache,
                         PyObject *query, PyObject *out, int ndim, const int64_t *shape,
                         bool return_lse);

#endif
