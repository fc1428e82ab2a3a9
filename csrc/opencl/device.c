/* SPDX-License-Identifier: MIT */
#include "opencl/device.h"

ca_status
ca_check_fork(const ca_fork_guard *guard, ca_error *error)
{
    if (!ca_fork_guard_is_child(guard)) {
        return CA_OK;
    }
    return ca_error_set(
        error, CA_ERROR_DEVICE,
        "OpenCL was opened before this process was forked, and does not survive that; use the "
        "'spawn' start method, or make the first clattn call in the child");
}

ca_status
ca_device_check_fork(const ca_device *device, ca_error *error)
{
    return ca_check_fork(device->fork_guard, error);
}

bool
ca_device_has_memory(const ca_device *device, ca_memory_mode mode)
{
    const bool has[] = {
        [CA_MEMORY_SVM] = device->system_svm,
        [CA_MEMORY_HOST_PTR] = device->shares_memory,
        [CA_MEMORY_COPY] = true,
    };
    return has[mode];
}

void
ca_device_set_memory(ca_device *device, ca_memory_mode mode)
{
    while (!ca_device_has_memory(device, mode) && !device->memory_is_given) {
        mode++;
    }
    device->info.memory = mode;
    device->storage_is_host =
        mode == CA_MEMORY_SVM || (mode == CA_MEMORY_HOST_PTR && device->info.type == CA_DEVICE_CPU);
}

/* cl_ext.h defines this value, but includes headers that some packages lack. */
#define CA_CL_QUEUE_THREAD_LOCAL_EXEC ((cl_command_queue_properties)1 << 31)

ca_status
ca_device_open(ca_device *device, ca_error *error)
{
    const ca_cl *cl = device->cl;
    ca_status status = CA_OK;
    cl_int code = CL_SUCCESS;
    if (device->adopted.queue != NULL) {
        code = cl->clRetainContext(device->adopted.context);
        CA_TRY(ca_cl_check(code, "clRetainContext", device->info.name, error));
        device->context = device->adopted.context;
        code = cl->clRetainCommandQueue(device->adopted.queue);
        CA_TRY(ca_cl_check(code, "clRetainCommandQueue", device->info.name, error));
        device->queue = device->adopted.queue;
        goto done;
    }
    const cl_context_properties properties[] = {CL_CONTEXT_PLATFORM,
                                                (cl_context_properties)device->platform, 0};
    device->context = cl->clCreateContext(properties, 1, &device->id, NULL, NULL, &code);
    CA_TRY(ca_cl_check(code, "clCreateContext", device->info.name, error));
    device->queue = cl->clCreateCommandQueue(device->context, device->id, 0, &code);
    CA_TRY(ca_cl_check(code, "clCreateCommandQueue", device->info.name, error));
    if (device->info.memory == CA_MEMORY_SVM && device->local_execution) {
        device->local_queue = cl->clCreateCommandQueue(device->context, device->id,
                                                       CA_CL_QUEUE_THREAD_LOCAL_EXEC, &code);
        if (code != CL_SUCCESS) { /* small launches take the other queue */
            device->local_queue = NULL;
        }
    }
done:
    return status;
}

static void
close_queue(const ca_device *device, cl_command_queue *queue)
{
    if (*queue != NULL) {
        device->cl->clReleaseCommandQueue(*queue);
        *queue = NULL;
    }
}

void
ca_device_close(ca_device *device)
{
    ca_kernel_table_free(&device->kernels, device->cl);
    ca_kernel_table_free(&device->left_out, device->cl);
    close_queue(device, &device->queue);
    close_queue(device, &device->local_queue);
    if (device->context != NULL) {
        device->cl->clReleaseContext(device->context);
        device->context = NULL;
    }
}
