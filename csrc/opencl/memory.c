/* SPDX-License-Identifier: MIT */
#include "opencl/memory.h"

#include "opencl/staging.h"

/* Make a buffer over the span, which is host memory. */
static ca_status
bind_host(ca_device *device, ca_binding *binding, ca_error *error)
{
    static const cl_mem_flags flags[] = {
        [CA_ACCESS_READ] = CL_MEM_READ_ONLY,
        [CA_ACCESS_WRITE] = CL_MEM_WRITE_ONLY,
        [CA_ACCESS_PASS] = CL_MEM_READ_WRITE,
        [CA_ACCESS_UPDATE] = CL_MEM_READ_WRITE,
    };
    const ca_span *span = &binding->span;
    cl_int code = CL_SUCCESS;
    binding->buffer = device->cl->clCreateBuffer(
        device->context, flags[span->access] | CL_MEM_USE_HOST_PTR, span->bytes, span->data, &code);
    binding->owned = code == CL_SUCCESS;
    return ca_cl_check(code, "clCreateBuffer", device->info.name, error);
}

/* If an earlier span is the same (a query that is also the key), use its binding: OpenCL
   leaves several buffers over the same host memory undefined. */
static bool
bind_again(ca_binding *bindings, int index)
{
    const ca_span *span = &bindings[index].span;
    for (int i = 0; i < index; i++) {
        const ca_span *earlier = &bindings[i].span;
        if (earlier->data == span->data && earlier->bytes == span->bytes &&
            earlier->access == span->access) {
            bindings[index] = bindings[i];
            bindings[index].owned = false;
            return true;
        }
    }
    return false;
}

static void
set_storage(ca_binding *binding, ca_storage *storage)
{
    binding->storage = storage;
    binding->buffer = ca_storage_buffer(storage);
    binding->data = ca_storage_block(storage)->address;
}

/* Bind a span of the host to a new storage; with `copy` copy its bytes now. */
static ca_status
bind_new_storage(ca_device *device, ca_binding *binding, bool copy, ca_error *error)
{
    const ca_span *span = &binding->span;
    ca_storage *storage = NULL;
    ca_status status = ca_storage_new(device, span->bytes, "an array", &storage, error);
    if (status != CA_OK) {
        return status;
    }
    set_storage(binding, storage);
    binding->owned = true;
    binding->copied = copy;
    return copy ? ca_storage_write(storage, 0, span->data, span->bytes, error) : CA_OK;
}

/* Bind one span that is not empty. */
static ca_status
bind_span(ca_device *device, ca_binding *binding, bool copy, ca_error *error)
{
    const ca_device_info *info = &device->info;
    const ca_span *span = &binding->span;
    if (span->block != NULL) {
        set_storage(binding, ca_storage_of(span->block));
        return CA_OK;
    }
    if (copy || info->memory == CA_MEMORY_COPY) {
        return bind_new_storage(device, binding, copy, error);
    }
    if (info->memory == CA_MEMORY_SVM) {
        binding->data = span->data;
        return CA_OK;
    }
    if ((uint64_t)span->bytes > (uint64_t)info->max_allocation) {
        return ca_error_set(
            error, CA_ERROR_MEMORY,
            "an array of %zu bytes is more than device '%s' allocates at once (%lld bytes)",
            span->bytes, info->name, (long long)info->max_allocation);
    }
    return bind_host(device, binding, error);
}

ca_status
ca_memory_bind(ca_device *device, const ca_span *spans, int nspans, bool copy, ca_binding *bindings,
               ca_error *error)
{
    ca_status status = CA_OK;
    bool in_place = device->info.memory == CA_MEMORY_SVM && !copy;
    for (int i = 0; i < nspans; i++) {
        bindings[i] = (ca_binding){.span = spans[i]};
    }
    for (int i = 0; i < nspans; i++) {
        bool stored = in_place || spans[i].block != NULL;
        if (spans[i].bytes != 0 && (stored || !bind_again(bindings, i))) {
            CA_TRY(bind_span(device, &bindings[i], copy, error));
        }
    }
done:
    return status;
}

ca_status
ca_memory_set(ca_device *device, ca_kernel *kernel, const ca_binding *bindings,
              const uint8_t *arguments, int count, ca_error *error)
{
    const ca_cl *cl = device->cl;
    bool svm = device->info.memory == CA_MEMORY_SVM;
    cl_int code = CL_SUCCESS;
    for (int i = 0; i < count && code == CL_SUCCESS; i++) {
        const ca_binding *binding = &bindings[arguments != NULL ? arguments[i] : i];
        bool empty = binding->span.bytes == 0;
        const void *pointer = empty ? NULL : binding->data;
        const uint32_t bit = UINT32_C(1) << i;
        bool stays = svm || empty; /* a buffer is a new one each time */
        if (stays && (kernel->given & bit) != 0 && kernel->pointers[i] == pointer) {
            continue;
        }
        code = svm ? cl->clSetKernelArgSVMPointer(kernel->handle, (cl_uint)i, pointer)
                   : cl->clSetKernelArg(kernel->handle, (cl_uint)i, sizeof(cl_mem),
                                        empty ? NULL : &binding->buffer);
        kernel->pointers[i] = pointer;
        kernel->given &= ~bit;
        if (stays && code == CL_SUCCESS) {
            kernel->given |= bit;
        }
    }
    return ca_cl_check(code, svm ? "clSetKernelArgSVMPointer" : "clSetKernelArg", device->info.name,
                       error);
}

ca_status
ca_memory_send(ca_device *device, const ca_binding *bindings, int nspans, ca_error *error)
{
    ca_status status = CA_OK;
    bool copies = device->info.memory == CA_MEMORY_COPY;
    for (int i = 0; i < nspans && copies && status == CA_OK; i++) {
        const ca_span *span = &bindings[i].span;
        bool whole = span->access == CA_ACCESS_WRITE || span->access == CA_ACCESS_PASS;
        if (!bindings[i].owned || bindings[i].copied || whole) {
            continue;
        }
        if (ca_staging_is_faster(device, span->bytes)) {
            status =
                ca_staging_write(device, bindings[i].buffer, 0, span->data, span->bytes, error);
            continue;
        }
        cl_int code = device->cl->clEnqueueWriteBuffer(device->queue, bindings[i].buffer, CL_FALSE,
                                                       0, span->bytes, span->data, 0, NULL, NULL);
        status = ca_cl_check(code, "clEnqueueWriteBuffer", device->info.name, error);
    }
    return status;
}

/* Returns whether a result for the host lies in other memory when the kernel is done, and threads
   (`by_threads`) or a command (else) have to fetch the result. */
static bool
is_fetched(const ca_device *device, const ca_binding *binding, bool by_threads)
{
    return binding->owned && binding->span.access != CA_ACCESS_READ &&
           device->info.memory != CA_MEMORY_SVM &&
           ca_staging_is_faster(device, binding->span.bytes) == by_threads;
}

/* Returns the index of the last span that a command fetches, -1 if there is none. */
static int
last_fetched(const ca_device *device, const ca_binding *bindings, int nspans)
{
    int last = nspans - 1;
    while (last >= 0 && !is_fetched(device, &bindings[last], false)) {
        last--;
    }
    return last;
}

bool
ca_memory_fetches(const ca_device *device, const ca_binding *bindings, int nspans)
{
    return last_fetched(device, bindings, nspans) >= 0;
}

static ca_status
fetch_copy(ca_device *device, const ca_binding *binding, cl_event *event, ca_error *error)
{
    cl_int code =
        device->cl->clEnqueueReadBuffer(device->queue, binding->buffer, CL_FALSE, 0,
                                        binding->span.bytes, binding->span.data, 0, NULL, event);
    return ca_cl_check(code, "clEnqueueReadBuffer", device->info.name, error);
}

/* Mapping makes the host memory current; unmapping memory that was mapped for reading
   changes nothing. The host reads after both, so neither is waited for here, and one event
   at the end is enough for all results. */
static ca_status
fetch_host(ca_device *device, const ca_binding *binding, cl_event *event, ca_error *error)
{
    const ca_cl *cl = device->cl;
    cl_int code = CL_SUCCESS;
    void *mapped = cl->clEnqueueMapBuffer(device->queue, binding->buffer, CL_FALSE, CL_MAP_READ, 0,
                                          binding->span.bytes, 0, NULL, NULL, &code);
    if (code != CL_SUCCESS) {
        return ca_cl_check(code, "clEnqueueMapBuffer", device->info.name, error);
    }
    code = cl->clEnqueueUnmapMemObject(device->queue, binding->buffer, mapped, 0, NULL, event);
    return ca_cl_check(code, "clEnqueueUnmapMemObject", device->info.name, error);
}

ca_status
ca_memory_fetch(ca_device *device, const ca_binding *bindings, int nspans, cl_event *event,
                ca_error *error)
{
    ca_status status = CA_OK;
    bool maps = device->info.memory == CA_MEMORY_HOST_PTR;
    int last = last_fetched(device, bindings, nspans);
    for (int i = 0; i <= last && status == CA_OK; i++) {
        cl_event *wanted = i == last ? event : NULL;
        if (is_fetched(device, &bindings[i], false)) {
            status = maps ? fetch_host(device, &bindings[i], wanted, error)
                          : fetch_copy(device, &bindings[i], wanted, error);
        }
    }
    return status;
}

ca_status
ca_memory_collect(ca_device *device, const ca_binding *bindings, int nspans, ca_error *error)
{
    ca_status status = CA_OK;
    for (int i = 0; i < nspans && status == CA_OK; i++) {
        const ca_span *span = &bindings[i].span;
        if (is_fetched(device, &bindings[i], true)) {
            status = ca_staging_read(device, bindings[i].buffer, 0, span->data, span->bytes, error);
        }
    }
    return status;
}

ca_status
ca_memory_check(const ca_binding *bindings, int nspans, const char *call, ca_error *error)
{
    ca_status status = CA_OK;
    for (int i = 0; i < nspans && status == CA_OK; i++) {
        const char *name = bindings[i].span.name != NULL ? bindings[i].span.name : "an array";
        if (bindings[i].storage != NULL) {
            status = ca_storage_check(bindings[i].storage, call, name, error);
        }
    }
    return status;
}

void
ca_memory_set_ticket(const ca_binding *bindings, int nspans, uint64_t ticket)
{
    for (int i = 0; i < nspans; i++) {
        if (bindings[i].storage != NULL) {
            ca_storage_set_ticket(bindings[i].storage, ticket);
        }
    }
}

void
ca_memory_release(ca_device *device, ca_binding *bindings, int nspans)
{
    for (int i = 0; i < nspans; i++) {
        if (bindings[i].owned && bindings[i].storage != NULL) {
            ca_storage_release(bindings[i].storage);
        } else if (bindings[i].owned) {
            device->cl->clReleaseMemObject(bindings[i].buffer);
        }
        bindings[i] = (ca_binding){0};
    }
}
