/* SPDX-License-Identifier: MIT */
#include "cl_launch.h"

#include <inttypes.h>
#include <stdio.h>

#include "cl_internal.h"
#include "cl_memory.h"
#include "cl_pending.h"

/* Name the kernel beside the call in a failure's message. */
static ca_status
error_set_call(ca_error *error, cl_int code, const char *call, const ca_device *device,
               const ca_kernel *kernel)
{
    char text[128];
    snprintf(text, sizeof text, "%s for kernel '%s'", call, kernel->spec.name);
    return ca_cl_error_set(error, code, text, device->info.name);
}

static ca_status
check_limits(const ca_device *device, const ca_step *step, int nspans, ca_error *error)
{
    const ca_device_info *info = &device->info;
    const char *name = step->kernel->spec.name;
    size_t most = step->kernel->work_group;
    if (nspans < 0 || nspans > CA_MAX_SPANS) {
        return ca_error_set(error, CA_ERROR_DEVICE,
                            "kernel '%s' is given %d arrays; at most %d can be bound",
                            name, nspans, CA_MAX_SPANS);
    }
    size_t parameters = step->params_size + (size_t)nspans * sizeof(void *);
    if (parameters > (uint64_t)info->max_parameter_size) {
        return ca_error_set(error, CA_ERROR_DEVICE,
                            "kernel '%s' is given %zu bytes of arguments; device '%s' "
                            "takes at most %" PRId64,
                            name, parameters, info->name, info->max_parameter_size);
    }
    if (step->local_size == 0 || step->local_size > most || step->global_size == 0 ||
        step->global_size % step->local_size != 0) {
        return ca_error_set(error, CA_ERROR_DEVICE,
                            "kernel '%s' is given %zu work-items in groups of %zu; "
                            "device '%s' takes whole groups of at most %zu",
                            name, step->global_size, step->local_size, info->name,
                            most);
    }
    return CA_OK;
}

/* *event is the kernel's, if wanted. */
static ca_status
enqueue_step(ca_device *device, cl_command_queue queue, const ca_step *step,
             const ca_binding *bindings, int nspans, cl_event *event, ca_error *error)
{
    ca_status status = CA_OK;
    const ca_cl *cl = device->cl;
    ca_kernel *kernel = step->kernel;
    CA_TRY(ca_memory_set(device, kernel, bindings, nspans, error));
    cl_int code = cl->clSetKernelArg(kernel->handle, (cl_uint)nspans, step->params_size,
                                     step->params);
    if (code != CL_SUCCESS) {
        CA_TRY(error_set_call(error, code, "clSetKernelArg", device, kernel));
    }
    code =
        cl->clEnqueueNDRangeKernel(queue, kernel->handle, 1, NULL, &step->global_size,
                                   &step->local_size, 0, NULL, event);
    if (code != CL_SUCCESS) {
        CA_TRY(error_set_call(error, code, "clEnqueueNDRangeKernel", device, kernel));
    }
done:
    return status;
}

/* The queue is in order, so the last one's event is that of all. */
static ca_status
enqueue_steps(ca_device *device, cl_command_queue queue, const ca_launch *launch,
              const ca_binding *bindings, cl_event *event, ca_error *error)
{
    ca_status status = CA_OK;
    for (int i = 0; i < launch->nsteps && status == CA_OK; i++) {
        bool last = i == launch->nsteps - 1;
        status = enqueue_step(device, queue, &launch->steps[i], bindings,
                              launch->nspans, last ? event : NULL, error);
    }
    return status;
}

static const ca_kernel *
last_kernel(const ca_launch *launch)
{
    return launch->steps[launch->nsteps - 1].kernel;
}

/* All commands of one launch, under the device's lock. After a failure the queue may
   still hold some of them. */
static ca_status
enqueue_all(ca_device *device, const ca_launch *launch, const ca_binding *bindings,
            cl_event *event, ca_error *error)
{
    ca_status status = CA_OK;
    int nspans = launch->nspans;
    bool fetches = ca_memory_fetches(device, bindings, nspans);
    CA_TRY(ca_memory_send(device, bindings, nspans, error));
    CA_TRY(enqueue_steps(device, device->queue, launch, bindings,
                         fetches ? NULL : event, error));
    if (fetches) {
        CA_TRY(ca_memory_fetch(device, bindings, nspans, event, error));
    }
    cl_int code = device->cl->clFlush(device->queue);
    if (code != CL_SUCCESS) {
        CA_TRY(error_set_call(error, code, "clFlush", device, last_kernel(launch)));
    }
done:
    return status;
}

/* Run the kernels, under the device's lock, in this thread. The queue's events are
   complete from the start, so there is nothing to wait for, and a failure is the
   enqueueing's. Other launches wait for the lock meanwhile, but no longer than a wake-up
   would take them. */
static ca_status
run_here(ca_device *device, const ca_launch *launch, const ca_binding *bindings,
         ca_error *error)
{
    return enqueue_steps(device, device->local_queue, launch, bindings, NULL, error);
}

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

/* Wait for the launch, and tell of those before it that failed. */
static ca_status
wait_for(ca_device *device, const ca_launch *launch, cl_event event, ca_error *error)
{
    const char *kernel = last_kernel(launch)->spec.name;
    const ca_pending_call call = {event, launch->call, kernel, NULL};
    cl_int code = device->cl->clWaitForEvents(1, &event);
    if (code != CL_SUCCESS) {
        device->cl->clFinish(device->queue);
    }
    ca_status status = ca_pending_check(device, error);
    return status == CA_OK && code != CL_SUCCESS
               ? ca_pending_failure(device, &call, code, error)
               : status;
}

static ca_status
launch_once(ca_device *device, const ca_launch *launch, ca_error *error)
{
    ca_status status = CA_OK;
    ca_binding bindings[CA_MAX_SPANS];
    int nbound = 0;
    cl_event event = NULL;
    for (int i = 0; i < launch->nsteps; i++) {
        CA_TRY(check_limits(device, &launch->steps[i], launch->nspans, error));
    }
    bool here = runs_here(device, launch);
    bool later = !here && runs_on(device, launch);
    nbound = launch->nspans;
    CA_TRY(ca_memory_bind(device, launch->spans, nbound, later, bindings, error));
    if (later) {
        ca_pending_make_room(device);
    }

    ca_mutex_lock(&device->lock);
    status = here ? run_here(device, launch, bindings, error)
                  : enqueue_all(device, launch, bindings, &event, error);
    if (status != CA_OK) {
        device->cl->clFinish(device->queue); /* some commands may be in flight */
    } else if (later) {
        const char *kernel = last_kernel(launch)->spec.name;
        const ca_pending_call call = {event, launch->call, kernel, NULL};
        ca_memory_set_ticket(bindings, nbound, ca_pending_add(device, &call));
        event = NULL;
    }
    ca_mutex_unlock(&device->lock);
    CA_TRY(status);
    if (event != NULL) {
        CA_TRY(wait_for(device, launch, event, error));
    }
done:
    if (event != NULL) {
        device->cl->clReleaseEvent(event);
    }
    ca_memory_release(device, bindings, nbound);
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
