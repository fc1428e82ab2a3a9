/* SPDX-License-Identifier: MIT
 *
 * An attention problem and its plan as the struct that a kernel reads.
 */
#ifndef CLATTN_ATTENTION_DESCRIBE_H
#define CLATTN_ATTENTION_DESCRIBE_H

#include "attention/plan.h"
#include "attention/problem.h"
#include "kernels/attention/params.h"

ca_attention_params ca_attention_describe(const ca_attention *attention,
                                          const ca_attention_plan *plan);

#endif
