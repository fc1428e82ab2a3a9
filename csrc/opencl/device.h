/* SPDX-License-Identifier: MIT
 *
 * ca_device is a device: its OpenCL objects, two locks, and what marks.c, pending.c, staging.c and
 * storage.c keep for it. Only files of csrc/opencl use its members. Files above this folder read
 * ca_device_info (info.h) and call the functions of runtime.h.
 *
 *     build_lock  held while the device is prepared, and while a program is built
 *     lock        held while commands are enqueued, and while a member is read or changed whose
 *                 comment says "under `lock`"
 *
 * A thread that holds build_lock may take lock. A thread that holds lock does not take build_lock.
 * A forked child takes neither.
 */
#ifndef CLATTN_OPENCL_DEVICE_H
#define CLATTN_OPENCL_DEVICE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/platform.h"
#include "base/status.h"
#include "opencl/info.h"
#include "opencl/loader.h"
#include "opencl/table.h"
#include "opencl/tuning.h"

/* A launch that nobody has waited for. */
typedef struct {
    cl_event event;
    const char *call;   /* the function that made the launch */
    const char *kernel; /* the last one of the launch */
    double seconds;     /* that it takes, about */
} ca_pending_call;

#define CA_MAX_PENDING 64

/* Bytes that a kernel's arguments may take. OpenCL promises as many, except for embedded devices,
   which cannot be used if they have fewer. */
#define CA_PARAMETER_BYTES 1024

/* Kept by pending.c, changed under `lock`. Calls have tickets in the queue's order; the
   call of ticket t is calls[t % CA_MAX_PENDING]. Calls before `first` are done. */
typedef struct {
    ca_pending_call calls[CA_MAX_PENDING];
    _Atomic(uint64_t) first;
    uint64_t next;
    bool failed; /* `failure` describes the first call that failed and was not reported */
    ca_error failure;
} ca_pending;

struct ca_storage; /* storage.c */

/* A context and a queue of another library, which the device uses in place of its own. */
typedef struct {
    cl_context context;
    cl_command_queue queue; /* NULL: the device makes its own */
} ca_adopted_queue;

#define CA_POOL_SLOTS 64

/* Kept by storage.c, changed under `lock`: released memory, oldest first. */
typedef struct {
    struct ca_storage *slots[CA_POOL_SLOTS];
    struct ca_storage *adopted; /* a list: buffers of other libraries */
    struct ca_storage *leaving; /* a list, to be freed once no call uses them */
    size_t leaving_bytes;
    size_t leaving_blocks;
    ca_memory_stats stats;
} ca_pool;

/* Kept by staging.c: pinned memory of the host. */
typedef struct {
    int threads; /* that make one copy; 0 or 1: the driver makes all copies */
    cl_mem buffer;
    char *slots;      /* the buffer's memory; NULL before the first use */
    atomic_bool busy; /* a copy uses the slots */
} ca_staging;

/* Kept by launched.c, under `lock`: step n is in entry n % CA_MAX_LAUNCHED. */
typedef struct {
    struct {
        const ca_kernel *kernel; /* NULL: no step, or one that was told */
        uint64_t thread;
        size_t global_size;
        size_t local_size;
    } steps[CA_MAX_LAUNCHED];
    uint64_t next;
} ca_launched;

typedef enum {
    CA_DEVICE_UNTRIED,
    CA_DEVICE_READY,
    CA_DEVICE_UNUSABLE, /* for good; `failure` says why */
} ca_device_state;

struct ca_device {
    const ca_cl *cl; /* the runtime's, like the next two */
    const ca_fork_guard *fork_guard;
    double longest;           /* seconds that a launch may take */
    const char *cache_folder; /* NULL: built programs are not kept on disk */
    cl_platform_id platform;
    cl_device_id id;
    int index; /* in the runtime's list */
    ca_device_info info;
    ca_tuning tuning;
    bool system_svm;      /* supports CA_MEMORY_SVM, whatever mode is chosen */
    bool shares_memory;   /* the same of CA_MEMORY_HOST_PTR */
    bool memory_is_given; /* by CLATTN_MEMORY: no other mode is tried */
    bool local_execution; /* has cl_intel_exec_by_local_thread */
    bool is_host;         /* runs on the processor that this process runs on */
    bool storage_is_host; /* the host reads and writes storages where they lie */

    atomic_int state; /* a ca_device_state */
    ca_error failure; /* written before `state` */
    /* Why the device lacks a capability that its driver reports; written before `state`. */
    ca_error lacks[CA_CAPABILITIES];
    atomic_bool pairs_known; /* info.bfloat16_pairs is final, and was written before */
    atomic_bool amx_known;   /* info.amx is final, and was written before */

    /* Kept for the room that has variants of kernels. */
    _Atomic(uint64_t) tried; /* bits, like `wrong` */
    _Atomic(uint64_t) wrong;
    atomic_int untold;        /* notices that nobody has taken */
    ca_kernel_table left_out; /* under `lock`: kernels without handles, the last one first */
    atomic_bool leaves_out;   /* the table is not empty */

    ca_mutex build_lock;
    ca_mutex lock;
    ca_adopted_queue adopted;
    _Atomic(ca_device *) next; /* the next device of an adopted queue */
    cl_context context;        /* NULL until the device is prepared, like the queues */
    cl_command_queue queue;
    /* Runs a kernel in the thread that enqueues it; enqueueing returns when the kernel is
       done. NULL: the device cannot do so, or has to copy memory. */
    cl_command_queue local_queue;
    ca_kernel_table kernels; /* under `lock` */
    ca_launched launched;
    ca_build_stats built; /* under `lock` */
    ca_pool pool;
    ca_pending pending;
    ca_staging staging;
    _Atomic(struct ca_storage *) marks; /* kept by marks.c; NULL before a mark is taken */
    _Atomic(uint64_t) marks_taken;
};

/* CA_ERROR_DEVICE in a child forked after the guard was made. */
ca_status ca_check_fork(const ca_fork_guard *guard, ca_error *error);
ca_status ca_device_check_fork(const ca_device *device, ca_error *error);

/* Make the context and the queues, or take the adopted ones, under the build_lock. After a failure some of them may
   be there, for ca_device_close. */
ca_status ca_device_open(ca_device *device, ca_error *error);

/* True if the device has the mode, whichever is chosen. */
bool ca_device_has_memory(const ca_device *device, ca_memory_mode mode);

/* Let kernels reach the host's memory in this mode, or in the next one that the device has. Before the
   device is ready. */
void ca_device_set_memory(ca_device *device, ca_memory_mode mode);

/* Release the kernels, the queues and the context. No storage may be left. */
void ca_device_close(ca_device *device);

#endif
