/* SPDX-License-Identifier: MIT
 *
 * Launches of one call in two queues.
 */
#include <stdlib.h>

#include "opencl/launch.h"
#include "opencl/run.h"

struct ca_flight {
    ca_device *device;
    ca_run runs[2]; /* of the two queues, by turns */
    int next;       /* the one to begin */
};

ca_status
ca_flight_begin(ca_device *device, ca_flight **flight, ca_error *error)
{
    ca_status status = ca_device_prepare(device, error);
    *flight = NULL;
    if (status != CA_OK || device->second_queue == NULL) {
        return status;
    }
    ca_flight *begun = calloc(1, sizeof *begun);
    if (begun == NULL) {
        return ca_error_set(error, CA_ERROR_MEMORY, "no memory for a call's parts");
    }
    begun->device = device;
    *flight = begun;
    return CA_OK;
}

static ca_status
finish_last(ca_flight *flight, ca_error *error)
{
    ca_run *last = &flight->runs[1 - flight->next];
    return last->event == NULL ? CA_OK : ca_run_finish(flight->device, last, error);
}

ca_status
ca_flight_run(ca_flight *flight, const ca_launch *launch, ca_error *error)
{
    ca_device *device = flight->device;
    cl_command_queue queue = flight->next == 0 ? device->queue : device->second_queue;
    ca_run *run = &flight->runs[flight->next];
    ca_status status = ca_run_check(device, launch, error);
    if (status == CA_OK) {
        status = ca_run_begin(device, queue, false, launch, run, error);
    }
    if (status == CA_ERROR_MEMORY) { /* there may be some without the other one */
        ca_error_clear(error);
        status = finish_last(flight, error);
        return status == CA_OK ? ca_launch_run(device, launch, error) : status;
    }
    if (status == CA_OK) {
        status = finish_last(flight, error);
        flight->next = 1 - flight->next;
    }
    return status;
}

ca_status
ca_flight_end(ca_flight *flight, ca_status status, ca_error *error)
{
    if (flight == NULL) {
        return status;
    }
    if (status == CA_OK) {
        status = finish_last(flight, error);
    }
    for (int i = 0; i < 2; i++) { /* what a failure left */
        if (flight->runs[i].event != NULL) {
            flight->device->cl->clFinish(flight->runs[i].queue);
            ca_run_forget(flight->device, &flight->runs[i]);
        }
    }
    free(flight);
    return status;
}
