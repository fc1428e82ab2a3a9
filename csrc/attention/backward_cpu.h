/* SPDX-License-Identifier: MIT
 *
 * The kernel attention/cpu_backward.cl: numbers of rows, and the gradients of query, key and value.
 */
#ifndef CLATTN_ATTENTION_BACKWARD_CPU_H
#define CLATTN_ATTENTION_BACKWARD_CPU_H

#include <stdbool.h>

#include "attention/backward_steps.h"
#include "attention/launch.h"
#include "attention/problem.h"
#include "opencl/forced.h"
#include "opencl/info.h"

/* True if the kernel takes the problem, and the device runs it fast. */
bool ca_backward_cpu_takes(const ca_device_info *info, const ca_forced *forced,
                           const ca_attention *attention);

ca_backward_division ca_backward_cpu_divide(const ca_device_info *info,
                                            const ca_attention *attention);

/* Plan its steps. `sums` are (parts * rows, stride), or absent. Returns how many steps there are. */
int ca_backward_cpu_plan(const ca_device_info *info, const ca_attention *attention,
                         const ca_backward_division *division, const ca_operand *numbers,
                         const ca_operand *sums, ca_launched *steps);

/* Plan a step of an array that a score_mod reads, whose operands are set: `copies` of the gradient for each of
   `groups` of rows. */
void ca_backward_cpu_plan_captured(const ca_device_info *info, const ca_backward_division *division,
                                   uint32_t gradient, int64_t groups, int64_t copies,
                                   ca_launched *launched);

#endif
