/* SPDX-License-Identifier: MIT
 *
 * Probes: small programs that test a device. One tells whether the device can be used, another
 * whether it multiplies pairs of bfloat16; capabilities.h has those of GPUs. Their verdicts are
 * kept on disk (verdict.h). The caller holds the device's build_lock, except in ca_probe_apart. Only
 * this room includes this header.
 */
#ifndef CLATTN_OPENCL_PROBE_H
#define CLATTN_OPENCL_PROBE_H

#include <stdbool.h>

#include "base/status.h"
#include "opencl/info.h"

/* Build kernels/probe/device.cl and run it once. CA_ERROR_KERNEL where it does not build
   or gives wrong results. Only a pass is kept on disk. */
ca_status ca_probe_device(ca_device *device, ca_error *error);

/* Build kernels/probe/loops.cl and run it once, if the driver is not known. CA_ERROR_KERNEL where it
   gives wrong results. Only a pass is kept on disk. */
ca_status ca_probe_loops(ca_device *device, ca_error *error);

/* Let another process make the device ready, if its driver is not known: ca_apart_try. The caller holds
   no lock. */
ca_status ca_probe_apart(ca_device *device, ca_error *error);

/* True if the device multiplies pairs of bfloat16: the processor has the instruction, the
   driver's compiler takes it (kernels/probe/pairs.cl), and the sums are right. */
bool ca_probe_pairs(ca_device *device);

/* True if kernels may use AMX: the processor has AMX, and the system allows its use. The
   function builds no program. If a compiler refuses the instructions of AMX, the kernels that have these
   instructions do not build, and other variants compute the calls. */
bool ca_may_use_amx(ca_device *device);

#endif
