/* SPDX-License-Identifier: MIT
 *
 * Launches: kernels enqueued together, on memory of the host and of the device.
 */
#ifndef CLATTN_OPENCL_LAUNCH_H
#define CLATTN_OPENCL_LAUNCH_H

#include "base/status.h"
#include "opencl/info.h"
#include "opencl/step.h"

/* CA_ERROR_SETTING if the launch would take too long (ca_runtime_open). Needs no spans yet. */
ca_status ca_launch_check(const ca_device *device, const ca_launch *launch, ca_error *error);

/* True if the launch, run now, would be left pending. Calls of other threads may change that. */
bool ca_launch_is_left(ca_device *device, const ca_launch *launch);

/* Run the launch: check the device's limits, bind the memory, enqueue the steps, and wait until the
   host can read the results. All steps together bind, send and fetch the memory once.

   The calling thread runs a small launch itself, where the device allows it. A launch that writes
   only to storages that are not shared is left pending; host arrays that it reads are copied first,
   unless they are large.

   A launch that takes more than about 0.1 s runs in pieces, some work-groups at a time, which give
   the same results. In between the caller may stop the launch (ca_error.stops); then the results
   are undefined. A launch that turns out to take too long ends as ca_launch_check says.

   If memory lacks, the launch runs once more. One that adds to its results does not, once a kernel may have run; an
   error of a kernel then is CA_ERROR_DEVICE, as no other kernel may take its place.

   Thread-safe: only arguments and enqueueing are under the device's lock. After an error nothing of
   the launch is bound or under way. */
ca_status ca_launch_run(ca_device *device, const ca_launch *launch, ca_error *error);

#endif
