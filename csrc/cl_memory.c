/* SPDX-License-Identifier: MIT */
#include "cl_memory.h"

#include <string.h>

/* Enough small buffers share a size for the pool to find them again, and no buffer is
   more than a quarter too large. */
static size_t
pool_class(const ca_device *device, size_t bytes)
{
    size_t power = 4096;
    while (power < bytes) {
        if (power > SIZE_MAX / 2) {
            return bytes;
        }
        power *= 2;
    }
    for (size_t quarters = 5; quarters < 8; quarters++) {
        size_t smaller = power / 8 * quarters;
        if (bytes <= smaller) {
            power = smaller;
            break;
        }
    }
    return (int64_t)power > device->info.max_allocation ? bytes : power;
}

/* A buffer of that capacity from the pool, or NULL. */
static cl_mem
pool_take(ca_device *device, size_t capacity)
{
    ca_pool *pool = &device->pool;
    cl_mem buffer = NULL;
    ca_mutex_lock(&device->lock);
    for (int i = 0; i < pool->count; i++) {
        if (pool->slots[i].capacity == capacity) {
            buffer = pool->slots[i].buffer;
            pool->bytes -= capacity;
            pool->slots[i] = pool->slots[--pool->count];
            break;
        }
    }
    ca_mutex_unlock(&device->lock);
    return buffer;
}

/* Into the pool, or back to the system where the pool has no slot left or would hold
   more than a quarter of the device's memory. */
static void
pool_give(ca_device *device, cl_mem buffer, size_t capacity)
{
    ca_pool *pool = &device->pool;
    size_t limit = (size_t)device->info.global_memory / 4;
    ca_mutex_lock(&device->lock);
    if (pool->count < CA_POOL_SLOTS && capacity <= limit &&
        pool->bytes <= limit - capacity) {
        pool->slots[pool->count].buffer = buffer;
        pool->slots[pool->count].capacity = capacity;
        pool->count++;
        pool->bytes += capacity;
        buffer = NULL;
    }
    ca_mutex_unlock(&device->lock);
    if (buffer != NULL) {
        device->cl->clReleaseMemObject(buffer);
    }
}

void
ca_memory_trim(ca_device *device)
{
    ca_pool *pool = &device->pool;
    ca_mutex_lock(&device->lock);
    while (pool->count > 0) {
        device->cl->clReleaseMemObject(pool->slots[--pool->count].buffer);
    }
    pool->bytes = 0;
    ca_mutex_unlock(&device->lock);
}

static cl_int
bind_copy(ca_device *device, ca_binding *binding)
{
    cl_int code = CL_SUCCESS;
    binding->capacity = pool_class(device, binding->span->bytes);
    binding->buffer = pool_take(device, binding->capacity);
    for (int attempt = 0; attempt < 2 && binding->buffer == NULL; attempt++) {
        if (attempt > 0) {
            ca_memory_trim(device);
        }
        binding->buffer = device->cl->clCreateBuffer(device->context, CL_MEM_READ_WRITE,
                                                     binding->capacity, NULL, &code);
    }
    return code;
}

static cl_int
bind_host(ca_device *device, ca_binding *binding)
{
    cl_int code = CL_SUCCESS;
    static const cl_mem_flags flags[] = {
        [CA_ACCESS_READ] = CL_MEM_READ_ONLY,
        [CA_ACCESS_WRITE] = CL_MEM_WRITE_ONLY,
        [CA_ACCESS_UPDATE] = CL_MEM_READ_WRITE,
    };
    binding->buffer = device->cl->clCreateBuffer(
        device->context, flags[binding->span->access] | CL_MEM_USE_HOST_PTR,
        binding->span->bytes, binding->span->data, &code);
    return code;
}

/* OpenCL leaves several buffers over the same host memory undefined, so a span that was
   given before (a query that is also the key) gets the buffer it has. */
static bool
bind_again(ca_binding *bindings, int index)
{
    const ca_span *span = bindings[index].span;
    for (int i = 0; i < index; i++) {
        const ca_span *earlier = bindings[i].span;
        if (earlier->data == span->data && earlier->bytes == span->bytes &&
            earlier->access == span->access) {
            bindings[index].buffer = bindings[i].buffer;
            return true;
        }
    }
    return false;
}

ca_status
ca_memory_bind(ca_device *device, const ca_span *spans, int nspans,
               ca_binding *bindings, ca_error *error)
{
    ca_status status = CA_OK;
    const ca_device_info *info = &device->info;
    for (int i = 0; i < nspans; i++) {
        bindings[i] = (ca_binding){.span = &spans[i]};
    }
    if (info->memory == CA_MEMORY_SVM) {
        goto done;
    }
    for (int i = 0; i < nspans; i++) {
        if (spans[i].bytes == 0 || bind_again(bindings, i)) {
            continue;
        }
        if ((uint64_t)spans[i].bytes > (uint64_t)info->max_allocation) {
            CA_TRY(ca_error_set(error, CA_ERROR_MEMORY,
                                "an array of %zu bytes is more than device '%s' "
                                "allocates at once (%lld bytes)",
                                spans[i].bytes, info->name,
                                (long long)info->max_allocation));
        }
        cl_int code = info->memory == CA_MEMORY_HOST_PTR
                          ? bind_host(device, &bindings[i])
                          : bind_copy(device, &bindings[i]);
        if (code != CL_SUCCESS) {
            bindings[i].buffer = NULL;
            CA_TRY(ca_cl_error_set(error, code, "clCreateBuffer", info->name));
        }
        bindings[i].owned = true;
    }
done:
    return status;
}

ca_status
ca_memory_set(ca_device *device, ca_kernel *kernel, const ca_binding *bindings,
              int nspans, ca_error *error)
{
    const ca_cl *cl = device->cl;
    bool svm = device->info.memory == CA_MEMORY_SVM;
    cl_int code = CL_SUCCESS;
    for (int i = 0; i < nspans && code == CL_SUCCESS; i++) {
        const ca_span *span = bindings[i].span;
        const void *pointer = span->bytes > 0 ? span->data : NULL;
        const uint32_t bit = UINT32_C(1) << i;
        /* A buffer is another one each time, even over the same memory. */
        bool stays = svm || pointer == NULL;
        if (stays && (kernel->given & bit) != 0 && kernel->pointers[i] == pointer) {
            continue;
        }
        code = svm ? cl->clSetKernelArgSVMPointer(kernel->handle, (cl_uint)i, pointer)
                   : cl->clSetKernelArg(kernel->handle, (cl_uint)i, sizeof(cl_mem),
                                        pointer != NULL ? &bindings[i].buffer : NULL);
        kernel->pointers[i] = pointer;
        kernel->given &= ~bit;
        if (stays && code == CL_SUCCESS) {
            kernel->given |= bit;
        }
    }
    if (code != CL_SUCCESS) {
        return ca_cl_error_set(error, code,
                               svm ? "clSetKernelArgSVMPointer" : "clSetKernelArg",
                               device->info.name);
    }
    return CA_OK;
}

ca_status
ca_memory_send(ca_device *device, const ca_binding *bindings, int nspans,
               ca_error *error)
{
    if (device->info.memory != CA_MEMORY_COPY) {
        return CA_OK;
    }
    for (int i = 0; i < nspans; i++) {
        const ca_span *span = bindings[i].span;
        if (!bindings[i].owned || span->access == CA_ACCESS_WRITE) {
            continue;
        }
        cl_int code = device->cl->clEnqueueWriteBuffer(
            device->queue, bindings[i].buffer, CL_FALSE, 0, span->bytes, span->data, 0,
            NULL, NULL);
        if (code != CL_SUCCESS) {
            return ca_cl_error_set(error, code, "clEnqueueWriteBuffer",
                                   device->info.name);
        }
    }
    return CA_OK;
}

static bool
binding_fetches(const ca_binding *binding)
{
    return binding->owned && binding->span->access != CA_ACCESS_READ;
}

bool
ca_memory_fetches(const ca_device *device, const ca_binding *bindings, int nspans)
{
    for (int i = 0; i < nspans && device->info.memory != CA_MEMORY_SVM; i++) {
        if (binding_fetches(&bindings[i])) {
            return true;
        }
    }
    return false;
}

static ca_status
fetch_copy(ca_device *device, const ca_binding *binding, cl_event *event,
           ca_error *error)
{
    cl_int code = device->cl->clEnqueueReadBuffer(device->queue, binding->buffer,
                                                  CL_FALSE, 0, binding->span->bytes,
                                                  binding->span->data, 0, NULL, event);
    if (code != CL_SUCCESS) {
        return ca_cl_error_set(error, code, "clEnqueueReadBuffer", device->info.name);
    }
    return CA_OK;
}

/* Completing a map makes the host memory current; the host reads it only after the
   unmapping, which changes nothing in memory mapped for reading. So neither is waited
   for here, and one event at the end serves them all. */
static ca_status
fetch_host(ca_device *device, const ca_binding *binding, cl_event *event,
           ca_error *error)
{
    const ca_cl *cl = device->cl;
    cl_int code = CL_SUCCESS;
    void *mapped =
        cl->clEnqueueMapBuffer(device->queue, binding->buffer, CL_FALSE, CL_MAP_READ, 0,
                               binding->span->bytes, 0, NULL, NULL, &code);
    if (code != CL_SUCCESS) {
        return ca_cl_error_set(error, code, "clEnqueueMapBuffer", device->info.name);
    }
    code = cl->clEnqueueUnmapMemObject(device->queue, binding->buffer, mapped, 0, NULL,
                                       event);
    if (code != CL_SUCCESS) {
        return ca_cl_error_set(error, code, "clEnqueueUnmapMemObject",
                               device->info.name);
    }
    return CA_OK;
}

ca_status
ca_memory_fetch(ca_device *device, const ca_binding *bindings, int nspans,
                cl_event *event, ca_error *error)
{
    ca_status status = CA_OK;
    int last = nspans - 1;
    while (last >= 0 && !binding_fetches(&bindings[last])) {
        last--;
    }
    for (int i = 0; i <= last; i++) {
        if (!binding_fetches(&bindings[i])) {
            continue;
        }
        cl_event *reported = i == last ? event : NULL;
        CA_TRY(device->info.memory == CA_MEMORY_HOST_PTR
                   ? fetch_host(device, &bindings[i], reported, error)
                   : fetch_copy(device, &bindings[i], reported, error));
    }
done:
    return status;
}

void
ca_memory_release(ca_device *device, ca_binding *bindings, int nspans)
{
    for (int i = 0; i < nspans; i++) {
        if (!bindings[i].owned) {
            continue;
        }
        if (device->info.memory == CA_MEMORY_COPY) {
            pool_give(device, bindings[i].buffer, bindings[i].capacity);
        } else {
            device->cl->clReleaseMemObject(bindings[i].buffer);
        }
        bindings[i] = (ca_binding){0};
    }
}
