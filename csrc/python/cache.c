/* SPDX-License-Identifier: MIT */
#include "python/cache.h"

#include "opencl/runtime.h"
#include "python/error.h"
#include "python/tensor.h"

int
ca_py_cache_look(ca_py_cache *self, ca_cache *cache, int64_t **lengths)
{
    int64_t B = ca_cache_batch(&self->cache);
    *lengths = PyMem_RawMalloc((size_t)B * sizeof(**lengths));
    if (*lengths == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    ca_mutex_lock(&self->lock.guard);
    *cache = self->cache;
    for (int64_t b = 0; b < B; b++) {
        (*lengths)[b] = ca_cache_length(cache, b);
    }
    ca_mutex_unlock(&self->lock.guard);
    cache->lengths = cache->lengths != NULL ? *lengths : NULL;
    return 0;
}

int
ca_py_cache_begin(ca_py_cache *self, ca_py_call *call, const char *name)
{
    ca_py_call_begin(call, self->module, name);
    return ca_py_call_note(call, self->tensors[CA_PY_KEY], "the cache");
}

/* Copies rows that a launch cannot read where they lie: they are in the cache itself, or reach farther than a
   buffer of the device. */
static int
set_apart(ca_py_call *call, const ca_cache *cache, ca_tensor *rows, PyObject *owner)
{
    const ca_extent extent = ca_tensor_extent(rows);
    ca_tensor tensors[CA_CACHE_TENSORS];
    bool apart = !ca_exceeds_device(ca_device_get_info(call->device), &extent, 1);
    for (int n = ca_cache_tensors(cache, tensors) - 1; n >= 0 && apart; n--) {
        const ca_extent written = ca_tensor_extent(&tensors[n]);
        apart = !ca_extents_overlap(&extent, &written);
    }
    if (apart) {
        return 0;
    }
    PyObject *copy = ca_py_tensor_copy(call->state, call->device, rows, owner, call->name);
    if (copy == NULL) {
        return -1;
    }
    *rows = ((ca_py_tensor *)copy)->view;
    call->keep[call->kept++] = copy;
    return 0;
}

int
ca_py_cache_rows(ca_py_cache *self, ca_py_call *call, PyObject *const args[2], int ndim,
                 ca_tensor *key, ca_tensor *value)
{
    CA_NEW_ERROR(error);
    return ca_py_call_array(call, args[0], "key", CA_TAKES_FLOATS, key) < 0 ||
                   ca_py_call_array(call, args[1], "value", CA_TAKES_FLOATS, value) < 0 ||
                   ca_py_error_check(call->state,
                                     ca_cache_rows_check(&self->cache, key, value, ndim, &error),
                                     &error) < 0 ||
                   set_apart(call, &self->cache, key, args[0]) < 0 ||
                   set_apart(call, &self->cache, value, args[1]) < 0
               ? -1
               : 0;
}

ca_status
ca_py_cache_write(ca_py_cache *self, const ca_py_call *call, const ca_tensor *key,
                  const ca_tensor *value, const int64_t *places, ca_error *error)
{
    const ca_rows keys = {*key, &self->cache.key, places, call->name};
    const ca_rows values = {*value, &self->cache.value, places, call->name};
    ca_py_work work;
    double asked = ca_seconds();
    ca_py_work_begin(&work, call->state, error);
    ca_status status = ca_rows_write(call->device, &keys, error);
    if (status == CA_OK) {
        status = ca_error_ask_now_and_then(error, &asked);
    }
    if (status == CA_OK) {
        status = ca_rows_write(call->device, &values, error);
    }
    ca_py_work_end(&work);
    return status;
}

ca_status
ca_py_cache_move(const ca_cache *from, const ca_cache *to, const ca_py_call *call,
                 const int64_t *moves, int64_t count, ca_error *error)
{
    ca_status status = CA_OK;
    double asked = ca_seconds();
    ca_tensor sources[CA_CACHE_TENSORS];
    ca_tensor targets[CA_CACHE_TENSORS];
    const int tensors = ca_cache_tensors(from, sources);
    (void)ca_cache_tensors(to, targets);
    for (int n = 0; n < tensors && status == CA_OK; n++) {
        status =
            ca_rows_copy(call->device, &sources[n], &targets[n], moves, count, call->name, error);
        if (status == CA_OK) {
            status = ca_error_ask_now_and_then(error, &asked);
        }
    }
    return status;
}
