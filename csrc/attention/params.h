/* SPDX-License-Identifier: MIT
 *
 * An attention problem as what a kernel is told: folded leading dimensions, memory
 * ranges, the parameter struct.
 */
#ifndef CLATTN_OP_ATTENTION_PARAMS_H
#define CLATTN_OP_ATTENTION_PARAMS_H

#include "attention/problem.h"
#include "base/fold.h" /* ca_leading_dims */
#include "kernels/attention/params.h"

/* The leading dimensions, folded, and each tensor's strides along them. */
void ca_attention_fold(const ca_attention *attention, ca_leading_dims *dims);

/* Dimensions of a tensor after the leading ones: 2, 1 or 0. */
int ca_attention_trailing(ca_attention_tensor t);

/* P */
int64_t ca_attention_past_keys(const ca_attention *attention);

/* T, past and new ones. */
int64_t ca_attention_keys(const ca_attention *attention);

/* Bytes of a key and its value. */
int64_t ca_attention_key_bytes(const ca_attention *attention);

/* Do keys and values of one head come from memory, not from a cache, for each tile of
   rows anew? */
bool ca_attention_keys_are_far(const ca_attention *attention);

/* True for what a kernel writes. */
bool ca_attention_is_result(ca_attention_tensor t);

/* `dims` has at most CA_BATCH_DIMS dimensions. first_row is dropout's number of the
   first row. */
ca_attention_params ca_attention_describe(const ca_attention *attention,
                                          const ca_extent *extents,
                                          const ca_leading_dims *dims,
                                          int64_t first_row);

#endif
