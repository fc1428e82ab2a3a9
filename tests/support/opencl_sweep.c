/* SPDX-License-Identifier: MIT */
/* An OpenCL loader in which the n-th call of a chosen function fails with a chosen error.
 *
 * It is linked against the real loader and passes every call on to that loader, except the call that
 * fails. It counts calls, and the objects that live. A function that releases an object does so, and
 * then reports its error. sweep.py uses the loader.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef void *handle;

static char chosen[64]; /* the function that fails; "": none */
static atomic_int to_go;
static atomic_int code;
static atomic_int fired;
static atomic_int aborts; /* the process dies in the place of the call */
static atomic_long living;

/* The n-th of the next calls of the function fails with `error`. */
void
sweep_fail(const char *function, int n, int error)
{
    to_go = 0;
    strncpy(chosen, function, sizeof chosen - 1);
    code = error;
    fired = 0;
    to_go = n;
}

/* The process dies in the call that would fail. */
void
sweep_abort(int dies)
{
    aborts = dies;
}

/* Returns whether the call has failed. Nothing fails from now on. */
int
sweep_end(void)
{
    to_go = 0;
    return fired;
}

/* Returns how many contexts, queues, programs, kernels, buffers and references of events live. */
long
sweep_living(void)
{
    return living;
}

static int
is_due(const char *function)
{
    if (to_go <= 0 || strcmp(function, chosen) != 0 || --to_go != 0) {
        return 0;
    }
    if (aborts) {
        abort();
    }
    fired = 1;
    return 1;
}

#define REAL(name) ((name##_type *)dlsym(RTLD_NEXT, #name))

/* A function that returns its status. */
#define RETURNS(name, parameters, arguments)                                                       \
    typedef int32_t name##_type parameters;                                                        \
    int32_t name parameters                                                                        \
    {                                                                                              \
        return is_due(#name) ? code : REAL(name) arguments;                                        \
    }

/* A function that creates an object. */
#define CREATES(name, parameters, arguments)                                                       \
    typedef handle name##_type parameters;                                                         \
    handle name parameters                                                                         \
    {                                                                                              \
        if (is_due(#name)) {                                                                       \
            *status = code;                                                                        \
            return NULL;                                                                           \
        }                                                                                          \
        handle made = REAL(name) arguments;                                                        \
        living += made != NULL;                                                                    \
        return made;                                                                               \
    }

/* A function that releases an object. */
#define RELEASES(name)                                                                             \
    typedef int32_t name##_type(handle);                                                           \
    int32_t name(handle object)                                                                    \
    {                                                                                              \
        int failed = is_due(#name);                                                                \
        int32_t status = REAL(name)(object);                                                       \
        living -= status == 0;                                                                     \
        return failed ? code : status;                                                             \
    }

/* A function that enqueues a command. */
#define ENQUEUES(name, parameters, arguments)                                                      \
    typedef int32_t name##_type parameters;                                                        \
    int32_t name parameters                                                                        \
    {                                                                                              \
        if (is_due(#name)) {                                                                       \
            return code;                                                                           \
        }                                                                                          \
        int32_t status = REAL(name) arguments;                                                     \
        living += status == 0 && event != NULL;                                                    \
        return status;                                                                             \
    }

typedef void notify(handle, void *);

RETURNS(clGetPlatformIDs, (uint32_t n, handle *ids, uint32_t *count), (n, ids, count))
RETURNS(clGetPlatformInfo, (handle p, uint32_t what, size_t n, void *value, size_t *size),
        (p, what, n, value, size))
RETURNS(clGetDeviceIDs, (handle p, uint64_t type, uint32_t n, handle *ids, uint32_t *count),
        (p, type, n, ids, count))
RETURNS(clGetDeviceInfo, (handle d, uint32_t what, size_t n, void *value, size_t *size),
        (d, what, n, value, size))
RETURNS(clGetProgramInfo, (handle p, uint32_t what, size_t n, void *value, size_t *size),
        (p, what, n, value, size))
RETURNS(clGetProgramBuildInfo,
        (handle p, handle d, uint32_t what, size_t n, void *value, size_t *size),
        (p, d, what, n, value, size))
RETURNS(clGetKernelWorkGroupInfo,
        (handle k, handle d, uint32_t what, size_t n, void *value, size_t *size),
        (k, d, what, n, value, size))
RETURNS(clGetEventInfo, (handle e, uint32_t what, size_t n, void *value, size_t *size),
        (e, what, n, value, size))
RETURNS(clBuildProgram,
        (handle p, uint32_t n, const handle *devices, const char *options, notify *done,
         void *data),
        (p, n, devices, options, done, data))
RETURNS(clSetKernelArg, (handle k, uint32_t n, size_t size, const void *value), (k, n, size, value))
RETURNS(clSetKernelArgSVMPointer, (handle k, uint32_t n, const void *value), (k, n, value))
RETURNS(clWaitForEvents, (uint32_t n, const handle *events), (n, events))
RETURNS(clFlush, (handle queue), (queue))
RETURNS(clFinish, (handle queue), (queue))

CREATES(clCreateContext,
        (const intptr_t *properties, uint32_t n, const handle *devices,
         void (*told)(const char *, const void *, size_t, void *), void *data, int32_t *status),
        (properties, n, devices, told, data, status))
CREATES(clCreateCommandQueue, (handle c, handle d, uint64_t properties, int32_t *status),
        (c, d, properties, status))
CREATES(clCreateProgramWithSource,
        (handle c, uint32_t n, const char **texts, const size_t *sizes, int32_t *status),
        (c, n, texts, sizes, status))
CREATES(clCreateProgramWithBinary,
        (handle c, uint32_t n, const handle *devices, const size_t *sizes,
         const unsigned char **binaries, int32_t *each, int32_t *status),
        (c, n, devices, sizes, binaries, each, status))
CREATES(clCreateKernel, (handle p, const char *name, int32_t *status), (p, name, status))
CREATES(clCreateBuffer, (handle c, uint64_t flags, size_t size, void *host, int32_t *status),
        (c, flags, size, host, status))

RELEASES(clReleaseContext)
RELEASES(clReleaseCommandQueue)
RELEASES(clReleaseProgram)
RELEASES(clReleaseKernel)
RELEASES(clReleaseMemObject)
RELEASES(clReleaseEvent)

ENQUEUES(clEnqueueReadBuffer,
         (handle q, handle b, uint32_t blocks, size_t offset, size_t size, void *to, uint32_t n,
          const handle *waits, handle *event),
         (q, b, blocks, offset, size, to, n, waits, event))
ENQUEUES(clEnqueueWriteBuffer,
         (handle q, handle b, uint32_t blocks, size_t offset, size_t size, const void *from,
          uint32_t n, const handle *waits, handle *event),
         (q, b, blocks, offset, size, from, n, waits, event))
ENQUEUES(clEnqueueUnmapMemObject,
         (handle q, handle b, void *mapped, uint32_t n, const handle *waits, handle *event),
         (q, b, mapped, n, waits, event))
ENQUEUES(clEnqueueNDRangeKernel,
         (handle q, handle k, uint32_t dims, const size_t *offset, const size_t *global,
          const size_t *local, uint32_t n, const handle *waits, handle *event),
         (q, k, dims, offset, global, local, n, waits, event))

typedef int32_t clRetainEvent_type(handle);

int32_t
clRetainEvent(handle event)
{
    if (is_due("clRetainEvent")) {
        return code;
    }
    int32_t status = REAL(clRetainEvent)(event);
    living += status == 0;
    return status;
}

typedef void *clEnqueueMapBuffer_type(handle, handle, uint32_t, uint64_t, size_t, size_t, uint32_t,
                                      const handle *, handle *, int32_t *);

void *
clEnqueueMapBuffer(handle queue, handle buffer, uint32_t blocks, uint64_t flags, size_t offset,
                   size_t size, uint32_t n, const handle *waits, handle *event, int32_t *status)
{
    if (is_due("clEnqueueMapBuffer")) {
        *status = code;
        return NULL;
    }
    return REAL(clEnqueueMapBuffer)(queue, buffer, blocks, flags, offset, size, n, waits, event,
                                    status);
}
