/* SPDX-License-Identifier: MIT
 *
 * Memory that a device keeps from one call to the next, and the pool of released memory.
 */
#ifndef CLATTN_OPENCL_STORAGE_H
#define CLATTN_OPENCL_STORAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "base/tensor.h"
#include "opencl/info.h"

/* Memory with counted references. Any thread may hold one. */
typedef struct ca_storage ca_storage;

/* Memory of a prepared device for at least that many bytes, not initialised, with one
   reference. The pool's memory is used first; if the system has none left, the pool is
   emptied. CA_ERROR_MEMORY naming `what` if there is still none. */
ca_status ca_storage_new(ca_device *device, size_t bytes, const char *what, ca_storage **storage,
                         ca_error *error);

/* Make memory for the device's own use, filled with zeros. Nobody counts references to this memory,
   ca_memory_stats leaves it out, and ca_storage_drop frees it. */
ca_status ca_storage_keep(ca_device *device, size_t bytes, ca_storage **storage, ca_error *error);

/* Free memory that ca_storage_keep has made. The caller makes sure that no call uses the memory
   any more. NULL frees nothing. */
void ca_storage_drop(ca_storage *storage);

/* Make a storage of a buffer of another library, a cl_mem of the device's context. Live storages of
   one buffer are the same storage. A sub-buffer counts as a part of its parent: *offset is the first
   byte of `buffer`. The pool and ca_memory_stats leave the memory out. CA_ERROR_VALUE naming `what`
   for another context, and for memory that is no buffer. */
ca_status ca_storage_adopt(ca_device *device, void *buffer, const char *what, ca_storage **storage,
                           size_t *offset, ca_error *error);

/* True if kernels may write to the memory. */
bool ca_storage_is_writeable(const ca_storage *storage);

void ca_storage_retain(ca_storage *storage);

/* The last release gives the memory to the pool, without waiting for calls that use it: the pool's
   next user is enqueued behind them. NULL is fine. Does nothing in a forked child. */
void ca_storage_release(ca_storage *storage);

ca_block *ca_storage_block(ca_storage *storage);
ca_storage *ca_storage_of(const ca_block *block);
ca_device *ca_storage_device(const ca_storage *storage);

/* True if the host may read and write the memory where it lies, while no call uses it. */
bool ca_storage_is_host(const ca_storage *storage);

/* The cl_mem. NULL where kernels take addresses. */
void *ca_storage_buffer(const ca_storage *storage);

/* Wait for the calls that use the memory. Reports the first failure since the last
   report, of any call. */
ca_status ca_storage_wait(ca_storage *storage, ca_error *error);

/* In a build with guard zones (opencl/guards.h), CA_ERROR_DEVICE if `call` has written outside of the
   memory, which it knows as `name`. */
ca_status ca_storage_check(const ca_storage *storage, const char *call, const char *name,
                           ca_error *error);

/* True if no call uses the memory any more. False in a forked child. */
bool ca_storage_is_idle(ca_storage *storage);

/* True if the host may read and write the tensor's memory now. */
static inline bool
ca_storage_is_at_hand(const ca_tensor *tensor)
{
    return tensor->block == NULL || (ca_storage_is_host(ca_storage_of(tensor->block)) &&
                                     ca_storage_is_idle(ca_storage_of(tensor->block)));
}

/* Note that the host was given the address. From now on, launches that use the memory are
   waited for. */
void ca_storage_share(ca_storage *storage);
bool ca_storage_is_shared(const ca_storage *storage);

/* Under the device's lock: the pending call of that ticket uses the memory. */
void ca_storage_set_ticket(ca_storage *storage, uint64_t ticket);

/* Copy from or to the host, from `offset` on, in the order of calls. The source may
   change and the target is complete when these return. */
ca_status ca_storage_write(ca_storage *storage, size_t offset, const void *source, size_t bytes,
                           ca_error *error);
ca_status ca_storage_read(ca_storage *storage, size_t offset, void *target, size_t bytes,
                          ca_error *error);

ca_status ca_device_memory_stats(ca_device *device, ca_memory_stats *stats, ca_error *error);

/* Give the pool's memory back to the system, after waiting for the calls that use it. */
ca_status ca_device_empty_cache(ca_device *device, ca_error *error);

/* Give the pool's memory back to the system, whatever the state of the device. For files of this
   room. */
void ca_pool_empty(ca_device *device);

/* Wait for all calls. Reports the first failure since the last report. */
ca_status ca_device_synchronize(ca_device *device, ca_error *error);

#endif
