/* SPDX-License-Identifier: MIT
 *
 * Which kernels a device has run lately, for tests: which kernel computes a call shows in no result.
 */
#ifndef CLATTN_OPENCL_LAUNCHED_H
#define CLATTN_OPENCL_LAUNCHED_H

#include "opencl/info.h" /* ca_device */
#include "opencl/spec.h"
#include "opencl/step.h" /* ca_launch */

typedef struct {
    const ca_kernel_spec *spec; /* lives as long as the device */
    size_t groups;              /* work-groups, of all pieces */
} ca_launched_step;

/* Under the device's lock: remember the steps of a launch, as this thread's. */
void ca_launched_add(ca_device *device, const ca_launch *launch);

/* Take the steps that this thread has launched since it asked last, in their order. Returns how many
   there are. Thread-safe. */
int ca_launched_take(ca_device *device, ca_launched_step steps[CA_MAX_LAUNCHED]);

#endif
