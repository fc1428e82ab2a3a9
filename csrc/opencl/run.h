/* SPDX-License-Identifier: MIT
 *
 * A launch in one queue, from binding its memory to its results. Only cl_* files include
 * this header.
 */
#ifndef CLATTN_CL_RUN_H
#define CLATTN_CL_RUN_H

#include "opencl/internal.h"
#include "opencl/launch.h"
#include "opencl/memory.h"

typedef struct {
    ca_binding bindings[CA_MAX_SPANS];
    int nbound;
    cl_event event; /* of all its commands; NULL: nothing is under way */
    const char *call;
    const char *kernel; /* the last one */
} ca_run;

/* Can the device run the launch's kernels? */
ca_status ca_run_check(const ca_device *device, const ca_launch *launch,
                       ca_error *error);

/* A launch that is to be bound. */
void ca_run_init(ca_run *run, const ca_launch *launch);

/* Under the device's lock: set the arguments of the kernels and enqueue them. The queue
   is in order, so *event, if wanted, is the last one's. */
ca_status ca_run_steps(ca_device *device, cl_command_queue queue,
                       const ca_launch *launch, const ca_binding *bindings,
                       cl_event *event, ca_error *error);

/* Under the device's lock: enqueue all that follows the sending. After a failure the
   queue may still hold some of it. */
ca_status ca_run_enqueue(ca_device *device, const ca_launch *launch, ca_run *run,
                         ca_error *error);

/* Bind, send and enqueue, to be finished. After an error nothing is left of it. */
ca_status ca_run_begin(ca_device *device, const ca_launch *launch, ca_run *run,
                       ca_error *error);

/* Wait, bring the results, let go of it; tell of calls before it that failed, too. */
ca_status ca_run_finish(ca_device *device, ca_run *run, ca_error *error);

/* Let go of what is no longer in flight, or is left to run. */
void ca_run_forget(ca_device *device, ca_run *run);

#endif
