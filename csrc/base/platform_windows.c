/* SPDX-License-Identifier: MIT */
#include "base/platform.h"

#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <windows.h>

_Static_assert(sizeof(SRWLOCK) == sizeof(void *), "a mutex holds an SRWLOCK");

void
ca_mutex_init(ca_mutex *mutex)
{
    InitializeSRWLock((SRWLOCK *)&mutex->handle);
}

void
ca_mutex_destroy(ca_mutex *mutex)
{
    (void)mutex;
}

void
ca_mutex_lock(ca_mutex *mutex)
{
    AcquireSRWLockExclusive((SRWLOCK *)&mutex->handle);
}

void
ca_mutex_unlock(ca_mutex *mutex)
{
    ReleaseSRWLockExclusive((SRWLOCK *)&mutex->handle);
}

int64_t
ca_process_id(void)
{
    return (int64_t)GetCurrentProcessId();
}

int64_t
ca_first_cache(void)
{
    return 0;
}

int64_t
ca_second_cache(void)
{
    return 0;
}

int
ca_processors(void)
{
    SYSTEM_INFO info;
    GetSystemInfo(&info);
    return (int)info.dwNumberOfProcessors;
}

typedef struct {
    void (*work)(void *context, int number);
    void *context;
    int number;
} thread_work;

static DWORD WINAPI
run_thread(void *argument)
{
    const thread_work *mine = argument;
    mine->work(mine->context, mine->number);
    return 0;
}

void
ca_threads_run(void (*work)(void *context, int number), void *context, int count)
{
    HANDLE threads[CA_MAX_THREADS];
    thread_work works[CA_MAX_THREADS];
    int started = 1;
    for (; started < count; started++) {
        works[started] = (thread_work){work, context, started};
        threads[started] = CreateThread(NULL, 0, run_thread, &works[started], 0, NULL);
        if (threads[started] == NULL) {
            break;
        }
    }
    work(context, 0);
    for (int i = 1; i < started; i++) {
        (void)WaitForSingleObject(threads[i], INFINITE);
        (void)CloseHandle(threads[i]);
    }
}

double
ca_seconds(void)
{
    LARGE_INTEGER ticks;
    LARGE_INTEGER rate;
    QueryPerformanceCounter(&ticks); /* cannot fail since Windows XP */
    QueryPerformanceFrequency(&rate);
    return (double)ticks.QuadPart / (double)rate.QuadPart;
}

void
ca_sleep(int milliseconds)
{
    Sleep((DWORD)milliseconds);
}

void
ca_yield(void)
{
    (void)SwitchToThread();
}

uint64_t
ca_thread_id(void)
{
    return GetCurrentThreadId();
}

/* Windows forks no process. */
void
ca_fork_guard_init(ca_fork_guard *guard)
{
    *guard = (ca_fork_guard){.process_id = ca_process_id()};
}

void
ca_fork_guard_destroy(ca_fork_guard *guard)
{
    *guard = (ca_fork_guard){0};
}

bool
ca_fork_guard_is_child(const ca_fork_guard *guard)
{
    (void)guard;
    return false;
}

void
ca_skip_exit_handlers(void)
{
}

#define RESULT_ALIGNMENT 128 /* of host pointers, for Intel's runtime */

ca_signals *
ca_signals_save(void)
{
    return NULL;
}

void
ca_signals_restore(ca_signals *signals)
{
    (void)signals;
}

void *
ca_memory_allocate(size_t bytes)
{
    return _aligned_malloc(bytes, RESULT_ALIGNMENT);
}

void
ca_memory_free(void *memory)
{
    _aligned_free(memory);
}

void
ca_memory_trim(void)
{
    (void)_heapmin();
}

void *
ca_pages_allocate(size_t bytes)
{
    return VirtualAlloc(NULL, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
}

void
ca_pages_free(void *pages, size_t bytes)
{
    (void)bytes;
    (void)VirtualFree(pages, 0, MEM_RELEASE);
}

void *
ca_addresses_reserve(size_t bytes)
{
    return VirtualAlloc(NULL, bytes, MEM_RESERVE, PAGE_NOACCESS);
}

void
ca_addresses_release(void *addresses, size_t bytes)
{
    (void)bytes;
    (void)VirtualFree(addresses, 0, MEM_RELEASE);
}

/* Returns a path in the system's letters, which the caller frees. Paths are UTF-8, as Python's
   os.fsencode makes them. */
static wchar_t *
wide_path(const char *path)
{
    int length = MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path, -1, NULL, 0);
    wchar_t *wide = length > 0 ? calloc((size_t)length, sizeof *wide) : NULL;
    if (wide != NULL) {
        MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path, -1, wide, length);
    }
    return wide;
}

/* A bare name is looked for in the system's folder alone, which has OpenCL.dll. The libraries that a
   library at a path needs may lie beside it. Windows knows no libraries whose names are local. */
void *
ca_library_open(const char *path, bool global, char *message, size_t size)
{
    DWORD flags = strpbrk(path, "/\\") != NULL
                      ? LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR | LOAD_LIBRARY_SEARCH_DEFAULT_DIRS
                      : LOAD_LIBRARY_SEARCH_SYSTEM32;
    wchar_t *wide = wide_path(path);
    HMODULE library = wide != NULL ? LoadLibraryExW(wide, NULL, flags) : NULL;
    (void)global;
    if (library == NULL && size > 0) {
        snprintf(message, size, "%s: error %lu of Windows", path, GetLastError());
    }
    free(wide);
    return library;
}

void *
ca_library_symbol(void *library, const char *name)
{
    FARPROC function = GetProcAddress(library, name);
    void *symbol;
    memcpy(&symbol, &function, sizeof symbol); /* C11 does not convert the one to the other */
    return symbol;
}

/* No program or verdict is larger. A file may say that it has any size. */
#define LARGEST_FILE ((int64_t)1 << 30)

bool
ca_file_read(const char *path, unsigned char **data, size_t *size)
{
    LARGE_INTEGER length = {0};
    DWORD done = 0;
    wchar_t *wide = wide_path(path);
    HANDLE file = wide != NULL
                      ? CreateFileW(wide, GENERIC_READ, FILE_SHARE_READ | FILE_SHARE_DELETE, NULL,
                                    OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL, NULL)
                      : INVALID_HANDLE_VALUE;
    free(wide);
    *data = NULL;
    *size = 0;
    if (file == INVALID_HANDLE_VALUE) {
        return false;
    }
    if (GetFileType(file) == FILE_TYPE_DISK && GetFileSizeEx(file, &length) &&
        length.QuadPart <= LARGEST_FILE) {
        *size = (size_t)length.QuadPart;
        *data = malloc(*size + 1);
    }
    if (*data != NULL &&
        (!ReadFile(file, *data, (DWORD)*size, &done, NULL) || done != (DWORD)*size)) {
        free(*data);
        *data = NULL;
    }
    CloseHandle(file);
    return *data != NULL;
}

/* Makes the folders above `path`. Changes `path` meanwhile and restores it. */
static void
file_make_parents(wchar_t *path)
{
    for (wchar_t *slash = wcspbrk(path, L"/\\"); slash != NULL;
         slash = wcspbrk(slash + 1, L"/\\")) {
        const wchar_t letter = *slash;
        *slash = L'\0';
        CreateDirectoryW(path, NULL); /* after a failure CreateFileW fails too */
        *slash = letter;
    }
}

bool
ca_file_write(const char *path, const void *data, size_t size)
{
    bool written = false;
    DWORD done = 0;
    LARGE_INTEGER ticks;
    HANDLE file = INVALID_HANDLE_VALUE;
    wchar_t *wide = wide_path(path);
    size_t length = wide != NULL ? wcslen(wide) + 64 : 0; /* two numbers and dots */
    wchar_t *temporary = length > 0 ? calloc(length, sizeof *temporary) : NULL;
    if (temporary == NULL || size > LARGEST_FILE) {
        goto done;
    }
    QueryPerformanceCounter(&ticks);
    _snwprintf(temporary, length, L"%ls.%lx.%llx", wide, GetCurrentThreadId(),
               (unsigned long long)ticks.QuadPart);
    file_make_parents(temporary);
    file = CreateFileW(temporary, GENERIC_WRITE, 0, NULL, CREATE_NEW, FILE_ATTRIBUTE_NORMAL, NULL);
    if (file == INVALID_HANDLE_VALUE) {
        goto done;
    }
    written = WriteFile(file, data, (DWORD)size, &done, NULL) && done == (DWORD)size;
    written = CloseHandle(file) && written;
    written = written && MoveFileExW(temporary, wide, MOVEFILE_REPLACE_EXISTING);
    if (!written) {
        DeleteFileW(temporary);
    }
done:
    free(temporary);
    free(wide);
    return written;
}
