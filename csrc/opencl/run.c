/* SPDX-License-Identifier: MIT */
#include "opencl/run.h"

#include <inttypes.h>
#include <stdio.h>

#include "opencl/pending.h"

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

ca_status
ca_run_check(const ca_device *device, const ca_launch *launch, ca_error *error)
{
    ca_status status = CA_OK;
    for (int i = 0; i < launch->nsteps && status == CA_OK; i++) {
        status = check_limits(device, &launch->steps[i], launch->nspans, error);
    }
    return status;
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

ca_status
ca_run_steps(ca_device *device, cl_command_queue queue, const ca_launch *launch,
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

ca_status
ca_run_enqueue(ca_device *device, const ca_launch *launch, ca_run *run, ca_error *error)
{
    ca_status status = CA_OK;
    bool fetches = ca_memory_fetches(device, run->bindings, run->nbound);
    CA_TRY(ca_run_steps(device, device->queue, launch, run->bindings,
                        fetches ? NULL : &run->event, error));
    if (fetches) {
        CA_TRY(ca_memory_fetch(device, run->bindings, run->nbound, &run->event, error));
    }
    cl_int code = device->cl->clFlush(device->queue);
    if (code != CL_SUCCESS) {
        CA_TRY(error_set_call(error, code, "clFlush", device, last_kernel(launch)));
    }
done:
    return status;
}

void
ca_run_init(ca_run *run, const ca_launch *launch)
{
    run->nbound = launch->nspans;
    run->event = NULL;
    run->call = launch->call;
    run->kernel = last_kernel(launch)->spec.name;
}

/* Wait for the launch, and tell of those before it that failed. */
static ca_status
wait_for(ca_device *device, const ca_run *run, ca_error *error)
{
    const ca_pending_call call = {run->event, run->call, run->kernel};
    cl_int code = device->cl->clWaitForEvents(1, &run->event);
    if (code != CL_SUCCESS) {
        device->cl->clFinish(device->queue);
    }
    ca_status status = ca_pending_check(device, error);
    return status == CA_OK && code != CL_SUCCESS
               ? ca_pending_failure(device, &call, code, error)
               : status;
}

void
ca_run_forget(ca_device *device, ca_run *run)
{
    if (run->event != NULL) {
        device->cl->clReleaseEvent(run->event);
        run->event = NULL;
    }
    ca_memory_release(device, run->bindings, run->nbound);
    run->nbound = 0;
}

ca_status
ca_run_begin(ca_device *device, const ca_launch *launch, ca_run *run, ca_error *error)
{
    ca_status status = CA_OK;
    ca_run_init(run, launch);
    CA_TRY(ca_memory_bind(device, launch->spans, run->nbound, false, run->bindings,
                          error));
    status = ca_memory_send(device, run->bindings, run->nbound, error);
    if (status == CA_OK) {
        ca_mutex_lock(&device->lock);
        status = ca_run_enqueue(device, launch, run, error);
        ca_mutex_unlock(&device->lock);
    }
    if (status != CA_OK) {
        device->cl->clFinish(device->queue); /* some commands may be in flight */
    }
done:
    if (status != CA_OK) {
        ca_run_forget(device, run);
    }
    return status;
}

ca_status
ca_run_finish(ca_device *device, ca_run *run, ca_error *error)
{
    ca_status status = wait_for(device, run, error);
    ca_run_forget(device, run);
    return status;
}
