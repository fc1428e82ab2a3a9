/* SPDX-License-Identifier: MIT */
#include "opencl/guards.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/platform.h"

/* No kernel writes this byte by itself: it is in no small integer, and in no NaN. */
#define PATTERN 0xa5

void *
ca_guards_allocate(size_t bytes)
{
    unsigned char *memory = NULL;
    if (bytes <= SIZE_MAX - 2 * CA_GUARD) {
        memory = ca_memory_allocate(bytes + 2 * CA_GUARD);
    }
    if (memory != NULL) {
        memory += CA_GUARD;
        ca_guards_fill(memory, bytes);
    }
    return memory;
}

void
ca_guards_free(void *memory)
{
    if (memory != NULL) {
        ca_memory_free((unsigned char *)memory - CA_GUARD);
    }
}

void
ca_guards_fill(void *memory, size_t bytes)
{
    if (memory != NULL) {
        memset((unsigned char *)memory - CA_GUARD, PATTERN, CA_GUARD);
        memset((unsigned char *)memory + bytes, PATTERN, CA_GUARD);
    }
}

/* Returns the first byte of a zone that has changed, counted from `zone`; CA_GUARD if none has. */
static size_t
first_change(const unsigned char *zone)
{
    const volatile unsigned char *byte = zone; /* kernels write it */
    size_t n = 0;
    while (n != CA_GUARD && byte[n] == PATTERN) {
        n++;
    }
    return n;
}

ca_status
ca_guards_check(const void *memory, size_t bytes, const char *call, const char *name,
                ca_error *error)
{
    const unsigned char *start = memory;
    if (start == NULL || CA_GUARD == 0) {
        return CA_OK;
    }
    const size_t before = first_change(start - CA_GUARD);
    const size_t behind = first_change(start + bytes);
    if (before == CA_GUARD && behind == CA_GUARD) {
        return CA_OK;
    }
    const long long place =
        before != CA_GUARD ? (long long)before - (long long)CA_GUARD : (long long)(bytes + behind);
    return ca_error_set(error, CA_ERROR_DEVICE, "%s wrote to byte %lld of %s, which has %zu bytes",
                        call, place, name, bytes);
}
