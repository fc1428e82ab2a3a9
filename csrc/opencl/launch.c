/* SPDX-License-Identifier: MIT */
#include "opencl/launch.h"

#include "opencl/internal.h"
#include "opencl/pending.h"
#include "opencl/run.h"

/* Of what the host has, so much is copied before a launch that is left to run, where the
   device could read it as it lies; for more it is sooner waited for. */
#define COPIED_BYTES ((size_t)1 << 20)

/* May it be left to run? Nothing is written to the host's memory, or to what somebody
   else may be looking at. */
static bool
runs_on(const ca_device *device, const ca_launch *launch)
{
    size_t copied = 0;
    for (int i = 0; i < launch->nspans; i++) {
        const ca_span *span = &launch->spans[i];
        bool ours = span->block != NULL;
        if (span->bytes != 0 && (ours ? ca_storage_is_shared(ca_storage_of(span->block))
                                      : span->access != CA_ACCESS_READ)) {
            return false;
        }
        copied += ours ? 0 : span->bytes;
    }
    return copied <= COPIED_BYTES || !device->storage_is_host;
}

/* The queue whose commands run in this thread is not in order with the other one, so
   that has to be empty. */
static bool
runs_here(ca_device *device, const ca_launch *launch)
{
    if (!launch->small || device->local_queue == NULL) {
        return false;
    }
    ca_mutex_lock(&device->lock);
    bool empty = ca_pending_is_empty(device);
    ca_mutex_unlock(&device->lock);
    return empty;
}

static ca_status
launch_and_leave(ca_device *device, const ca_launch *launch, ca_error *error)
{
    ca_status status = CA_OK;
    ca_run run;
    ca_run_init(&run, launch);
    CA_TRY(
        ca_memory_bind(device, launch->spans, run.nbound, true, run.bindings, error));
    ca_pending_make_room(device);
    ca_mutex_lock(&device->lock);
    status = ca_run_enqueue(device, launch, &run, error);
    if (status != CA_OK) {
        device->cl->clFinish(device->queue);
    } else {
        const ca_pending_call call = {run.event, run.call, run.kernel};
        ca_memory_set_ticket(run.bindings, run.nbound, ca_pending_add(device, &call));
        run.event = NULL;
    }
    ca_mutex_unlock(&device->lock);
done:
    ca_run_forget(device, &run);
    return status;
}

/* Run the kernels, under the device's lock, in this thread. The queue's events are
   complete from the start, so there is nothing to wait for, and a failure is the
   enqueueing's. Other launches wait for the lock meanwhile, but no longer than a wake-up
   would take them. */
static ca_status
launch_here(ca_device *device, const ca_launch *launch, ca_error *error)
{
    ca_status status = CA_OK;
    ca_binding bindings[CA_MAX_SPANS];
    CA_TRY(
        ca_memory_bind(device, launch->spans, launch->nspans, false, bindings, error));
    ca_mutex_lock(&device->lock);
    status = ca_run_steps(device, device->local_queue, launch, bindings, NULL, error);
    ca_mutex_unlock(&device->lock);
done:
    ca_memory_release(device, bindings, launch->nspans);
    return status;
}

static ca_status
launch_once(ca_device *device, const ca_launch *launch, ca_error *error)
{
    ca_status status = CA_OK;
    CA_TRY(ca_run_check(device, launch, error));
    if (runs_here(device, launch)) {
        return launch_here(device, launch, error);
    }
    if (runs_on(device, launch)) {
        return launch_and_leave(device, launch, error);
    }
    ca_run run;
    CA_TRY(ca_run_begin(device, launch, &run, error));
    CA_TRY(ca_run_finish(device, &run, error));
done:
    return status;
}

ca_status
ca_launch_run(ca_device *device, const ca_launch *launch, ca_error *error)
{
    ca_status status = ca_device_check_fork(device, error);
    if (status == CA_OK) {
        status = launch_once(device, launch, error);
    }
    if (status == CA_ERROR_MEMORY) { /* some drivers allocate no sooner than here */
        ca_error_clear(error);
        ca_pool_empty(device);
        status = launch_once(device, launch, error);
    }
    return status;
}
