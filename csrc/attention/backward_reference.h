/* SPDX-License-Identifier: MIT
 *
 * The steps of the kernel attention/backward.cl, which computes gradients of any problem on any device.
 */
#ifndef CLATTN_ATTENTION_BACKWARD_REFERENCE_H
#define CLATTN_ATTENTION_BACKWARD_REFERENCE_H

#include <stdbool.h>
#include <stdint.h>

#include "attention/launch.h"
#include "attention/problem.h"
#include "opencl/info.h"

/* Plan the steps that compute the numbers of rows. Returns how many there are. */
int ca_backward_reference_plan_rows(const ca_device_info *info, const ca_attention *attention,
                                    const ca_operand *numbers, ca_launched *steps);

/* Plan a step for each gradient of these that has elements. Returns how many there are. */
int ca_backward_reference_plan(const ca_device_info *info, const ca_attention *attention,
                               const ca_operand *numbers, bool (*is_chosen)(ca_attention_role role),
                               ca_launched *steps);

/* Plan a step of an array that a score_mod reads, whose operands are set: rows * columns work-items, and
   `copies` of the gradient. */
void ca_backward_reference_plan_captured(const ca_device_info *info, ca_launched *launched,
                                         int products, int64_t copies, uint32_t gradient,
                                         int64_t rows, int64_t columns);

#endif
