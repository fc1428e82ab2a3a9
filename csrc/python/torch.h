/* SPDX-License-Identifier: MIT
 *
 * What scaled_dot_product_attention and KVCache.attend share: a checked call and its results.
 */
#ifndef CLATTN_PYTHON_TORCH_H
#define CLATTN_PYTHON_TORCH_H

#include "doors/cache.h"
#include "doors/torch.h"
#include "python/arguments.h"
#include "python/call.h"

/* The arguments that the forward and the backward pass share, as rows of python/arguments.h. attention.py
   and flex/attention.py explain each. Other rows come after these. */
#define CA_PY_SDPA_TAKEN(ROW, STAR)                                                                \
    ROW(QUERY, "query")                                                                            \
    ROW(KEY, "key")                                                                                \
    ROW(VALUE, "value")                                                                            \
    ROW(ATTN_MASK, "attn_mask=None")                                                               \
    ROW(DROPOUT_P, "dropout_p=0.0")                                                                \
    ROW(IS_CAUSAL, "is_causal=False")                                                              \
    ROW(SCALE, "scale=None")                                                                       \
    ROW(ENABLE_GQA, "enable_gqa=False")                                                            \
    STAR()                                                                                         \
    ROW(WINDOW, "window=None")                                                                     \
    ROW(SOFTCAP, "softcap=0.0")                                                                    \
    ROW(SEED, "seed=None")                                                                         \
    ROW(OUT, "out=None")                                                                           \
    ROW(DEVICE, "device=None")                                                                     \
    ROW(SINKS, "sinks=None")                                                                       \
    ROW(QUERY_OFFSET, "query_offset=0")                                                            \
    ROW(LAYOUT, "layout='BHLE'")                                                                   \
    ROW(MODS, "mods=None")                                                                         \
    ROW(BLOCK_MASK, "block_mask=None")

/* Reads these arguments, but for `out` and `device`. Key and value have the dtypes `keys`. The call has begun, and `sdpa`
   is initialised. The caller frees the mods in any case, whose `numbers` start as NULL. Returns -1 with an
   exception. */
int ca_py_sdpa_parse(PyObject *const *args, ca_py_call *call, ca_py_dtypes keys,
                     ca_torch_sdpa *sdpa, ca_mods *mods, bool *rows_first);

/* Checks the call, in whose views heads come before rows afterwards. Where the other layout would fit, the
   message says so, if `advises`. The result's shape is (…, Hq, L, Ev). */
ca_status ca_py_sdpa_check(ca_torch_sdpa *sdpa, bool rows_first, bool advises, int *ndim,
                           int64_t shape[CA_MAX_DIMS], ca_error *error);

/* View sinks, or their gradient, without dimensions of size 1, as (Hq,). */
void ca_py_flatten_sinks(const ca_tensor *sinks, ca_tensor *flat);

/* View (…, L, H, E) as (…, H, L, E), or the other way round. */
void ca_py_swap_heads(ca_tensor *tensor);

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
