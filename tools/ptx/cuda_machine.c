/* SPDX-License-Identifier: MIT */
/* The back end of opencl_machine.c for a machine that has NVIDIA's driver for CUDA and none for
 * OpenCL. clang makes PTX of a kernel, and the driver's library runs it. Nothing else of CUDA is
 * needed. tools/cuda_machine.py builds this file and sets the variables:
 *
 *   CLATTN_CUDA_COMPILER   the command that makes PTX; "": only programs of the folder are there
 *   CLATTN_CUDA_PROGRAMS   a folder for PTX, by hash of its source: other processes find it there
 *   CLATTN_CUDA_MADE_BY    the compiler's version, which clattn's verdicts depend on
 *   CLATTN_CUDA_LIBRARY    where the driver's library is; or what stands in for it, in tests
 *
 * Buffers are memory of the device, and copies are explicit, as with NVIDIA's driver for OpenCL:
 * with managed memory, the first kernel after a copy would wait for pages.
 */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "opencl_machine.h"

#define MOST_GROUPS        INT32_MAX
#define LOG_BYTES          16384
#define HIGHEST_CAPABILITY 80 /* of PTX, which newer devices take too */

/* ---- the driver's functions ---- */

typedef uint64_t address; /* of the device's memory */

/* Names, parameters. All return a code. */
#define CUDA_FUNCTIONS(X)                                                                          \
    X(cuInit, unsigned flags)                                                                      \
    X(cuDriverGetVersion, int *version)                                                            \
    X(cuGetErrorName, int code, const char **name)                                                 \
    X(cuDeviceGet, int *device, int number)                                                        \
    X(cuDeviceGetName, char *name, int size, int device)                                           \
    X(cuDeviceTotalMem_v2, size_t *bytes, int device)                                              \
    X(cuDeviceGetAttribute, int *value, int attribute, int device)                                 \
    X(cuDevicePrimaryCtxRetain, void **context, int device)                                        \
    X(cuCtxSetCurrent, void *context)                                                              \
    X(cuMemAlloc_v2, address *made, size_t bytes)                                                  \
    X(cuMemFree_v2, address memory)                                                                \
    X(cuMemcpyHtoDAsync_v2, address to, const void *from, size_t bytes, void *stream)              \
    X(cuMemcpyDtoHAsync_v2, void *to, address from, size_t bytes, void *stream)                    \
    X(cuModuleLoadDataEx, void **module, const void *image, unsigned count, int *options,          \
      void **values)                                                                               \
    X(cuModuleGetFunction, void **function, void *module, const char *name)                        \
    X(cuFuncGetAttribute, int *value, int attribute, void *function)                               \
    X(cuLaunchKernel, void *function, unsigned groups_x, unsigned groups_y, unsigned groups_z,     \
      unsigned items_x, unsigned items_y, unsigned items_z, unsigned shared, void *stream,         \
      void **arguments, void **extra)                                                              \
    X(cuEventCreate, void **event, unsigned flags)                                                 \
    X(cuEventRecord, void *event, void *stream)                                                    \
    X(cuEventQuery, void *event)                                                                   \
    X(cuEventSynchronize, void *event)                                                             \
    X(cuEventDestroy_v2, void *event)                                                              \
    X(cuStreamSynchronize, void *stream)

#define DECLARE(name, ...) static int (*name)(__VA_ARGS__);
CUDA_FUNCTIONS(DECLARE)

/* Codes, and numbers of attributes and options. */
enum {
    CUDA_OUT_OF_MEMORY = 2,
    CUDA_NOT_READY = 600,
    MAX_THREADS_PER_BLOCK = 1,
    MAX_SHARED_MEMORY_PER_BLOCK = 8,
    MULTIPROCESSOR_COUNT = 16,
    L2_CACHE_SIZE = 38,
    COMPUTE_CAPABILITY_MAJOR = 75,
    COMPUTE_CAPABILITY_MINOR = 76,
    FUNCTION_MAX_THREADS = 0,
    EVENT_WITHOUT_TIME = 2,
    JIT_ERROR_LOG = 5,
    JIT_ERROR_LOG_SIZE = 6,
};

static machine_facts facts;
static void *context;
static int is_open;

/* All commands go to the default stream, where they run in order. */
static void *const stream = NULL;

/* Tells the user, since OpenCL has codes only. */
__attribute__((format(printf, 1, 2))) static void
say(const char *format, ...)
{
    va_list values;
    va_start(values, format);
    fprintf(stderr, "clattn's test loader: ");
    vfprintf(stderr, format, values);
    fprintf(stderr, "\n");
    va_end(values);
}

static const char *
name_of(int code)
{
    const char *name = NULL;
    cuGetErrorName(code, &name);
    return name == NULL ? "an unknown error" : name;
}

/* Returns OpenCL's code. After a kernel that failed, all calls give its error: it is told once. */
static int32_t
check(const char *call, int code)
{
    static atomic_int told;
    if (code == 0) {
        return SUCCESS;
    }
    if (code == CUDA_OUT_OF_MEMORY) {
        return ALLOCATION_FAILURE;
    }
    if (atomic_exchange(&told, code) != code) {
        say("%s gave %s (%d)", call, name_of(code), code);
    }
    return OUT_OF_RESOURCES;
}

/* Returns what a call in the device's context gives, as OpenCL's code. Any thread may call. */
#define CALL(function, ...)                                                                        \
    (cuCtxSetCurrent(context) == 0 ? check(#function, function(__VA_ARGS__)) : OUT_OF_RESOURCES)

/* ---- the device ---- */

static int
load_functions(void)
{
    const char *path = getenv("CLATTN_CUDA_LIBRARY");
    void *library = dlopen(path == NULL ? "libcuda.so.1" : path, RTLD_NOW);
    const char *missing = NULL;
    if (library == NULL) {
        say("%s", dlerror());
        return 0;
    }
#define LOAD(function, ...)                                                                        \
    *(void **)&function = dlsym(library, #function);                                               \
    missing = function == NULL ? #function : missing;
    CUDA_FUNCTIONS(LOAD)
    if (missing != NULL) {
        say("the library of CUDA has no %s", missing);
    }
    return missing == NULL;
}

static uint64_t
attribute(int device, int number)
{
    int value = 0;
    CALL(cuDeviceGetAttribute, &value, number, device);
    return (uint64_t)value;
}

/* A buffer is at most a quarter of the memory, as with NVIDIA's driver for OpenCL, so that plans
   are the same. */
static void
describe(int device)
{
    static char name[256];
    static char driver[128];
    const char *made_by = getenv("CLATTN_CUDA_MADE_BY");
    int version = 0;
    size_t memory = 0;
    CALL(cuDeviceGetName, name, sizeof name, device);
    CALL(cuDriverGetVersion, &version);
    CALL(cuDeviceTotalMem_v2, &memory, device);
    snprintf(driver, sizeof driver, "CUDA %d.%d, %s", version / 1000, version % 1000 / 10,
             made_by == NULL ? "no compiler" : made_by);
    facts = (machine_facts){
        .platform = "CUDA by clattn's test loader",
        .name = name,
        .vendor = "NVIDIA Corporation",
        .driver = driver,
        .compute_units = attribute(device, MULTIPROCESSOR_COUNT),
        .work_group = attribute(device, MAX_THREADS_PER_BLOCK),
        .allocation = memory / 4,
        .parameters = 4096,
        .cache = attribute(device, L2_CACHE_SIZE),
        .memory = memory,
        .local_memory = attribute(device, MAX_SHARED_MEMORY_PER_BLOCK),
        .shares_memory = 0,
        .capability_major = attribute(device, COMPUTE_CAPABILITY_MAJOR),
        .capability_minor = attribute(device, COMPUTE_CAPABILITY_MINOR),
    };
}

/* Other loaders look for drivers in this folder. A user, or a test, who wants none names one that
   has none. */
static int
is_wanted(void)
{
    const char *vendors = getenv("OCL_ICD_VENDORS");
    DIR *folder = vendors == NULL ? NULL : opendir(vendors);
    int count = 0;
    if (folder == NULL) {
        return 1;
    }
    for (const struct dirent *file; (file = readdir(folder)) != NULL;) {
        count += strstr(file->d_name, ".icd") != NULL;
    }
    closedir(folder);
    return count > 0;
}

static void
open_once(void)
{
    int device = 0;
    if (is_wanted() && load_functions() && check("cuInit", cuInit(0)) == SUCCESS &&
        check("cuDeviceGet", cuDeviceGet(&device, 0)) == SUCCESS &&
        check("cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain(&context, device)) == SUCCESS) {
        describe(device);
        is_open = 1;
    }
}

static const machine_facts *
open_device(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, open_once);
    return is_open ? &facts : NULL;
}

/* ---- programs ---- */

/* A name in the folder of programs. */
typedef struct {
    char text[4096];
} path;

static path
path_of(const char *stem, const char *ending)
{
    path made;
    snprintf(made.text, sizeof made.text, "%s/%s.%s", getenv("CLATTN_CUDA_PROGRAMS"), stem, ending);
    return made;
}

/* Returns the text of a file, NULL if it cannot be read. */
static char *
text_of(path file)
{
    char *text = NULL;
    size_t size = 0;
    FILE *from = fopen(file.text, "r");
    FILE *to = from == NULL ? NULL : open_memstream(&text, &size);
    if (to != NULL) {
        char part[4096];
        size_t count;
        while ((count = fread(part, 1, sizeof part, from)) > 0) {
            fwrite(part, 1, count, to);
        }
        fclose(to);
    }
    if (from != NULL) {
        fclose(from);
    }
    return text;
}

static int
write_text(path file, const char *text)
{
    FILE *to = fopen(file.text, "w");
    int failed = to == NULL || fputs(text, to) < 0;
    return (to == NULL || fclose(to) == 0) && !failed;
}

static uint64_t
hash_of(uint64_t hash, const char *text)
{
    for (; *text != '\0'; text++) {
        hash = (hash ^ (unsigned char)*text) * UINT64_C(0x100000001b3);
    }
    return hash;
}

/* The capability that PTX is made for. */
static int
capability(void)
{
    int own = (int)(10 * facts.capability_major + facts.capability_minor);
    return own < HIGHEST_CAPABILITY ? own : HIGHEST_CAPABILITY;
}

/* Returns PTX as CUDA takes it: kernels can be seen from outside, and there is no mode of textures,
   which CUDA lacks. */
static char *
for_cuda(const char *ptx)
{
    static const char mode[] = ", texmode_independent";
    static const char entry[] = "\n.entry";
    char *text = NULL;
    size_t size = 0;
    FILE *to = open_memstream(&text, &size);
    while (to != NULL && *ptx != '\0') {
        if (strncmp(ptx, mode, sizeof mode - 1) == 0) {
            ptx += sizeof mode - 1;
        } else if (strncmp(ptx, entry, sizeof entry - 1) == 0) {
            fputs("\n.visible .entry", to);
            ptx += sizeof entry - 1;
        } else {
            fputc(*ptx++, to);
        }
    }
    if (to != NULL) {
        fclose(to);
    }
    return text;
}

/* Lets the compiler make PTX. Returns it; or NULL, and the compiler's log is the program's. clattn
   builds one program at a time. */
static char *
compile(machine_program *program)
{
    const char *compiler = getenv("CLATTN_CUDA_COMPILER");
    char stem[32];
    char *command = NULL;
    char *ptx = NULL;
    char *text = NULL;
    if (compiler == NULL || compiler[0] == '\0') {
        program->log = strdup("there is no compiler for PTX, and the program is not in the folder "
                              "of programs");
        return NULL;
    }
    snprintf(stem, sizeof stem, "process-%ld", (long)getpid());
    const path source = path_of(stem, "cl");
    const path made = path_of(stem, "ptx");
    const path log = path_of(stem, "log");
    if (!write_text(source, program->source) ||
        asprintf(&command,
                 "cd \"$CLATTN_CUDA_PROGRAMS\" && %s -Xclang -target-cpu -Xclang sm_%d %s "
                 "-o %s.ptx %s.cl >%s.log 2>&1",
                 compiler, capability(), program->options, stem, stem, stem) < 0) {
        program->log = strdup("the folder of programs cannot be written");
        return NULL;
    }
    if (system(command) == 0 && (ptx = text_of(made)) != NULL) {
        text = for_cuda(ptx);
    } else {
        program->log = text_of(log);
    }
    unlink(source.text);
    unlink(made.text);
    unlink(log.text);
    free(ptx);
    free(command);
    return text;
}

/* Keeps PTX for other processes. Nothing is kept if the folder cannot be written. */
static void
keep(const char *stem, const char *ptx)
{
    char own[32];
    snprintf(own, sizeof own, "process-%ld", (long)getpid());
    const path written = path_of(own, "kept");
    if (!write_text(written, ptx) || rename(written.text, path_of(stem, "ptx").text) != 0) {
        unlink(written.text);
    }
}

static int32_t
load(machine_program *program, const char *ptx)
{
    char *log = calloc(1, LOG_BYTES);
    int options[] = {JIT_ERROR_LOG, JIT_ERROR_LOG_SIZE};
    void *values[] = {log, (void *)(uintptr_t)(LOG_BYTES - 1)};
    if (log == NULL) {
        return OUT_OF_HOST_MEMORY;
    }
    cuCtxSetCurrent(context);
    int code = cuModuleLoadDataEx(&program->module, ptx, 2, options, values);
    if (code == CUDA_OUT_OF_MEMORY) {
        free(log);
        return ALLOCATION_FAILURE;
    }
    if (code != 0 && asprintf(&program->log, "cuModuleLoadDataEx gave %s (%d):\n%s", name_of(code),
                              code, log) < 0) {
        program->log = NULL;
    }
    free(log);
    return code == 0 ? SUCCESS : BUILD_FAILURE;
}

static int32_t
build(machine_program *program)
{
    char stem[32];
    if (getenv("CLATTN_CUDA_PROGRAMS") == NULL) {
        program->log = strdup("CLATTN_CUDA_PROGRAMS is not set; tools/cuda_machine.py sets it");
        return BUILD_FAILURE;
    }
    uint64_t hash = hash_of(UINT64_C(0xcbf29ce484222325) + (uint64_t)capability(), program->source);
    snprintf(stem, sizeof stem, "%016llx", (unsigned long long)hash_of(hash, program->options));
    char *ptx = text_of(path_of(stem, "ptx"));
    if (ptx == NULL) {
        ptx = compile(program);
        if (ptx == NULL) {
            return BUILD_FAILURE;
        }
        keep(stem, ptx);
    }
    int32_t status = load(program, ptx);
    free(ptx);
    return status;
}

static int32_t
find(machine_kernel *kernel)
{
    int most = 0;
    int32_t status =
        CALL(cuModuleGetFunction, &kernel->function, kernel->program->module, kernel->name);
    if (status != SUCCESS) {
        return INVALID_KERNEL_NAME;
    }
    status = CALL(cuFuncGetAttribute, &most, FUNCTION_MAX_THREADS, kernel->function);
    kernel->work_group = (size_t)most;
    return status;
}

/* ---- commands ---- */

static int32_t
launch(const machine_kernel *kernel, size_t groups, size_t work_items)
{
    void *arguments[MOST_ARGUMENTS];
    if (groups > MOST_GROUPS) {
        return INVALID_GLOBAL_WORK_SIZE;
    }
    if (work_items > kernel->work_group) {
        return INVALID_WORK_GROUP_SIZE;
    }
    for (uint32_t n = 0; n < kernel->count; n++) {
        const machine_argument *a = &kernel->arguments[n];
        arguments[n] = a->is_buffer ? (void *)&a->bytes : (void *)a->bytes;
    }
    return CALL(cuLaunchKernel, kernel->function, (unsigned)groups, 1, 1, (unsigned)work_items, 1,
                1, 0, stream, arguments, NULL);
}

static int32_t
finish(void)
{
    return CALL(cuStreamSynchronize, stream);
}

static int32_t
allocate(size_t size, unsigned char **bytes)
{
    address made = 0;
    int32_t status = CALL(cuMemAlloc_v2, &made, size);
    *bytes = (unsigned char *)(uintptr_t)made;
    return status;
}

/* CUDA waits for the commands that use the memory. */
static void
release(unsigned char *bytes)
{
    CALL(cuMemFree_v2, (address)(uintptr_t)bytes);
}

static int32_t
read_bytes(void *to, const unsigned char *from, size_t size, uint32_t waits)
{
    int32_t status = CALL(cuMemcpyDtoHAsync_v2, to, (address)(uintptr_t)from, size, stream);
    return status == SUCCESS && waits ? finish() : status;
}

static int32_t
write_bytes(unsigned char *to, const void *from, size_t size, uint32_t waits)
{
    int32_t status = CALL(cuMemcpyHtoDAsync_v2, (address)(uintptr_t)to, from, size, stream);
    return status == SUCCESS && waits ? finish() : status;
}

static int32_t
mark(void **made)
{
    int32_t status = CALL(cuEventCreate, made, EVENT_WITHOUT_TIME);
    if (status != SUCCESS) {
        return status;
    }
    status = CALL(cuEventRecord, *made, stream);
    if (status != SUCCESS) {
        CALL(cuEventDestroy_v2, *made);
    }
    return status;
}

static int32_t
state(void *made)
{
    cuCtxSetCurrent(context);
    int code = cuEventQuery(made);
    return code == CUDA_NOT_READY ? 1 : check("cuEventQuery", code);
}

static int32_t
wait_for(void *made)
{
    return CALL(cuEventSynchronize, made);
}

static void
drop(void *made)
{
    CALL(cuEventDestroy_v2, made);
}

const machine_backend backend = {
    .open = open_device,
    .build = build,
    .find = find,
    .launch = launch,
    .allocate = allocate,
    .release = release,
    .read = read_bytes,
    .write = write_bytes,
    .mark = mark,
    .state = state,
    .wait = wait_for,
    .drop = drop,
    .finish = finish,
};
