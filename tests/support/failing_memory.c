/* SPDX-License-Identifier: MIT */
/* Memory that runs out: preloaded, it lets the n-th allocation of one library fail.
 *
 * Only calls whose return address lies in the library count, so that drivers and Python get theirs.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

static uintptr_t first; /* addresses of the library: first … last */
static uintptr_t last;
static atomic_int to_go; /* allocations until one fails; 0: none fails */
static atomic_int fired; /* 1: one has failed */

void
memory_of(uintptr_t from, uintptr_t to)
{
    first = from;
    last = to;
}

/* Lets the n-th allocation from now on fail. */
void
memory_fail(int n)
{
    fired = 0;
    to_go = n;
}

/* Lets no more allocations fail. Returns whether one has failed. */
int
memory_end(void)
{
    to_go = 0;
    return fired;
}

static int
is_due(const void *caller)
{
    uintptr_t address = (uintptr_t)caller;
    if (to_go <= 0 || address < first || address > last || --to_go != 0) {
        return 0;
    }
    fired = 1;
    return 1;
}

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

void *
malloc(size_t size)
{
    return is_due(__builtin_return_address(0)) ? NULL : __libc_malloc(size);
}

void *
calloc(size_t count, size_t size)
{
    return is_due(__builtin_return_address(0)) ? NULL : __libc_calloc(count, size);
}

void *
realloc(void *memory, size_t size)
{
    return is_due(__builtin_return_address(0)) ? NULL : __libc_realloc(memory, size);
}

void *
aligned_alloc(size_t alignment, size_t size)
{
    return is_due(__builtin_return_address(0)) ? NULL : __libc_memalign(alignment, size);
}

int
posix_memalign(void **memory, size_t alignment, size_t size)
{
    if (is_due(__builtin_return_address(0))) {
        return ENOMEM;
    }
    *memory = __libc_memalign(alignment, size);
    return *memory != NULL ? 0 : ENOMEM;
}

void *
mmap(void *address, size_t size, int protection, int flags, int file, off_t offset)
{
    typedef void *mmap_type(void *, size_t, int, int, int, off_t);
    return is_due(__builtin_return_address(0))
               ? MAP_FAILED
               : ((mmap_type *)dlsym(RTLD_NEXT, "mmap"))(address, size, protection, flags, file,
                                                         offset);
}
