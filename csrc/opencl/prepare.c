/* SPDX-License-Identifier: MIT */
#include "opencl/prepare.h"

#include "base/platform.h" /* ca_signals */
#include "opencl/capabilities.h"
#include "opencl/device.h"
#include "opencl/probe.h"
#include "opencl/staging.h"
#include "opencl/storage.h" /* ca_pool_empty */

void
ca_device_release(ca_device *device)
{
    ca_pool_empty(device);
    ca_storage_drop(device->marks);
    device->marks = NULL;
    ca_staging_close(device);
    ca_device_close(device);
}

/* True if a failure of this kind is the device's, not one of lack of memory or a stop. */
static bool
is_final(ca_status status)
{
    return status == CA_ERROR_KERNEL || status == CA_ERROR_DEVICE;
}

/* Take the next memory mode, if there is one. `why` the present one fails becomes a reason that the
   listing shows. */
static bool
take_next_memory(ca_device *device, ca_error *why)
{
    ca_error *reason = &device->lacks[CA_MEMORY_IN_PLACE];
    if (device->info.memory == CA_MEMORY_COPY || device->memory_is_given) {
        return false;
    }
    if (reason->message[0] == '\0') {
        ca_error_set(reason, CA_ERROR_KERNEL, "%s", why->message);
    }
    ca_error_clear(why);
    ca_device_set_memory(device, device->info.memory + 1);
    return true;
}

/* Open and probe the device in one memory mode. *opened: it has a context, so a failure is the
   probe's, and is in device->failure. */
static ca_status
open_and_probe(ca_device *device, bool *opened, ca_error *error)
{
    ca_status status = ca_device_open(device, error);
    *opened = status == CA_OK;
    if (*opened) {
        ca_staging_open(device);
        status = ca_probe_device(device, &device->failure);
    }
    if (status != CA_OK) {
        ca_device_release(device);
    }
    return status;
}

/* Open and probe the device, under the build_lock. The probe's verdict is final; a context
   or memory that was not there may be there at the next call. */
static ca_status
try_open(ca_device *device, ca_error *error)
{
    bool opened;
    ca_status status = open_and_probe(device, &opened, error);
    while (opened && is_final(status) && take_next_memory(device, &device->failure)) {
        status = open_and_probe(device, &opened, error);
    }
    if (status == CA_OK) {
        status = ca_probe_loops(device, &device->failure);
        if (status != CA_OK) {
            ca_device_release(device);
        }
    }
    if (status == CA_OK) {
        ca_probe_capabilities(device);
        atomic_store(&device->state, CA_DEVICE_READY);
    } else if (opened && is_final(status)) {
        atomic_store(&device->state, CA_DEVICE_UNUSABLE);
    } else if (opened) {
        ca_error_set(error, status, "%s", device->failure.message);
        ca_error_clear(&device->failure);
    }
    return status;
}

/* Let another process open a device whose driver is not known, in the first memory mode that does not
   end that process. A device that ends it in each mode is unusable. */
static ca_status
open_apart(ca_device *device, ca_error *error)
{
    ca_status status = CA_OK;
    bool again = atomic_load(&device->state) == CA_DEVICE_UNTRIED && device->adopted.queue == NULL;
    while (again) {
        const ca_memory_mode tried = device->info.memory;
        status = ca_probe_apart(device, error);
        again = status == CA_ERROR_KERNEL;
        if (again) {
            ca_mutex_lock(&device->build_lock);
            /* Another thread may have found out the same. */
            again = device->info.memory != tried || take_next_memory(device, error);
            if (!again && atomic_load(&device->state) == CA_DEVICE_UNTRIED) {
                ca_error_set(&device->failure, status, "%s", error->message);
                atomic_store(&device->state, CA_DEVICE_UNUSABLE);
            }
            ca_mutex_unlock(&device->build_lock);
        }
    }
    return status;
}

ca_status
ca_device_prepare(ca_device *device, ca_error *error)
{
    ca_status status = ca_device_check_fork(device, error);
    if (status != CA_OK) {
        return status;
    }
    if (atomic_load_explicit(&device->state, memory_order_acquire) == CA_DEVICE_READY) {
        return CA_OK;
    }
    status = open_apart(device, error);
    if (status == CA_ERROR_STOPPED) {
        return status;
    }
    ca_mutex_lock(&device->build_lock);
    if (atomic_load(&device->state) == CA_DEVICE_UNTRIED) {
        ca_signals *signals = ca_signals_save();
        status = try_open(device, error);
        ca_signals_restore(signals);
    }
    if (atomic_load(&device->state) == CA_DEVICE_UNUSABLE) {
        status = ca_error_set(error, CA_ERROR_DEVICE, "%s", device->failure.message);
        if (device->failure.log != NULL) {
            ca_error_set_log(error, device->failure.log);
        }
    }
    ca_mutex_unlock(&device->build_lock);
    return status;
}

/* Prepare the device, and find out something about it. The first call asks `find`, stores its answer in
   *answer, and sets *known. Later calls leave both as they are. */
static ca_status
find_out(ca_device *device, atomic_bool *known, bool *answer, bool (*find)(ca_device *),
         ca_error *error)
{
    ca_status status = ca_device_prepare(device, error);
    if (status != CA_OK || atomic_load_explicit(known, memory_order_acquire)) {
        return status;
    }
    ca_mutex_lock(&device->build_lock);
    if (!atomic_load(known)) {
        *answer = find(device);
        atomic_store(known, true);
    }
    ca_mutex_unlock(&device->build_lock);
    return CA_OK;
}

ca_status
ca_device_find_pairs(ca_device *device, ca_error *error)
{
    return find_out(device, &device->pairs_known, &device->info.bfloat16_pairs, ca_probe_pairs,
                    error);
}

ca_status
ca_device_find_amx(ca_device *device, ca_error *error)
{
    return find_out(device, &device->amx_known, &device->info.amx, ca_may_use_amx, error);
}
