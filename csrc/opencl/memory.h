/* SPDX-License-Identifier: MIT
 *
 * Memory as a kernel's arguments, in the device's memory mode. Only this room includes this header.
 *
 * One launch goes: bind; send; under the device's lock, set the arguments, enqueue the kernels,
 * fetch; unless the launch is left pending, wait for the event and collect; release. After an error
 * at any point, wait for what was enqueued, then release.
 */
#ifndef CLATTN_OPENCL_MEMORY_H
#define CLATTN_OPENCL_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "opencl/device.h"
#include "opencl/span.h"
#include "opencl/storage.h"

/* A span and its stand-in on the device: an address in the mode CA_MEMORY_SVM, a buffer in
   the others. An empty span has neither. */
typedef struct {
    ca_span span;
    const void *data;
    cl_mem buffer;
    ca_storage *storage; /* the span's own, or a copy of the span; NULL: none */
    bool owned;          /* released with this binding; else an earlier one, or a Tensor, owns it */
    bool copied;         /* `storage` has the span's bytes already */
} ca_binding;

/* Fill bindings[0] to bindings[nspans - 1]. With `copy` host memory is copied at once, so
   that it may change when this returns. */
ca_status ca_memory_bind(ca_device *device, const ca_span *spans, int nspans, bool copy,
                         ca_binding *bindings, ca_error *error);

/* Copy large inputs to the device, and enqueue the copies of other inputs, which read the host's
   memory until the launch is done. */
ca_status ca_memory_send(ca_device *device, const ca_binding *bindings, int nspans,
                         ca_error *error);

/* Set the kernel's first `count` arguments, except pointers that are set already. Argument n is
   bindings[arguments[n]], or bindings[n] if `arguments` is NULL. */
ca_status ca_memory_set(ca_device *device, ca_kernel *kernel, const ca_binding *bindings,
                        const uint8_t *arguments, int count, ca_error *error);

/* True if ca_memory_fetch enqueues a command. */
bool ca_memory_fetches(const ca_device *device, const ca_binding *bindings, int nspans);

/* Enqueue the commands that bring results to the host. ca_memory_collect brings the results that
   threads copy. *event is the last command's. */
ca_status ca_memory_fetch(ca_device *device, const ca_binding *bindings, int nspans,
                          cl_event *event, ca_error *error);

/* After waiting: let threads copy the results that are large to the host. */
ca_status ca_memory_collect(ca_device *device, const ca_binding *bindings, int nspans,
                            ca_error *error);

/* After waiting: ca_storage_check of all storages. */
ca_status ca_memory_check(const ca_binding *bindings, int nspans, const char *call,
                          ca_error *error);

/* Under the device's lock: the pending call of that ticket uses these storages. */
void ca_memory_set_ticket(const ca_binding *bindings, int nspans, uint64_t ticket);

void ca_memory_release(ca_device *device, ca_binding *bindings, int nspans);

#endif
