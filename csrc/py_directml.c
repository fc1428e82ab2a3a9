/* SPDX-License-Identifier: MIT */
#include <stdlib.h>

#include "op_attention.h"
#include "py_attention.h"
#include "py_convert.h"
#include "py_error.h"
#include "py_ops.h"
#include "py_scalars.h"
#include "spec_directml.h"

/* The positional arguments, in directml.py's order: the tensors, then these. */
enum {
    MASK_TYPE = CA_DIRECTML_TENSORS,
    SCALE,
    MASK_FILTER_VALUE,
    HEAD_COUNT,
    RETURN_PRESENT,
    DEVICE,
    ARGUMENTS,
};

enum { OUTPUT, PRESENT_KEY, PRESENT_VALUE, RESULTS };

/* The tensors; keep[t] owns the memory of tensor t. */
static int
parse_tensors(PyObject *const *args, ca_directml_attention *call, PyObject **keep)
{
    for (int t = 0; t < CA_DIRECTML_TENSORS; t++) {
        ca_py_dtypes dtypes =
            t == CA_DIRECTML_MASK ? CA_TAKES_INT32 : CA_TAKES_HALF_AND_SINGLE;
        if (ca_py_tensor_from_optional(args[t], ca_directml_name((ca_directml_tensor)t),
                                       dtypes, &call->tensors[t], &keep[t]) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
parse_options(PyObject *const *args, ca_directml_attention *call, bool *return_present)
{
    int type;
    if (ca_py_double(args[SCALE], "scale", &call->scale) < 0 ||
        ca_py_double(args[MASK_FILTER_VALUE], "mask_filter_value",
                     &call->mask_filter_value) < 0 ||
        ca_py_flag(args[RETURN_PRESENT], "return_present", return_present) < 0 ||
        ca_py_word(args[MASK_TYPE], "mask_type", ca_directml_mask_words,
                   CA_DIRECTML_MASK_TYPES, &type) < 0) {
        return -1;
    }
    call->mask_type = (ca_directml_mask_type)type;
    /* HeadCount is an unsigned number of 32 bits. */
    return ca_py_int(args[HEAD_COUNT], "head_count", 1, UINT32_MAX, &call->head_count);
}

/* results[OUTPUT … PRESENT_VALUE] of the dtype of `query`, None for those not
   wanted. */
static int
allocate_results(const ca_directml_shapes *shapes, PyObject *query, ca_dtype dtype,
                 bool return_present, PyObject **results, ca_tensor *tensors)
{
    ca_tensor_set_absent(&tensors[PRESENT_KEY]);
    ca_tensor_set_absent(&tensors[PRESENT_VALUE]);
    results[OUTPUT] = ca_py_array_new(query, dtype, shapes->output_ndim, shapes->output,
                                      &tensors[OUTPUT]);
    if (results[OUTPUT] == NULL) {
        return -1;
    }
    if (!return_present) {
        results[PRESENT_KEY] = Py_NewRef(Py_None);
        results[PRESENT_VALUE] = Py_NewRef(Py_None);
        return 0;
    }
    results[PRESENT_KEY] =
        ca_py_array_new(query, dtype, 4, shapes->present_key, &tensors[PRESENT_KEY]);
    if (results[PRESENT_KEY] == NULL) {
        return -1;
    }
    results[PRESENT_VALUE] = ca_py_array_new(query, dtype, 4, shapes->present_value,
                                             &tensors[PRESENT_VALUE]);
    return results[PRESENT_VALUE] == NULL ? -1 : 0;
}

/* directml_multihead_attention(query, key, …, device, /) ->
   (output, present_key, present_value): see directml.py */
static PyObject *
multihead_attention(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (ca_py_check_count(nargs, ARGUMENTS) < 0) {
        return NULL;
    }
    ca_state *state = ca_state_get(module);
    PyObject *answer = NULL;
    PyObject *keep[CA_DIRECTML_TENSORS] = {NULL};
    PyObject *results[RESULTS] = {NULL};
    void *scratch = NULL;
    ca_tensor tensors[RESULTS];
    ca_directml_attention call;
    ca_directml_shapes shapes;
    ca_attention attention;
    ca_variant variant;
    ca_error error = {0};
    bool return_present;

    if (parse_tensors(args, &call, keep) < 0 ||
        parse_options(args, &call, &return_present) < 0 ||
        ca_py_check_device_and_kernel(state, args[DEVICE], &variant) < 0) {
        goto done;
    }
    ca_status status = ca_directml_attention_check(&call, &shapes, &error);
    if (ca_py_error_check(state, status, &error) < 0) {
        goto done;
    }
    ca_directml_tensor query = shapes.sources[0];
    if (allocate_results(&shapes, args[query], call.tensors[query].dtype,
                         return_present, results, tensors) < 0) {
        goto done;
    }
    status = ca_directml_attention_problem(
        &call, &shapes, &tensors[OUTPUT], &tensors[PRESENT_KEY],
        &tensors[PRESENT_VALUE], &attention, &scratch, &error);
    if (ca_py_error_check(state, status, &error) < 0 ||
        ca_py_run_attention(state, args[DEVICE], variant, &attention) < 0) {
        goto done;
    }
    answer = PyTuple_Pack(RESULTS, results[OUTPUT], results[PRESENT_KEY],
                          results[PRESENT_VALUE]);
done:
    for (int t = 0; t < CA_DIRECTML_TENSORS; t++) {
        Py_XDECREF(keep[t]);
    }
    for (int r = 0; r < RESULTS; r++) {
        Py_XDECREF(results[r]);
    }
    free(scratch);
    return answer;
}

PyMethodDef ca_py_directml_methods[] = {
    {"directml_multihead_attention", (PyCFunction)(void (*)(void))multihead_attention,
     METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
