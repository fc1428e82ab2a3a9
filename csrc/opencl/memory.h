/* SPDX-License-Identifier: MIT
 *
 * Memory as a kernel's arguments, in the device's memory mode. Only cl_* files include
 * this header.
 *
 * One launch goes: bind; send; then, under the device's lock, set, the kernels, fetch;
 * then, unless the launch is left to run, wait for the event; then release, which also
 * follows an error at any point, when what was enqueued is through.
 */
#ifndef CLATTN_CL_MEMORY_H
#define CLATTN_CL_MEMORY_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"
#include "opencl/internal.h"
#include "opencl/launch.h"

/* A span and what stands for it on the device: an address in the mode CA_MEMORY_SVM, a
   buffer in the others, neither where the span is empty. */
typedef struct {
    ca_span span;
    const void *data;
    cl_mem buffer;
    ca_storage
        *storage; /* that is the span, or holds it meanwhile; NULL: there is none */
    bool owned;   /* false: an earlier binding of this launch, or a tensor, owns it */
    bool copied;  /* the span, to `storage`, before the launch */
} ca_binding;

/* Give each span what stands for it. `bindings` has CA_MAX_SPANS entries. With `copy`
   host memory is copied, to be read after this returns. */
ca_status ca_memory_bind(ca_device *device, const ca_span *spans, int nspans, bool copy,
                         ca_binding *bindings, ca_error *error);

/* Set arguments 0 … nspans-1, but for pointers that are what they were set to last. */
ca_status ca_memory_set(ca_device *device, ca_kernel *kernel,
                        const ca_binding *bindings, int nspans, ca_error *error);

/* Enqueue what brings inputs to the device. The host's memory is read until the launch
   is done. */
ca_status ca_memory_send(ca_device *device, const ca_binding *bindings, int nspans,
                         ca_error *error);

/* Whether ca_memory_fetch will enqueue anything. */
bool ca_memory_fetches(const ca_device *device, const ca_binding *bindings, int nspans);

/* Enqueue what brings results to the host. *event is that of the last command. */
ca_status ca_memory_fetch(ca_device *device, const ca_binding *bindings, int nspans,
                          cl_event *event, ca_error *error);

/* Under the device's lock: the launch will not be waited for. */
void ca_memory_set_ticket(const ca_binding *bindings, int nspans, uint64_t ticket);

void ca_memory_release(ca_device *device, ca_binding *bindings, int nspans);

#endif
