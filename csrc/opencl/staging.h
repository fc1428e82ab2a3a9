/* SPDX-License-Identifier: MIT
 *
 * Copies between arrays of the host and a device with memory of its own. A driver moves pinned memory
 * several times as fast as other memory. Given an array in other memory, a driver lets one thread copy
 * the array to pinned memory first. This file copies with several threads. While a thread copies one
 * chunk of the array, the driver moves other chunks.
 */
#ifndef CLATTN_OPENCL_STAGING_H
#define CLATTN_OPENCL_STAGING_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"
#include "opencl/device.h"

/* Decide how many threads copy an array. */
void ca_staging_open(ca_device *device);

/* Returns whether threads copy an array of this size faster than the driver does. */
bool ca_staging_is_faster(const ca_device *device, size_t bytes);

/* Copy bytes of the host to the buffer, or bytes of the buffer to the host. The bytes of the buffer
   begin at `offset`. The copy comes after all commands in the device's queue. Threads make the copy if
   they are faster, else the driver does. When the function returns, the source may change, and the
   target is complete. If a copy fails because an earlier call has failed, the error is that of the
   call. */
ca_status ca_staging_write(ca_device *device, cl_mem buffer, size_t offset, const void *source,
                           size_t bytes, ca_error *error);
ca_status ca_staging_read(ca_device *device, cl_mem buffer, size_t offset, void *target,
                          size_t bytes, ca_error *error);

/* Release the pinned memory. */
void ca_staging_close(ca_device *device);

#endif
