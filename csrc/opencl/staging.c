/* SPDX-License-Identifier: MIT
 *
 * A thread has two slots of pinned memory. It copies chunks between the array and its slots. The
 * driver moves chunks between the slots and the device's buffer. Two threads copy an array to the
 * device:
 *
 *     thread 0   copies chunk 0   copies chunk 2      copies chunk 4
 *     thread 1   copies chunk 1   copies chunk 3      copies chunk 5
 *     driver                      moves chunks 0, 1   moves chunks 2, 3
 */
#include "opencl/staging.h"

#include <string.h>

#include "opencl/pending.h"

#define CHUNK ((size_t)1 << 20) /* bytes; an H200 moves one in 20 us */

enum { SLOTS = 2 }; /* of a thread */

/* The least bytes of an array that threads copy. Threads copy arrays of 8 MiB to an H100 in 0.6 of the
   driver's time, and arrays of 4 MiB in 0.9. On the host of an H200, arrays of 4 MiB took twice the
   driver's time. */
#define LEAST_BYTES (8 * CHUNK)

/* One copy. */
typedef struct {
    ca_device *device;
    cl_mem buffer;
    char *slots;
    size_t offset; /* in the buffer */
    char *host;
    size_t bytes;
    bool to_device;
    atomic_size_t next;         /* the first byte of the array that no thread has taken */
    atomic_int code;            /* OpenCL's, of the first call that failed */
    _Atomic(const char *) call; /* the name of that call */
} copy;

/* A slot, and the bytes of the array that belong to it. */
typedef struct {
    char *memory;
    char *host;
    size_t bytes;
    cl_event event; /* of the driver's move; NULL: the driver does not use the slot */
} slot;

/* Keep the first failure. */
static void
note(copy *job, const char *call, cl_int code)
{
    int none = CL_SUCCESS;
    if (code != CL_SUCCESS && atomic_compare_exchange_strong(&job->code, &none, code)) {
        atomic_store(&job->call, call);
    }
}

/* Wait until the driver has moved the chunk of the slot. Copy a chunk from the device to the array. */
static void
settle(copy *job, slot *used)
{
    const ca_cl *cl = job->device->cl;
    if (used->event == NULL) {
        return;
    }
    cl_int code = cl->clWaitForEvents(1, &used->event);
    if (code != CL_SUCCESS) {
        cl->clFinish(job->device->queue); /* the driver may use the slot still */
    }
    cl->clReleaseEvent(used->event);
    used->event = NULL;
    note(job, "clWaitForEvents", code);
    if (code == CL_SUCCESS && !job->to_device) {
        memcpy(used->host, used->memory, used->bytes);
    }
}

static const char *
name_of(const copy *job)
{
    return job->to_device ? "clEnqueueWriteBuffer" : "clEnqueueReadBuffer";
}

/* Let the driver move the chunk that begins at byte `first` of the array. */
static void
start(copy *job, slot *unused, size_t first)
{
    const ca_device *device = job->device;
    const ca_cl *cl = device->cl;
    size_t left = job->bytes - first;
    size_t offset = job->offset + first;
    unused->host = job->host + first;
    unused->bytes = left < CHUNK ? left : CHUNK;
    cl_int code;
    if (job->to_device) {
        memcpy(unused->memory, unused->host, unused->bytes);
        code = cl->clEnqueueWriteBuffer(device->queue, job->buffer, CL_FALSE, offset, unused->bytes,
                                        unused->memory, 0, NULL, &unused->event);
    } else {
        code = cl->clEnqueueReadBuffer(device->queue, job->buffer, CL_FALSE, offset, unused->bytes,
                                       unused->memory, 0, NULL, &unused->event);
    }
    if (code != CL_SUCCESS) {
        unused->event = NULL;
        note(job, name_of(job), code);
        return;
    }
    note(job, "clFlush", cl->clFlush(device->queue));
}

/* Copy chunks until none is left, as thread `number`. */
static void
work(void *context, int number)
{
    copy *job = context;
    slot slots[SLOTS] = {{0}};
    int turn = 0;
    for (int i = 0; i < SLOTS; i++) {
        slots[i].memory = job->slots + (size_t)(number * SLOTS + i) * CHUNK;
    }
    for (;;) {
        size_t first = atomic_fetch_add(&job->next, CHUNK);
        if (first >= job->bytes || atomic_load(&job->code) != CL_SUCCESS) {
            break;
        }
        settle(job, &slots[turn]);
        start(job, &slots[turn], first);
        turn = (turn + 1) % SLOTS;
    }
    for (int i = 0; i < SLOTS; i++) {
        settle(job, &slots[(turn + i) % SLOTS]);
    }
}

/* Make the slots of all threads in pinned memory. */
static cl_int
make_slots(ca_device *device)
{
    const ca_cl *cl = device->cl;
    ca_staging *staging = &device->staging;
    const size_t bytes = (size_t)(staging->threads * SLOTS) * CHUNK;
    cl_int code = CL_SUCCESS;
    staging->buffer = cl->clCreateBuffer(device->context, CL_MEM_READ_WRITE | CL_MEM_ALLOC_HOST_PTR,
                                         bytes, NULL, &code);
    if (code != CL_SUCCESS) {
        staging->buffer = NULL;
        return code;
    }
    staging->slots =
        cl->clEnqueueMapBuffer(device->queue, staging->buffer, CL_TRUE, CL_MAP_READ | CL_MAP_WRITE,
                               0, bytes, 0, NULL, NULL, &code);
    if (code != CL_SUCCESS) {
        staging->slots = NULL;
        ca_staging_close(device);
    }
    return code;
}

void
ca_staging_open(ca_device *device)
{
    int processors = ca_processors();
    int most = processors < CA_MAX_THREADS ? processors : CA_MAX_THREADS;
    device->staging.threads = device->info.memory == CA_MEMORY_COPY ? most : 0;
}

bool
ca_staging_is_faster(const ca_device *device, size_t bytes)
{
    return device->staging.threads > 1 && bytes >= LEAST_BYTES;
}

static cl_int
copy_by_driver(const copy *job)
{
    const ca_device *device = job->device;
    return job->to_device
               ? device->cl->clEnqueueWriteBuffer(device->queue, job->buffer, CL_TRUE, job->offset,
                                                  job->bytes, job->host, 0, NULL, NULL)
               : device->cl->clEnqueueReadBuffer(device->queue, job->buffer, CL_TRUE, job->offset,
                                                 job->bytes, job->host, 0, NULL, NULL);
}

/* Threads make the copy if they are faster and no other copy uses the slots. Else the driver makes
   the copy. */
static ca_status
run(copy *job, ca_error *error)
{
    ca_device *device = job->device;
    bool copied = false;
    if (ca_staging_is_faster(device, job->bytes) && !atomic_exchange(&device->staging.busy, true)) {
        if (device->staging.slots != NULL || make_slots(device) == CL_SUCCESS) {
            job->slots = device->staging.slots;
            ca_threads_run(work, job, device->staging.threads);
            copied = true;
        }
        atomic_store(&device->staging.busy, false);
    }
    if (!copied) {
        note(job, name_of(job), copy_by_driver(job));
    }
    cl_int code = atomic_load(&job->code);
    ca_status status = code != CL_SUCCESS ? ca_pending_check(device, error) : CA_OK;
    return status != CA_OK ? status
                           : ca_cl_check(code, atomic_load(&job->call), device->info.name, error);
}

ca_status
ca_staging_write(ca_device *device, cl_mem buffer, size_t offset, const void *source, size_t bytes,
                 ca_error *error)
{
    copy job = {.device = device,
                .buffer = buffer,
                .offset = offset,
                .host = (char *)(uintptr_t)source, /* only read */
                .bytes = bytes,
                .to_device = true};
    return run(&job, error);
}

ca_status
ca_staging_read(ca_device *device, cl_mem buffer, size_t offset, void *target, size_t bytes,
                ca_error *error)
{
    copy job = {
        .device = device, .buffer = buffer, .offset = offset, .host = target, .bytes = bytes};
    return run(&job, error);
}

void
ca_staging_close(ca_device *device)
{
    const ca_cl *cl = device->cl;
    ca_staging *staging = &device->staging;
    if (staging->slots != NULL) {
        (void)cl->clEnqueueUnmapMemObject(device->queue, staging->buffer, staging->slots, 0, NULL,
                                          NULL);
        (void)cl->clFinish(device->queue);
        staging->slots = NULL;
    }
    if (staging->buffer != NULL) {
        cl->clReleaseMemObject(staging->buffer);
        staging->buffer = NULL;
    }
}
