/* SPDX-License-Identifier: MIT */
/* An OpenCL loader with one device that says it is an NVIDIA GPU. What runs its kernels is the
 * back end that is compiled with it: interpreted_machine.c or cuda_machine.c.
 */

#include "opencl_machine.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define USE_HOST_PTR         (1 << 3)
#define PROGRAM_BINARY_SIZES 0x1165
#define PROGRAM_BINARIES     0x1166

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
    atomic_int references;
    void *mark;
} event;

static memory *memories;
static pthread_mutex_t memories_lock = PTHREAD_MUTEX_INITIALIZER;
static char the_platform;
static char the_device;

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

/* ---- platform, device ---- */

int32_t
clGetPlatformIDs(uint32_t entries, handle *platforms, uint32_t *count)
{
    if (backend.open() == NULL) {
        return PLATFORM_NOT_FOUND;
    }
    return answer_one(&the_platform, entries, platforms, count);
}

int32_t
clGetPlatformInfo(handle platform, uint32_t name, size_t size, void *to, size_t *needed)
{
    return answer_text(backend.open()->platform, size, to, needed);
}

int32_t
clGetDeviceIDs(handle platform, uint64_t type, uint32_t entries, handle *devices, uint32_t *count)
{
    return answer_one(&the_device, entries, devices, count);
}

int32_t
clGetDeviceInfo(handle device, uint32_t name, size_t size, void *to, size_t *needed)
{
    const machine_facts *facts = backend.open();
    const struct {
        uint32_t name;
        uint64_t value;
    } numbers[] = {
        {0x1000, 1 << 2}, /* TYPE: GPU */
        {0x1002, facts->compute_units},
        {0x1004, facts->work_group},
        {0x1010, facts->allocation},
        {0x1017, facts->parameters},
        {0x101E, facts->cache},
        {0x101F, facts->memory},
        {0x1023, facts->local_memory},
        {0x1026, 1}, /* ENDIAN_LITTLE */
        {0x1027, 1}, /* AVAILABLE */
        {0x1028, 1}, /* COMPILER_AVAILABLE */
        {0x1035, facts->shares_memory},
        {0x103A, 1}, /* NATIVE_VECTOR_WIDTH_FLOAT */
        {0x4000, facts->capability_major},
        {0x4001, facts->capability_minor},
    };
    const struct {
        uint32_t name;
        const char *text;
    } texts[] = {
        {0x102B, facts->name},
        {0x102C, facts->vendor},
        {0x102D, facts->driver},
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
NOTHING(clFlush, handle queue)

int32_t
clFinish(handle queue)
{
    return backend.finish();
}

/* ---- events ---- */

/* Returns the status of a command that has been enqueued, and its event if it is wanted. */
static int32_t
enqueued(int32_t status, handle *wanted)
{
    if (status != SUCCESS || wanted == NULL) {
        return status;
    }
    event *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return OUT_OF_HOST_MEMORY;
    }
    made->references = 1;
    status = backend.mark(&made->mark);
    if (status != SUCCESS) {
        free(made);
        made = NULL;
    }
    *wanted = made;
    return status;
}

int32_t
clWaitForEvents(uint32_t count, const handle *events)
{
    int32_t status = SUCCESS;
    for (uint32_t i = 0; i < count && status == SUCCESS; i++) {
        status = backend.wait(((event *)events[i])->mark);
    }
    return status;
}

int32_t
clGetEventInfo(handle made, uint32_t name, size_t size, void *to, size_t *needed)
{
    const int32_t state = backend.state(((event *)made)->mark);
    return answer(&state, sizeof state, size, to, needed);
}

int32_t
clRetainEvent(handle made)
{
    ((event *)made)->references++;
    return SUCCESS;
}

int32_t
clReleaseEvent(handle made)
{
    event *e = made;
    if (--e->references == 0) {
        backend.drop(e->mark);
        free(e);
    }
    return SUCCESS;
}

/* ---- programs, kernels ---- */

static char *
copied(const char *text, size_t length)
{
    char *copy = calloc(length + 1, 1);
    return copy == NULL ? NULL : memcpy(copy, text, length);
}

static char *
joined(uint32_t count, const char **texts, const size_t *lengths)
{
    size_t length = 0;
    for (uint32_t n = 0; n < count; n++) {
        length += lengths[n];
    }
    char *text = calloc(length + 1, 1);
    char *end = text;
    for (uint32_t n = 0; n < count && text != NULL; n++) {
        memcpy(end, texts[n], lengths[n]);
        end += lengths[n];
    }
    return text;
}

handle
clCreateProgramWithSource(handle context, uint32_t count, const char **texts, const size_t *lengths,
                          int32_t *status)
{
    machine_program *made = calloc(1, sizeof *made);
    if (made != NULL) {
        made->source = joined(count, texts, lengths);
    }
    *status = made == NULL || made->source == NULL ? OUT_OF_HOST_MEMORY : SUCCESS;
    return made;
}

handle
clCreateProgramWithBinary(handle context, uint32_t count, const handle *devices,
                          const size_t *lengths, const unsigned char **binaries, int32_t *loaded,
                          int32_t *status)
{
    machine_program *made = backend.header == NULL ? NULL : calloc(1, sizeof *made);
    if (made != NULL) {
        made->source = copied((const char *)binaries[0], lengths[0]);
    }
    *status = *loaded = made == NULL || made->source == NULL ? INVALID_BINARY : SUCCESS;
    return made;
}

int32_t
clBuildProgram(handle made, uint32_t count, const handle *devices, const char *options,
               handle notify, void *data)
{
    machine_program *p = made;
    p->options = copied(options, strlen(options));
    return p->options == NULL ? OUT_OF_HOST_MEMORY : backend.build(p);
}

/* Programs and kernels are few, and live as long as the process. */
NOTHING(clReleaseProgram, handle made)
NOTHING(clReleaseKernel, handle made)

/* A program's binary is its source behind a header. */
int32_t
clGetProgramInfo(handle made, uint32_t name, size_t size, void *to, size_t *needed)
{
    const char *source = ((machine_program *)made)->source;
    const char *header = backend.header == NULL ? "" : backend.header;
    bool has_header = strncmp(source, header, strlen(".target")) == 0;
    size_t before = has_header ? 0 : strlen(header);
    size_t length = before + strlen(source);
    if (backend.header == NULL) {
        return INVALID_OPERATION;
    }
    if (name == PROGRAM_BINARY_SIZES) {
        return answer(&length, sizeof length, size, to, needed);
    }
    if (name != PROGRAM_BINARIES) {
        return INVALID_VALUE;
    }
    memcpy(*(char **)to, header, before);
    memcpy(*(char **)to + before, source, length - before);
    return SUCCESS;
}

int32_t
clGetProgramBuildInfo(handle made, handle device, uint32_t name, size_t size, void *to,
                      size_t *needed)
{
    const char *log = ((machine_program *)made)->log;
    return answer_text(log == NULL ? "" : log, size, to, needed);
}

handle
clCreateKernel(handle made, const char *name, int32_t *status)
{
    machine_kernel *k = calloc(1, sizeof *k);
    if (k == NULL) {
        *status = OUT_OF_HOST_MEMORY;
        return NULL;
    }
    k->program = made;
    snprintf(k->name, sizeof k->name, "%s", name);
    *status = backend.find(k);
    if (*status != SUCCESS) {
        free(k);
        k = NULL;
    }
    return k;
}

static void
forget(machine_argument *a)
{
    if (!a->is_buffer) {
        free(a->bytes);
    }
    *a = (machine_argument){0};
}

/* A value of a handle's size is a buffer if it is the handle of one, else a number. */
static const memory *
buffer_of(size_t size, const void *value)
{
    const memory *m = NULL;
    const memory *given = NULL;
    if (value != NULL && size == sizeof m) {
        memcpy(&given, value, sizeof given);
        pthread_mutex_lock(&memories_lock);
        m = memories;
        while (m != NULL && m != given) {
            m = m->next;
        }
        pthread_mutex_unlock(&memories_lock);
    }
    return m;
}

int32_t
clSetKernelArg(handle made, uint32_t index, size_t size, const void *value)
{
    machine_kernel *k = made;
    machine_argument *a = &k->arguments[index];
    if (index >= MOST_ARGUMENTS) {
        return INVALID_VALUE;
    }
    forget(a);
    k->count = index >= k->count ? index + 1 : k->count;
    const memory *m = buffer_of(size, value);
    if (value == NULL) {
        *a = (machine_argument){.is_buffer = 1};
    } else if (m != NULL) {
        *a = (machine_argument){m->bytes, m->size, 1};
    } else {
        *a = (machine_argument){(unsigned char *)copied(value, size), size, 0};
    }
    return SUCCESS;
}

int32_t
clGetKernelWorkGroupInfo(handle made, handle device, uint32_t name, size_t size, void *to,
                         size_t *needed)
{
    return answer_number(((machine_kernel *)made)->work_group, size, to, needed);
}

int32_t
clEnqueueNDRangeKernel(handle queue, handle made, uint32_t dims, const size_t *offset,
                       const size_t *global, const size_t *local, uint32_t waits,
                       const handle *wait_list, handle *wanted)
{
    return enqueued(backend.launch(made, global[0] / local[0], local[0]), wanted);
}

/* ---- memory ---- */

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
    m->bytes = host;
    *status = m->owned                        ? backend.allocate(size, &m->bytes)
              : backend.open()->shares_memory ? SUCCESS
                                              : INVALID_OPERATION;
    if (*status != SUCCESS) {
        free(m);
        return NULL;
    }
    pthread_mutex_lock(&memories_lock);
    m->next = memories;
    memories = m;
    pthread_mutex_unlock(&memories_lock);
    return m;
}

int32_t
clReleaseMemObject(handle buffer)
{
    memory *m = buffer;
    memory **at = &memories;
    pthread_mutex_lock(&memories_lock);
    while (*at != m) {
        at = &(*at)->next;
    }
    *at = m->next;
    pthread_mutex_unlock(&memories_lock);
    if (m->owned) {
        backend.release(m->bytes);
    }
    free(m);
    return SUCCESS;
}

int32_t
clEnqueueReadBuffer(handle queue, handle buffer, uint32_t blocking, size_t offset, size_t size,
                    void *to, uint32_t waits, const handle *wait_list, handle *wanted)
{
    const memory *m = buffer;
    return enqueued(backend.read(to, m->bytes + offset, size, blocking), wanted);
}

int32_t
clEnqueueWriteBuffer(handle queue, handle buffer, uint32_t blocking, size_t offset, size_t size,
                     const void *from, uint32_t waits, const handle *wait_list, handle *wanted)
{
    const memory *m = buffer;
    return enqueued(backend.write(m->bytes + offset, from, size, blocking), wanted);
}

/* Only memory of the host is mapped. */
handle
clEnqueueMapBuffer(handle queue, handle buffer, uint32_t blocking, uint64_t flags, size_t offset,
                   size_t size, uint32_t waits, const handle *wait_list, handle *wanted,
                   int32_t *status)
{
    const memory *m = buffer;
    *status = backend.open()->shares_memory ? enqueued(SUCCESS, wanted) : INVALID_OPERATION;
    return *status == SUCCESS ? m->bytes + offset : NULL;
}

int32_t
clEnqueueUnmapMemObject(handle queue, handle buffer, void *mapped, uint32_t waits,
                        const handle *wait_list, handle *wanted)
{
    return enqueued(SUCCESS, wanted);
}
