/* SPDX-License-Identifier: MIT
 *
 * Probes: small programs that test a device. One tells whether the device can be used; two tell
 * whether it has instructions that kernels can do without. Verdicts are kept on disk beside the
 * programs, and a later process does not run a probe whose verdict it finds. The caller of each
 * function holds the device's build_lock. Only this room includes this header.
 */
#ifndef CLATTN_OPENCL_PROBE_H
#define CLATTN_OPENCL_PROBE_H

#include <stdbool.h>

#include "base/status.h"
#include "opencl/info.h"

/* Build kernels/probe/device.cl and run it once. CA_ERROR_DEVICE where it does not build
   or gives wrong results. Only a pass is kept on disk. */
ca_status ca_probe_device(ca_device *device, ca_error *error);

/* Build kernels/probe/ptx.cl on a device that has its instructions. If the driver refuses
   the program, take those capabilities from the device's info. */
void ca_probe_ptx(ca_device *device);

/* True if the device multiplies pairs of bfloat16: the processor has the instruction, the
   driver's compiler takes it (kernels/probe/pairs.cl), and the sums are right. */
bool ca_probe_pairs(ca_device *device);

#endif
