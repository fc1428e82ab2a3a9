/* SPDX-License-Identifier: MIT */
#include "doors/varlen.h"

#include <stdlib.h>

#include "kernels/attention/params.h" /* CA_KERNEL_FLOAT8_E5M2 */
#include "python/arguments.h"
#include "python/call.h"
#include "python/error.h"
#include "python/methods.h"
#include "python/mods.h"
#include "python/scalars.h"
#include "python/torch.h"

/* The arguments of _core.pyi. varlen.py explains each. */
#define VARLEN(ROW, STAR)                                                                          \
    CA_PY_SDPA_TAKEN(ROW, STAR)                                                                    \
    ROW(RETURN_LSE, "return_lse=False")                                                            \
    ROW(CU_SEQ_Q, "cu_seq_q=None")                                                                 \
    ROW(CU_SEQ_K, "cu_seq_k=None")                                                                 \
    ROW(SEQUSED_K, "seqused_k=None")                                                               \
    ROW(BLOCK_TABLE, "block_table=None")                                                           \
    ROW(HEADS_FIRST, "heads_first=False")                                                          \
    ROW(ROWS_ARE_LAST, "rows_are_last=False")                                                      \
    ROW(KEY_SCALE, "key_scale=None")                                                               \
    ROW(VALUE_SCALE, "value_scale=None")                                                           \
    ROW(KEY_OFFSET, "key_offset=None")                                                             \
    ROW(VALUE_OFFSET, "value_offset=None")                                                         \
    ROW(VALUE_SIZE, "value_size=0")                                                                \
    ROW(CODE, "code=None")
enum { CA_PY_SLOTS(VARLEN) ARGUMENTS };
const char *const ca_py_varlen_arguments[] = CA_PY_TEXTS(VARLEN);

/* Reads int64 numbers that varlen.py has made, or None. */
static int
parse_numbers(ca_py_call *call, PyObject *object, const char *name, int ndim, ca_tensor *tensor)
{
    ca_tensor_set_absent(tensor);
    if (object == Py_None) {
        return 0;
    }
    if (ca_py_call_array(call, object, name, CA_TAKES_NUMBERS, tensor) < 0) {
        return -1;
    }
    bool fits = tensor->dtype == CA_INT64 && tensor->block == NULL && tensor->ndim == ndim;
    return fits ? 0
                : ca_py_raise(PyExc_TypeError, "%s must be contiguous int64 of %d dimensions", name,
                              ndim);
}

/* Reads what the bytes of key and value are: None, or a word of Python's. */
static int
parse_code(PyObject *object, ca_torch_sdpa *sdpa)
{
    static const struct {
        const char *word;
        int64_t code;
    } codes[] = {
        {"float8_e4m3fn", CA_KERNEL_FLOAT8_E4M3FN},
        {"float8_e5m2", CA_KERNEL_FLOAT8_E5M2},
        {"int4", CA_KERNEL_INT4},
    };
    for (size_t n = 0; object != Py_None && n < sizeof codes / sizeof codes[0]; n++) {
        if (PyUnicode_CompareWithASCIIString(object, codes[n].word) == 0) {
            sdpa->code = codes[n].code;
        }
    }
    return 0;
}

/* Reads the scale of keys or values, float32. */
static int
parse_scale(ca_py_call *call, PyObject *object, const char *name, ca_tensor *scale)
{
    if (ca_py_call_optional(call, object, name, CA_TAKES_NUMBERS, scale) < 0) {
        return -1;
    }
    return object == Py_None || scale->dtype == CA_FLOAT32
               ? 0
               : ca_py_raise(PyExc_TypeError, "%s has dtype %s; expected float32", name,
                             ca_dtype_name(scale->dtype));
}

static int
parse_sequences(PyObject *const *args, ca_py_call *call, ca_varlen *varlen)
{
    varlen->heads_first = args[HEADS_FIRST] == Py_True;
    varlen->rows_are_last = args[ROWS_ARE_LAST] == Py_True;
    return parse_numbers(call, args[CU_SEQ_Q], "cu_seq_q", 1, &varlen->cu_seq_q) < 0 ||
                   parse_numbers(call, args[CU_SEQ_K], "cu_seq_k", 1, &varlen->cu_seq_k) < 0 ||
                   parse_numbers(call, args[SEQUSED_K], "seqused_k", 1, &varlen->seqused_k) < 0 ||
                   parse_numbers(call, args[BLOCK_TABLE], "block_table", 2, &varlen->block_table) <
                       0 ||
                   parse_scale(call, args[KEY_SCALE], "key_scale", &varlen->key_scale) < 0 ||
                   parse_scale(call, args[VALUE_SCALE], "value_scale", &varlen->value_scale) < 0 ||
                   parse_scale(call, args[KEY_OFFSET], "key_offset", &varlen->key_offset) < 0 ||
                   parse_scale(call, args[VALUE_OFFSET], "value_offset", &varlen->value_offset) <
                       0 ||
                   ca_py_any_int(args[VALUE_SIZE], "value_size", &varlen->value_size) < 0
               ? -1
               : 0;
}

static PyObject *
varlen_attn(PyObject *module, PyObject *const *given, Py_ssize_t count, PyObject *names)
{
    PyObject *args[ARGUMENTS];
    PyObject *answer = NULL;
    ca_py_call call;
    ca_torch_sdpa sdpa;
    ca_mods mods;
    mods.numbers = NULL;
    ca_varlen varlen;
    ca_varlen_sequences found = {.memory = NULL};
    CA_NEW_ERROR(error);
    ca_py_sdpa_results wanted = {.query = NULL};
    int ndim = 0;
    int64_t shape[CA_MAX_DIMS] = {0};
    ca_py_call_begin(&call, module, "varlen_attn");
    ca_torch_sdpa_init(&sdpa);
    if (ca_py_arguments(call.state, CA_PY_VARLEN, given, count, names, args) == 0 &&
        ca_py_call_note_out(&call, args[OUT]) == 0 &&
        ca_py_sdpa_parse(args, &call, CA_TAKES_NUMBERS, &sdpa, &mods, &wanted.rows_first) == 0 &&
        parse_sequences(args, &call, &varlen) == 0 && parse_code(args[CODE], &sdpa) == 0 &&
        ca_py_flag(args[RETURN_LSE], "return_lse", &wanted.return_lse) == 0 &&
        ca_py_call_ready(&call, args[DEVICE]) == 0 &&
        ca_py_error_check(call.state, ca_varlen_find(&varlen, &sdpa, &found, &error), &error) ==
            0 &&
        ca_py_error_check(call.state,
                          ca_py_sdpa_check(&sdpa, wanted.rows_first, false, &ndim, shape, &error),
                          &error) == 0) {
        wanted.query = args[QUERY];
        wanted.out = args[OUT] != Py_None ? args[OUT] : NULL;
        call.name = "varlen_attn"; /* ca_py_sdpa_parse has changed it, if there are mods */
        answer = ca_py_sdpa_run(&call, &sdpa, NULL, &wanted, ndim, shape);
    }
    free(found.memory);
    ca_py_mods_free(&mods);
    ca_py_call_end(&call);
    return answer;
}

PyMethodDef ca_py_varlen_methods[] = {
    {"varlen_attn", CA_PY_NAMED(varlen_attn), CA_PY_SIGNATURE("varlen_attn", "$module", VARLEN)},
    {NULL, NULL, 0, NULL},
};
