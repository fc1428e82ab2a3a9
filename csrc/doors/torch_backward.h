/* SPDX-License-Identifier: MIT
 *
 * The backward pass of torch's attention: its rules, and its arguments as an attention problem.
 */
#ifndef CLATTN_DOORS_TORCH_BACKWARD_H
#define CLATTN_DOORS_TORCH_BACKWARD_H

#include "doors/torch.h"

/* The gradients that a call gives, in this order. */
typedef enum {
    CA_GRADIENT_QUERY,
    CA_GRADIENT_KEY,
    CA_GRADIENT_VALUE,
    CA_GRADIENT_MASK,
    CA_GRADIENT_SINKS,
    CA_GRADIENTS,
} ca_gradient;

/* What the backward pass takes beside the arguments of the forward pass. */
typedef struct {
    ca_tensor grad_output; /* (…, Hq, L, Ev) */
    ca_tensor output;      /* that the forward pass gave, of the same shape */
    ca_tensor lse;         /* that the forward pass gave, (…, Hq, L) */
    ca_tensor grad_lse;    /* of the same shape; data NULL: zeros */
} ca_torch_backward;

/* Check these arguments of a checked call, whose result has this shape. CA_ERROR_TYPE or CA_ERROR_VALUE
   naming the argument. */
ca_status ca_torch_backward_check(const ca_torch_sdpa *call, const ca_torch_backward *backward,
                                  int ndim, const int64_t *shape, ca_error *error);

/* Set the options and views of the checked call, which are to be folded. `gradients` have the shapes of
   what they belong to; those with data NULL are not wanted. Keys and values have heads before rows. */
void ca_torch_backward_views(const ca_torch_sdpa *call, const ca_torch_backward *backward,
                             const ca_tensor gradients[CA_GRADIENTS], ca_attention *attention,
                             ca_tensor views[CA_ATTENTION_OPERANDS]);

#endif
