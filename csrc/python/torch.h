/* SPDX-License-Identifier: MIT
 *
 * What scaled_dot_product_attention and KVCache.attend share: a checked call and its results.
 */
#ifndef CLATTN_PYTHON_TORCH_H
#define CLATTN_PYTHON_TORCH_H

#include "doors/cache.h"
#include "doors/torch.h"
#include "python/call.h"

/* What a call gives. */
typedef struct {
    PyObject *query; /* the argument, whose library the results are of */
    PyObject *out;   /* the argument; NULL: none */
    bool return_lse;
    bool only_check; /* give nothing but the shape of the output */
    bool splits_lse; /* as (2, …, Hq, L): base and sum of kernels/attention/params.h */
    bool rows_first; /* the output is (…, L, Hq, Ev) */
} ca_py_sdpa_results;

/* Runs the checked call, whose result has this shape (…, Hq, L, Ev), for arrays or for what the
   `cache` holds, which is NULL for arrays. Returns the output, or a tuple of output, log-sum-exp and
   weights, of which the last two may be missing; NULL with an exception. */
PyObject *ca_py_sdpa_run(const ca_py_call *call, const ca_torch_sdpa *sdpa, const ca_cache *cache,
                         const ca_py_sdpa_results *wanted, int ndim, const int64_t *shape);

#endif
