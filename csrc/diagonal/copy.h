/* SPDX-License-Identifier: MIT
 *
 * Copies within a device's memory.
 */
#ifndef CLATTN_OP_COPY_H
#define CLATTN_OP_COPY_H

#include "base/status.h"
#include "base/tensor.h"
#include "opencl/info.h"

/* Copy `from`, of the same dtype and shape, to `to`, which the device holds and no two
   elements of which share a place; for the function `call`. They share no memory. It is
   not waited for where a launch would not be (ca_launch_run). */
ca_status ca_copy_run(ca_device *device, const ca_tensor *from, const ca_tensor *to,
                      const char *call, ca_error *error);

#endif
