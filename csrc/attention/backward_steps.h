/* SPDX-License-Identifier: MIT
 *
 * What the kernels of the backward pass have in common: their steps share three numbers of each row.
 */
#ifndef CLATTN_ATTENTION_BACKWARD_STEPS_H
#define CLATTN_ATTENTION_BACKWARD_STEPS_H

#include "attention/problem.h"

/* Make a problem of one step: its only result is `numbers`, base, sum and delta of each row. */
void ca_backward_start_step(const ca_attention *attention, const ca_operand *numbers,
                            ca_attention *step);

/* Remove what only scores need. */
void ca_backward_remove_optional(ca_attention *step);

#endif
