/* SPDX-License-Identifier: MIT
 *
 * Launches: kernels enqueued together, on memory of the host and of the device.
 */
#ifndef CLATTN_OPENCL_LAUNCH_H
#define CLATTN_OPENCL_LAUNCH_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"
#include "opencl/info.h"
#include "opencl/span.h"
#include "opencl/spec.h" /* ca_kernel */

#define CA_MAX_STEPS 3

/* One kernel. Arguments 0 to nspans - 1 are the launch's spans; argument nspans is a params
   struct by value. The range has one dimension. */
typedef struct {
    ca_kernel *kernel;
    const void *params;
    size_t params_size;
    size_t global_size; /* work-items, a multiple of local_size */
    size_t local_size;
} ca_step;

/* Kernels that run one after the other on the same memory. */
typedef struct {
    const ca_span *spans;
    int nspans;
    ca_step steps[CA_MAX_STEPS];
    int nsteps;
    bool small;       /* microseconds of work: waking other threads would take as long */
    const char *call; /* the function that asks for it, for messages */
    bool *left;       /* NULL, or becomes true if the launch is left pending, else false */
} ca_launch;

/* Run the launch: check the device's limits, bind the memory, enqueue the steps, and wait until the
   host can read the results. All steps together bind, send and fetch the memory once.

   The calling thread runs a small launch itself, where the device allows it. A launch that writes
   only to storages that are not shared is left pending; host arrays that it reads are copied first,
   unless they are large.

   Thread-safe: only arguments and enqueueing are under the device's lock. After an error nothing of
   the launch is bound or under way. */
ca_status ca_launch_run(ca_device *device, const ca_launch *launch, ca_error *error);

#endif
