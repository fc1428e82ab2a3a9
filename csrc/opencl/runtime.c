/* SPDX-License-Identifier: MIT */
#include "opencl/runtime.h"

#include <stdlib.h>
#include <string.h>

#include "base/platform.h" /* ca_signals */
#include "base/strbuf.h"
#include "opencl/device.h"
#include "opencl/loader.h"
#include "opencl/modes.h"
#include "opencl/prepare.h"
#include "opencl/query.h"
#include "opencl/words.h"

struct ca_runtime {
    ca_cl cl;
    char *cache_folder; /* NULL: no disk cache */
    ca_fork_guard fork_guard;
    ca_device *devices;
    int device_count;
    ca_mutex adopting;            /* held while a queue is adopted */
    _Atomic(ca_device *) adopted; /* a list */
};

static ca_status
check_memory_override(const char *words, ca_error *error)
{
    ca_memory_mode mode;
    if (words == NULL || words[0] == '\0' || ca_memory_find(words, &mode)) {
        return CA_OK;
    }
    return ca_error_set(error, CA_ERROR_SETTING,
                        "memory mode '%s': expected 'svm', 'host' or 'copy'", words);
}

ca_status
ca_runtime_open(const char *const *preload, const char *const *candidates, const char *cache_folder,
                const char *memory_override, double longest, bool trusts_drivers,
                ca_runtime **runtime, ca_error *error)
{
    ca_status status = CA_OK;
    ca_runtime *opened = NULL;
    ca_signals *signals = ca_signals_save();
    *runtime = NULL;
    CA_TRY(check_memory_override(memory_override, error));
    opened = calloc(1, sizeof *opened);
    if (opened == NULL) {
        CA_TRY(ca_error_set(error, CA_ERROR_MEMORY, "no memory for the runtime"));
    }
    ca_fork_guard_init(&opened->fork_guard);
    ca_mutex_init(&opened->adopting);
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
        device->longest = longest;
        device->info.is_known = device->info.is_known || trusts_drivers;
        device->info.tuning = &device->tuning;
        ca_mutex_init(&device->build_lock);
        ca_mutex_init(&device->lock);
    }
    *runtime = opened;
    opened = NULL;
done:
    ca_signals_restore(signals);
    ca_runtime_close(opened);
    return status;
}

/* Release all that the device holds, for good. */
static void
end_device(ca_device *device)
{
    ca_device_release(device);
    ca_error_clear(&device->failure);
    for (int n = 0; n < CA_CAPABILITIES; n++) {
        ca_error_clear(&device->lacks[n]);
    }
    ca_mutex_destroy(&device->lock);
    ca_mutex_destroy(&device->build_lock);
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
        end_device(&runtime->devices[i]);
    }
    for (ca_device *device = runtime->adopted, *next; device != NULL; device = next) {
        next = device->next;
        if (!stale) {
            end_device(device);
            runtime->cl.clReleaseCommandQueue(device->adopted.queue);
            runtime->cl.clReleaseContext(device->adopted.context);
        }
        free(device);
    }
    if (!stale) {
        ca_mutex_destroy(&runtime->adopting);
    }
    ca_fork_guard_destroy(&runtime->fork_guard);
    free(runtime->devices);
    free(runtime->cache_folder);
    free(runtime);
}

void *
ca_runtime_loader(const ca_runtime *runtime)
{
    return runtime->cl.library;
}

int
ca_runtime_device_count(const ca_runtime *runtime)
{
    return runtime->device_count;
}

ca_device *
ca_runtime_device(const ca_runtime *runtime, int index)
{
    if (index < runtime->device_count) {
        return &runtime->devices[index];
    }
    ca_device *device = runtime->adopted;
    for (int i = runtime->device_count; i < index && device != NULL; i++) {
        device = device->next;
    }
    return device;
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

/* ---- queues of other libraries ---- */

bool
ca_device_is_adopted(const ca_device *device)
{
    return device->adopted.queue != NULL;
}

/* Make a device that is `base`, but for the context, the queue, and how it reaches memory. */
static ca_device *
new_adopted(ca_device *base, const ca_adopted_queue *adopted)
{
    ca_device *device = calloc(1, sizeof *device);
    if (device == NULL) {
        return NULL;
    }
    device->cl = base->cl;
    device->fork_guard = base->fork_guard;
    device->cache_folder = base->cache_folder;
    device->platform = base->platform;
    device->id = base->id;
    device->index = base->index;
    ca_mutex_lock(&base->build_lock);
    device->info = base->info;
    ca_mutex_unlock(&base->build_lock);
    device->info.bfloat16_pairs = false; /* not asked for yet */
    device->info.amx = false;
    device->info.memory = CA_MEMORY_COPY;
    device->info.tuning = &device->tuning;
    atomic_init(&device->tuning.in_use, atomic_load(&base->tuning.in_use));
    for (int n = 0; n < CA_TUNING_WORDS; n++) {
        atomic_init(&device->tuning.words[n], atomic_load(&base->tuning.words[n]));
    }
    device->system_svm = base->system_svm;
    device->longest = base->longest;
    device->is_host = base->is_host;
    device->adopted = *adopted;
    ca_mutex_init(&device->build_lock);
    ca_mutex_init(&device->lock);
    return device;
}

/* Find out the queue's context and device. */
static ca_status
inspect_queue(const ca_cl *cl, ca_adopted_queue *adopted, cl_device_id *id, ca_error *error)
{
    const char *call = "clGetCommandQueueInfo";
    const char *whose = "of queue";
    cl_command_queue queue = adopted->queue;
    cl_command_queue_properties properties = 0;
    ca_status status = CA_OK;
    if (cl->clGetCommandQueueInfo == NULL || cl->clGetMemObjectInfo == NULL ||
        cl->clRetainCommandQueue == NULL || cl->clRetainContext == NULL ||
        cl->clRetainMemObject == NULL) {
        CA_TRY(ca_error_set(error, CA_ERROR_DEVICE,
                            "the OpenCL loader lacks functions that take over a queue"));
    }
    CA_TRY(ca_cl_check(cl->clGetCommandQueueInfo(queue, CL_QUEUE_CONTEXT, sizeof(cl_context),
                                                 &adopted->context, NULL),
                       call, whose, error));
    CA_TRY(ca_cl_check(cl->clGetCommandQueueInfo(queue, CL_QUEUE_DEVICE, sizeof *id, id, NULL),
                       call, whose, error));
    CA_TRY(ca_cl_check(
        cl->clGetCommandQueueInfo(queue, CL_QUEUE_PROPERTIES, sizeof properties, &properties, NULL),
        call, whose, error));
    if ((properties & CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE) != 0) {
        CA_TRY(ca_error_set(error, CA_ERROR_VALUE,
                            "queue runs its commands out of order; expected one in order"));
    }
done:
    return status;
}

/* Retain the queue and its context, and append a device for them. Under `adopting`. */
static ca_status
append_adopted(ca_runtime *runtime, ca_device *base, const ca_adopted_queue *adopted,
               ca_device **device, ca_error *error)
{
    const ca_cl *cl = &runtime->cl;
    const char *name = base->info.name;
    ca_device *made = new_adopted(base, adopted);
    if (made == NULL) {
        return ca_error_set(error, CA_ERROR_MEMORY, "no memory for a device");
    }
    const cl_int kept = cl->clRetainContext(adopted->context);
    ca_status status =
        kept == CL_INVALID_CONTEXT /* some runtimes release a context before its queues */
            ? ca_error_set(error, CA_ERROR_DEVICE,
                           "the context of queue is gone (CL_INVALID_CONTEXT) on device '%s'; keep "
                           "the context in a variable as long as the queue",
                           name)
            : ca_cl_check(kept, "clRetainContext", name, error);
    if (status == CA_OK) {
        status = ca_cl_check(cl->clRetainCommandQueue(adopted->queue), "clRetainCommandQueue", name,
                             error);
        if (status != CA_OK) {
            cl->clReleaseContext(adopted->context);
        }
    }
    if (status != CA_OK) {
        ca_mutex_destroy(&made->lock);
        ca_mutex_destroy(&made->build_lock);
        free(made);
        return status;
    }
    _Atomic(ca_device *) *link = &runtime->adopted;
    while (*link != NULL) {
        link = &(*link)->next;
    }
    *link = made;
    *device = made;
    return CA_OK;
}

ca_status
ca_runtime_adopt(ca_runtime *runtime, void *queue, ca_device **device, ca_error *error)
{
    ca_adopted_queue adopted = {.queue = queue};
    cl_device_id id = NULL;
    ca_device *base = NULL;
    ca_device *found = NULL;
    ca_status status = CA_OK;
    CA_TRY(ca_runtime_check_fork(runtime, error));
    CA_TRY(inspect_queue(&runtime->cl, &adopted, &id, error));
    for (int i = 0; i < runtime->device_count && base == NULL; i++) {
        base = runtime->devices[i].id == id ? &runtime->devices[i] : NULL;
    }
    if (base == NULL) {
        CA_TRY(ca_error_set(error, CA_ERROR_VALUE,
                            "the device of queue is none of those that clattn lists; expected one "
                            "of clattn.devices()"));
    }
    CA_TRY(ca_device_prepare(base, error)); /* its capabilities are final then */
    ca_mutex_lock(&runtime->adopting);
    found = runtime->adopted;
    while (found != NULL && found->adopted.queue != queue) {
        found = found->next;
    }
    if (found == NULL) {
        status = append_adopted(runtime, base, &adopted, &found, error);
    }
    ca_mutex_unlock(&runtime->adopting);
    CA_TRY(status);
    CA_TRY(ca_device_prepare(found, error));
    *device = found;
done:
    return status;
}

/* ---- finding a device ---- */

/* Find out whether the device can be used; if not, its reason is appended to `reasons`.
   CA_ERROR_STOPPED is the only failure. */
static ca_status
check_usable(ca_device *device, ca_strbuf *reasons, bool *usable, const ca_error *error)
{
    CA_NEW_ERROR_FOR(why, error);
    ca_status status = ca_device_prepare(device, &why);
    *usable = status == CA_OK;
    if (!*usable) {
        ca_strbuf_append(reasons, "%s%s", reasons->length > 0 ? "; " : "", why.message);
    }
    ca_error_clear(&why);
    return status == CA_ERROR_STOPPED ? status : CA_OK;
}

ca_status
ca_runtime_default_device(ca_runtime *runtime, ca_device **device, ca_error *error)
{
    ca_status status = CA_OK;
    ca_strbuf reasons = {0};
    *device = NULL;
    CA_TRY(ca_runtime_check_fork(runtime, error));
    for (int i = 0; i < runtime->device_count; i++) {
        bool usable;
        CA_TRY(check_usable(&runtime->devices[i], &reasons, &usable, error));
        if (usable) {
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

ca_status
ca_runtime_find_device(ca_runtime *runtime, const char *words, const char *what, ca_device **device,
                       ca_error *error)
{
    ca_status status = CA_OK;
    ca_strbuf reasons = {0};
    ca_device_words request;
    long matches = 0;
    *device = NULL;
    CA_TRY(ca_runtime_check_fork(runtime, error));
    CA_TRY(ca_words_read(&request, words, what, runtime->devices, runtime->device_count, error));
    for (int i = 0; i < runtime->device_count; i++) {
        ca_device *candidate = &runtime->devices[i];
        if (!ca_words_fit(&request, &candidate->info)) {
            continue;
        }
        bool usable = true;
        if (request.counts_usable) {
            CA_TRY(check_usable(candidate, &reasons, &usable, error));
        }
        const bool wanted = usable && (request.number < 0 || request.number == matches);
        matches += usable;
        if (wanted && !request.counts_usable) {
            CA_TRY(check_usable(candidate, &reasons, &usable, error));
        }
        if (wanted && usable) {
            *device = candidate;
            goto done;
        }
    }
    if (request.counts_usable || (reasons.length == 0 && !reasons.failed)) {
        status = ca_words_error(ca_words_verdict(words), words, what, runtime->devices,
                                runtime->device_count, error);
    } else {
        status = ca_error_set(error, CA_ERROR_DEVICE, "%s '%s' cannot be used: %s", what, words,
                              ca_strbuf_text(&reasons));
    }
done:
    ca_strbuf_free(&reasons);
    return status;
}
