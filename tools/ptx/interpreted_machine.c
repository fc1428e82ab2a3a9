/* SPDX-License-Identifier: MIT */
/* The back end of opencl_machine.c that compiles nothing and hands each launch, with the source,
 * the options and the arguments, to a function that ptx/device.py sets. A command is complete when
 * it is enqueued, and buffers are memory of the host.
 */

#include <stdlib.h>
#include <string.h>

#include "opencl_machine.h"

typedef int32_t (*launch_function)(const char *source, const char *options, const char *name,
                                   uint32_t count, const machine_argument *arguments, size_t groups,
                                   size_t work_items);

launch_function machine_launch;

static const machine_facts *
open_device(void)
{
    static const machine_facts facts = {
        .platform = "PTX machine",
        .name = "PTX machine",
        .vendor = "clattn tests",
        .driver = "1",
        .compute_units = 4,
        .work_group = 1024,
        .allocation = UINT64_C(1) << 34,
        .parameters = 4352,
        .cache = 50 << 20,
        .memory = UINT64_C(1) << 36,
        .local_memory = 48 << 10,
        .shares_memory = 1,
        .capability_major = 9,
        .capability_minor = 0,
    };
    return &facts;
}

static int32_t
build(machine_program *program)
{
    (void)program;
    return SUCCESS;
}

static int32_t
find(machine_kernel *kernel)
{
    kernel->work_group = 1024;
    return SUCCESS;
}

static int32_t
launch(const machine_kernel *kernel, size_t groups, size_t work_items)
{
    const machine_program *program = kernel->program;
    return machine_launch(program->source, program->options, kernel->name, kernel->count,
                          kernel->arguments, groups, work_items);
}

/* Fills new memory with bytes that are a large number in every type. */
static int32_t
allocate(size_t size, unsigned char **bytes)
{
    *bytes = aligned_alloc(256, (size + 255) / 256 * 256);
    if (*bytes == NULL) {
        return OUT_OF_HOST_MEMORY;
    }
    memset(*bytes, 0x64, size);
    return SUCCESS;
}

static void
release(unsigned char *bytes)
{
    free(bytes);
}

static int32_t
read_bytes(void *to, const unsigned char *from, size_t size, uint32_t waits)
{
    (void)waits;
    memcpy(to, from, size);
    return SUCCESS;
}

static int32_t
write_bytes(unsigned char *to, const void *from, size_t size, uint32_t waits)
{
    (void)waits;
    memcpy(to, from, size);
    return SUCCESS;
}

static int32_t
mark(void **made)
{
    *made = NULL;
    return SUCCESS;
}

static int32_t
complete(void *made)
{
    (void)made;
    return SUCCESS;
}

static void
drop(void *made)
{
    (void)made;
}

static int32_t
finish(void)
{
    return SUCCESS;
}

const machine_backend backend = {
    .header = ".target sm_90\n//@90a .mark\n",
    .open = open_device,
    .build = build,
    .find = find,
    .launch = launch,
    .allocate = allocate,
    .release = release,
    .read = read_bytes,
    .write = write_bytes,
    .mark = mark,
    .state = complete,
    .wait = complete,
    .drop = drop,
    .finish = finish,
};
