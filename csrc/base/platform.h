/* SPDX-License-Identifier: MIT
 *
 * The operating system: mutexes, threads, memory, shared libraries, files, a clock, the process's
 * identity. Only platform.c calls POSIX, and only platform_windows.c, in its place, Windows;
 * libraries.c asks glibc.
 */
#ifndef CLATTN_PLATFORM_H
#define CLATTN_PLATFORM_H

#ifndef _WIN32
#include <pthread.h>
#endif
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
#ifdef _WIN32
    void *handle; /* an SRWLOCK; windows.h would bring names of all kinds */
#else
    pthread_mutex_t handle;
#endif
} ca_mutex;

/* The first value of a mutex that lives as long as the process. */
#ifdef _WIN32
#define CA_STATIC_MUTEX {NULL}
#else
#define CA_STATIC_MUTEX {PTHREAD_MUTEX_INITIALIZER}
#endif

void ca_mutex_init(ca_mutex *mutex);
void ca_mutex_destroy(ca_mutex *mutex);
void ca_mutex_lock(ca_mutex *mutex);
void ca_mutex_unlock(ca_mutex *mutex);

int64_t ca_process_id(void);

/* Return the size of a core's first data cache, or of its second cache, in bytes, or 0 if the system
   does not report the size. */
int64_t ca_first_cache(void);
int64_t ca_second_cache(void);

/* Returns the number of processors, 1 if the system does not say. */
int ca_processors(void);

/* Calls work(context, 0) in this thread, and work(context, 1) to work(context, count - 1) in threads of
   their own, and returns when all calls have returned. If the system starts fewer threads, the calls
   of the others are left out. The new threads get no signals. */
void ca_threads_run(void (*work)(void *context, int number), void *context, int count);

/* The most threads of ca_threads_run. */
#define CA_MAX_THREADS 8

/* The time in seconds, for differences: the clock runs on when somebody sets the time of day. */
double ca_seconds(void);

/* Sleep for some milliseconds, or less if a signal comes. */
void ca_sleep(int milliseconds);

/* Let other threads of this processor run first. */
void ca_yield(void);

/* A number that no other thread of the process has while this one runs. */
uint64_t ca_thread_id(void);

/* A guard tells a forked child from the process that made the guard. A test of the guard
   is one load if the system can clear a page in the child (Linux). Elsewhere the test asks
   the system for the process id. */
typedef struct {
    int64_t process_id;
    volatile unsigned char *page; /* NULL: compare process ids */
    size_t page_size;
} ca_fork_guard;

void ca_fork_guard_init(ca_fork_guard *guard);
void ca_fork_guard_destroy(ca_fork_guard *guard);
bool ca_fork_guard_is_child(const ca_fork_guard *guard);

/* Lets a forked child skip the exit handlers (atexit) that its parent has registered. The child calls
   this function right after the fork. It works with glibc, and does nothing elsewhere. */
void ca_skip_exit_handlers(void);

/* The handlers of signals that ask a process for something, such as SIGUSR1 and SIGTERM. Libraries may
   replace them: LLVM does, which drivers bring. Faults, such as SIGFPE, are not among them, since a
   driver may need its own handlers of these. Windows has no such signals. */
typedef struct ca_signals ca_signals;

/* NULL if there is no memory. */
ca_signals *ca_signals_save(void);

/* Gives those that had a handler, or were ignored, what they had, and frees `signals`. */
void ca_signals_restore(ca_signals *signals);

/* Returns memory for a result, not initialised, 128-byte aligned at least, for ca_memory_free.
   NULL if no memory is left, or the machine has less. Large memory is made of large pages if the
   system has them: touching new small pages takes as long as copying them. */
void *ca_memory_allocate(size_t bytes);
void ca_memory_free(void *memory);

/* The allocator that gives a result its memory. */
typedef enum {
    CA_PAGES_ANY,  /* ca_memory_allocate's */
    CA_PAGES_ZERO, /* ca_pages_allocate's */
} ca_pages;

/* From this size on, the system's allocators return new pages. Smaller memory was mostly
   used before, so touching it costs nothing. */
#define CA_LARGE_MEMORY ((int64_t)32 << 20) /* bytes */

/* Returns to the system the freed memory that the allocator keeps. */
void ca_memory_trim(void);

/* Returns new pages for ca_pages_free, large pages if the system has them. Their bytes
   are zero, and a page takes memory once it is touched. NULL if there is no memory. */
void *ca_pages_allocate(size_t bytes);
void ca_pages_free(void *pages, size_t bytes);

/* Returns addresses that nothing else has, without memory behind them. NULL if there are none. */
void *ca_addresses_reserve(size_t bytes);
void ca_addresses_release(void *addresses, size_t bytes);

/* Opens a shared library. `global` makes its symbols visible to libraries opened later.
   NULL on failure, with the system's words in `message`. */
void *ca_library_open(const char *path, bool global, char *message, size_t size);

void *ca_library_symbol(void *library, const char *name);

/* Reads a whole file. The caller frees *data. False, and NULL, if it cannot be read, is no regular
   file, or if a user other than this one and root may have written it. On Windows, where the rights
   of the user's folder say who may write, any regular file is read. */
bool ca_file_read(const char *path, unsigned char **data, size_t *size);

/* Writes a file under a temporary name beside it, then renames it, so that a reader sees all of
   it or none. Makes missing parent folders (mode 0700). On failure returns false and leaves no
   file. What a killed process has left in the folder is removed after a day, but not on Windows. */
bool ca_file_write(const char *path, const void *data, size_t size);

#endif
