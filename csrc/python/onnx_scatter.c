/* SPDX-License-Identifier: MIT
 *
 * ONNX TensorScatter: its arguments and its call.
 */
#include "doors/onnx_scatter.h"

#include "base/platform.h" /* ca_seconds */
#include "diagonal/copy.h"
#include "python/call.h"
#include "python/error.h"
#include "python/methods.h"
#include "python/scalars.h"

/* Makes the places of the rows. Returns -1 with an exception. */
static int
place_rows(const ca_py_call *call, ca_onnx_scatter *scatter)
{
    CA_NEW_ERROR(error);
    if (scatter->indices.data != NULL) {
        scatter->places = PyMem_RawCalloc((size_t)scatter->past.shape[0], sizeof(int64_t));
        if (scatter->places == NULL) {
            PyErr_NoMemory();
            return -1;
        }
    }
    return ca_py_error_check(call->state, ca_onnx_scatter_place(scatter, &error), &error);
}

static ca_status
copy_rows(ca_device *device, const ca_onnx_scatter *scatter, const ca_tensor *output,
          const char *name, ca_error *error)
{
    ca_status status = CA_OK;
    ca_onnx_copies copies = {.begun = false};
    ca_tensor from;
    ca_tensor to;
    double asked = ca_seconds();
    while (ca_onnx_scatter_next(scatter, output, &copies, &from, &to)) {
        CA_TRY(ca_copy_run(device, &from, &to, name, error));
        CA_TRY(ca_error_ask_now_and_then(error, &asked));
    }
done:
    return status;
}

/* Fills the result. An empty one needs no device. */
static int
fill(const ca_py_call *call, const ca_onnx_scatter *scatter, const ca_tensor *output)
{
    ca_device *device;
    ca_py_work work;
    CA_NEW_ERROR(error);
    if (ca_tensor_count(output) == 0) {
        return 0;
    }
    if (ca_py_call_device(call, &device) < 0) {
        return -1;
    }
    ca_py_work_begin(&work, call->state, &error);
    ca_status status = copy_rows(device, scatter, output, call->name, &error);
    ca_py_work_end(&work);
    return ca_py_error_check(call->state, status, &error);
}

/* onnx_tensor_scatter(past_cache, update, write_indices, axis, mode, device, /): see onnx.py */
static PyObject *
onnx_tensor_scatter(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    enum { PAST_CACHE, UPDATE, WRITE_INDICES, AXIS, MODE, DEVICE, ARGUMENTS };
    static const char *const modes[] = {"linear", "circular"};
    const ca_py_dtypes numbers = CA_TAKES_NUMBERS;
    PyObject *result = NULL;
    PyObject *answer = NULL;
    ca_py_call call;
    ca_onnx_scatter scatter = {.places = NULL};
    const ca_tensor *past = &scatter.past;
    ca_tensor output;
    int mode = 0;
    CA_NEW_ERROR(error);

    ca_py_call_begin(&call, module, "onnx.tensor_scatter");
    if (ca_py_check_count(nargs, ARGUMENTS) < 0 ||
        ca_py_call_array(&call, args[PAST_CACHE], "past_cache", numbers, &scatter.past) < 0 ||
        ca_py_call_array(&call, args[UPDATE], "update", numbers, &scatter.update) < 0 ||
        ca_py_call_host_array(&call, args[WRITE_INDICES], "write_indices", numbers,
                              &scatter.indices) < 0 ||
        ca_py_int(args[AXIS], "axis", INT64_MIN, INT64_MAX, &scatter.axis) < 0 ||
        ca_py_word(args[MODE], "mode", modes, 2, &mode) < 0 ||
        ca_py_call_ready(&call, args[DEVICE]) < 0) {
        goto done;
    }
    scatter.circular = mode == 1;
    if (ca_py_error_check(call.state, ca_onnx_scatter_check(&scatter, &error), &error) < 0 ||
        place_rows(&call, &scatter) < 0) {
        goto done;
    }
    result =
        ca_py_call_result(&call, args[PAST_CACHE], past->dtype, past->ndim, past->shape, &output);
    if (result != NULL && fill(&call, &scatter, &output) == 0) {
        answer = ca_py_call_give(&call, args[PAST_CACHE], past->dtype, result);
    }
done:
    ca_py_call_end(&call);
    Py_XDECREF(result);
    PyMem_RawFree(scatter.places);
    return answer;
}

PyMethodDef ca_py_scatter_methods[] = {
    {"onnx_tensor_scatter", CA_PY_FASTCALL(onnx_tensor_scatter), NULL},
    {NULL, NULL, 0, NULL},
};
