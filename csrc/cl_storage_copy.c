/* SPDX-License-Identifier: MIT
 *
 * Copies between storages and the host's arrays.
 */
#include <stdlib.h>
#include <string.h>

#include "cl_internal.h"
#include "cl_pending.h"

/* Up to here a copy is staged, so that the caller's array may change at once; larger
   ones are waited for rather than held twice. */
#define STAGED_BYTES ((size_t)32 << 20)

/* From memory of its own, not waited for; false where there is none. */
static bool
write_staged(ca_storage *storage, size_t offset, const void *source, size_t bytes,
             cl_int *code)
{
    ca_device *device = storage->device;
    const ca_cl *cl = device->cl;
    cl_event event = NULL;
    void *staging = bytes <= STAGED_BYTES ? malloc(bytes) : NULL;
    if (staging == NULL) {
        return false;
    }
    memcpy(staging, source, bytes);
    ca_pending_make_room(device);
    ca_mutex_lock(&device->lock);
    *code = cl->clEnqueueWriteBuffer(device->queue, storage->buffer, CL_FALSE, offset,
                                     bytes, staging, 0, NULL, &event);
    if (*code == CL_SUCCESS) {
        const ca_pending_call call = {event, "a copy from the host", NULL, staging};
        storage->ticket = ca_pending_add(device, &call);
        *code = cl->clFlush(device->queue);
    } else {
        free(staging);
    }
    ca_mutex_unlock(&device->lock);
    return true;
}

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
    cl_int code = CL_SUCCESS;
    if (!write_staged(storage, offset, source, bytes, &code)) {
        code = device->cl->clEnqueueWriteBuffer(device->queue, storage->buffer, CL_TRUE,
                                                offset, bytes, source, 0, NULL, NULL);
    }
    if (code != CL_SUCCESS) {
        CA_TRY(
            ca_pending_check(device, error)); /* what it waited for may have failed */
        CA_TRY(ca_cl_error_set(error, code, "clEnqueueWriteBuffer", device->info.name));
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
        CA_TRY(ca_cl_error_set(error, code, "clEnqueueReadBuffer", device->info.name));
    }
done:
    return status;
}
