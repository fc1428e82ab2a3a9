/* SPDX-License-Identifier: MIT */
/* The back end of opencl_machine.c, an OpenCL loader with one device. A back end is a file that runs
 * kernels, and is compiled together with the loader.
 */
#ifndef CLATTN_OPENCL_MACHINE_H
#define CLATTN_OPENCL_MACHINE_H

#include <stddef.h>
#include <stdint.h>

#define MOST_ARGUMENTS 32

/* OpenCL's codes. */
enum {
    SUCCESS = 0,
    ALLOCATION_FAILURE = -4,
    OUT_OF_RESOURCES = -5,
    OUT_OF_HOST_MEMORY = -6,
    BUILD_FAILURE = -11,
    INVALID_VALUE = -30,
    INVALID_BINARY = -42,
    INVALID_KERNEL_NAME = -46,
    INVALID_WORK_GROUP_SIZE = -54,
    INVALID_OPERATION = -59,
    INVALID_GLOBAL_WORK_SIZE = -63,
    PLATFORM_NOT_FOUND = -1001,
};

/* The device, as clGetDeviceInfo tells of it. */
typedef struct {
    const char *platform;
    const char *name;
    const char *vendor;
    const char *driver;
    uint64_t compute_units;
    uint64_t work_group;
    uint64_t allocation; /* bytes, at most */
    uint64_t parameters; /* bytes, at most */
    uint64_t cache;
    uint64_t memory;
    uint64_t local_memory;
    uint64_t shares_memory; /* 1: buffers are memory of the host */
    uint64_t capability_major;
    uint64_t capability_minor;
} machine_facts;

typedef struct {
    char *source;
    char *options;
    char *log;    /* of building it; NULL: there is none */
    void *module; /* the back end's */
} machine_program;

/* ptx/device.py has the same struct. */
typedef struct {
    unsigned char *bytes; /* of a buffer or of a value; NULL for no buffer */
    size_t size;
    int32_t is_buffer;
} machine_argument;

typedef struct {
    machine_program *program;
    char name[64];
    size_t work_group; /* most work-items */
    void *function;    /* the back end's */
    uint32_t count;
    machine_argument arguments[MOST_ARGUMENTS];
} machine_kernel;

/* Functions return OpenCL's codes. Commands run in order. A mark stands for all commands before
   it. */
typedef struct {
    const char *header; /* of a binary, in front of the source; NULL: programs have no binaries */
    const machine_facts *(*open)(void); /* NULL: there is no device */
    int32_t (*build)(machine_program *program);
    int32_t (*find)(machine_kernel *kernel); /* in its program; fills in function, work_group */
    int32_t (*launch)(const machine_kernel *kernel, size_t groups, size_t work_items);
    int32_t (*allocate)(size_t size, unsigned char **bytes);
    void (*release)(unsigned char *bytes);
    int32_t (*read)(void *to, const unsigned char *from, size_t size, uint32_t waits);
    int32_t (*write)(unsigned char *to, const void *from, size_t size, uint32_t waits);
    int32_t (*mark)(void **mark);
    int32_t (*state)(void *mark); /* 0: its commands are complete; 1: they run; or an error */
    int32_t (*wait)(void *mark);
    void (*drop)(void *mark);
    int32_t (*finish)(void);
} machine_backend;

extern const machine_backend backend;

#endif
