/* SPDX-License-Identifier: MIT */
/* An OpenCL loader with one device that says it is an NVIDIA GPU. It compiles nothing and
 * hands each launch, with the source, the options and the arguments, to a function that
 * ptx/device.py sets. A command is complete when it is enqueued.
 */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_ARGUMENTS 32
#define USE_HOST_PTR   (1 << 3)

enum { SUCCESS = 0, OUT_OF_HOST_MEMORY = -6, INVALID_VALUE = -30, INVALID_BINARY = -42 };

/* Most functions ignore most of OpenCL's parameters. */
#pragma GCC diagnostic ignored "-Wunused-parameter"

typedef void *handle;

typedef struct memory {
    unsigned char *bytes;
    size_t size;
    int owned;
    struct memory *next; /* in the list of all memory */
} memory;

typedef struct {
    char *source;
    char *options;
} program;

/* ptx/device.py has the same struct. */
typedef struct {
    unsigned char *bytes; /* of a buffer or of a value; NULL for no buffer */
    size_t size;
    int32_t is_buffer;
} argument;

typedef struct {
    program *program;
    char name[64];
    uint32_t count;
    argument arguments[MOST_ARGUMENTS];
} kernel;

typedef int32_t (*launch_function)(const char *source, const char *options, const char *name,
                                   uint32_t count, const argument *arguments, size_t global,
                                   size_t local);

static memory *memories;
static char the_platform;
static char the_device;
static char the_event;

launch_function machine_launch;

static int32_t
answer(const void *value, size_t bytes, size_t size, void *to, size_t *needed)
{
    if (needed != NULL) {
        *needed = bytes;
    }
    if (to != NULL && size < bytes) {
        return INVALID_VALUE;
    }
    if (to != NULL) {
        memcpy(to, value, bytes);
    }
    return SUCCESS;
}

static int32_t
answer_text(const char *text, size_t size, void *to, size_t *needed)
{
    return answer(text, strlen(text) + 1, size, to, needed);
}

static int32_t
answer_number(uint64_t x, size_t size, void *to, size_t *needed)
{
    return answer(&x, sizeof x, size, to, needed);
}

/* Returns the only platform or device. */
static int32_t
answer_one(handle it, uint32_t entries, handle *all, uint32_t *count)
{
    if (count != NULL) {
        *count = 1;
    }
    if (entries > 0) {
        all[0] = it;
    }
    return SUCCESS;
}

/* Ends a command. */
static int32_t
done(handle *event)
{
    if (event != NULL) {
        *event = &the_event;
    }
    return SUCCESS;
}

/* ---- platform, device ---- */

int32_t
clGetPlatformIDs(uint32_t entries, handle *platforms, uint32_t *count)
{
    return answer_one(&the_platform, entries, platforms, count);
}

int32_t
clGetPlatformInfo(handle platform, uint32_t name, size_t size, void *to, size_t *needed)
{
    return answer_text("PTX machine", size, to, needed);
}

int32_t
clGetDeviceIDs(handle platform, uint64_t type, uint32_t entries, handle *devices, uint32_t *count)
{
    return answer_one(&the_device, entries, devices, count);
}

int32_t
clGetDeviceInfo(handle device, uint32_t name, size_t size, void *to, size_t *needed)
{
    static const struct {
        uint32_t name;
        uint64_t value;
    } numbers[] = {
        {0x1000, 1 << 2},            /* TYPE: GPU */
        {0x1002, 4},                 /* MAX_COMPUTE_UNITS */
        {0x1004, 1024},              /* MAX_WORK_GROUP_SIZE */
        {0x1010, UINT64_C(1) << 34}, /* MAX_MEM_ALLOC_SIZE */
        {0x1017, 4352},              /* MAX_PARAMETER_SIZE */
        {0x101E, 50 << 20},          /* GLOBAL_MEM_CACHE_SIZE */
        {0x101F, UINT64_C(1) << 36}, /* GLOBAL_MEM_SIZE */
        {0x1023, 48 << 10},          /* LOCAL_MEM_SIZE */
        {0x1026, 1},                 /* ENDIAN_LITTLE */
        {0x1027, 1},                 /* AVAILABLE */
        {0x1028, 1},                 /* COMPILER_AVAILABLE */
        {0x1035, 1},                 /* HOST_UNIFIED_MEMORY */
        {0x103A, 1},                 /* NATIVE_VECTOR_WIDTH_FLOAT */
        {0x4000, 9},                 /* COMPUTE_CAPABILITY_MAJOR_NV */
        {0x4001, 0},                 /* COMPUTE_CAPABILITY_MINOR_NV */
    };
    static const struct {
        uint32_t name;
        const char *text;
    } texts[] = {
        {0x102B, "PTX machine"},                              /* NAME */
        {0x102C, "clattn tests"},                             /* VENDOR */
        {0x102D, "1"},                                        /* DRIVER_VERSION */
        {0x102F, "OpenCL 1.2"},                               /* VERSION */
        {0x1030, "cl_khr_fp64 cl_nv_device_attribute_query"}, /* EXTENSIONS */
        {0x103D, "OpenCL C 1.2"},                             /* OPENCL_C_VERSION */
    };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        if (texts[i].name == name) {
            return answer_text(texts[i].text, size, to, needed);
        }
    }
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        if (numbers[i].name == name) {
            return answer_number(numbers[i].value, size, to, needed);
        }
    }
    return INVALID_VALUE;
}

/* ---- functions that return a handle or nothing ---- */

#define HANDLE_FOR(name, ...)                                                                      \
    handle name(__VA_ARGS__, int32_t *status)                                                      \
    {                                                                                              \
        *status = SUCCESS;                                                                         \
        return &the_device;                                                                        \
    }
#define NOTHING(name, ...)                                                                         \
    int32_t name(__VA_ARGS__)                                                                      \
    {                                                                                              \
        return SUCCESS;                                                                            \
    }

HANDLE_FOR(clCreateContext, const void *properties, uint32_t count, const handle *devices,
           handle notify, void *data)
HANDLE_FOR(clCreateCommandQueue, handle context, handle device, uint64_t properties)
NOTHING(clReleaseContext, handle context)
NOTHING(clReleaseCommandQueue, handle queue)
NOTHING(clWaitForEvents, uint32_t count, const handle *events)
NOTHING(clRetainEvent, handle event)
NOTHING(clReleaseEvent, handle event)
NOTHING(clFlush, handle queue)
NOTHING(clFinish, handle queue)

int32_t
clGetEventInfo(handle event, uint32_t name, size_t size, void *to, size_t *needed)
{
    const int32_t complete = 0;
    return answer(&complete, sizeof complete, size, to, needed);
}

/* ---- programs, kernels ---- */

static char *
copied(const char *text, size_t length)
{
    char *copy = calloc(length + 1, 1);
    return copy == NULL ? NULL : memcpy(copy, text, length);
}

handle
clCreateProgramWithSource(handle context, uint32_t count, const char **texts, const size_t *lengths,
                          int32_t *status)
{
    program *made = calloc(1, sizeof *made);
    if (made != NULL) {
        made->source = copied(texts[0], lengths[0]);
    }
    *status = made == NULL || made->source == NULL ? OUT_OF_HOST_MEMORY : SUCCESS;
    return made;
}

handle
clCreateProgramWithBinary(handle context, uint32_t count, const handle *devices,
                          const size_t *lengths, const unsigned char **binaries, int32_t *loaded,
                          int32_t *status)
{
    *status = INVALID_BINARY;
    return NULL;
}

int32_t
clBuildProgram(handle made, uint32_t count, const handle *devices, const char *options,
               handle notify, void *data)
{
    program *p = made;
    p->options = copied(options, strlen(options));
    return p->options == NULL ? OUT_OF_HOST_MEMORY : SUCCESS;
}

/* Programs and kernels are few, and live as long as the process. */
NOTHING(clReleaseProgram, handle made)
NOTHING(clReleaseKernel, handle made)
NOTHING(clGetProgramInfo, handle made, uint32_t name, size_t size, void *to, size_t *needed)
NOTHING(clGetProgramBuildInfo, handle made, handle device, uint32_t name, size_t size, void *to,
        size_t *needed)

handle
clCreateKernel(handle made, const char *name, int32_t *status)
{
    kernel *k = calloc(1, sizeof *k);
    if (k != NULL) {
        k->program = made;
        snprintf(k->name, sizeof k->name, "%s", name);
    }
    *status = k == NULL ? OUT_OF_HOST_MEMORY : SUCCESS;
    return k;
}

static void
forget(argument *a)
{
    if (!a->is_buffer) {
        free(a->bytes);
    }
    *a = (argument){0};
}

/* A value of a handle's size is a buffer if it is the handle of one, else a number. */
int32_t
clSetKernelArg(handle made, uint32_t index, size_t size, const void *value)
{
    kernel *k = made;
    argument *a = &k->arguments[index];
    if (index >= MOST_ARGUMENTS) {
        return INVALID_VALUE;
    }
    forget(a);
    k->count = index >= k->count ? index + 1 : k->count;
    a->is_buffer = value == NULL;
    for (memory *m = memories; m != NULL && size == sizeof m && value != NULL; m = m->next) {
        if (memcmp(&m, value, sizeof m) == 0) {
            *a = (argument){m->bytes, m->size, 1};
            return SUCCESS;
        }
    }
    if (value != NULL) {
        *a = (argument){(unsigned char *)copied(value, size), size, 0};
    }
    return SUCCESS;
}

int32_t
clGetKernelWorkGroupInfo(handle made, handle device, uint32_t name, size_t size, void *to,
                         size_t *needed)
{
    return answer_number(1024, size, to, needed);
}

int32_t
clEnqueueNDRangeKernel(handle queue, handle made, uint32_t dims, const size_t *offset,
                       const size_t *global, const size_t *local, uint32_t waits,
                       const handle *wait_list, handle *event)
{
    kernel *k = made;
    done(event);
    return machine_launch(k->program->source, k->program->options, k->name, k->count, k->arguments,
                          global[0], local[0]);
}

/* ---- memory ---- */

/* Fills new memory with bytes that are a large number in every type. */
handle
clCreateBuffer(handle context, uint64_t flags, size_t size, void *host, int32_t *status)
{
    memory *m = calloc(1, sizeof *m);
    if (m == NULL) {
        *status = OUT_OF_HOST_MEMORY;
        return NULL;
    }
    m->size = size;
    m->owned = (flags & USE_HOST_PTR) == 0;
    m->bytes = m->owned ? aligned_alloc(256, (size + 255) / 256 * 256) : host;
    if (m->owned && m->bytes != NULL) {
        memset(m->bytes, 0x64, size);
    }
    m->next = memories;
    memories = m;
    *status = m->bytes == NULL ? OUT_OF_HOST_MEMORY : SUCCESS;
    return m;
}

int32_t
clReleaseMemObject(handle buffer)
{
    memory *m = buffer;
    memory **at = &memories;
    while (*at != m) {
        at = &(*at)->next;
    }
    *at = m->next;
    if (m->owned) {
        free(m->bytes);
    }
    free(m);
    return SUCCESS;
}

int32_t
clEnqueueReadBuffer(handle queue, handle buffer, uint32_t blocking, size_t offset, size_t size,
                    void *to, uint32_t waits, const handle *wait_list, handle *event)
{
    memcpy(to, ((memory *)buffer)->bytes + offset, size);
    return done(event);
}

int32_t
clEnqueueWriteBuffer(handle queue, handle buffer, uint32_t blocking, size_t offset, size_t size,
                     const void *from, uint32_t waits, const handle *wait_list, handle *event)
{
    memcpy(((memory *)buffer)->bytes + offset, from, size);
    return done(event);
}

handle
clEnqueueMapBuffer(handle queue, handle buffer, uint32_t blocking, uint64_t flags, size_t offset,
                   size_t size, uint32_t waits, const handle *wait_list, handle *event,
                   int32_t *status)
{
    *status = SUCCESS;
    done(event);
    return ((memory *)buffer)->bytes + offset;
}

int32_t
clEnqueueUnmapMemObject(handle queue, handle buffer, void *mapped, uint32_t waits,
                        const handle *wait_list, handle *event)
{
    return done(event);
}
