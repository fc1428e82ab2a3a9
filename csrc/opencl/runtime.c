/* SPDX-License-Identifier: MIT */
#include "opencl/runtime.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "base/strbuf.h"
#include "opencl/capabilities.h"
#include "opencl/device.h"
#include "opencl/loader.h"
#include "opencl/probe.h"
#include "opencl/query.h"
#include "opencl/storage.h" /* ca_pool_empty */

struct ca_runtime {
    ca_cl cl;
    char *cache_folder; /* NULL: no disk cache */
    ca_fork_guard fork_guard;
    ca_device *devices;
    int device_count;
};

static const char *const type_words[] = {
    [CA_DEVICE_GPU] = "gpu",
    [CA_DEVICE_ACCELERATOR] = "accelerator",
    [CA_DEVICE_CPU] = "cpu",
};

static ca_status
check_memory_override(const char *words, ca_error *error)
{
    if (words == NULL || words[0] == '\0' || strcmp(words, "svm") == 0 ||
        strcmp(words, "host") == 0 || strcmp(words, "copy") == 0) {
        return CA_OK;
    }
    return ca_error_set(error, CA_ERROR_VALUE, "memory mode '%s': expected 'svm', 'host' or 'copy'",
                        words);
}

ca_status
ca_runtime_open(const char *const *preload, const char *const *candidates, const char *cache_folder,
                const char *memory_override, ca_runtime **runtime, ca_error *error)
{
    ca_status status = CA_OK;
    ca_runtime *opened = NULL;
    *runtime = NULL;
    CA_TRY(check_memory_override(memory_override, error));
    opened = calloc(1, sizeof *opened);
    if (opened == NULL) {
        CA_TRY(ca_error_set(error, CA_ERROR_MEMORY, "no memory for the runtime"));
    }
    ca_fork_guard_init(&opened->fork_guard);
    if (cache_folder != NULL) {
        size_t size = strlen(cache_folder) + 1;
        opened->cache_folder = malloc(size);
        if (opened->cache_folder == NULL) {
            CA_TRY(ca_error_set(error, CA_ERROR_MEMORY, "no memory for the runtime"));
        }
        memcpy(opened->cache_folder, cache_folder, size);
    }
    CA_TRY(ca_cl_open(&opened->cl, preload, candidates, error));
    CA_TRY(ca_query_devices(&opened->cl, memory_override, &opened->devices, &opened->device_count,
                            error));
    for (int i = 0; i < opened->device_count; i++) {
        ca_device *device = &opened->devices[i];
        device->fork_guard = &opened->fork_guard;
        device->cache_folder = opened->cache_folder;
        device->info.tuning = &device->tuning;
        ca_mutex_init(&device->build_lock);
        ca_mutex_init(&device->lock);
    }
    *runtime = opened;
    opened = NULL;
done:
    ca_runtime_close(opened);
    return status;
}

/* Release all that the device holds. It may be opened again. */
static void
close_device(ca_device *device)
{
    ca_pool_empty(device);
    ca_storage_drop(device->marks);
    device->marks = NULL;
    ca_device_close(device);
}

/* In a forked child the parent owns OpenCL's objects, and a thread that does not exist in
   the child may hold a lock. Leave both alone and free only the runtime itself. */
void
ca_runtime_close(ca_runtime *runtime)
{
    if (runtime == NULL) {
        return;
    }
    bool stale = ca_fork_guard_is_child(&runtime->fork_guard);
    for (int i = 0; i < runtime->device_count && !stale; i++) {
        ca_device *device = &runtime->devices[i];
        close_device(device);
        ca_error_clear(&device->failure);
        for (int n = 0; n < CA_CAPABILITIES; n++) {
            ca_error_clear(&device->lacks[n]);
        }
        ca_mutex_destroy(&device->lock);
        ca_mutex_destroy(&device->build_lock);
    }
    ca_fork_guard_destroy(&runtime->fork_guard);
    free(runtime->devices);
    free(runtime->cache_folder);
    free(runtime);
}

int
ca_runtime_device_count(const ca_runtime *runtime)
{
    return runtime->device_count;
}

ca_device *
ca_runtime_device(const ca_runtime *runtime, int index)
{
    return &runtime->devices[index];
}

bool
ca_exceeds_device(const ca_device_info *info, const ca_extent *extents, int count)
{
    for (int t = 0; t < count; t++) {
        if (info->memory != CA_MEMORY_SVM && extents[t].bytes > (uint64_t)info->max_allocation) {
            return true;
        }
    }
    return false;
}

const ca_device_info *
ca_device_get_info(const ca_device *device)
{
    return &device->info;
}

const ca_error *
ca_device_lacks(const ca_device *device, ca_capability capability)
{
    const ca_error *why = &device->lacks[capability];
    return why->message[0] != '\0' ? why : NULL;
}

bool
ca_device_was_tried(const ca_device *device, int bit)
{
    return (atomic_load_explicit(&device->tried, memory_order_relaxed) >> bit & 1) != 0;
}

void
ca_device_set_tried(ca_device *device, int bit, bool is_right)
{
    atomic_fetch_or(&device->wrong, (uint64_t)!is_right << bit);
    atomic_fetch_or(&device->tried, UINT64_C(1) << bit);
}

uint64_t
ca_device_wrong(const ca_device *device)
{
    return atomic_load_explicit(&device->wrong, memory_order_relaxed);
}

bool
ca_device_leaves_out(ca_device *device, const ca_kernel_spec *spec)
{
    if (!atomic_load_explicit(&device->leaves_out, memory_order_relaxed)) {
        return false;
    }
    ca_mutex_lock(&device->lock);
    bool found = ca_kernel_table_find(&device->left_out, spec, ca_kernel_spec_hash(spec)) != NULL;
    ca_mutex_unlock(&device->lock);
    return found;
}

void
ca_device_leave_out(ca_device *device, const ca_kernel_spec *spec, const char *reason)
{
    ca_strbuf notice = {0};
    ca_strbuf_append(&notice,
                     "device '%s' cannot use the kernel '%s' for calls like this one, and others "
                     "take its place there from now on: %s",
                     device->info.name, spec->name, reason);
    ca_kernel *kernel = calloc(1, sizeof *kernel);
    if (!notice.failed && kernel != NULL && !ca_device_leaves_out(device, spec)) {
        kernel->spec = *spec;
        kernel->spec.mods = NULL; /* the caller's */
        kernel->hash = ca_kernel_spec_hash(spec);
        kernel->notice = notice.data;
        notice.data = NULL;
        ca_mutex_lock(&device->lock);
        ca_kernel_table_insert(&device->left_out, kernel);
        kernel = NULL;
        atomic_store(&device->leaves_out, true);
        atomic_fetch_add(&device->untold, 1);
        ca_mutex_unlock(&device->lock);
    }
    free(kernel);
    ca_strbuf_free(&notice);
}

char *
ca_device_take_notice(ca_device *device)
{
    char *notice = NULL;
    if (atomic_load(&device->untold) > 0) {
        ca_mutex_lock(&device->lock);
        ca_kernel *kernel = device->left_out.first;
        for (; kernel != NULL && notice == NULL; kernel = kernel->next) {
            notice = kernel->notice;
            kernel->notice = NULL;
        }
        atomic_fetch_sub(&device->untold, notice != NULL);
        ca_mutex_unlock(&device->lock);
    }
    return notice;
}

ca_status
ca_runtime_check_fork(const ca_runtime *runtime, ca_error *error)
{
    return ca_check_fork(&runtime->fork_guard, error);
}

/* Open and probe the device, under the build_lock. The probe's verdict is final; a context
   or memory that was not there may be there at the next call. */
static ca_status
try_open(ca_device *device, ca_error *error)
{
    ca_status status = ca_device_open(device, error);
    bool opened = status == CA_OK;
    if (opened) {
        status = ca_probe_device(device, &device->failure);
    }
    if (status == CA_OK) {
        ca_probe_capabilities(device);
        atomic_store(&device->state, CA_DEVICE_READY);
        return CA_OK;
    }
    close_device(device);
    if (opened && (status == CA_ERROR_KERNEL || status == CA_ERROR_DEVICE)) {
        atomic_store(&device->state, CA_DEVICE_UNUSABLE);
    } else if (opened) {
        ca_error_set(error, status, "%s", device->failure.message);
        ca_error_clear(&device->failure);
    }
    return status;
}

ca_status
ca_device_prepare(ca_device *device, ca_error *error)
{
    ca_status status = ca_device_check_fork(device, error);
    if (status != CA_OK) {
        return status;
    }
    if (atomic_load_explicit(&device->state, memory_order_acquire) == CA_DEVICE_READY) {
        return CA_OK;
    }
    ca_mutex_lock(&device->build_lock);
    if (atomic_load(&device->state) == CA_DEVICE_UNTRIED) {
        status = try_open(device, error);
    }
    if (atomic_load(&device->state) == CA_DEVICE_UNUSABLE) {
        status = ca_error_set(error, CA_ERROR_DEVICE, "%s", device->failure.message);
        if (device->failure.log != NULL) {
            ca_error_set_log(error, device->failure.log);
        }
    }
    ca_mutex_unlock(&device->build_lock);
    return status;
}

ca_status
ca_device_find_pairs(ca_device *device, ca_error *error)
{
    ca_status status = ca_device_prepare(device, error);
    if (status != CA_OK || atomic_load_explicit(&device->pairs_known, memory_order_acquire)) {
        return status;
    }
    ca_mutex_lock(&device->build_lock);
    if (!atomic_load(&device->pairs_known)) {
        device->info.bfloat16_pairs = ca_probe_pairs(device);
        atomic_store(&device->pairs_known, true);
    }
    ca_mutex_unlock(&device->build_lock);
    return CA_OK;
}

/* ---- finding a device ---- */

/* True if the device can be used; else its reason is appended to `reasons`. */
static bool
is_usable(ca_device *device, ca_strbuf *reasons)
{
    ca_error error = {0};
    bool usable = ca_device_prepare(device, &error) == CA_OK;
    if (!usable) {
        ca_strbuf_append(reasons, "%s%s", reasons->length > 0 ? "; " : "", error.message);
    }
    ca_error_clear(&error);
    return usable;
}

ca_status
ca_runtime_default_device(ca_runtime *runtime, ca_device **device, ca_error *error)
{
    ca_status status = CA_OK;
    ca_strbuf reasons = {0};
    *device = NULL;
    CA_TRY(ca_runtime_check_fork(runtime, error));
    for (int i = 0; i < runtime->device_count; i++) {
        if (is_usable(&runtime->devices[i], &reasons)) {
            *device = &runtime->devices[i];
            goto done;
        }
    }
    status = ca_error_set(error, CA_ERROR_DEVICE, "no OpenCL device is usable: %s",
                          ca_strbuf_text(&reasons));
done:
    ca_strbuf_free(&reasons);
    return status;
}

static bool
same_letter(char a, char b)
{
    return tolower((unsigned char)a) == tolower((unsigned char)b);
}

/* True if `part` occurs in `whole`, in any case. */
static bool
text_contains(const char *whole, const char *part)
{
    for (; *whole != '\0'; whole++) {
        size_t i = 0;
        while (part[i] != '\0' && same_letter(whole[i], part[i])) {
            i++;
        }
        if (part[i] == '\0') {
            return true;
        }
    }
    return false;
}

/* A type, perhaps with a number, or a part of a name. */
typedef struct {
    const char *name; /* a part of a name; NULL: by type */
    ca_device_type type;
    long number; /* -1: the first usable one */
} device_request;

/* Read the words of a request. Words that name no type are a part of a name. */
static device_request
request_parse(const char *words)
{
    for (int type = 0; type <= CA_DEVICE_CPU; type++) {
        const char *rest = words;
        const char *word = type_words[type];
        while (*word != '\0' && same_letter(*rest, *word)) {
            rest++;
            word++;
        }
        if (*word != '\0') {
            continue;
        }
        device_request request = {.type = (ca_device_type)type, .number = -1};
        if (*rest == '\0') {
            return request;
        }
        if (*rest == ':' && rest[1] != '\0' && strlen(rest) <= 5 &&
            strspn(rest + 1, "0123456789") == strlen(rest + 1)) {
            request.number = strtol(rest + 1, NULL, 10);
            return request;
        }
    }
    return (device_request){.name = words, .number = -1};
}

static bool
request_matches(const device_request *request, const ca_device_info *info)
{
    if (request->name == NULL) {
        return info->type == request->type;
    }
    return request->name[0] != '\0' && (text_contains(info->platform, request->name) ||
                                        text_contains(info->name, request->name));
}

/* Set the error for words that name no device, with a list of all devices. */
static ca_status
error_no_match(const ca_runtime *runtime, const char *words, const char *what, ca_error *error)
{
    ca_strbuf list = {0};
    for (int i = 0; i < runtime->device_count; i++) {
        const ca_device_info *info = &runtime->devices[i].info;
        ca_strbuf_append(&list, "%s%s '%s' (%s)", i > 0 ? ", " : "", type_words[info->type],
                         info->name, info->platform);
    }
    ca_status status =
        ca_error_set(error, CA_ERROR_VALUE, "%s '%s' names no OpenCL device; there are: %s", what,
                     words, ca_strbuf_text(&list));
    ca_strbuf_free(&list);
    return status;
}

ca_status
ca_runtime_find_device(ca_runtime *runtime, const char *words, const char *what, ca_device **device,
                       ca_error *error)
{
    ca_status status = CA_OK;
    ca_strbuf reasons = {0};
    device_request request = request_parse(words);
    long matches = 0;
    *device = NULL;
    CA_TRY(ca_runtime_check_fork(runtime, error));
    for (int i = 0; i < runtime->device_count; i++) {
        ca_device *candidate = &runtime->devices[i];
        if (!request_matches(&request, &candidate->info)) {
            continue;
        }
        bool wanted = request.number < 0 || request.number == matches;
        matches++;
        if (wanted && is_usable(candidate, &reasons)) {
            *device = candidate;
            goto done;
        }
    }
    if (reasons.length == 0 && !reasons.failed) {
        status = error_no_match(runtime, words, what, error);
    } else {
        status = ca_error_set(error, CA_ERROR_DEVICE, "%s '%s' cannot be used: %s", what, words,
                              ca_strbuf_text(&reasons));
    }
done:
    ca_strbuf_free(&reasons);
    return status;
}
