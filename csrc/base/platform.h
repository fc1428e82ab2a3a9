/* SPDX-License-Identifier: MIT
 *
 * What C11 leaves to the operating system: mutexes, shared libraries, files of the
 * kernel cache, the process's identity. POSIX.
 */
#ifndef CLATTN_PLATFORM_H
#define CLATTN_PLATFORM_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    pthread_mutex_t handle;
} ca_mutex;

void ca_mutex_init(ca_mutex *mutex);
void ca_mutex_destroy(ca_mutex *mutex);
void ca_mutex_lock(ca_mutex *mutex);
void ca_mutex_unlock(ca_mutex *mutex);

int64_t ca_process_id(void);

/* Whether the processor multiplies pairs of bfloat16, 16 at a time (vdpbf16ps on
   512-bit registers), and the system keeps such registers. */
bool ca_processor_has_bfloat16_pairs(void);

/* Tells a forked child from the process that made the guard. Asking costs a load where
   the system can wipe a page in the child (Linux), else a call for the process id. */
typedef struct {
    int64_t process_id;
    volatile unsigned char *page; /* NULL: compare process ids */
    size_t page_size;
} ca_fork_guard;

void ca_fork_guard_init(ca_fork_guard *guard);
void ca_fork_guard_destroy(ca_fork_guard *guard);
bool ca_fork_guard_is_child(const ca_fork_guard *guard);

/* Memory for a result, not initialised, at least 128-byte aligned, for free(). A large
   one is made of large pages where the system has them: touching fresh small ones takes
   as long as copying them. NULL where there is none. */
void *ca_memory_allocate(size_t bytes);

/* What the memory of a result is. */
typedef enum {
    CA_PAGES_ANY,  /* ca_memory_allocate's */
    CA_PAGES_ZERO, /* ca_pages_allocate's */
} ca_pages;

/* From here on the system's allocators return new pages; smaller results are mostly
   made of memory that was used before, which costs nothing to touch. */
#define CA_LARGE_MEMORY ((int64_t)32 << 20) /* bytes */

/* Give what was freed back to the system, where the allocator keeps it. */
void ca_memory_trim(void);

/* Returns new pages, large ones where the system has them. They are zero, and each is
   made when it is touched. ca_pages_free gives them back. NULL where there is no
   memory. */
void *ca_pages_allocate(size_t bytes);
void ca_pages_free(void *pages, size_t bytes);

/* Addresses that nothing else has, and no memory behind them. NULL where there are
   none. */
void *ca_addresses_reserve(size_t bytes);
void ca_addresses_release(void *addresses, size_t bytes);

/* Open a shared library; `global` makes its symbols visible to libraries opened later.
   NULL on failure, with the system's words in `message`. */
void *ca_library_open(const char *path, bool global, char *message, size_t size);

void *ca_library_symbol(void *library, const char *name);

/* Read a whole file; the caller frees *data. False (and NULL) if it cannot be read. */
bool ca_file_read(const char *path, unsigned char **data, size_t *size);

/* Write a file so that a reader sees all of it or none: to a temporary name beside it,
   then renamed. Missing parent folders are made (mode 0700). False on any failure, and
   nothing is left behind. */
bool ca_file_write(const char *path, const void *data, size_t size);

#endif
