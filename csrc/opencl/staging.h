/* SPDX-License-Identifier: MIT
 *
 * Copies between the host's memory and that of a device by way of pinned memory, which
 * the device reads and writes itself. Only cl_* files include this header.
 *
 * Of each device there are two pieces of pinned memory, made at first use: a ring for
 * what is sent and one for what is fetched. Where none can be had, the driver copies
 * from where the data lie. Neither function is called under the device's lock.
 */
#ifndef CLATTN_CL_STAGING_H
#define CLATTN_CL_STAGING_H

#include <stddef.h>

#include "opencl/internal.h"

/* A smaller copy, which is waited for anyway, gains nothing by it. */
#define CA_STAGED_BYTES ((size_t)256 << 10)

/* Copy to the storage from `offset` on, in that queue. The bytes are taken at once, and
   arrive later: these are pending calls of the function `call`. After a failure some of
   them may be under way. */
ca_status ca_staging_write(ca_storage *storage, cl_command_queue queue, size_t offset,
                           const void *source, size_t bytes, const char *call,
                           ca_error *error);

/* Copy from the storage, which no call under way writes to, and wait. */
ca_status ca_staging_read(ca_storage *storage, cl_command_queue queue, size_t offset,
                          void *target, size_t bytes, ca_error *error);

/* Give the pinned memory back; waits for what uses it. */
void ca_staging_free(ca_device *device);

#endif
