/* SPDX-License-Identifier: MIT
 *
 * Rows that several work-groups have a part of the keys of: where each leaves what it
 * knows, and what its scores are relative to.
 */
#ifndef CLATTN_ATTENTION_PARTS_CL
#define CLATTN_ATTENTION_PARTS_CL

#include "common.cl"

/* What scores are taken relative to, given the highest: no -inf, as -inf - -inf is no
   number. */
static inline real
base_of(real highest)
{
    return highest == -INFINITY ? REAL(0.0) : highest;
}

/* Where a part leaves `size` reals of row i. */
static inline __global real *
partial_row(const attention_call *call, const ca_int64 *batch, ca_int64 i,
            ca_int64 split, int size)
{
    const ca_attention_params *params = call->params;
    ca_int64 row = 0;
    for (int n = 0; n < CA_BATCH_DIMS; n++) {
        row = row * params->batch[n] + batch[n];
    }
    row = row * params->L + i;
    return call->partial + (row * params->splits + split) * size;
}

#endif
