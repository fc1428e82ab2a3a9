/* SPDX-License-Identifier: MIT
 *
 * Memory that a device keeps from one call to the next, and the pool that it comes from
 * and goes back to.
 */
#ifndef CLATTN_CL_STORAGE_H
#define CLATTN_CL_STORAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "base/tensor.h" /* ca_block */
#include "opencl/device.h"

/* Counted references; any thread may hold one. */
typedef struct ca_storage ca_storage;

/* So many bytes or more on a prepared device, not initialised, with one reference. The
   pool's are used first; where the system has none left, the pool's
   are given back to it. CA_ERROR_MEMORY naming `what` otherwise. */
ca_status ca_storage_new(ca_device *device, size_t bytes, const char *what,
                         ca_storage **storage, ca_error *error);

void ca_storage_retain(ca_storage *storage);

/* The last one gives the memory to the pool, without a wait: what is enqueued still may
   use it, and what uses it next is enqueued behind that. NULL is fine; in a forked child
   nothing happens. */
void ca_storage_release(ca_storage *storage);

ca_block *ca_storage_block(ca_storage *storage);
ca_storage *ca_storage_of(const ca_block *block);
ca_device *ca_storage_device(const ca_storage *storage);

/* May the host read and write it where it lies, while no call uses it? */
bool ca_storage_is_host(const ca_storage *storage);

/* The cl_mem; NULL where kernels take addresses. */
void *ca_storage_buffer(const ca_storage *storage);

/* Wait for the calls that use it. What failed meanwhile is told, once. */
ca_status ca_storage_wait(ca_storage *storage, ca_error *error);

/* Does no call use it any more? False in a forked child. */
bool ca_storage_is_idle(ca_storage *storage);

/* From now on somebody else holds its address: calls that use it return when they are
   done. */
void ca_storage_share(ca_storage *storage);
bool ca_storage_is_shared(const ca_storage *storage);

/* Copy from or to the host, from `offset` on. Reading waits; writing takes the bytes at
   once and may be done later, in the order of calls. */
ca_status ca_storage_write(ca_storage *storage, size_t offset, const void *source,
                           size_t bytes, ca_error *error);
ca_status ca_storage_read(ca_storage *storage, size_t offset, void *target,
                          size_t bytes, ca_error *error);

typedef struct {
    size_t allocated_bytes; /* in use */
    size_t allocated_blocks;
    size_t pooled_bytes; /* kept for later */
    size_t pooled_blocks;
    size_t peak_bytes; /* the most that was in use */
} ca_memory_stats;

ca_status ca_device_memory_stats(ca_device *device, ca_memory_stats *stats,
                                 ca_error *error);

/* Give the pool's memory back to the system. Waits for the calls that use it. */
ca_status ca_device_empty_cache(ca_device *device, ca_error *error);

/* Wait for all calls. What failed is told, once. */
ca_status ca_device_synchronize(ca_device *device, ca_error *error);

#endif
