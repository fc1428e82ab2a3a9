/* SPDX-License-Identifier: MIT
 *
 * Run kernels on memory of the host and of the device.
 */
#ifndef CLATTN_CL_LAUNCH_H
#define CLATTN_CL_LAUNCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "base/tensor.h" /* ca_block */
#include "opencl/device.h"
#include "opencl/program.h"

typedef enum {
    CA_ACCESS_READ,
    CA_ACCESS_WRITE,  /* the kernel writes every byte of it */
    CA_ACCESS_UPDATE, /* it writes some and leaves the others as they are */
} ca_access;

/* Memory behind one __global argument of every kernel. bytes == 0: the argument is NULL. */
typedef struct {
    void *data;
    size_t bytes;
    ca_access access;
    ca_block *block; /* of a storage, all of which it is; NULL: host memory */
} ca_span;

#define CA_MAX_SPANS 16

#define CA_MAX_STEPS 3

/* One kernel. Arguments 0 … nspans-1 are the launch's spans; argument nspans is a params
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
    bool small; /* microseconds of work: waking other threads would take as long */
    const char *call; /* the function it is done for, should it fail later */
} ca_launch;

/* Check the device's limits, bind the memory, enqueue, wait, make results visible to
   the host: all once, whatever the number of steps. Thread-safe: arguments and
   enqueueing happen under the device's lock, waiting is outside it. A small launch is run by the calling thread where the
   device lets it. A launch that writes only to storages, of which none is shared, is
   not waited for; what it reads of the host's is copied first, if it is not much. After
   an error nothing is left bound, and in flight only what was before. */
ca_status ca_launch_run(ca_device *device, const ca_launch *launch, ca_error *error);

#endif
