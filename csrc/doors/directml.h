/* SPDX-License-Identifier: MIT
 *
 * DirectML's DML_MULTIHEAD_ATTENTION_OPERATOR_DESC: its rules, and its tensors as an
 * attention problem.
 */
#ifndef CLATTN_DOORS_DIRECTML_H
#define CLATTN_DOORS_DIRECTML_H

#include <stdint.h>

#include "attention/problem.h" /* ca_attention */
#include "base/status.h"
#include "base/tensor.h"
#include "doors/directml_tensors.h" /* ca_directml_attention */

/* Which tensors hold the inputs, and the shapes of results and scores. */
typedef struct {
    ca_directml_tensor sources[3]; /* of query, key and value */
    int output_ndim;
    int64_t output[CA_DIRECTML_MAX_DIMS]; /* (…, B, L, H * Ev) */
    int64_t present_key[4];               /* (B, H, T, E), T = P + S */
    int64_t present_value[4];             /* (B, H, T, Ev) */
    int64_t scores[4];                    /* (B, H, L, T) */
} ca_directml_shapes;

/* Check every rule. CA_ERROR_TYPE or CA_ERROR_VALUE naming the argument. */
ca_status ca_directml_attention_check(const ca_directml_attention *call, ca_directml_shapes *shapes,
                                      ca_error *error);

/* Set the options and views of the checked call, which are to be folded. The results have the
   shapes given; both present ones may be absent. *scratch is memory that the views refer to, to be
   freed after the call; NULL after CA_ERROR_MEMORY. */
ca_status ca_directml_attention_views(const ca_directml_attention *call,
                                      const ca_directml_shapes *shapes, const ca_tensor *output,
                                      const ca_tensor *present_key, const ca_tensor *present_value,
                                      ca_attention *attention,
                                      ca_tensor views[CA_ATTENTION_OPERANDS], void **scratch,
                                      ca_error *error);

#endif
