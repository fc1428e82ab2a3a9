/* SPDX-License-Identifier: MIT
 *
 * The structs that cl_* files share. Nothing else includes this header.
 *
 * Locks of a device: `build_lock` is held while the device is prepared or a program is
 * built, `lock` while anything below is changed or enqueued. `lock` may be taken under
 * `build_lock`, never the other way round. No lock is taken in a forked child.
 */
#ifndef CLATTN_CL_INTERNAL_H
#define CLATTN_CL_INTERNAL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/platform.h"
#include "opencl/device.h"
#include "opencl/launch.h" /* CA_MAX_SPANS */
#include "opencl/loader.h"
#include "opencl/program.h"
#include "opencl/storage.h"

/* How far ca_device_prepare came; a device's `state`. */
enum { CA_DEVICE_UNTRIED, CA_DEVICE_READY, CA_DEVICE_UNUSABLE };

struct ca_kernel {
    cl_program program;
    cl_kernel handle;
    ca_kernel_spec spec;
    uint64_t hash;     /* of the spec */
    size_t work_group; /* most work-items of a work-group */
    /* Bit i: argument i is set to pointers[i]; under the device's lock. */
    uint32_t given;
    const void *pointers[CA_MAX_SPANS];
};

/* Kernels by spec: open addressing, a power of two of slots, at most half of them full.
   The kernels do not move when the table grows. */
typedef struct {
    ca_kernel **slots;
    size_t capacity;
    size_t count;
} ca_kernel_table;

struct ca_storage {
    ca_block block; /* first, see ca_storage_of */
    ca_device *device;
    cl_mem buffer;
    atomic_int references;
    atomic_bool shared;
    _Atomic(uint64_t) ticket; /* of the last call that uses it; set under the lock */
    ca_storage *next;         /* see ca_pool */
};

#define CA_POOL_SLOTS 64

/* Released memory, to be used again, oldest first; under the device's lock. */
typedef struct {
    ca_storage *slots[CA_POOL_SLOTS];
    ca_storage *leaving; /* a list of what is to be freed once no call uses it */
    size_t leaving_bytes;
    size_t leaving_blocks;
    ca_memory_stats stats;
} ca_pool;

/* A call that nobody has waited for yet. */
typedef struct {
    cl_event event;
    const char *call; /* the function that made it */
    const char *kernel;
} ca_pending_call;

#define CA_MAX_PENDING 64

/* Calls in the queue's order, the one of ticket t at t % CA_MAX_PENDING; those before
   `first` are done. Changed under the device's lock. */
typedef struct {
    ca_pending_call calls[CA_MAX_PENDING];
    _Atomic(uint64_t) first;
    uint64_t next;
    bool failed; /* `failure` tells of the first one that failed since it was told */
    ca_error failure;
} ca_pending;

struct ca_device {
    ca_runtime *runtime;
    const ca_cl *cl; /* the runtime's */
    cl_platform_id platform;
    cl_device_id id;
    ca_device_info info;
    bool system_svm;      /* has CA_MEMORY_SVM, whatever mode is chosen */
    bool local_execution; /* has cl_intel_exec_by_local_thread */
    bool is_host;         /* runs on the processor that this process runs on */
    bool storage_is_host; /* the host reads and writes its storages where they lie */

    atomic_int state;
    ca_error failure;        /* why it is unusable; written before `state` says so */
    atomic_bool pairs_known; /* info.bfloat16_pairs is final, and was written before */

    ca_mutex build_lock;
    ca_mutex lock;
    cl_context context;
    cl_command_queue queue;
    /* Runs a kernel in the thread that enqueues it, which returns when it is done. NULL:
       there is none, or memory has to be brought to the device. */
    cl_command_queue local_queue;
    ca_kernel_table kernels;
    ca_pool pool;
    ca_pending pending;
};

struct ca_runtime {
    ca_cl cl;
    char *cache_folder; /* NULL: no disk cache */
    ca_fork_guard fork_guard;
    ca_device *devices;
    int device_count;
};

/* opencl/query.c: everything the runtime needs to know of the machine, without a context.
   On failure *devices is NULL. */
ca_status ca_query_devices(const ca_cl *cl, const char *memory_override,
                           ca_device **devices, int *count, ca_error *error);

/* opencl/program.c: as ca_kernel_get on a device that is being prepared, under its
   build_lock. */
ca_status ca_kernel_get_locked(ca_device *device, const ca_kernel_spec *spec,
                               ca_kernel **kernel, ca_error *error);

void ca_kernel_free(const ca_cl *cl, ca_kernel *kernel); /* NULL is fine */

/* opencl/table.c: finding (NULL: not there) and inserting (false: no memory) are done under
   the device's lock. Freeing releases the kernels too. */
uint64_t ca_kernel_spec_hash(const ca_kernel_spec *spec);
ca_kernel *ca_kernel_table_find(const ca_kernel_table *table,
                                const ca_kernel_spec *spec, uint64_t hash);
bool ca_kernel_table_insert(ca_kernel_table *table, ca_kernel *kernel);
void ca_kernel_table_free(ca_kernel_table *table, const ca_cl *cl);

/* opencl/cache.c: binaries of built programs on disk. The identity says all that a binary
   depends on. Reading gives NULL for whatever is not there or is damaged; the caller
   frees *data. Writing fails silently: the cache is only there to save time. */
typedef struct {
    uint64_t words[2];
} ca_hash;

ca_hash ca_cache_hash(const void *data, size_t size);
bool ca_cache_read(const char *folder, const char *name, ca_hash identity,
                   unsigned char **data, size_t *size);
void ca_cache_write(const char *folder, const char *name, ca_hash identity,
                    const void *data, size_t size);

/* opencl/program.c: the identity of a build of a kernel that there is. False without
   memory. */
bool ca_kernel_identity(const ca_device *device, const ca_kernel_spec *spec,
                        ca_hash *identity);

/* opencl/probe.c: build the probe kernel and run it once, under the build_lock. */
ca_status ca_probe_run(ca_device *device, ca_error *error);

/* opencl/probe.c: build kernels/probe/ptx.cl, under the build_lock, if the device is one
   that has its instructions; where that is refused, the device has no capability. */
void ca_probe_ptx(ca_device *device);

/* opencl/storage.c: give the pool back to the system, of a device in any state. */
void ca_pool_empty(ca_device *device);

/* opencl/device.c: CA_ERROR_DEVICE in a forked child. */
ca_status ca_device_check_fork(const ca_device *device, ca_error *error);

#endif
