/* SPDX-License-Identifier: MIT
 *
 * Inputs that a call computes before it attends: present keys and values, and sums with an input bias
 * (kernels/attention/inputs.cl). The kernels that attend know neither.
 */
#ifndef CLATTN_ATTENTION_INPUTS_H
#define CLATTN_ATTENTION_INPUTS_H

#include <stdbool.h>

#include "attention/plan.h"
#include "attention/problem.h"
#include "base/status.h"
#include "opencl/info.h"    /* ca_device */
#include "opencl/storage.h" /* ca_storage */

typedef struct {
    ca_attention inputs;   /* what is computed first */
    ca_attention attended; /* what is left: its `inputs` are these */
    ca_storage *sums[3];   /* of query, key and value with the bias; NULL: none */
} ca_separated;

/* True if the problem has inputs that are computed first. */
bool ca_attention_has_inputs(const ca_attention *attention);

/* Separate the inputs from the problem. `attended` points to `inputs`, so the caller keeps the struct where
   it is. The caller releases the struct, also after an error. */
ca_status ca_attention_separate(ca_device *device, const ca_attention *attention,
                                ca_separated *separated, ca_error *error);

void ca_separated_release(ca_separated *separated);

/* Plan the kernel that computes the inputs. */
void ca_attention_plan_inputs(const ca_device_info *info, const ca_attention *inputs,
                              ca_attention_plan *plan);

#endif
