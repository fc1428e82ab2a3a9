/* SPDX-License-Identifier: MIT
 *
 * Copies between storages and the host's arrays.
 */
#include <string.h>

#include "opencl/internal.h"
#include "opencl/pending.h"

ca_status
ca_storage_write(ca_storage *storage, size_t offset, const void *source, size_t bytes,
                 ca_error *error)
{
    ca_status status = CA_OK;
    ca_device *device = storage->device;
    CA_TRY(ca_device_check_fork(device, error));
    if (bytes == 0) {
        goto done;
    }
    if (device->storage_is_host) {
        CA_TRY(ca_storage_wait(storage, error));
        memcpy((char *)storage->block.address + offset, source, bytes);
        goto done;
    }
    cl_int code = device->cl->clEnqueueWriteBuffer(
        device->queue, storage->buffer, CL_TRUE, offset, bytes, source, 0, NULL, NULL);
    if (code != CL_SUCCESS) {
        status =
            ca_cl_error_set(error, code, "clEnqueueWriteBuffer", device->info.name);
        /* A call that the copy waited for may have failed, which tells more. */
        ca_status earlier = ca_pending_check(device, error);
        status = earlier != CA_OK ? earlier : status;
    }
done:
    return status;
}

ca_status
ca_storage_read(ca_storage *storage, size_t offset, void *target, size_t bytes,
                ca_error *error)
{
    ca_status status = CA_OK;
    ca_device *device = storage->device;
    CA_TRY(ca_storage_wait(storage, error));
    if (bytes == 0) {
        goto done;
    }
    if (device->storage_is_host) {
        memcpy(target, (char *)storage->block.address + offset, bytes);
        goto done;
    }
    cl_int code = device->cl->clEnqueueReadBuffer(
        device->queue, storage->buffer, CL_TRUE, offset, bytes, target, 0, NULL, NULL);
    if (code != CL_SUCCESS) {
        status = ca_cl_error_set(error, code, "clEnqueueReadBuffer", device->info.name);
    }
done:
    return status;
}
