/* SPDX-License-Identifier: MIT
 *
 * Capabilities: what kernels use beyond OpenCL C 1.2, such as matrix units. A driver may report
 * more than its compiler makes right. So each capability is tried by itself, and its numbers are
 * compared. Only this room includes this header.
 */
#ifndef CLATTN_OPENCL_CAPABILITIES_H
#define CLATTN_OPENCL_CAPABILITIES_H

#include "opencl/info.h"

/* Run the program of each capability that the device reports and kernels would use. What fails is
   taken from the device's info, alone, and device->lacks says why. The caller holds the device's
   build_lock. */
void ca_probe_capabilities(ca_device *device);

#endif
