/* SPDX-License-Identifier: MIT */
#define _DEFAULT_SOURCE /* POSIX, and madvise */

#include "base/platform.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifdef __GLIBC__
#include <malloc.h>
#endif
#ifdef __linux__
#include <sys/sysinfo.h>
#endif

void
ca_mutex_init(ca_mutex *mutex)
{
    pthread_mutex_init(&mutex->handle, NULL);
}

void
ca_mutex_destroy(ca_mutex *mutex)
{
    pthread_mutex_destroy(&mutex->handle);
}

void
ca_mutex_lock(ca_mutex *mutex)
{
    pthread_mutex_lock(&mutex->handle);
}

void
ca_mutex_unlock(ca_mutex *mutex)
{
    pthread_mutex_unlock(&mutex->handle);
}

int64_t
ca_process_id(void)
{
    return (int64_t)getpid();
}

/* The macros are glibc's. */
#ifdef _SC_LEVEL1_DCACHE_SIZE
#define FIRST_CACHE  _SC_LEVEL1_DCACHE_SIZE
#define SECOND_CACHE _SC_LEVEL2_CACHE_SIZE
#else
#define FIRST_CACHE  -1
#define SECOND_CACHE -1
#endif

/* Returns a size that the system reports, 0 if it does not. */
static int64_t
reported_size(int name)
{
    const int64_t bytes = sysconf(name);
    return bytes > 0 ? bytes : 0;
}

int64_t
ca_first_cache(void)
{
    return reported_size(FIRST_CACHE);
}

int64_t
ca_second_cache(void)
{
    return reported_size(SECOND_CACHE);
}

int
ca_processors(void)
{
    const long count = sysconf(_SC_NPROCESSORS_ONLN);
    return count > 0 && count <= INT_MAX ? (int)count : 1;
}

typedef struct {
    void (*work)(void *context, int number);
    void *context;
    int number;
} thread_work;

static void *
run_thread(void *argument)
{
    const thread_work *mine = argument;
    mine->work(mine->context, mine->number);
    return NULL;
}

void
ca_threads_run(void (*work)(void *context, int number), void *context, int count)
{
    pthread_t threads[CA_MAX_THREADS];
    thread_work works[CA_MAX_THREADS];
    sigset_t all;
    sigset_t before;
    int started = 1;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; started < count; started++) {
        works[started] = (thread_work){work, context, started};
        if (pthread_create(&threads[started], NULL, run_thread, &works[started]) != 0) {
            break;
        }
    }
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    work(context, 0);
    for (int i = 1; i < started; i++) {
        pthread_join(threads[i], NULL);
    }
}

double
ca_seconds(void)
{
    struct timespec now = {0};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

void
ca_sleep(int milliseconds)
{
    const struct timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
    (void)nanosleep(&time, NULL);
}

void
ca_yield(void)
{
    (void)sched_yield();
}

uint64_t
ca_thread_id(void)
{
    return (uint64_t)(uintptr_t)pthread_self();
}

void
ca_fork_guard_init(ca_fork_guard *guard)
{
    *guard = (ca_fork_guard){.process_id = ca_process_id()};
#ifdef MADV_WIPEONFORK
    size_t size = (size_t)sysconf(_SC_PAGESIZE);
    void *page = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) {
        return;
    }
    if (madvise(page, size, MADV_WIPEONFORK) != 0) {
        munmap(page, size);
        return;
    }
    guard->page = page;
    guard->page_size = size;
    guard->page[0] = 1;
#endif
}

void
ca_fork_guard_destroy(ca_fork_guard *guard)
{
    if (guard->page != NULL) {
        munmap((void *)guard->page, guard->page_size);
    }
    *guard = (ca_fork_guard){0};
}

bool
ca_fork_guard_is_child(const ca_fork_guard *guard)
{
    if (guard->page != NULL) {
        return guard->page[0] == 0;
    }
    return guard->process_id != ca_process_id();
}

#ifdef __GLIBC__
/* This exit handler writes buffered output and ends the process. So no later handler runs. */
static void
leave(int status, void *unused)
{
    (void)unused;
    (void)fflush(NULL);
    _exit(status);
}
#endif

void
ca_skip_exit_handlers(void)
{
#ifdef __GLIBC__
    (void)on_exit(leave, NULL); /* runs before all that are registered */
#endif
}

#define RESULT_ALIGNMENT 128 /* of host pointers, for Intel's runtime */

/* Results are not aligned to large pages: the allocator would give such a block back to
   the system each time, and the next result would get new pages. */
#define LARGE_RESULT ((size_t)4 << 20)

/* Asks for large pages. Only whole pages take advice. */
static void
advise_large_pages(void *memory, size_t bytes)
{
#ifdef MADV_HUGEPAGE
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t first = ((uintptr_t)memory + page - 1) / page * page;
    const uintptr_t end = ((uintptr_t)memory + bytes) / page * page;
    (void)madvise((void *)first, end - first, MADV_HUGEPAGE);
#else
    (void)memory;
    (void)bytes;
#endif
}

/* True if the machine has so many bytes of memory. Linux may give a process more addresses than the
   machine has memory (overcommit), and kills the process when it uses them. */
static bool
machine_holds(size_t bytes)
{
#ifdef __linux__
    struct sysinfo machine;
    return bytes < LARGE_RESULT || sysinfo(&machine) != 0 ||
           bytes / machine.mem_unit < machine.totalram + machine.totalswap;
#else
    (void)bytes;
    return true;
#endif
}

#define KEPT_SIGNALS 8

static const int kept_signals[KEPT_SIGNALS] = {SIGHUP,  SIGINT,  SIGQUIT, SIGPIPE,
                                               SIGALRM, SIGTERM, SIGUSR1, SIGUSR2};

struct ca_signals {
    struct sigaction actions[KEPT_SIGNALS];
};

ca_signals *
ca_signals_save(void)
{
    ca_signals *signals = calloc(1, sizeof *signals);
    for (int n = 0; signals != NULL && n < KEPT_SIGNALS; n++) {
        (void)sigaction(kept_signals[n], NULL, &signals->actions[n]);
    }
    return signals;
}

void
ca_signals_restore(ca_signals *signals)
{
    for (int n = 0; signals != NULL && n < KEPT_SIGNALS; n++) {
        if (signals->actions[n].sa_handler != SIG_DFL) {
            (void)sigaction(kept_signals[n], &signals->actions[n], NULL);
        }
    }
    free(signals);
}

void *
ca_memory_allocate(size_t bytes)
{
    char *start = machine_holds(bytes) && bytes < SIZE_MAX - RESULT_ALIGNMENT
                      ? malloc(bytes + RESULT_ALIGNMENT)
                      : NULL;
    if (start == NULL) {
        return NULL;
    }
    /* free() needs the pointer that malloc returned. The pointer is kept just before the memory. There
       is room for one pointer, because malloc aligns to two. posix_memalign would do the same, but
       takes five times as long as malloc, which small calls notice. */
    void **memory = (void **)(start + RESULT_ALIGNMENT - (uintptr_t)start % RESULT_ALIGNMENT);
    memory[-1] = start;
    if (bytes >= LARGE_RESULT) {
        advise_large_pages(memory, bytes);
    }
    return memory;
}

void
ca_memory_free(void *memory)
{
    if (memory != NULL) {
        free(((void **)memory)[-1]);
    }
}

void
ca_memory_trim(void)
{
#ifdef __GLIBC__
    (void)malloc_trim(0);
#endif
}

/* Linux aligns a mapping to large pages if its size is a multiple of them. */
static size_t
whole_large_pages(size_t bytes)
{
    const size_t page = (size_t)2 << 20;
    return (bytes + page - 1) / page * page;
}

void *
ca_pages_allocate(size_t bytes)
{
    size_t size = whole_large_pages(bytes);
    if (!machine_holds(size)) {
        return NULL;
    }
    void *pages = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) {
        return NULL;
    }
    advise_large_pages(pages, size);
    return pages;
}

void
ca_pages_free(void *pages, size_t bytes)
{
    munmap(pages, whole_large_pages(bytes));
}

void *
ca_addresses_reserve(size_t bytes)
{
    void *addresses = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return addresses != MAP_FAILED ? addresses : NULL;
}

void
ca_addresses_release(void *addresses, size_t bytes)
{
    munmap(addresses, bytes);
}

void *
ca_library_open(const char *path, bool global, char *message, size_t size)
{
    void *library = dlopen(path, RTLD_NOW | (global ? RTLD_GLOBAL : RTLD_LOCAL));
    if (library == NULL && size > 0) {
        const char *words = dlerror();
        (void)snprintf(message, size, "%s", words != NULL ? words : "unknown error");
    }
    return library;
}

void *
ca_library_symbol(void *library, const char *name)
{
    return dlsym(library, name);
}

/* No program or verdict is larger. A file may say that it has any size. */
#define LARGEST_FILE ((off_t)1 << 30)

/* True for a regular file of this user or of root that no other user may write to. */
static bool
is_private(const struct stat *info)
{
    bool trusted = info->st_uid == geteuid() || info->st_uid == 0;
    return S_ISREG(info->st_mode) && trusted && (info->st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

bool
ca_file_read(const char *path, unsigned char **data, size_t *size)
{
    struct stat info;
    /* Opening does not wait for a writer of a named pipe. Programs that this process starts do not
       get the file. */
    int descriptor = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    FILE *file = descriptor >= 0 ? fdopen(descriptor, "rb") : NULL;
    *data = NULL;
    *size = 0;
    if (file == NULL) {
        if (descriptor >= 0) {
            close(descriptor);
        }
        return false;
    }
    if (fstat(descriptor, &info) == 0 && is_private(&info) && info.st_size <= LARGEST_FILE) {
        *size = (size_t)info.st_size;
        *data = malloc(*size + 1);
    }
    if (*data != NULL && fread(*data, 1, *size, file) != *size) {
        free(*data);
        *data = NULL;
    }
    (void)fclose(file);
    return *data != NULL;
}

/* Makes the folders above `path`. Changes `path` meanwhile and restores it. */
static void
file_make_parents(char *path)
{
    for (char *slash = strchr(path + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        mkdir(path, 0700); /* after a failure mkstemp fails too */
        *slash = '/';
    }
}

/* The name of a file that is being written ends so. mkstemp puts letters in the place of each X. */
#define UNFINISHED ".part-"
#define LETTERS    "XXXXXX"

#define SECONDS_OF_A_DAY 86400

/* Removes files that a killed process has left in the folder of `path`: they are a day old. */
static void
remove_unfinished(char *path)
{
    char *slash = strrchr(path, '/');
    if (slash == NULL) {
        return;
    }
    *slash = '\0';
    DIR *folder = opendir(path);
    *slash = '/';
    if (folder == NULL) {
        return;
    }
    const int inside = dirfd(folder);
    for (struct dirent *entry = readdir(folder); entry != NULL; entry = readdir(folder)) {
        const char *end = strstr(entry->d_name, UNFINISHED);
        struct stat info;
        if (end != NULL && inside >= 0 && strlen(end) == strlen(UNFINISHED LETTERS) &&
            fstatat(inside, entry->d_name, &info, AT_SYMLINK_NOFOLLOW) == 0 &&
            time(NULL) - info.st_mtime > SECONDS_OF_A_DAY) {
            (void)unlinkat(inside, entry->d_name, 0);
        }
    }
    (void)closedir(folder);
}

bool
ca_file_write(const char *path, const void *data, size_t size)
{
    static const char random[] = UNFINISHED LETTERS;
    size_t length = strlen(path) + sizeof(random);
    bool written = false;
    char *temporary = malloc(length);
    if (temporary == NULL) {
        return false;
    }
    (void)snprintf(temporary, length, "%s%s", path, random);
    file_make_parents(temporary);
    remove_unfinished(temporary);
    int descriptor = mkstemp(temporary);
    FILE *file = descriptor >= 0 ? fdopen(descriptor, "wb") : NULL;
    if (file != NULL) {
        written = fwrite(data, 1, size, file) == size;
        written = fclose(file) == 0 && written;
        written = written && rename(temporary, path) == 0;
    } else if (descriptor >= 0) {
        close(descriptor);
    }
    if (descriptor >= 0 && !written) {
        unlink(temporary);
    }
    free(temporary);
    return written;
}
