/* SPDX-License-Identifier: MIT
 *
 * An attention problem and its plan as the struct that a kernel reads.
 */
#ifndef CLATTN_ATTENTION_DESCRIBE_H
#define CLATTN_ATTENTION_DESCRIBE_H

#include "attention/plan.h"
#include "attention/problem.h"
#include "kernels/attention/params.h"

/* Write what kernels read of the problem. What they read of a plan, and of a step, is 0. */
void ca_attention_describe(const ca_attention *attention, ca_attention_params *params);

/* Write what kernels read of the plan, into the params of its problem. */
void ca_attention_describe_plan(const ca_attention_plan *plan, ca_attention_params *params);

#endif
