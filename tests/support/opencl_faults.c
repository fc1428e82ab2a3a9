/* SPDX-License-Identifier: MIT */
/* An OpenCL loader whose commands fail when a test says so.
 *
 * It is linked against the real loader, passes every call on to that loader, and changes some
 * answers. It counts copies, builds and kernels, and defines a macro for programs.
 * Variables of the environment say what it changes:
 *
 *     FAULTS_WITHOUT  an extension that no device has
 *     FAULTS_GPU      every device reports that it is a GPU
 *     FAULTS_NVIDIA   every device reports that it is a GPU of NVIDIA
 *     FAULTS_WIDTH    how many floats a vector register holds
 *     FAULTS_UNKNOWN  no platform has a name that clattn knows
 *     FAULTS_UNMAP    memory cannot be unmapped
 *     FAULTS_ROUNDS   how many rounds the probe of loops makes
 *     FAULTS_TEXT, FAULTS_INSTEAD
 *                     a text in the source of kernels, and what stands in its place
 *     FAULTS_EXTENSIONS, FAULTS_SIZES (of sub-groups, such as "8 16"), FAULTS_WAVE, FAULTS_LOCAL
 *                     facts of a GPU; its attention kernels are not built, and their options are
 *                     printed instead
 *
 * faults.py builds the loader and puts it in the real one's place.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TYPE                0x1000
#define EXTENSIONS          0x1030
#define FLOAT_WIDTH         0x103A
#define PLATFORM_NAME       0x0902
#define INVALID_VALUE       (-30)
#define LOCAL_MEMORY        0x1023
#define SUB_GROUP_SIZES     0x4108
#define WAVE                0x4043
#define CAPABILITY_MAJOR    0x4000
#define CAPABILITY_MINOR    0x4001
#define GPU                 4
#define EVENT_STATUS        0x11D3
#define FAILED_IN_WAIT_LIST (-14)

typedef void *handle;
typedef void (*callback)(handle event, int32_t status, void *data);

/* A command that fails when it is the `to_go`-th of the next ones of its kind. */
typedef struct {
    atomic_int to_go;
    atomic_int code;
} fault;

/* Defines a fault and the function that asks for it: faults_NAME(n, code). */
#define FAULT(name)                                                                                \
    static fault name;                                                                             \
    void faults_##name(int n, int code)                                                            \
    {                                                                                              \
        name.code = code;                                                                          \
        name.to_go = n;                                                                            \
    }

FAULT(fail)         /* the n-th of the next kernels fails with `code` when it has run */
FAULT(refuse)       /* enqueueing the n-th of the next kernels returns `code` */
FAULT(refuse_each)  /* enqueueing each of the next n kernels returns `code` */
FAULT(refuse_write) /* enqueueing the n-th of the next copies to devices returns `code` */
FAULT(refuse_read)  /* enqueueing the n-th of the next copies from devices returns `code` */
FAULT(fail_buffers) /* creating each of the next n buffers returns `code` */

/* Defines a counter and the function that returns it: faults_NAME(). */
#define COUNTER(name, type)                                                                        \
    static _Atomic(type) name;                                                                     \
    type faults_##name(void)                                                                       \
    {                                                                                              \
        return name;                                                                               \
    }

COUNTER(planted, int)    /* sources so far in which FAULTS_INSTEAD stands */
COUNTER(builds, int)     /* of programs so far, from a source or a binary */
COUNTER(kernels, int)    /* enqueued so far */
COUNTER(had_event, int)  /* the caller had asked for the event of the kernel that failed last */
COUNTER(written, size_t) /* bytes sent to devices */
COUNTER(fetched, size_t) /* bytes fetched from devices */

static _Atomic(handle) failing;  /* the event of the kernel that fails; kept, so that no other
                                    event gets its handle */
static _Atomic(handle) untold;   /* that kernel's queue, until a call that waits has returned the
                                    error */
static _Atomic(handle) follower; /* the event of a later command of that queue, which fails too */
static char definition[128];     /* of a macro, for programs; "": none */

static struct {
    callback function;
    void *data;
} wrapped;

#define REAL(name) ((name##_type *)dlsym(RTLD_NEXT, #name))

/* Later programs are built with this macro, "NAME=VALUE". "" stands for none. */
void
faults_define(const char *macro)
{
    snprintf(definition, sizeof definition, macro[0] != '\0' ? " -D%s" : "%s", macro);
}

/* Returns how many kinds of fault were asked for and have not occurred yet. */
int
faults_to_come(void)
{
    return (fail.to_go > 0) + (refuse.to_go > 0) + (refuse_each.to_go > 0) +
           (fail_buffers.to_go > 0) + (refuse_write.to_go > 0) + (refuse_read.to_go > 0);
}

/* True for the n-th call since the fault was asked for. */
static int
is_due(fault *f)
{
    return f->to_go > 0 && --f->to_go == 0;
}

typedef int32_t clRetainEvent_type(handle);

/* A queue executes its commands in order. A command behind the failed kernel fails too, until a
 * call has returned the error. */
static void
follow(handle queue, const handle *event)
{
    if (untold != NULL && queue == untold && event != NULL) {
        REAL(clRetainEvent)(*event);
        follower = *event;
    }
}

typedef int32_t clEnqueueNDRangeKernel_type(handle, handle, uint32_t, const size_t *,
                                            const size_t *, const size_t *, uint32_t,
                                            const handle *, handle *);

int32_t
clEnqueueNDRangeKernel(handle queue, handle kernel, uint32_t dims, const size_t *offset,
                       const size_t *global, const size_t *local, uint32_t waits,
                       const handle *wait_list, handle *event)
{
    kernels++;
    if (is_due(&refuse)) {
        return refuse.code;
    }
    if (refuse_each.to_go > 0) {
        refuse_each.to_go--;
        return refuse_each.code;
    }
    handle own = NULL;
    int is_lost = is_due(&fail);
    if (is_lost) {
        had_event = event != NULL;
        event = had_event ? event : &own;
    }
    int32_t status = REAL(clEnqueueNDRangeKernel)(queue, kernel, dims, offset, global, local, waits,
                                                  wait_list, event);
    if (status == 0 && is_lost) {
        REAL(clRetainEvent)(*event);
        failing = *event;
        untold = queue;
        follower = NULL;
    } else if (status == 0 && !had_event) { /* else the kernel's own event tells */
        follow(queue, event);
    }
    return status;
}

typedef int32_t clWaitForEvents_type(uint32_t, const handle *);

int32_t
clWaitForEvents(uint32_t count, const handle *events)
{
    int32_t status = REAL(clWaitForEvents)(count, events);
    for (uint32_t i = 0; status == 0 && i < count; i++) {
        if (events[i] == failing || events[i] == follower) {
            status = FAILED_IN_WAIT_LIST;
            untold = NULL;
        }
    }
    return status;
}

typedef int32_t clEnqueueUnmapMemObject_type(handle, handle, void *, uint32_t, const handle *,
                                             handle *);

int32_t
clEnqueueUnmapMemObject(handle queue, handle buffer, void *mapped, uint32_t waits,
                        const handle *wait_list, handle *event)
{
    int32_t status = REAL(clEnqueueUnmapMemObject)(queue, buffer, mapped, waits, wait_list, event);
    follow(queue, event);
    return getenv("FAULTS_UNMAP") != NULL ? INVALID_VALUE : status;
}

typedef int32_t clSetKernelArg_type(handle, uint32_t, size_t, const void *);

int32_t
clSetKernelArg(handle kernel, uint32_t index, size_t size, const void *value)
{
    const char *rounds = getenv("FAULTS_ROUNDS");
    const int64_t fewer = rounds != NULL ? atoll(rounds) : 0;
    const int64_t probed = 100000;
    bool is_probe = rounds != NULL && size == sizeof probed && value != NULL &&
                    memcmp(value, &probed, sizeof probed) == 0;
    return REAL(clSetKernelArg)(kernel, index, size, is_probe ? &fewer : value);
}

typedef int32_t clGetPlatformInfo_type(handle, uint32_t, size_t, void *, size_t *);

int32_t
clGetPlatformInfo(handle platform, uint32_t what, size_t size, void *value, size_t *wanted)
{
    int32_t status = REAL(clGetPlatformInfo)(platform, what, size, value, wanted);
    if (getenv("FAULTS_UNKNOWN") != NULL && what == PLATFORM_NAME && size > 0) {
        *(char *)value = '?';
    }
    return status;
}

typedef int32_t clEnqueueReadBuffer_type(handle, handle, uint32_t, size_t, size_t, void *, uint32_t,
                                         const handle *, handle *);

int32_t
clEnqueueReadBuffer(handle queue, handle buffer, uint32_t blocking, size_t offset, size_t size,
                    void *to, uint32_t waits, const handle *wait_list, handle *event)
{
    if (is_due(&refuse_read)) {
        return refuse_read.code;
    }
    fetched += size;
    int32_t status = REAL(clEnqueueReadBuffer)(queue, buffer, blocking, offset, size, to, waits,
                                               wait_list, event);
    follow(queue, event);
    if (blocking && untold != NULL && queue == untold) {
        untold = NULL;
        return FAILED_IN_WAIT_LIST;
    }
    return status;
}

typedef int32_t clEnqueueWriteBuffer_type(handle, handle, uint32_t, size_t, size_t, const void *,
                                          uint32_t, const handle *, handle *);

int32_t
clEnqueueWriteBuffer(handle queue, handle buffer, uint32_t blocking, size_t offset, size_t size,
                     const void *from, uint32_t waits, const handle *wait_list, handle *event)
{
    if (is_due(&refuse_write)) {
        return refuse_write.code;
    }
    written += size;
    return REAL(clEnqueueWriteBuffer)(queue, buffer, blocking, offset, size, from, waits, wait_list,
                                      event);
}

typedef int32_t clGetEventInfo_type(handle, uint32_t, size_t, void *, size_t *);

int32_t
clGetEventInfo(handle event, uint32_t name, size_t size, void *value, size_t *needed)
{
    int32_t status = REAL(clGetEventInfo)(event, name, size, value, needed);
    int is_complete =
        status == 0 && name == EVENT_STATUS && value != NULL && *(int32_t *)value == 0;
    int is_first = failing != NULL && event == failing;
    int is_next = !had_event && follower != NULL && event == follower;
    if (is_complete && (is_first || is_next)) {
        *(int32_t *)value = fail.code;
        untold = NULL;
    }
    return status;
}

static void
call_wrapped(handle event, int32_t status, void *data)
{
    (void)data;
    wrapped.function(event, status == 0 ? fail.code : status, wrapped.data);
}

typedef int32_t clSetEventCallback_type(handle, int32_t, callback, void *);

int32_t
clSetEventCallback(handle event, int32_t type, callback function, void *data)
{
    if (failing != NULL && event == failing) {
        wrapped.function = function;
        wrapped.data = data;
        return REAL(clSetEventCallback)(event, type, call_wrapped, NULL);
    }
    return REAL(clSetEventCallback)(event, type, function, data);
}

static char told[4096];

/* The options of the last attention kernel that was not built. */
const char *
faults_options(void)
{
    return told;
}

typedef int32_t clBuildProgram_type(handle, uint32_t, const handle *, const char *,
                                    void (*)(handle, void *), void *);

int32_t
clBuildProgram(handle program, uint32_t count, const handle *devices, const char *options,
               void (*notify)(handle, void *), void *data)
{
    builds++;
    char all[4096];
    if (getenv("FAULTS_EXTENSIONS") != NULL && strstr(options, "-DHEAD_E=") != NULL) {
        snprintf(told, sizeof told, "%s", options);
        return -11;
    }
    snprintf(all, sizeof all, "%s%s", options, definition);
    return REAL(clBuildProgram)(program, count, devices, all, notify, data);
}

typedef handle clCreateProgramWithSource_type(handle, uint32_t, const char **, const size_t *,
                                              int32_t *);

/* The last text is that of the kernel. */
handle
clCreateProgramWithSource(handle context, uint32_t count, const char **texts, const size_t *sizes,
                          int32_t *status)
{
    const char *old = getenv("FAULTS_TEXT");
    const char *instead = getenv("FAULTS_INSTEAD");
    const char *text = texts[count - 1];
    const size_t size = sizes != NULL ? sizes[count - 1] : strlen(text);
    const char *at = old != NULL && instead != NULL ? memmem(text, size, old, strlen(old)) : NULL;
    const char *changed[2] = {texts[0], NULL};
    size_t changed_sizes[2] = {sizes != NULL ? sizes[0] : strlen(texts[0]), 0};
    char *own = at != NULL && count <= 2 ? malloc(size + strlen(instead)) : NULL;
    if (own != NULL) {
        const size_t before = (size_t)(at - text);
        const size_t after = size - before - strlen(old);
        memcpy(own, text, before);
        memcpy(own + before, instead, strlen(instead));
        memcpy(own + before + strlen(instead), at + strlen(old), after);
        changed[count - 1] = own;
        changed_sizes[count - 1] = before + strlen(instead) + after;
        texts = changed;
        sizes = changed_sizes;
        planted++;
    }
    handle program = REAL(clCreateProgramWithSource)(context, count, texts, sizes, status);
    free(own);
    return program;
}

typedef handle clCreateBuffer_type(handle, uint64_t, size_t, void *, int32_t *);

handle
clCreateBuffer(handle context, uint64_t flags, size_t size, void *host, int32_t *status)
{
    if (fail_buffers.to_go > 0) {
        fail_buffers.to_go--;
        if (status != NULL) {
            *status = fail_buffers.code;
        }
        return NULL;
    }
    return REAL(clCreateBuffer)(context, flags, size, host, status);
}

typedef int32_t clGetDeviceInfo_type(handle, uint32_t, size_t, void *, size_t *);

static int32_t
answer(const void *data, size_t bytes, size_t size, void *value, size_t *wanted)
{
    if (wanted != NULL) {
        *wanted = bytes;
    }
    if (value != NULL) {
        memcpy(value, data, bytes < size ? bytes : size);
    }
    return 0;
}

/* Answers a query with the value of a FAULTS_… variable. Returns 0 if no variable holds that value. */
static int
answer_fact(uint32_t what, size_t size, void *value, size_t *wanted)
{
    const char *extensions = getenv("FAULTS_EXTENSIONS");
    const char *sizes = getenv("FAULTS_SIZES");
    const char *number = what == WAVE           ? getenv("FAULTS_WAVE")
                         : what == LOCAL_MEMORY ? getenv("FAULTS_LOCAL")
                                                : NULL;
    if (extensions != NULL && what == EXTENSIONS) {
        answer(extensions, strlen(extensions) + 1, size, value, wanted);
        return 1;
    }
    if (sizes != NULL && what == SUB_GROUP_SIZES) {
        size_t list[8];
        size_t count = 0;
        for (char *end; count < 8 && *sizes != '\0'; sizes = end) {
            list[count++] = strtoul(sizes, &end, 10);
        }
        answer(list, count * sizeof list[0], size, value, wanted);
        return 1;
    }
    if (number != NULL) {
        const uint64_t wide = strtoul(number, NULL, 10);
        const uint32_t narrow = (uint32_t)wide;
        what == WAVE ? answer(&narrow, sizeof narrow, size, value, wanted)
                     : answer(&wide, sizeof wide, size, value, wanted);
        return 1;
    }
    return 0;
}

int32_t
clGetDeviceInfo(handle device, uint32_t what, size_t size, void *value, size_t *wanted)
{
    static const char extensions[] = "cl_khr_fp64 cl_nv_device_attribute_query";
    const uint64_t type = GPU;
    const uint32_t number = what == CAPABILITY_MAJOR ? 9 : 0;
    if (answer_fact(what, size, value, wanted)) {
        return 0;
    }
    if (getenv("FAULTS_GPU") != NULL && what == TYPE) {
        return answer(&type, sizeof type, size, value, wanted);
    }
    if (getenv("FAULTS_WIDTH") != NULL && what == FLOAT_WIDTH) {
        const uint32_t width = (uint32_t)atoi(getenv("FAULTS_WIDTH"));
        return answer(&width, sizeof width, size, value, wanted);
    }
    if (getenv("FAULTS_NVIDIA") != NULL) {
        switch (what) {
        case TYPE:
            return answer(&type, sizeof type, size, value, wanted);
        case EXTENSIONS:
            return answer(extensions, sizeof extensions, size, value, wanted);
        case CAPABILITY_MAJOR:
        case CAPABILITY_MINOR:
            return answer(&number, sizeof number, size, value, wanted);
        }
    }
    int32_t status = REAL(clGetDeviceInfo)(device, what, size, value, wanted);
    const char *without = getenv("FAULTS_WITHOUT");
    char *found = status == 0 && what == EXTENSIONS && value != NULL && without != NULL
                      ? strstr(value, without)
                      : NULL;
    if (found != NULL) {
        memset(found, 'x', strlen(without));
    }
    return status;
}
