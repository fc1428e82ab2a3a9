/* SPDX-License-Identifier: MIT */
#include "opencl/peak.h"
#include "opencl/storage.h"
#include "python/array.h"
#include "python/call.h" /* ca_py_check_count */
#include "python/error.h"
#include "python/methods.h"
#include "python/runtime.h"
#include "python/scalars.h"

#define MOST_STEPS  INT32_MAX
#define MOST_PASSES 1024

/* peak_fma(float64, steps, device, /) -> (flop, value): see opencl/peak.h */
static PyObject *
peak_fma(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    enum { DOUBLE, STEPS, DEVICE, ARGUMENTS };
    ca_state *state = ca_state_get(module);
    bool is_double;
    int64_t steps;
    ca_device *device;
    if (ca_py_check_count(nargs, ARGUMENTS) < 0 ||
        ca_py_flag(args[DOUBLE], "float64", &is_double) < 0 ||
        ca_py_int(args[STEPS], "steps", 0, MOST_STEPS, &steps) < 0 ||
        ca_py_find_device(state, args[DEVICE], &device) < 0) {
        return NULL;
    }
    ca_dtype dtype = is_double ? CA_FLOAT64 : CA_FLOAT32;
    double flop = 0;
    double value = 0;
    ca_error error = {0};
    ca_status status;
    Py_BEGIN_ALLOW_THREADS
        status = ca_peak_fma(device, dtype, steps, &flop, &value, &error);
    Py_END_ALLOW_THREADS
    return ca_py_error_check(state, status, &error) < 0
               ? NULL
               : Py_BuildValue("(dd)", flop, value);
}

/* peak_read(array, passes, device, /) -> sum: see opencl/peak.h */
static PyObject *
peak_read(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    enum { ARRAY, PASSES, DEVICE, ARGUMENTS };
    ca_state *state = ca_state_get(module);
    PyObject *keep = NULL;
    PyObject *answer = NULL;
    ca_tensor array;
    int64_t passes;
    ca_device *device;
    if (ca_py_check_count(nargs, ARGUMENTS) < 0 ||
        ca_py_array(state, args[ARRAY], "array", CA_TAKES_HALF_AND_SINGLE, &array,
                    &keep) < 0) {
        return NULL;
    }
    bool contiguous = array.ndim == 1 &&
                      (array.shape[0] < 2 || array.strides[0] == 1) &&
                      ca_tensor_memory(&array).offset == 0;
    if (array.dtype != CA_FLOAT32 || !contiguous) {
        PyErr_SetString(PyExc_ValueError, "array must be contiguous float32 of one "
                                          "dimension, and no part of a Tensor");
        goto done;
    }
    if (ca_py_int(args[PASSES], "passes", 0, MOST_PASSES, &passes) < 0 ||
        ca_py_find_device(state, args[DEVICE], &device) < 0) {
        goto done;
    }
    if (array.block != NULL &&
        ca_storage_device(ca_storage_of(array.block)) != device) {
        PyErr_SetString(PyExc_ValueError, "array is a Tensor of another device");
        goto done;
    }
    double sum = 0;
    ca_error error = {0};
    ca_status status;
    Py_BEGIN_ALLOW_THREADS
        status = ca_peak_read(device, &array, passes, &sum, &error);
    Py_END_ALLOW_THREADS
    if (ca_py_error_check(state, status, &error) == 0) {
        answer = PyFloat_FromDouble(sum);
    }
done:
    Py_XDECREF(keep);
    return answer;
}

PyMethodDef ca_py_peak_methods[] = {
    {"peak_fma", (PyCFunction)(void (*)(void))peak_fma, METH_FASTCALL, NULL},
    {"peak_read", (PyCFunction)(void (*)(void))peak_read, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
