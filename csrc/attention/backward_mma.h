/* SPDX-License-Identifier: MIT
 *
 * The kernel attention/mma_backward.cl, for devices with matrix units: the gradients of query, key and value of half
 * types. Numbers of rows are left to attention/tiled_backward.cl.
 */
#ifndef CLATTN_ATTENTION_BACKWARD_MMA_H
#define CLATTN_ATTENTION_BACKWARD_MMA_H

#include <stdbool.h>

#include "attention/backward_steps.h"
#include "attention/launch.h"
#include "attention/problem.h"
#include "opencl/forced.h"
#include "opencl/info.h"

/* True if the kernel takes the problem, and the device runs it fast. */
bool ca_backward_mma_takes(const ca_device_info *info, const ca_forced *forced,
                           const ca_attention *attention);

/* Plan its steps. Returns how many there are. */
int ca_backward_mma_plan(const ca_device_info *info, const ca_attention *attention,
                         const ca_backward_division *division, const ca_operand *numbers,
                         const ca_operand *sums, ca_launched *steps);

#endif
