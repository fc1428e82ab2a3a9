/* SPDX-License-Identifier: MIT */
#include <stdlib.h>

#include "attention/problem.h"
#include "doors/directml.h"
#include "doors/directml_mask.h"
#include "python/arguments.h"
#include "python/call.h"
#include "python/error.h"
#include "python/methods.h"
#include "python/scalars.h"

/* The arguments that directml.py explains. The tensors come first, in the order of ca_directml_tensor. */
#define ATTENTION(ROW, STAR)                                                                       \
    ROW(QUERY, "query")                                                                            \
    ROW(KEY, "key")                                                                                \
    ROW(VALUE, "value")                                                                            \
    ROW(STACKED_QUERY_KEY, "stacked_query_key")                                                    \
    ROW(STACKED_KEY_VALUE, "stacked_key_value")                                                    \
    ROW(STACKED_QUERY_KEY_VALUE, "stacked_query_key_value")                                        \
    ROW(BIAS, "bias")                                                                              \
    ROW(MASK, "mask")                                                                              \
    ROW(RELATIVE_POSITION_BIAS, "relative_position_bias")                                          \
    ROW(PAST_KEY, "past_key")                                                                      \
    ROW(PAST_VALUE, "past_value")                                                                  \
    STAR()                                                                                         \
    ROW(MASK_TYPE, "mask_type")                                                                    \
    ROW(SCALE, "scale")                                                                            \
    ROW(MASK_FILTER_VALUE, "mask_filter_value")                                                    \
    ROW(HEAD_COUNT, "head_count")                                                                  \
    ROW(RETURN_PRESENT, "return_present")                                                          \
    ROW(DEVICE, "device")
enum { CA_PY_SLOTS(ATTENTION) ARGUMENTS };
_Static_assert((int)MASK_TYPE == (int)CA_DIRECTML_TENSORS, "a slot for each tensor");
const char *const ca_py_multihead_arguments[] = CA_PY_TEXTS(ATTENTION);

enum { OUTPUT, PRESENT_KEY, PRESENT_VALUE, RESULTS };

/* The host reads the bias, and a mask that holds numbers; a kernel reads a mask of flags. */
static int
parse_tensors(PyObject *const *args, ca_directml_attention *dml, ca_py_call *call)
{
    for (int t = 0; t < CA_DIRECTML_TENSORS; t++) {
        const char *name = ca_directml_name((ca_directml_tensor)t);
        bool is_mask = t == CA_DIRECTML_MASK;
        bool is_read =
            t == CA_DIRECTML_BIAS || (is_mask && ca_directml_mask_is_counted(dml->mask_type));
        ca_py_dtypes dtypes = is_mask ? CA_TAKES_INT32 : CA_TAKES_HALF_AND_SINGLE;
        if ((is_read ? ca_py_call_host_array : ca_py_call_optional)(call, args[t], name, dtypes,
                                                                    &dml->tensors[t]) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Is called before parse_tensors: mask_type decides where the mask is read. */
static int
parse_mask_type(PyObject *const *args, ca_directml_attention *dml)
{
    int type;
    if (ca_py_word(args[MASK_TYPE], "mask_type", ca_directml_mask_words, CA_DIRECTML_MASK_TYPES,
                   &type) < 0) {
        return -1;
    }
    dml->mask_type = (ca_directml_mask_type)type;
    return 0;
}

static int
parse_options(PyObject *const *args, ca_directml_attention *dml, bool *return_present)
{
    if (ca_py_double(args[SCALE], "scale", &dml->scale) < 0 ||
        ca_py_double(args[MASK_FILTER_VALUE], "mask_filter_value", &dml->mask_filter_value) < 0 ||
        ca_py_flag(args[RETURN_PRESENT], "return_present", return_present) < 0) {
        return -1;
    }
    /* HeadCount is an unsigned number of 32 bits. */
    return ca_py_int(args[HEAD_COUNT], "head_count", 1, UINT32_MAX, &dml->head_count);
}

/* Returns (output, present_key, present_value). */
static PyObject *
multihead_attention(PyObject *module, PyObject *const *given, Py_ssize_t count, PyObject *names)
{
    PyObject *args[ARGUMENTS];
    PyObject *answer = NULL;
    ca_py_output results[RESULTS] = {{.result = NULL}};
    void *scratch = NULL;
    ca_tensor tensors[RESULTS];
    ca_py_call call;
    ca_directml_attention dml;
    ca_directml_shapes shapes;
    ca_attention attention;
    ca_tensor views[CA_ATTENTION_OPERANDS];
    CA_NEW_ERROR(error);
    bool present;

    ca_py_call_begin(&call, module, "directml.multihead_attention");
    if (ca_py_arguments(call.state, CA_PY_MULTIHEAD, given, count, names, args) < 0 ||
        parse_mask_type(args, &dml) < 0 || parse_tensors(args, &dml, &call) < 0 ||
        parse_options(args, &dml, &present) < 0 || ca_py_call_ready(&call, args[DEVICE]) < 0 ||
        ca_py_error_check(call.state, ca_directml_attention_check(&dml, &shapes, &error), &error) <
            0) {
        goto done;
    }
    PyObject *query = args[shapes.sources[0]];
    ca_dtype dtype = dml.tensors[shapes.sources[0]].dtype;
    results[OUTPUT] =
        ca_py_output_of(true, query, dtype, shapes.output_ndim, shapes.output, &tensors[OUTPUT]);
    results[PRESENT_KEY] =
        ca_py_output_of(present, query, dtype, 4, shapes.present_key, &tensors[PRESENT_KEY]);
    results[PRESENT_VALUE] =
        ca_py_output_of(present, query, dtype, 4, shapes.present_value, &tensors[PRESENT_VALUE]);
    if (ca_py_call_outputs(&call, results, RESULTS) < 0) {
        goto done;
    }
    ca_status status =
        ca_directml_attention_views(&dml, &shapes, &tensors[OUTPUT], &tensors[PRESENT_KEY],
                                    &tensors[PRESENT_VALUE], &attention, views, &scratch, &error);
    if (ca_py_error_check(call.state, status, &error) < 0) {
        goto done;
    }
    if (ca_py_call_attention(&call, &attention, views) < 0) {
        goto done;
    }
    answer = ca_py_call_give_all(&call, results, RESULTS);
done:
    ca_py_call_end(&call);
    ca_py_call_clear(results, RESULTS);
    free(scratch);
    return answer;
}

PyMethodDef ca_py_directml_methods[] = {
    {"directml_multihead_attention", CA_PY_NAMED(multihead_attention),
     CA_PY_SIGNATURE("directml_multihead_attention", "$module", ATTENTION)},
    {NULL, NULL, 0, NULL},
};
