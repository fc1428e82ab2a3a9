/* SPDX-License-Identifier: MIT */
#include "opencl/marks.h"

#include "kernels/support/marks.h" /* CA_MARKS */
#include "opencl/device.h"
#include "opencl/storage.h"

/* Two threads may come here at once; the marks of the second one are dropped. */
static ca_status
make_marks(ca_device *device, ca_error *error)
{
    ca_storage *made = NULL;
    ca_status status = ca_storage_keep(device, 2 * CA_MARKS * sizeof(uint32_t), &made, error);
    if (status == CA_OK) {
        ca_mutex_lock(&device->lock);
        if (device->marks == NULL) {
            device->marks = made;
            made = NULL;
        }
        ca_mutex_unlock(&device->lock);
        ca_storage_drop(made);
    }
    return status;
}

ca_status
ca_mark_take(ca_device *device, ca_mark *mark, ca_span *marks, ca_error *error)
{
    if (device->marks == NULL) {
        ca_status status = make_marks(device, error);
        if (status != CA_OK) {
            return status;
        }
    }
    uint64_t number = atomic_fetch_add(&device->marks_taken, 1);
    *mark = (ca_mark){(uint32_t)(number % CA_MARKS), (uint32_t)(number / CA_MARKS + 1)};
    ca_block *block = ca_storage_block(device->marks);
    *marks = (ca_span){block->address, block->bytes, CA_ACCESS_UPDATE, block, "the marks"};
    return CA_OK;
}

ca_status
ca_mark_is_set(ca_device *device, const ca_mark *mark, bool *set, ca_error *error)
{
    uint32_t word = 0;
    ca_status status = CA_OK;
    *set = false;
    if (device->storage_is_host) { /* the usual case, without a lock */
        word = ((const volatile uint32_t *)ca_storage_block(device->marks)->address)[mark->slot];
    } else {
        status =
            ca_storage_read(device->marks, mark->slot * sizeof word, &word, sizeof word, error);
    }
    *set = status == CA_OK && word >= mark->value;
    return status;
}

void
ca_mark_stop(ca_device *device, const ca_mark *mark)
{
    if (device->storage_is_host) {
        volatile uint32_t *words = ca_storage_block(device->marks)->address;
        words[CA_MARKS + mark->slot] = mark->value;
    }
}
