/* SPDX-License-Identifier: MIT
 *
 * Tensors from arrays, and the memory of devices.
 */
#include "opencl/storage.h"
#include "python/call.h"
#include "python/error.h"
#include "python/methods.h"
#include "python/runtime.h"
#include "python/scalars.h"
#include "python/tensor.h"

/* tensor(array, device, /) -> Tensor: see tensors.py */
static PyObject *
tensor(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    enum { ARRAY, DEVICE, ARGUMENTS };
    ca_state *state = ca_state_get(module);
    PyObject *keep = NULL;
    PyObject *hold = NULL;
    PyObject *result = NULL;
    ca_tensor array;
    ca_device *device = NULL;
    if (ca_py_check_count(nargs, ARGUMENTS) < 0 ||
        ca_py_array(state, args[ARRAY], "array", CA_TAKES_NUMBERS, &array, &keep) < 0 ||
        ca_py_hold(keep, &hold) < 0) {
        goto done;
    }
    if (args[DEVICE] == Py_None && ca_py_is_tensor(state, keep)) {
        device = ca_py_tensor_device(keep);
    } else if (ca_py_find_device(state, args[DEVICE], &device) < 0) {
        goto done;
    }
    result = ca_py_tensor_copy(state, device, &array, keep, "tensor");
done:
    Py_XDECREF(hold);
    Py_XDECREF(keep);
    return result;
}

/* host_array(array, name, /) -> a NumPy array with the elements of an array of any library. The
   elements are copied only from a device. Error messages call the array `name`. */
static PyObject *
host_array(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    enum { ARRAY, NAME, ARGUMENTS };
    PyObject *result = NULL;
    ca_py_call call;
    ca_tensor tensor;
    ca_py_call_begin(&call, module, "host_array");
    const char *name =
        ca_py_check_count(nargs, ARGUMENTS) == 0 ? PyUnicode_AsUTF8(args[NAME]) : NULL;
    if (name != NULL &&
        (args[ARRAY] != Py_None
             ? ca_py_call_host_array(&call, args[ARRAY], name, CA_TAKES_NUMBERS, &tensor)
             : ca_py_call_array(&call, Py_None, name, CA_TAKES_NUMBERS, &tensor)) == 0) {
        PyObject *descr = ca_py_descr(tensor.dtype);
        result = descr != NULL ? ca_py_array_over(&tensor, descr, false, call.keep[0]) : NULL;
        Py_XDECREF(descr);
    }
    ca_py_call_end(&call);
    return result;
}

/* empty(shape, dtype, device, /) -> Tensor, not initialised */
static PyObject *
empty(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    enum { SHAPE, DTYPE, DEVICE, ARGUMENTS };
    ca_state *state = ca_state_get(module);
    PyObject *native = NULL;
    PyObject *result = NULL;
    ca_device *device;
    ca_dtype dtype;
    int ndim;
    int64_t shape[CA_MAX_DIMS];
    if (ca_py_check_count(nargs, ARGUMENTS) == 0 &&
        ca_py_shape(args[SHAPE], "shape", &ndim, shape) == 0 &&
        ca_py_dtype(args[DTYPE], "dtype", &dtype, &native) == 0 &&
        ca_py_find_device(state, args[DEVICE], &device) == 0) {
        result = ca_py_tensor_empty(state, device, dtype, ndim, shape);
    }
    Py_XDECREF(native);
    return result;
}

/* Calls `action` for a device; for None, for all if OpenCL is open. Raises the first failure. */
static int
for_each_device(PyObject *module, PyObject *argument,
                ca_status (*action)(ca_device *device, ca_error *error))
{
    ca_state *state = ca_state_get(module);
    ca_runtime *runtime = atomic_load(&state->runtime);
    ca_device *only = NULL;
    int result = 0;
    ca_status status = CA_OK;
    if (argument != Py_None && ca_py_find_device(state, argument, &only) < 0) {
        return -1;
    }
    ca_device *device = only != NULL      ? only
                        : runtime != NULL ? ca_runtime_device(runtime, 0)
                                          : NULL;
    for (int next = 1; device != NULL && status != CA_ERROR_STOPPED; next++) {
        CA_NEW_ERROR(error);
        ca_py_work work;
        ca_py_work_begin(&work, state, &error);
        error.stops = result == 0 ? error.stops : NULL; /* an exception is raised already */
        status = action(device, &error);
        ca_py_work_end(&work);
        if (result == 0) {
            result = ca_py_error_check(state, status, &error);
        }
        ca_error_clear(&error);
        device = only != NULL ? NULL : ca_runtime_device(runtime, next);
    }
    return result;
}

/* empty_cache(device, /) */
static PyObject *
empty_cache(PyObject *module, PyObject *argument)
{
    return for_each_device(module, argument, ca_device_empty_cache) < 0 ? NULL : Py_NewRef(Py_None);
}

/* synchronize(device, /) */
static PyObject *
synchronize(PyObject *module, PyObject *argument)
{
    return for_each_device(module, argument, ca_device_synchronize) < 0 ? NULL : Py_NewRef(Py_None);
}

/* memory_stats(device, /) -> dict[str, int] */
static PyObject *
memory_stats(PyObject *module, PyObject *argument)
{
    ca_state *state = ca_state_get(module);
    ca_device *device;
    if (ca_py_find_device(state, argument, &device) < 0) {
        return NULL;
    }
    ca_memory_stats stats = {0};
    CA_NEW_ERROR(error);
    ca_py_work work;
    ca_py_work_begin(&work, state, &error);
    ca_status status = ca_device_memory_stats(device, &stats, &error);
    ca_py_work_end(&work);
    if (ca_py_error_check(state, status, &error) < 0) {
        return NULL;
    }
    return Py_BuildValue("{snsnsnsnsn}", "allocated_bytes", (Py_ssize_t)stats.allocated_bytes,
                         "allocated_blocks", (Py_ssize_t)stats.allocated_blocks, "pooled_bytes",
                         (Py_ssize_t)stats.pooled_bytes, "pooled_blocks",
                         (Py_ssize_t)stats.pooled_blocks, "peak_bytes",
                         (Py_ssize_t)stats.peak_bytes);
}

PyMethodDef ca_py_memory_methods[] = {
    {"host_array", CA_PY_FASTCALL(host_array), NULL},
    {"tensor", CA_PY_FASTCALL(tensor), NULL},
    {"empty", CA_PY_FASTCALL(empty), NULL},
    {"empty_cache", empty_cache, METH_O, NULL},
    {"synchronize", synchronize, METH_O, NULL},
    {"memory_stats", memory_stats, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
