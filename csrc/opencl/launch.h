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
#include "opencl/marks.h" /* ca_mark */
#include "opencl/span.h"
#include "opencl/spec.h" /* ca_kernel */

#define CA_MAX_STEPS 3

/* One kernel. Arguments 0 to nspans - 1 are the launch's spans; argument nspans is a params
   struct by value. The range has one dimension. A step with work may run in pieces: its params begin
   with an int64, the first work-group of a piece, which is 0 here. */
typedef struct {
    ca_kernel *kernel;
    const void *params;
    size_t params_size;
    size_t global_size; /* work-items, a multiple of local_size */
    size_t local_size;
    double work; /* operations, or bytes; 0: little, or nobody knows */
} ca_step;

/* Kernels that run one after the other on the same memory. */
typedef struct {
    const ca_span *spans;
    int nspans;
    ca_step steps[CA_MAX_STEPS];
    int nsteps;
    bool small;          /* microseconds of work: waking other threads would take as long */
    const char *call;    /* the function that asks for it, for messages */
    const char *sizes;   /* of its arguments, for a message; NULL: none */
    const ca_mark *mark; /* of the call; NULL: its kernels do not look at marks */
    bool *left;          /* NULL, or becomes true if the launch is left pending, else false */
} ca_launch;

/* CA_ERROR_VALUE if the launch would take too long (ca_runtime_open). Needs no spans yet. */
ca_status ca_launch_check(const ca_device *device, const ca_launch *launch, ca_error *error);

/* Run the launch: check the device's limits, bind the memory, enqueue the steps, and wait until the
   host can read the results. All steps together bind, send and fetch the memory once.

   The calling thread runs a small launch itself, where the device allows it. A launch that writes
   only to storages that are not shared is left pending; host arrays that it reads are copied first,
   unless they are large.

   A launch that takes more than about 0.1 s runs in pieces, some work-groups at a time, which give
   the same results. In between the caller may stop the launch (ca_error.stops); then the results
   are undefined. A launch that turns out to take too long ends as ca_launch_check says.

   Thread-safe: only arguments and enqueueing are under the device's lock. After an error nothing of
   the launch is bound or under way. */
ca_status ca_launch_run(ca_device *device, const ca_launch *launch, ca_error *error);

#endif
