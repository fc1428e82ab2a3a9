/* SPDX-License-Identifier: MIT
 *
 * Copies within a device's memory.
 */
#ifndef CLATTN_DIAGONAL_COPY_H
#define CLATTN_DIAGONAL_COPY_H

#include "base/status.h"
#include "base/tensor.h"
#include "opencl/info.h"

/* Copies `from` to `to` for the function `call`. Both have the same dtype and shape and
   share no memory. No two elements of `to` share memory. If the host holds it, no other thread
   writes between its elements meanwhile. Waits only where ca_launch_run would. */
ca_status ca_copy_run(ca_device *device, const ca_tensor *from, const ca_tensor *to,
                      const char *call, ca_error *error);

#endif
