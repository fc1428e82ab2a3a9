/* SPDX-License-Identifier: MIT
 *
 * What the kernels of the backward pass have in common: their steps share three numbers of each row.
 */
#ifndef CLATTN_ATTENTION_BACKWARD_STEPS_H
#define CLATTN_ATTENTION_BACKWARD_STEPS_H

#include <stdbool.h>
#include <stdint.h>

#include "attention/launch.h"
#include "attention/problem.h"
#include "opencl/forced.h"
#include "opencl/info.h"

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

/* True if a kernel for GPUs is forced, by the variant in a row of the table; or if nothing is forced, the variant is
   not left out, and the device runs it fast. */
bool ca_backward_is_chosen(const ca_device_info *info, const ca_forced *forced, int variant,
                           const ca_attention *attention);

/* Start the plan of a step for GPUs, whose operands are set: the kernel's name, `threads` work-items of a group, and
   one for each entry of the leading dimensions that its gradients have. */
void ca_backward_begin_plan(const ca_device_info *info, const char *name, uint32_t step,
                            int64_t threads, ca_launched *launched);

/* Remove what only scores need. */
void ca_backward_remove_optional(ca_attention *step);

#endif
