/* SPDX-License-Identifier: MIT */
/* In the place of libcuda.so.1: a device that hands each launch, with the PTX, to a function that
 * ptx/fake_cuda.py sets. Addresses of its memory are no addresses of the host. Calls without the
 * context and with unknown addresses are errors. The functions fake_… let calls fail. Where nobody
 * sets the function that launches, launches do nothing, and what is read from the device is zeros.
 */

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DISGUISE                (UINT64_C(0x5A) << 56)
#define MOST_MEMORIES           4096
#define THE_DEVICE              0
#define THE_CONTEXT             ((void *)&the_context)
#define SUCCESS                 0
#define INVALID_VALUE           1
#define OUT_OF_MEMORY           2
#define NO_CONTEXT              201
#define INVALID_PTX             218
#define NOT_FOUND               500
#define NOT_READY               600
#define LAUNCH_OUT_OF_RESOURCES 701
#define LAUNCH_FAILED           719
#define JIT_LOG                 5
#define MOST_SHARED             (48 << 10) /* bytes that PTX may declare */
#define VISIBLE_KERNEL          ".visible .entry"

typedef int32_t (*launch_function)(const char *ptx, const char *name, uint32_t groups,
                                   uint32_t work_items, void **arguments);

typedef struct {
    char *ptx;
    char name[64];
} function;

static struct {
    unsigned char *bytes;
    size_t size;
} memories[MOST_MEMORIES];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char the_context;
static _Thread_local void *current;
static int lost;     /* the error of all calls after a launch that failed */
static char bad[64]; /* PTX with this text is refused */
static size_t allocated;
static size_t limit = (size_t)1 << 40;

launch_function fake_launch;
int fake_modules; /* loaded so far */

/* The next launch, which does nothing, is accepted, and fails later. */
static int failing;

void
fake_fail_later(void)
{
    failing = 1;
}

void
fake_refuse(const char *text)
{
    snprintf(bad, sizeof bad, "%s", text);
}

/* No more memory than now, and `bytes` more. */
void
fake_leave(size_t bytes)
{
    limit = allocated + bytes;
}

static int
ready(void)
{
    return current != THE_CONTEXT ? NO_CONTEXT : lost;
}

/* Returns the host's address of memory, if all of it is allocated, else NULL. */
static void *
host_of(uint64_t address, size_t size)
{
    unsigned char *bytes = (unsigned char *)(uintptr_t)(address ^ DISGUISE);
    void *found = NULL;
    pthread_mutex_lock(&lock);
    for (int n = 0; n < MOST_MEMORIES && found == NULL; n++) {
        uintptr_t start = (uintptr_t)memories[n].bytes;
        uintptr_t at = (uintptr_t)bytes;
        if (start != 0 && at >= start && at - start <= memories[n].size &&
            size <= memories[n].size - (at - start)) {
            found = bytes;
        }
    }
    pthread_mutex_unlock(&lock);
    return found;
}

/* Returns the size of the memory that begins there, 0 if none does. */
size_t
fake_size(uint64_t address)
{
    size_t size = 0;
    pthread_mutex_lock(&lock);
    for (int n = 0; n < MOST_MEMORIES; n++) {
        if (memories[n].bytes != NULL &&
            (uint64_t)(uintptr_t)memories[n].bytes == (address ^ DISGUISE)) {
            size = memories[n].size;
        }
    }
    pthread_mutex_unlock(&lock);
    return size;
}

uint64_t
fake_disguise(void)
{
    return DISGUISE;
}

int
cuInit(unsigned flags)
{
    return flags;
}

int
cuDriverGetVersion(int *version)
{
    *version = 12040;
    return SUCCESS;
}

int
cuGetErrorName(int code, const char **name)
{
    *name = code == INVALID_PTX               ? "CUDA_ERROR_INVALID_PTX"
            : code == LAUNCH_FAILED           ? "CUDA_ERROR_LAUNCH_FAILED"
            : code == LAUNCH_OUT_OF_RESOURCES ? "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"
                                              : NULL;
    return *name == NULL ? INVALID_VALUE : SUCCESS;
}

int
cuDeviceGet(int *device, int number)
{
    *device = THE_DEVICE;
    return number == 0 ? SUCCESS : INVALID_VALUE;
}

int
cuDeviceGetName(char *name, int size, int device)
{
    snprintf(name, (size_t)size, "a fake of CUDA");
    return device == THE_DEVICE ? SUCCESS : INVALID_VALUE;
}

int
cuDeviceTotalMem_v2(size_t *bytes, int device)
{
    *bytes = (size_t)1 << 36;
    return device == THE_DEVICE ? SUCCESS : INVALID_VALUE;
}

static int
chosen(const char *variable, int usual)
{
    const char *text = getenv(variable);
    return text == NULL ? usual : atoi(text);
}

int
cuDeviceGetAttribute(int *value, int attribute, int device)
{
    int units = chosen("FAKE_CUDA_UNITS", 4);
    int capability = chosen("FAKE_CUDA_CAPABILITY", 90);
    const int values[][2] = {
        {1, 1024},      {8, 48 << 10},         {16, units},
        {38, 50 << 20}, {75, capability / 10}, {76, capability % 10},
    };
    for (size_t n = 0; n < sizeof values / sizeof values[0]; n++) {
        if (values[n][0] == attribute) {
            *value = values[n][1];
            return device == THE_DEVICE ? SUCCESS : INVALID_VALUE;
        }
    }
    return INVALID_VALUE;
}

int
cuDevicePrimaryCtxRetain(void **context, int device)
{
    *context = THE_CONTEXT;
    return device == THE_DEVICE ? SUCCESS : INVALID_VALUE;
}

int
cuCtxSetCurrent(void *context)
{
    current = context;
    return SUCCESS;
}

/* Fills new memory with bytes that are a large number in every type. */
int
cuMemAlloc_v2(uint64_t *made, size_t bytes)
{
    int n = 0;
    int code = ready();
    if (code != SUCCESS || bytes == 0) {
        return code != SUCCESS ? code : INVALID_VALUE;
    }
    pthread_mutex_lock(&lock);
    while (n < MOST_MEMORIES && memories[n].bytes != NULL) {
        n++;
    }
    unsigned char *memory = n == MOST_MEMORIES || allocated + bytes > limit
                                ? NULL
                                : aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (memory != NULL) {
        memset(memory, 0x64, bytes);
        memories[n].bytes = memory;
        memories[n].size = bytes;
        allocated += bytes;
    }
    pthread_mutex_unlock(&lock);
    *made = (uint64_t)(uintptr_t)memory ^ DISGUISE;
    return memory == NULL ? OUT_OF_MEMORY : SUCCESS;
}

int
cuMemFree_v2(uint64_t address)
{
    int code = INVALID_VALUE;
    pthread_mutex_lock(&lock);
    for (int n = 0; n < MOST_MEMORIES; n++) {
        if (memories[n].bytes != NULL &&
            (uint64_t)(uintptr_t)memories[n].bytes == (address ^ DISGUISE)) {
            free(memories[n].bytes);
            memories[n].bytes = NULL;
            allocated -= memories[n].size;
            code = SUCCESS;
        }
    }
    pthread_mutex_unlock(&lock);
    return ready() != SUCCESS ? ready() : code;
}

int
cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream)
{
    void *host = host_of(to, bytes);
    if (ready() != SUCCESS || host == NULL || stream != NULL) {
        return ready() != SUCCESS ? ready() : INVALID_VALUE;
    }
    memcpy(host, from, bytes);
    return SUCCESS;
}

int
cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream)
{
    const void *host = host_of(from, bytes);
    if (ready() != SUCCESS || host == NULL || stream != NULL) {
        return ready() != SUCCESS ? ready() : INVALID_VALUE;
    }
    memcpy(to, host, bytes);
    if (fake_launch == NULL) {
        memset(to, 0, bytes);
    }
    return SUCCESS;
}

/* Returns the bytes of the one array that PTX declares in local memory, 0 if there is none. */
static long
shared_of(const char *ptx)
{
    const char *line = strstr(ptx, ".shared ");
    const char *size = line == NULL ? NULL : strchr(line, '[');
    return size == NULL ? 0 : atol(size + 1);
}

/* A module is its text. */
int
cuModuleLoadDataEx(void **module, const void *image, unsigned count, int *options, void **values)
{
    int refused = bad[0] != '\0' && strstr(image, bad) != NULL;
    int large = shared_of(image) > MOST_SHARED;
    if (ready() != SUCCESS) {
        return ready();
    }
    if (refused || large || strstr(image, VISIBLE_KERNEL) == NULL ||
        strstr(image, "texmode_independent") != NULL) {
        if (count == 2 && options[0] == JIT_LOG && options[1] == JIT_LOG + 1) {
            snprintf(values[0], (size_t)(uintptr_t)values[1], "ptxas fatal: %s",
                     refused ? "it was asked for"
                     : large ? "too much shared data"
                             : "no kernel for CUDA");
        }
        return INVALID_PTX;
    }
    fake_modules++;
    *module = strdup(image);
    return SUCCESS;
}

int
cuModuleGetFunction(void **made, void *module, const char *name)
{
    char line[128];
    snprintf(line, sizeof line, VISIBLE_KERNEL " %s(", name);
    function *f = strstr(module, line) == NULL ? NULL : calloc(1, sizeof *f);
    if (f != NULL) {
        f->ptx = module;
        snprintf(f->name, sizeof f->name, "%s", name);
    }
    *made = f;
    return ready() != SUCCESS ? ready() : f == NULL ? NOT_FOUND : SUCCESS;
}

int
cuFuncGetAttribute(int *value, int attribute, void *made)
{
    *value = attribute == 0 && made != NULL ? 1024 : 0;
    return ready();
}

int
cuLaunchKernel(void *made, unsigned groups_x, unsigned groups_y, unsigned groups_z,
               unsigned items_x, unsigned items_y, unsigned items_z, unsigned shared, void *stream,
               void **arguments, void **extra)
{
    const function *f = made;
    if (ready() != SUCCESS || groups_y != 1 || groups_z != 1 || items_y != 1 || items_z != 1 ||
        shared != 0 || stream != NULL || extra != NULL) {
        return ready() != SUCCESS ? ready() : INVALID_VALUE;
    }
    if (failing) {
        lost = LAUNCH_FAILED;
        failing = 0;
        return SUCCESS;
    }
    return fake_launch == NULL ? SUCCESS
                               : fake_launch(f->ptx, f->name, groups_x, items_x, arguments);
}

/* An event counts down until it is complete. */
int
cuEventCreate(void **event, unsigned flags)
{
    *event = flags == 2 ? calloc(1, sizeof(int)) : NULL;
    return *event == NULL ? INVALID_VALUE : SUCCESS;
}

int
cuEventRecord(void *event, void *stream)
{
    *(int *)event = 2;
    return stream == NULL ? SUCCESS : INVALID_VALUE;
}

int
cuEventQuery(void *event)
{
    int *to_come = event;
    if (lost == SUCCESS && *to_come > 0) {
        (*to_come)--;
        return NOT_READY;
    }
    return ready();
}

int
cuEventSynchronize(void *event)
{
    *(int *)event = 0;
    return ready();
}

int
cuEventDestroy_v2(void *event)
{
    free(event);
    return SUCCESS;
}

int
cuStreamSynchronize(void *stream)
{
    return stream == NULL ? ready() : INVALID_VALUE;
}
