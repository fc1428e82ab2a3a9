/* SPDX-License-Identifier: MIT
 *
 * What the kernels of the backward pass have in common: their steps share three numbers of each row.
 */
#ifndef CLATTN_ATTENTION_BACKWARD_STEPS_H
#define CLATTN_ATTENTION_BACKWARD_STEPS_H

#include <stdbool.h>
#include <stdint.h>

#include "attention/problem.h"

/* How a kernel divides a problem. */
typedef struct {
    int64_t parts;  /* of the keys of a head, each with a gradient of the queries */
    int64_t keys;   /* of a block, at most */
    int64_t stride; /* of the rows of sums that stay between the blocks; 0: there are none */
} ca_backward_division;

/* Make a problem of one step: its only result is `numbers`, base, sum and delta of each row. */
void ca_backward_start_step(const ca_attention *attention, const ca_operand *numbers,
                            ca_attention *step);

/* Make a problem of the step that computes these numbers from what the forward pass gave. */
void ca_backward_start_numbers(const ca_attention *attention, const ca_operand *numbers,
                               ca_attention *step);

/* True if the problem asks for the gradient of this role, which is summed over leading dimension d. */
bool ca_backward_is_summed(const ca_attention *attention, ca_attention_role role, int d);

/* Remove what only scores need. */
void ca_backward_remove_optional(ca_attention *step);

#endif
