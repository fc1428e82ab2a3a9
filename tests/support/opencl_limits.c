/* SPDX-License-Identifier: MIT */
/* An OpenCL loader whose one device has the limits of another device, and is strict about them.
 *
 * The library lies as libOpenCL.so.1 in a folder of LD_LIBRARY_PATH, so a process and its children find
 * it. It is linked to the real loader. It shows one device, of the real platform that LIMITS_REAL names.
 * The other variables LIMITS_… hold what the device reports; `told` below lists them. The loader
 * refuses what exceeds a limit, as a strict driver does:
 *
 *     a work-group larger than the device's, or than the kernel's own limit, which LIMITS_GROUPS sets
 *     ("attention_tiled=64 *=128": "*" is every other kernel), or larger than the size in the source
 *     more local memory than the device has; LIMITS_LOCALS lists the bytes that kernels report
 *     a buffer larger than an allocation, buffers larger than all memory
 *     arguments of a kernel that take more bytes than the device passes
 *     a program in a later OpenCL C than the device's; with LIMITS_NAMES, a program with a double on a
 *     device that lacks it
 *     properties of queues that came after OpenCL 1.2
 *
 * Three things end the process, because a driver may crash there: a function that is newer than the
 * device's OpenCL, a system pointer that the device does not take, and a kernel of LIMITS_ENDS. Each
 * refusal adds a line "refused WHY" to the file LIMITS_LOG, each kernel that runs a line "ran NAME
 * WORK_ITEMS PROCESS". limits.py builds the library.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "opencl_ending.h"

#define INVALID_VALUE            (-30)
#define INVALID_QUEUE_PROPERTIES (-35)
#define INVALID_BUILD_OPTIONS    (-43)
#define INVALID_ARG_SIZE         (-51)
#define INVALID_WORK_GROUP_SIZE  (-54)
#define INVALID_BUFFER_SIZE      (-61)
#define OUT_OF_MEMORY            (-4) /* CL_MEM_OBJECT_ALLOCATION_FAILURE */
#define OUT_OF_RESOURCES         (-5)
#define DEVICE_NOT_FOUND         (-1)

typedef void *handle;

#define REAL(name) ((name##_type *)dlsym(RTLD_NEXT, #name))

/* ---- what the device tells of itself ---- */

typedef enum { TEXT, NUMBER32, NUMBER64, SIZES } kind;

static const struct {
    uint32_t what;
    kind kind;
    const char *variable;
} told[] = {
    {0x1000, NUMBER64, "LIMITS_TYPE"},
    {0x1002, NUMBER32, "LIMITS_COMPUTE_UNITS"},
    {0x1004, NUMBER64, "LIMITS_WORK_GROUP"},
    {0x1005, SIZES, "LIMITS_WORK_ITEMS"},
    {0x100D, NUMBER32, "LIMITS_ADDRESS_BITS"},
    {0x1010, NUMBER64, "LIMITS_ALLOCATION"},
    {0x1016, NUMBER32, "LIMITS_IMAGES"},
    {0x1017, NUMBER64, "LIMITS_PARAMETERS"},
    {0x1019, NUMBER32, "LIMITS_ALIGNMENT"},
    {0x101E, NUMBER64, "LIMITS_CACHE"},
    {0x101F, NUMBER64, "LIMITS_MEMORY"},
    {0x1023, NUMBER64, "LIMITS_LOCAL_MEMORY"},
    {0x1026, NUMBER32, "LIMITS_LITTLE_ENDIAN"},
    {0x1027, NUMBER32, "LIMITS_AVAILABLE"},
    {0x1028, NUMBER32, "LIMITS_COMPILER"},
    {0x102B, TEXT, "LIMITS_NAME"},
    {0x102C, TEXT, "LIMITS_VENDOR"},
    {0x102D, TEXT, "LIMITS_DRIVER"},
    {0x102E, TEXT, "LIMITS_PROFILE"},
    {0x102F, TEXT, "LIMITS_VERSION"},
    {0x1030, TEXT, "LIMITS_EXTENSIONS"},
    {0x1035, NUMBER32, "LIMITS_UNIFIED"},
    {0x103A, NUMBER32, "LIMITS_FLOAT_WIDTH"},
    {0x103D, TEXT, "LIMITS_C_VERSION"},
    {0x1053, NUMBER64, "LIMITS_SVM"},
    {0x4108, SIZES, "LIMITS_SUB_GROUPS"},
};

/* The number of a variable; `fallback` if the variable is not set. */
static uint64_t
number_of(const char *variable, uint64_t fallback)
{
    const char *text = getenv(variable);
    return text != NULL ? strtoull(text, NULL, 10) : fallback;
}

static const char *
text_of(const char *variable)
{
    const char *text = getenv(variable);
    return text != NULL ? text : "";
}

static int32_t
answer(const void *data, size_t bytes, size_t size, void *value, size_t *wanted)
{
    if (value != NULL && size < bytes) {
        return INVALID_VALUE;
    }
    if (value != NULL) {
        memcpy(value, data, bytes);
    }
    if (wanted != NULL) {
        *wanted = bytes;
    }
    return 0;
}

static int32_t
answer_text(const char *text, size_t size, void *value, size_t *wanted)
{
    return answer(text, strlen(text) + 1, size, value, wanted);
}

static int32_t
answer_sizes(const char *text, size_t size, void *value, size_t *wanted)
{
    size_t sizes[8];
    size_t count = 0;
    for (char *at = (char *)text; *at != '\0' && count < sizeof sizes / sizeof sizes[0];) {
        sizes[count++] = strtoull(at, &at, 10);
    }
    return count == 0 ? INVALID_VALUE : answer(sizes, count * sizeof sizes[0], size, value, wanted);
}

/* True if the list, in which spaces are between words, has the word. */
static int
has_word(const char *list, const char *word)
{
    size_t length = strlen(word);
    for (const char *at = strstr(list, word); at != NULL; at = strstr(at + length, word)) {
        if ((at == list || at[-1] == ' ') && (at[length] == ' ' || at[length] == '\0')) {
            return 1;
        }
    }
    return 0;
}

static int
has_extension(const char *name)
{
    return has_word(text_of("LIMITS_EXTENSIONS"), name);
}

/* The device's version of OpenCL, times ten. */
static int
version(void)
{
    int major = 0;
    int minor = 0;
    (void)sscanf(text_of("LIMITS_VERSION"), "OpenCL %d.%d", &major, &minor);
    return 10 * major + minor;
}

/* ---- the log ---- */

static void
note(const char *format, ...)
{
    const char *log = getenv("LIMITS_LOG");
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    int file = log != NULL ? open(log, O_WRONLY | O_APPEND | O_CREAT, 0600) : -1;
    if (file >= 0) {
        ssize_t written = write(file, line, (size_t)length);
        (void)written;
        close(file);
    }
}

/* Ends the process unless the device has this version, times ten, of OpenCL. */
static void
need_version(const char *function, int needed)
{
    if (version() < needed) {
        note("refused %s: the device has OpenCL %d.%d\n", function, version() / 10, version() % 10);
        fprintf(stderr, "%s was called, and the device has %s\n", function,
                text_of("LIMITS_VERSION"));
        abort();
    }
}

/* ---- platforms and devices ---- */

typedef int32_t clGetPlatformInfo_type(handle, uint32_t, size_t, void *, size_t *);
typedef int32_t clGetPlatformIDs_type(uint32_t, handle *, uint32_t *);

int32_t
clGetPlatformIDs(uint32_t room, handle *platforms, uint32_t *count)
{
    handle all[16];
    uint32_t found = 0;
    int32_t status = REAL(clGetPlatformIDs)(16, all, &found);
    for (uint32_t n = 0; status == 0 && n < found && n < 16; n++) {
        char name[256] = "";
        REAL(clGetPlatformInfo)(all[n], 0x0902, sizeof name, name, NULL);
        if (strstr(name, text_of("LIMITS_REAL")) != NULL) {
            if (platforms != NULL && room > 0) {
                platforms[0] = all[n];
            }
            if (count != NULL) {
                *count = 1;
            }
            return 0;
        }
    }
    return status != 0 ? status : DEVICE_NOT_FOUND;
}

int32_t
clGetPlatformInfo(handle platform, uint32_t what, size_t size, void *value, size_t *wanted)
{
    static const struct {
        uint32_t what;
        const char *variable;
    } texts[] = {{0x0900, "LIMITS_PROFILE"},
                 {0x0901, "LIMITS_VERSION"},
                 {0x0902, "LIMITS_PLATFORM"},
                 {0x0903, "LIMITS_VENDOR"},
                 {0x0904, "LIMITS_EXTENSIONS"}};
    for (size_t n = 0; n < sizeof texts / sizeof texts[0]; n++) {
        if (texts[n].what == what) {
            return answer_text(text_of(texts[n].variable), size, value, wanted);
        }
    }
    return REAL(clGetPlatformInfo)(platform, what, size, value, wanted);
}

typedef int32_t clGetDeviceIDs_type(handle, uint64_t, uint32_t, handle *, uint32_t *);

int32_t
clGetDeviceIDs(handle platform, uint64_t type, uint32_t room, handle *devices, uint32_t *count)
{
    handle first;
    uint32_t found = 0;
    const uint64_t all = 0xFFFFFFFF;
    if (type != all && (type & number_of("LIMITS_TYPE", 0)) == 0) {
        return DEVICE_NOT_FOUND;
    }
    int32_t status = REAL(clGetDeviceIDs)(platform, all, 1, &first, &found);
    if (status == 0 && devices != NULL && room > 0) {
        devices[0] = first;
    }
    if (status == 0 && count != NULL) {
        *count = 1;
    }
    return status;
}

typedef int32_t clGetDeviceInfo_type(handle, uint32_t, size_t, void *, size_t *);

int32_t
clGetDeviceInfo(handle device, uint32_t what, size_t size, void *value, size_t *wanted)
{
    for (size_t n = 0; n < sizeof told / sizeof told[0]; n++) {
        const char *text = getenv(told[n].variable);
        if (told[n].what != what) {
            continue;
        }
        if (text == NULL) {
            return INVALID_VALUE; /* the device does not say */
        }
        const uint64_t wide = strtoull(text, NULL, 10);
        const uint32_t narrow = (uint32_t)wide;
        switch (told[n].kind) {
        case TEXT:
            return answer_text(text, size, value, wanted);
        case SIZES:
            return answer_sizes(text, size, value, wanted);
        case NUMBER32:
            return answer(&narrow, sizeof narrow, size, value, wanted);
        case NUMBER64:
            return answer(&wide, sizeof wide, size, value, wanted);
        }
    }
    const int is_of_a_vendor = what >= 0x4000 && what < 0x5000;
    return is_of_a_vendor ? INVALID_VALUE
                          : REAL(clGetDeviceInfo)(device, what, size, value, wanted);
}

/* ---- programs ---- */

typedef handle clCreateProgramWithSource_type(handle, uint32_t, const char **, const size_t *,
                                              int32_t *);

/* With LIMITS_NAMES the compiler does not know the type that the device lacks. Without it all devices
 * share programs. */
handle
clCreateProgramWithSource(handle context, uint32_t count, const char **texts, const size_t *sizes,
                          int32_t *status)
{
    static const char no_double[] = "#define double the_device_has_no_double\n";
    const char *all[8];
    size_t lengths[8];
    uint32_t n = 0;
    if (getenv("LIMITS_NAMES") == NULL) {
        return REAL(clCreateProgramWithSource)(context, count, texts, sizes, status);
    }
    all[n] = has_extension("cl_khr_fp64") ? "" : no_double;
    lengths[n] = strlen(all[n]);
    n++;
    for (uint32_t i = 0; i < count && n < 8; i++) {
        lengths[n] = sizes != NULL && sizes[i] != 0 ? sizes[i] : strlen(texts[i]);
        all[n++] = texts[i];
    }
    return REAL(clCreateProgramWithSource)(context, n, all, lengths, status);
}

typedef int32_t clBuildProgram_type(handle, uint32_t, const handle *, const char *,
                                    void (*)(handle, void *), void *);

int32_t
clBuildProgram(handle program, uint32_t count, const handle *devices, const char *options,
               void (*notify)(handle, void *), void *data)
{
    int major = 0;
    int minor = 0;
    const char *standard = options != NULL ? strstr(options, "-cl-std=CL") : NULL;
    if (standard != NULL && sscanf(standard, "-cl-std=CL%d.%d", &major, &minor) == 2 &&
        10 * major + minor > version()) {
        note("refused -cl-std=CL%d.%d\n", major, minor);
        return INVALID_BUILD_OPTIONS;
    }
    return REAL(clBuildProgram)(program, count, devices, options, notify, data);
}

/* ---- kernels ---- */

#define MOST_KERNELS   512
#define MOST_ARGUMENTS 64

/* A kernel with the bytes of its arguments, under the lock. */
static struct {
    handle kernel;
    size_t bytes[MOST_ARGUMENTS];
} given[MOST_KERNELS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

typedef int32_t clGetKernelInfo_type(handle, uint32_t, size_t, void *, size_t *);
typedef int32_t clGetKernelWorkGroupInfo_type(handle, handle, uint32_t, size_t, void *, size_t *);

#define KERNEL_GROUP          0x11B0
#define KERNEL_COMPILED_GROUP 0x11B1
#define KERNEL_LOCAL          0x11B2

/* What a list says of a kernel: "NAME=NUMBER …", in which "*" is every kernel without a number. */
static uint64_t
listed(const char *variable, handle kernel, uint64_t fallback)
{
    char name[128] = "";
    const char *list = text_of(variable);
    const char *every = strstr(list, "*=");
    REAL(clGetKernelInfo)(kernel, 0x1190, sizeof name - 1, name, NULL);
    strcat(name, "=");
    const char *at = strstr(list, name);
    return at != NULL      ? strtoull(at + strlen(name), NULL, 10)
           : every != NULL ? strtoull(every + 2, NULL, 10)
                           : fallback;
}

static size_t
group_of(handle kernel)
{
    return (size_t)listed("LIMITS_GROUPS", kernel, number_of("LIMITS_WORK_GROUP", 1));
}

static uint64_t
local_of(handle kernel, handle device)
{
    uint64_t bytes = 0;
    REAL(clGetKernelWorkGroupInfo)(kernel, device, KERNEL_LOCAL, sizeof bytes, &bytes, NULL);
    return listed("LIMITS_LOCALS", kernel, bytes);
}

int32_t
clGetKernelWorkGroupInfo(handle kernel, handle device, uint32_t what, size_t size, void *value,
                         size_t *wanted)
{
    if (what == KERNEL_GROUP) {
        const size_t most = group_of(kernel);
        return answer(&most, sizeof most, size, value, wanted);
    }
    if (what == KERNEL_LOCAL) {
        const uint64_t bytes = local_of(kernel, device);
        return answer(&bytes, sizeof bytes, size, value, wanted);
    }
    return REAL(clGetKernelWorkGroupInfo)(kernel, device, what, size, value, wanted);
}

typedef handle clCreateKernel_type(handle, const char *, int32_t *);

handle
clCreateKernel(handle program, const char *name, int32_t *status)
{
    handle kernel = REAL(clCreateKernel)(program, name, status);
    pthread_mutex_lock(&lock);
    for (int n = 0; n < MOST_KERNELS && kernel != NULL; n++) {
        if (given[n].kernel == NULL || given[n].kernel == kernel) {
            memset(&given[n], 0, sizeof given[n]);
            given[n].kernel = kernel;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    return kernel;
}

/* Notes an argument. False if all of them now take more bytes than the device passes. */
static int
fits(handle kernel, uint32_t index, size_t bytes)
{
    size_t sum = 0;
    pthread_mutex_lock(&lock);
    for (int n = 0; n < MOST_KERNELS; n++) {
        if (given[n].kernel == kernel && index < MOST_ARGUMENTS) {
            given[n].bytes[index] = bytes;
            for (int i = 0; i < MOST_ARGUMENTS; i++) {
                sum += given[n].bytes[i];
            }
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    if (sum > number_of("LIMITS_PARAMETERS", 0)) {
        note("refused %zu bytes of arguments\n", sum);
        return 0;
    }
    return 1;
}

typedef int32_t clSetKernelArg_type(handle, uint32_t, size_t, const void *);

int32_t
clSetKernelArg(handle kernel, uint32_t index, size_t size, const void *value)
{
    return fits(kernel, index, size) ? REAL(clSetKernelArg)(kernel, index, size, value)
                                     : INVALID_ARG_SIZE;
}

typedef int32_t clSetKernelArgSVMPointer_type(handle, uint32_t, const void *);

int32_t
clSetKernelArgSVMPointer(handle kernel, uint32_t index, const void *pointer)
{
    const uint64_t system = 1 << 2;
    need_version("clSetKernelArgSVMPointer", 20);
    if ((number_of("LIMITS_SVM", 0) & system) == 0) {
        note("refused a pointer of the system\n");
        fprintf(stderr, "a kernel was given a pointer of the system, which the device lacks\n");
        abort();
    }
    return fits(kernel, index, sizeof pointer)
               ? REAL(clSetKernelArgSVMPointer)(kernel, index, pointer)
               : INVALID_ARG_SIZE;
}

/* ---- memory ---- */

typedef handle clCreateBuffer_type(handle, uint64_t, size_t, void *, int32_t *);
typedef int32_t clGetMemObjectInfo_type(handle, uint32_t, size_t, void *, size_t *);

static _Atomic(uint64_t) allocated;

static handle
fail(int32_t code, int32_t *status)
{
    if (status != NULL) {
        *status = code;
    }
    return NULL;
}

handle
clCreateBuffer(handle context, uint64_t flags, size_t size, void *host, int32_t *status)
{
    if (size > number_of("LIMITS_ALLOCATION", 0)) {
        note("refused a buffer of %zu bytes\n", size);
        return fail(INVALID_BUFFER_SIZE, status);
    }
    if (allocated + size > number_of("LIMITS_MEMORY", 0)) {
        return fail(OUT_OF_MEMORY, status);
    }
    handle buffer = REAL(clCreateBuffer)(context, flags, size, host, status);
    allocated += buffer != NULL ? size : 0;
    return buffer;
}

typedef int32_t clReleaseMemObject_type(handle);

int32_t
clReleaseMemObject(handle object)
{
    size_t size = 0;
    uint32_t references = 0;
    REAL(clGetMemObjectInfo)(object, 0x1102, sizeof size, &size, NULL);
    REAL(clGetMemObjectInfo)(object, 0x1105, sizeof references, &references, NULL);
    allocated -= references == 1 ? size : 0;
    return REAL(clReleaseMemObject)(object);
}

/* ---- queues ---- */

typedef handle clCreateCommandQueue_type(handle, handle, uint64_t, int32_t *);

handle
clCreateCommandQueue(handle context, handle device, uint64_t properties, int32_t *status)
{
    if ((properties & ~(uint64_t)3) != 0) {
        note("refused properties 0x%llx of a queue\n", (unsigned long long)properties);
        return fail(INVALID_QUEUE_PROPERTIES, status);
    }
    return REAL(clCreateCommandQueue)(context, device, properties, status);
}

typedef int32_t clGetCommandQueueInfo_type(handle, uint32_t, size_t, void *, size_t *);

/* Says why the device does not run the kernel in such groups; 0 if it runs it. */
static int32_t
refuse_launch(handle queue, handle kernel, uint32_t dims, const size_t *global, const size_t *local,
              size_t items)
{
    handle device = NULL;
    uint64_t bytes;
    size_t compiled[3] = {0, 0, 0};
    REAL(clGetCommandQueueInfo)(queue, 0x1091, sizeof(handle), &device, NULL);
    REAL(clGetKernelWorkGroupInfo)(kernel, device, KERNEL_COMPILED_GROUP, sizeof compiled, compiled,
                                   NULL);
    if (items > group_of(kernel)) {
        note("refused a group of %zu work-items; most are %zu\n", items, group_of(kernel));
        return INVALID_WORK_GROUP_SIZE;
    }
    for (uint32_t n = 0; n < dims; n++) {
        if (global[n] % local[n] != 0 || (compiled[0] != 0 && compiled[n] != local[n])) {
            note("refused a part of a group, or another size than the source has\n");
            return INVALID_WORK_GROUP_SIZE;
        }
    }
    bytes = local_of(kernel, device);
    if (bytes > number_of("LIMITS_LOCAL_MEMORY", 0)) {
        note("refused %llu bytes of local memory\n", (unsigned long long)bytes);
        return OUT_OF_RESOURCES;
    }
    return 0;
}

typedef int32_t clEnqueueNDRangeKernel_type(handle, handle, uint32_t, const size_t *,
                                            const size_t *, const size_t *, uint32_t,
                                            const handle *, handle *);

int32_t
clEnqueueNDRangeKernel(handle queue, handle kernel, uint32_t dims, const size_t *offset,
                       const size_t *global, const size_t *local, uint32_t waits,
                       const handle *wait_list, handle *event)
{
    char name[128] = "";
    size_t items = 1;
    for (uint32_t n = 0; n < dims && local != NULL; n++) {
        items *= local[n];
    }
    int32_t status = local == NULL ? 0 : refuse_launch(queue, kernel, dims, global, local, items);
    if (status != 0) {
        return status;
    }
    end_process((int)listed("LIMITS_ENDS", kernel, 0));
    REAL(clGetKernelInfo)(kernel, 0x1190, sizeof name, name, NULL);
    note("ran %s %zu %d\n", name, items, (int)getpid());
    return REAL(clEnqueueNDRangeKernel)(queue, kernel, dims, offset, global, local, waits,
                                        wait_list, event);
}
