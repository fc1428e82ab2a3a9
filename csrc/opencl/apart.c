/* SPDX-License-Identifier: MIT */
#include "opencl/apart.h"

#include <stdio.h>

#include "opencl/device.h"
#include "opencl/modes.h"
#include "opencl/verdict.h"

static ca_status
ask_caller(ca_device *device, const ca_kernel_spec *spec, const void *context, ca_error *error)
{
    (void)spec;
    char request[256];
    (void)snprintf(request, sizeof request, "%d %s %s", device->index,
                   ca_memory_word(device->info.memory), (const char *)context);
    return error->apart(error->caller, request, error);
}

ca_status
ca_apart_try(ca_device *device, const ca_kernel_spec *spec, const char *request, ca_error *error)
{
    if (device->info.is_known || error->apart == NULL) {
        return CA_OK;
    }
    ca_status status = ca_verdict_find(device, spec, request, true, ask_caller, request, error);
    if (status != CA_ERROR_KERNEL && status != CA_ERROR_STOPPED) {
        ca_error_clear(error); /* no process could be started, or no memory is left */
        status = CA_OK;
    }
    return status;
}
