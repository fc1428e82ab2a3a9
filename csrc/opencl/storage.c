/* SPDX-License-Identifier: MIT
 *
 * A storage of a CPU is host memory, with a buffer over it if kernels take no addresses.
 * A storage of another device, or of another library's buffer, has addresses without memory.
 */
#include "opencl/storage.h"

#include <stdlib.h>
#include <string.h>

#include "opencl/device.h"
#include "opencl/guards.h"
#include "opencl/pending.h"
#include "opencl/query.h"
#include "opencl/staging.h"

struct ca_storage {
    ca_block block; /* first, see ca_storage_of */
    ca_device *device;
    cl_mem buffer;
    void *memory; /* the host's, of the storage or behind its buffer; NULL: none */
    size_t asked; /* bytes between the guard zones */
    atomic_int references;
    atomic_bool shared;
    _Atomic(uint64_t) ticket; /* the last pending call that uses the memory */
    ca_storage *next;         /* in ca_pool's list `leaving` or `adopted` */
    bool adopted;
    bool read_only;
};

/* ---- making and freeing ---- */

/* Rounds a size up to 5, 6, 7 or 8 eighths of a power of two, of at least 4 KiB. Storages of similar
   sizes then have the same size, and the pool can reuse one for another. */
static size_t
pool_class(const ca_device *device, size_t bytes)
{
    size_t power = 4096;
    while (power < bytes) {
        if (power > SIZE_MAX / 2) {
            return bytes;
        }
        power *= 2;
    }
    size_t size = power / 8 * 5;
    while (size < bytes) {
        size += power / 8;
    }
    return (uint64_t)size > (uint64_t)device->info.max_allocation ? bytes : size;
}

static void
free_storage(ca_storage *storage)
{
    const ca_device *device = storage->device;
    if (storage->buffer != NULL) {
        device->cl->clReleaseMemObject(storage->buffer);
    }
    if (!device->storage_is_host && storage->block.address != NULL) {
        ca_addresses_release(storage->block.address, storage->block.bytes);
    }
    ca_guards_free(storage->memory);
    free(storage);
}

/* Make a new storage. Returns OpenCL's code. */
static cl_int
make_storage(ca_device *device, size_t capacity, ca_storage **made)
{
    cl_int code = CL_SUCCESS;
    ca_storage *storage = calloc(1, sizeof *storage);
    if (storage == NULL) {
        return CL_OUT_OF_HOST_MEMORY;
    }
    bool host = device->storage_is_host || CA_GUARD > 0;
    void *memory = host ? ca_guards_allocate(capacity) : NULL;
    void *address = device->storage_is_host ? memory : ca_addresses_reserve(capacity);
    storage->device = device;
    storage->memory = memory;
    storage->asked = capacity;
    storage->block = (ca_block){address, capacity};
    if (address == NULL || (host && memory == NULL)) {
        free_storage(storage);
        return CL_OUT_OF_HOST_MEMORY;
    }
    if (device->info.memory != CA_MEMORY_SVM) {
        storage->buffer = device->cl->clCreateBuffer(
            device->context, CL_MEM_READ_WRITE | (host ? CL_MEM_USE_HOST_PTR : 0), capacity, memory,
            &code);
        if (code != CL_SUCCESS) {
            storage->buffer = NULL;
            free_storage(storage);
            return code;
        }
    }
    *made = storage;
    return CL_SUCCESS;
}

/* ---- the pool ---- */

/* Take the storage out of slot `i`. The others keep their order. */
static ca_storage *
pool_remove(ca_pool *pool, size_t i)
{
    ca_storage *storage = pool->slots[i];
    size_t left = --pool->stats.pooled_blocks;
    pool->stats.pooled_bytes -= storage->block.bytes;
    memmove(&pool->slots[i], &pool->slots[i + 1], (left - i) * sizeof(pool->slots[0]));
    return storage;
}

/* Take the youngest storage of that capacity; NULL if there is none. The host may write to its own
   memory at once, so there no call may use the storage any more. */
static ca_storage *
pool_take(ca_device *device, size_t capacity)
{
    ca_pool *pool = &device->pool;
    for (size_t i = pool->stats.pooled_blocks; i-- > 0;) {
        ca_storage *storage = pool->slots[i];
        if (storage->block.bytes == capacity && ((!device->storage_is_host && CA_GUARD == 0) ||
                                                 ca_pending_is_done(device, storage->ticket))) {
            return pool_remove(pool, i);
        }
    }
    return NULL;
}

/* Returns the most bytes that the pool may keep. The process needs the host's memory too, so
   a CPU's pool is smaller. */
static size_t
pool_limit(const ca_device *device)
{
    return (size_t)device->info.global_memory / (device->storage_is_host ? 16 : 4);
}

/* Put the storage into the pool, freeing the oldest ones to make room. False if it is too
   large, or a call still uses the oldest. */
static bool
pool_give(ca_device *device, ca_storage *storage)
{
    ca_pool *pool = &device->pool;
    ca_memory_stats *stats = &pool->stats;
    size_t limit = pool_limit(device);
    size_t capacity = storage->block.bytes;
    if (capacity > limit) {
        return false;
    }
    while (stats->pooled_blocks == CA_POOL_SLOTS || stats->pooled_bytes > limit - capacity) {
        if (!ca_pending_is_done(device, pool->slots[0]->ticket)) {
            return false;
        }
        free_storage(pool_remove(pool, 0));
    }
    pool->slots[stats->pooled_blocks++] = storage;
    stats->pooled_bytes += capacity;
    return true;
}

/* Free the storages that the pool did not take, once no call uses them. */
static void
free_leaving(ca_device *device)
{
    ca_storage **link = &device->pool.leaving;
    while (*link != NULL) {
        ca_storage *storage = *link;
        if (ca_pending_is_done(device, storage->ticket)) {
            *link = storage->next;
            device->pool.leaving_blocks--;
            device->pool.leaving_bytes -= storage->block.bytes;
            free_storage(storage);
        } else {
            link = &storage->next;
        }
    }
}

/* Storages that other threads release meanwhile may still be in use; these stay. */
void
ca_pool_empty(ca_device *device)
{
    ca_pool *pool = &device->pool;
    CA_NEW_ERROR(unasked);
    (void)ca_pending_drain(device, &unasked);
    ca_mutex_lock(&device->lock);
    for (size_t i = pool->stats.pooled_blocks; i-- > 0;) {
        if (ca_pending_is_done(device, pool->slots[i]->ticket)) {
            free_storage(pool_remove(pool, i));
        }
    }
    free_leaving(device);
    ca_mutex_unlock(&device->lock);
}

/* True if this process has used the device. */
static bool
is_open(ca_device *device)
{
    return atomic_load(&device->state) == CA_DEVICE_READY;
}

ca_status
ca_device_empty_cache(ca_device *device, ca_error *error)
{
    ca_status status = ca_device_check_fork(device, error);
    if (status == CA_OK && is_open(device)) {
        ca_pool_empty(device);
        ca_memory_trim();
    }
    return status;
}

ca_status
ca_device_memory_stats(ca_device *device, ca_memory_stats *stats, ca_error *error)
{
    ca_status status = ca_device_check_fork(device, error);
    if (status == CA_OK) {
        ca_mutex_lock(&device->lock);
        free_leaving(device);
        *stats = device->pool.stats;
        stats->pooled_blocks += device->pool.leaving_blocks;
        stats->pooled_bytes += device->pool.leaving_bytes;
        ca_mutex_unlock(&device->lock);
    }
    return status;
}

/* ---- storages ---- */

/* Take a storage from the pool; NULL if a new one may be made. If released memory, with this
   storage, exceeds the pool's limit, wait for the calls that use it. */
static ca_storage *
take_or_wait(ca_device *device, size_t capacity)
{
    const ca_pool *pool = &device->pool;
    size_t limit = pool_limit(device);
    ca_storage *found = NULL;
    bool waits = true;
    while (found == NULL && waits) {
        ca_mutex_lock(&device->lock);
        free_leaving(device);
        found = pool_take(device, capacity);
        waits = pool->stats.pooled_bytes + pool->leaving_bytes + capacity > limit;
        ca_mutex_unlock(&device->lock);
        waits = waits && found == NULL && ca_pending_wait_for_oldest(device);
    }
    return found;
}

/* See that nobody wrote into the guard zones of the last user, and move them to the next one's. */
static ca_status
move_guards(ca_storage *storage, size_t bytes, ca_error *error)
{
    ca_status status = ca_storage_check(storage, "an earlier call", "released memory", error);
    storage->asked = bytes;
    ca_guards_fill(storage->memory, bytes);
    return status;
}

ca_status
ca_storage_new(ca_device *device, size_t bytes, const char *what, ca_storage **storage,
               ca_error *error)
{
    const ca_device_info *info = &device->info;
    if (info->memory != CA_MEMORY_SVM && (uint64_t)bytes > (uint64_t)info->max_allocation) {
        return ca_error_set(
            error, CA_ERROR_MEMORY,
            "%s of %zu bytes is more than device '%s' allocates at once (%lld bytes)", what, bytes,
            info->name, (long long)info->max_allocation);
    }
    if ((uint64_t)bytes > (uint64_t)info->global_memory) {
        return ca_error_set(error, CA_ERROR_MEMORY,
                            "%s of %zu bytes is more than device '%s' has (%lld bytes)", what,
                            bytes, info->name, (long long)info->global_memory);
    }
    size_t capacity = pool_class(device, bytes);
    ca_storage *found = take_or_wait(device, capacity);
    cl_int code = CL_SUCCESS;
    for (int attempt = 0; attempt < 2 && found == NULL; attempt++) {
        if (attempt > 0) {
            ca_pool_empty(device);
        }
        code = make_storage(device, capacity, &found);
    }
    if (found == NULL) {
        return ca_error_set(error, CA_ERROR_MEMORY,
                            "no memory for %s of %zu bytes on device '%s' (%s)", what, bytes,
                            info->name, ca_cl_error_name(code));
    }
    ca_status status = move_guards(found, bytes, error);
    if (status != CA_OK) {
        free_storage(found);
        return status;
    }
    atomic_store(&found->references, 1);
    atomic_store(&found->shared, false);
    ca_mutex_lock(&device->lock);
    ca_memory_stats *stats = &device->pool.stats;
    stats->allocated_blocks++;
    stats->allocated_bytes += capacity;
    if (stats->allocated_bytes > stats->peak_bytes) {
        stats->peak_bytes = stats->allocated_bytes;
    }
    ca_mutex_unlock(&device->lock);
    *storage = found;
    return CA_OK;
}

ca_status
ca_storage_keep(ca_device *device, size_t bytes, ca_storage **storage, ca_error *error)
{
    cl_int code = make_storage(device, bytes, storage);
    if (code != CL_SUCCESS) {
        return ca_error_set(error, CA_ERROR_MEMORY, "no memory for device '%s' to work with (%s)",
                            device->info.name, ca_cl_error_name(code));
    }
    void *zeros = calloc(1, bytes);
    ca_status status = zeros == NULL
                           ? ca_error_set(error, CA_ERROR_MEMORY, "no memory for %zu zeros", bytes)
                           : ca_storage_write(*storage, 0, zeros, bytes, error);
    free(zeros);
    if (status != CA_OK) {
        free_storage(*storage);
        *storage = NULL;
    }
    return status;
}

void
ca_storage_drop(ca_storage *storage)
{
    if (storage != NULL) {
        free_storage(storage);
    }
}

/* Returns the live storage of the buffer with one more reference, or NULL. Under the lock. */
static ca_storage *
find_adopted(ca_device *device, cl_mem buffer)
{
    ca_storage *found = device->pool.adopted;
    while (found != NULL && found->buffer != buffer) {
        found = found->next;
    }
    if (found != NULL) {
        ca_storage_retain(found);
    }
    return found;
}

/* Make a storage of the buffer, and put it into the list. Under the lock. */
static ca_storage *
new_adopted(ca_device *device, cl_mem buffer, size_t bytes, bool read_only)
{
    ca_storage *storage = calloc(1, sizeof *storage);
    void *address = storage != NULL ? ca_addresses_reserve(bytes) : NULL;
    if (address == NULL || device->cl->clRetainMemObject(buffer) != CL_SUCCESS) {
        if (address != NULL) {
            ca_addresses_release(address, bytes);
        }
        free(storage);
        return NULL;
    }
    storage->block = (ca_block){address, bytes};
    storage->device = device;
    storage->buffer = buffer;
    storage->adopted = true;
    storage->read_only = read_only;
    atomic_init(&storage->references, 1);
    storage->next = device->pool.adopted;
    device->pool.adopted = storage;
    return storage;
}

ca_status
ca_storage_adopt(ca_device *device, void *buffer, const char *what, ca_storage **storage,
                 size_t *offset, ca_error *error)
{
    ca_buffer_info info;
    ca_status status = CA_OK;
    CA_TRY(ca_device_check_fork(device, error));
    CA_TRY(ca_query_buffer(device, buffer, what, &info, error));
    *offset = info.offset;
    ca_mutex_lock(&device->lock);
    *storage = find_adopted(device, info.whole);
    if (*storage == NULL) {
        *storage = new_adopted(device, info.whole, info.bytes, info.read_only);
    }
    ca_mutex_unlock(&device->lock);
    if (*storage == NULL) {
        status = ca_error_set(error, CA_ERROR_MEMORY,
                              "no memory to take over a buffer of %zu bytes", info.bytes);
    }
done:
    return status;
}

bool
ca_storage_is_writeable(const ca_storage *storage)
{
    return !storage->read_only;
}

void
ca_storage_retain(ca_storage *storage)
{
    atomic_fetch_add(&storage->references, 1);
}

/* Let a buffer of another library go. Its last reference goes under the lock, because
   ca_storage_adopt may find the storage until then. */
static void
release_adopted(ca_storage *storage)
{
    ca_device *device = storage->device;
    ca_mutex_lock(&device->lock);
    bool last = atomic_fetch_sub(&storage->references, 1) == 1;
    if (last) {
        ca_storage **link = &device->pool.adopted;
        while (*link != storage) {
            link = &(*link)->next;
        }
        *link = storage->next;
    }
    ca_mutex_unlock(&device->lock);
    if (last) {
        free_storage(storage);
    }
}

void
ca_storage_release(ca_storage *storage)
{
    if (storage != NULL && storage->adopted) {
        if (!ca_fork_guard_is_child(storage->device->fork_guard)) {
            release_adopted(storage);
        }
        return;
    }
    if (storage == NULL || atomic_fetch_sub(&storage->references, 1) != 1) {
        return;
    }
    ca_device *device = storage->device;
    if (ca_fork_guard_is_child(device->fork_guard)) {
        return; /* the parent owns it */
    }
    ca_mutex_lock(&device->lock);
    device->pool.stats.allocated_blocks--;
    device->pool.stats.allocated_bytes -= storage->block.bytes;
    if (!pool_give(device, storage)) {
        storage->next = device->pool.leaving;
        device->pool.leaving = storage;
        device->pool.leaving_blocks++;
        device->pool.leaving_bytes += storage->block.bytes;
    }
    free_leaving(device);
    ca_mutex_unlock(&device->lock);
}

ca_block *
ca_storage_block(ca_storage *storage)
{
    return &storage->block;
}

ca_storage *
ca_storage_of(const ca_block *block)
{
    return (ca_storage *)(void *)block;
}

ca_device *
ca_storage_device(const ca_storage *storage)
{
    return storage->device;
}

bool
ca_storage_is_host(const ca_storage *storage)
{
    return storage->device->storage_is_host;
}

void *
ca_storage_buffer(const ca_storage *storage)
{
    return storage->buffer;
}

ca_status
ca_storage_wait(ca_storage *storage, ca_error *error)
{
    ca_device *device = storage->device;
    ca_status status = ca_device_check_fork(device, error);
    status = status != CA_OK ? status : ca_pending_wait(device, storage->ticket, error);
    return status != CA_OK ? status : ca_storage_check(storage, "a pending call", "memory", error);
}

ca_status
ca_storage_check(const ca_storage *storage, const char *call, const char *name, ca_error *error)
{
    if (CA_GUARD > 0) { /* a write of few bytes may return before the driver writes the memory */
        storage->device->cl->clFinish(storage->device->queue);
    }
    return ca_guards_check(storage->memory, storage->asked, call, name, error);
}

bool
ca_storage_is_idle(ca_storage *storage)
{
    ca_device *device = storage->device;
    if (ca_fork_guard_is_child(device->fork_guard)) {
        return false;
    }
    if (storage->ticket < device->pending.first) { /* the usual case, without the lock */
        return true;
    }
    ca_mutex_lock(&device->lock);
    bool idle = ca_pending_is_done(device, storage->ticket);
    ca_mutex_unlock(&device->lock);
    return idle;
}

void
ca_storage_share(ca_storage *storage)
{
    atomic_store(&storage->shared, true);
}

bool
ca_storage_is_shared(const ca_storage *storage)
{
    return atomic_load(&storage->shared);
}

void
ca_storage_set_ticket(ca_storage *storage, uint64_t ticket)
{
    storage->ticket = ticket;
}

/* ---- copies ---- */

ca_status
ca_storage_write(ca_storage *storage, size_t offset, const void *source, size_t bytes,
                 ca_error *error)
{
    ca_device *device = storage->device;
    ca_status status = ca_device_check_fork(device, error);
    if (status != CA_OK || bytes == 0) {
        return status;
    }
    if (device->storage_is_host) {
        status = ca_storage_wait(storage, error);
        if (status == CA_OK) {
            memcpy((char *)storage->block.address + offset, source, bytes);
        }
        return status;
    }
    return ca_staging_write(device, storage->buffer, offset, source, bytes, error);
}

ca_status
ca_storage_read(ca_storage *storage, size_t offset, void *target, size_t bytes, ca_error *error)
{
    ca_device *device = storage->device;
    ca_status status = ca_storage_wait(storage, error);
    if (status != CA_OK || bytes == 0) {
        return status;
    }
    if (device->storage_is_host) {
        memcpy(target, (char *)storage->block.address + offset, bytes);
        return CA_OK;
    }
    return ca_staging_read(device, storage->buffer, offset, target, bytes, error);
}

/* ---- the device ---- */

ca_status
ca_device_synchronize(ca_device *device, ca_error *error)
{
    ca_status status = ca_device_check_fork(device, error);
    if (status == CA_OK && is_open(device)) {
        CA_TRY(ca_pending_drain(device, error));
        ca_mutex_lock(&device->lock);
        free_leaving(device);
        ca_mutex_unlock(&device->lock);
        status = ca_pending_check(device, error);
    }
done:
    return status;
}
