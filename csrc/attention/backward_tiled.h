/* SPDX-License-Identifier: MIT
 *
 * The kernel attention/tiled_backward.cl, for GPUs: numbers of rows, and the gradients of query, key and value.
 */
#ifndef CLATTN_ATTENTION_BACKWARD_TILED_H
#define CLATTN_ATTENTION_BACKWARD_TILED_H

#include <stdbool.h>

#include "attention/backward_steps.h"
#include "attention/launch.h"
#include "attention/problem.h"
#include "opencl/forced.h"
#include "opencl/info.h"

/* True if steps of tiles fit the problem and the device. */
bool ca_backward_tiles_fit(const ca_device_info *info, const ca_attention *attention);

/* Plan a step whose operands are set, of the gradients of `length` rows or keys. */
typedef void ca_backward_plan_step(const ca_device_info *info, uint32_t step, int64_t length,
                                   ca_launched *launched);

/* Plan the numbers of rows by tiles, and steps for the gradients of query, key and value. Returns how many there
   are. */
int ca_backward_plan_steps(const ca_device_info *info, const ca_attention *attention,
                           const ca_operand *numbers, ca_backward_plan_step *plan_step,
                           ca_launched *steps);

/* True if the kernel takes the problem, and the device runs it fast. */
bool ca_backward_tiled_takes(const ca_device_info *info, const ca_forced *forced,
                             const ca_attention *attention);

/* No sums stay between steps. */
ca_backward_division ca_backward_tiled_divide(const ca_device_info *info,
                                              const ca_attention *attention);

/* Plan its steps. Returns how many there are. */
int ca_backward_tiled_plan(const ca_device_info *info, const ca_attention *attention,
                           const ca_backward_division *division, const ca_operand *numbers,
                           const ca_operand *sums, ca_launched *steps);

#endif
