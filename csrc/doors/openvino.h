/* SPDX-License-Identifier: MIT
 *
 * OpenVINO's ScaledDotProductAttention-13: its rules, and its arguments as attention problems.
 */
#ifndef CLATTN_DOORS_OPENVINO_H
#define CLATTN_DOORS_OPENVINO_H

#include <stdbool.h>
#include <stdint.h>

#include "attention/problem.h"
#include "base/status.h"
#include "base/tensor.h"

typedef struct {
    ca_tensor query;          /* (N, …, L, E) */
    ca_tensor key;            /* (N, …, S, E) */
    ca_tensor value;          /* (N, …, S, Ev) */
    ca_tensor attention_mask; /* (…, L, S); without dimensions: a scalar, or absent */
    double mask_value;        /* that of a scalar */
    bool causal;              /* j <= i; attention_mask is absent then */
    bool has_scale;           /* else 1/sqrt(E) */
    ca_tensor scale_array;    /* that scale comes from; absent: from a Python number */
    double scale;
} ca_openvino_sdpa;

/* Check every rule; the result's shape (N, …, L, Ev) is written to `shape`.
   CA_ERROR_TYPE or CA_ERROR_VALUE naming the argument. */
ca_status ca_openvino_sdpa_check(const ca_openvino_sdpa *call, int *ndim,
                                 int64_t shape[CA_MAX_DIMS], ca_error *error);

/* Set the options and views of the checked call, which are to be folded. `output` has the result's
   shape and is not empty. Strides cannot always say how batch dimensions repeat. Then the call is
   run in several turns: these are the views of turn `index`. Returns the number of turns. */
int64_t ca_openvino_sdpa_views(const ca_openvino_sdpa *call, const ca_tensor *output, int64_t index,
                               ca_attention *attention, ca_tensor views[CA_ATTENTION_OPERANDS]);

#endif
