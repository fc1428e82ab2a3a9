/* SPDX-License-Identifier: MIT
 *
 * Copies between arrays of the host and a device with memory of its own. A driver copies pinned
 * memory several times as fast as other memory, which it first copies itself, with one thread. Here
 * several threads copy an array to pinned memory and back, a chunk each, while the driver moves other
 * chunks.
 */
#ifndef CLATTN_OPENCL_STAGING_H
#define CLATTN_OPENCL_STAGING_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"
#include "opencl/device.h"

/* True if arrays of this size are copied faster here than by the driver alone. */
bool ca_staging_is_faster(const ca_device *device, size_t bytes);

/* Copy from or to the buffer, from `offset` on, behind all commands in the device's queue: by
   threads if that is faster, else by the driver. The source may change and the target is complete
   when these return. They report the failure of a call that nobody has waited for, if there is one. */
ca_status ca_staging_write(ca_device *device, cl_mem buffer, size_t offset, const void *source,
                           size_t bytes, ca_error *error);
ca_status ca_staging_read(ca_device *device, cl_mem buffer, size_t offset, void *target,
                          size_t bytes, ca_error *error);

/* Release the pinned memory. */
void ca_staging_close(ca_device *device);

#endif
