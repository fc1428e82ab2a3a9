/* SPDX-License-Identifier: MIT */
#include "python/torch.h"

#include <stdio.h>
#include <string.h>

#include "attention/problem.h"
#include "python/arguments.h"
#include "python/call.h"
#include "python/error.h"
#include "python/methods.h"
#include "python/mods.h"
#include "python/scalars.h"
#include "python/tensor.h"

#define SDPA(ROW, STAR)                                                                            \
    CA_PY_SDPA_TAKEN(ROW, STAR)                                                                    \
    ROW(RETURN_LSE, "return_lse=False")                                                            \
    ROW(RETURN_WEIGHTS, "return_weights=False")
enum { CA_PY_SLOTS(SDPA) ARGUMENTS };
const char *const ca_py_sdpa_arguments[] = CA_PY_TEXTS(SDPA);

static int
parse_dropout(PyObject *const *args, ca_torch_sdpa *sdpa)
{
    if (args[DROPOUT_P] == Py_True) { /* meant for is_causal, the argument behind it */
        return ca_py_refuse(PyExc_TypeError, "dropout_p", Py_True, "a number from 0 to 1");
    }
    if (ca_py_double(args[DROPOUT_P], "dropout_p", &sdpa->dropout) < 0) {
        return -1;
    }
    if (!(sdpa->dropout >= 0 && sdpa->dropout <= 1)) {
        return ca_py_refuse(PyExc_ValueError, "dropout_p", args[DROPOUT_P], "0 to 1");
    }
    return ca_py_seed(args[SEED], sdpa->dropout > 0, &sdpa->seed);
}

void
ca_py_flatten_sinks(const ca_tensor *sinks, ca_tensor *flat)
{
    ca_tensor_start_view(sinks, flat);
    for (int d = 0; d < sinks->ndim; d++) {
        if (sinks->shape[d] != 1) {
            ca_tensor_add_dim(flat, sinks->shape[d], sinks->strides[d]);
        }
    }
    if (flat->ndim == 0) {
        ca_tensor_add_dim(flat, 1, 1);
    }
}

/* Reads sinks, as numbers of the type of the arithmetic, which the call keeps. */
static int
parse_sinks(PyObject *object, ca_torch_sdpa *sdpa, ca_py_call *call)
{
    ca_tensor sinks;
    ca_tensor flat;
    if (object == Py_None) {
        return 0;
    }
    if (ca_py_call_host_array(call, object, "sinks", CA_TAKES_FLOATS, &sinks) < 0) {
        return -1;
    }
    ca_py_flatten_sinks(&sinks, &flat);
    if (flat.ndim != 1) {
        return ca_py_raise(PyExc_ValueError,
                           "sinks has shape %s; expected (Hq,), one for each query head, or "
                           "more dimensions of size 1",
                           CA_SHAPE_OF(&sinks));
    }
    ca_dtype dtype = sdpa->query.dtype == CA_FLOAT64 ? CA_FLOAT64 : CA_FLOAT32;
    PyObject *converted = ca_py_host_result(call->state, NULL, dtype, 1, flat.shape, &sdpa->sinks);
    if (converted == NULL) {
        return -1;
    }
    call->keep[call->kept++] = converted;
    ca_torch_convert_sinks(&flat, &sdpa->sinks);
    return 0;
}

/* Reads query_offset: a whole number, or the int64 numbers of clattn._arguments.integers. */
static int
parse_offset(PyObject *object, ca_torch_sdpa *sdpa, ca_py_call *call)
{
    return PyLong_Check(object) ? ca_py_any_int(object, "query_offset", &sdpa->position)
                                : ca_py_call_int64s(call, object, "query_offset", &sdpa->offsets);
}

static int
parse_layout(PyObject *object, bool *rows_first)
{
    if (!PyUnicode_Check(object)) {
        return ca_py_wrong_type("layout", "\"BHLE\" or \"BLHE\"", object);
    }
    *rows_first = PyUnicode_CompareWithASCIIString(object, "BLHE") == 0;
    if (!*rows_first && PyUnicode_CompareWithASCIIString(object, "BHLE") != 0) {
        return ca_py_raise(PyExc_ValueError, "layout is %R; expected \"BHLE\" or \"BLHE\"", object);
    }
    return 0;
}

/* Reads all arguments that are neither arrays nor results. */
static int
parse_options(PyObject *const *args, ca_torch_sdpa *sdpa, bool *rows_first)
{
    return parse_layout(args[LAYOUT], rows_first) < 0 || parse_dropout(args, sdpa) < 0 ||
                   ca_py_causal(args[IS_CAUSAL], &sdpa->causal) < 0 ||
                   ca_py_scale(args[SCALE], &sdpa->has_scale, &sdpa->scale) < 0 ||
                   ca_py_flag(args[ENABLE_GQA], "enable_gqa", &sdpa->enable_gqa) < 0 ||
                   ca_py_window(args[WINDOW], &sdpa->window_left, &sdpa->window_right) < 0 ||
                   ca_py_double(args[SOFTCAP], "softcap", &sdpa->softcap) < 0
               ? -1
               : 0;
}

/* Reads what the forward pass gives beside its output. */
static int
parse_results(PyObject *const *args, const ca_state *state, ca_torch_sdpa *sdpa,
              ca_py_sdpa_results *wanted)
{
    if (ca_py_flag(args[RETURN_WEIGHTS], "return_weights", &sdpa->returns_weights) < 0) {
        return -1;
    }
    wanted->splits_lse = args[RETURN_LSE] == state->base_and_sum;
    if (wanted->splits_lse && sdpa->sinks.data != NULL) {
        return ca_py_raise(PyExc_ValueError, "sinks have no base and sum; expected none");
    }
    wanted->only_check = args[RETURN_LSE] == state->only_check;
    wanted->return_lse = wanted->splits_lse;
    return wanted->splits_lse || wanted->only_check
               ? 0
               : ca_py_flag(args[RETURN_LSE], "return_lse", &wanted->return_lse);
}

static int
parse_arrays(PyObject *const *args, ca_py_dtypes keys, ca_torch_sdpa *sdpa, ca_py_call *call)
{
    sdpa->has_mask = args[ATTN_MASK] != Py_None;
    if (ca_py_call_array(call, args[QUERY], "query", CA_TAKES_FLOATS, &sdpa->query) < 0 ||
        ca_py_call_array(call, args[KEY], "key", keys, &sdpa->key) < 0 ||
        ca_py_call_array(call, args[VALUE], "value", keys, &sdpa->value) < 0 ||
        parse_sinks(args[SINKS], sdpa, call) < 0 ||
        parse_offset(args[QUERY_OFFSET], sdpa, call) < 0) {
        return -1;
    }
    return ca_py_call_optional(call, args[ATTN_MASK], "attn_mask", CA_TAKES_BOOL_AND_FLOATS,
                               &sdpa->attn_mask);
}

/* Reads mods and block_mask. block_mask is None, or the tuple that BlockMask.for_kernels returns. */
static int
parse_mods(PyObject *const *args, ca_torch_sdpa *sdpa, ca_mods *mods, ca_py_call *call)
{
    PyObject *entries;
    long long rows;
    long long keys;
    long long block_rows;
    long long block_keys;
    int uses[2];
    ca_blocks *blocks = &sdpa->blocks;
    sdpa->mods = args[MODS] != Py_None ? mods : NULL;
    call->name = sdpa->mods != NULL ? "flex_attention" : call->name;
    if (ca_py_mods_parse(call, args[MODS], sdpa->query.dtype == CA_FLOAT64, mods) < 0) {
        return -1;
    }
    if (args[BLOCK_MASK] == Py_None) {
        return 0;
    }
    if (!PyArg_ParseTuple(args[BLOCK_MASK], "OLL(LL)pp", &entries, &rows, &keys, &block_rows,
                          &block_keys, &uses[0], &uses[1])) {
        return -1;
    }
    blocks->rows = rows;
    blocks->keys = keys;
    blocks->block_rows = block_rows;
    blocks->block_keys = block_keys;
    blocks->uses[0] = uses[0];
    blocks->uses[1] = uses[1];
    return ca_py_call_array(call, entries, "block_mask", CA_TAKES_NUMBERS, &blocks->entries);
}

int
ca_py_sdpa_parse(PyObject *const *args, ca_py_call *call, ca_py_dtypes keys, ca_torch_sdpa *sdpa,
                 ca_mods *mods, bool *rows_first)
{
    return parse_arrays(args, keys, sdpa, call) < 0 || parse_options(args, sdpa, rows_first) < 0 ||
                   parse_mods(args, sdpa, mods, call) < 0
               ? -1
               : 0;
}

void
ca_py_swap_heads(ca_tensor *tensor)
{
    ca_tensor_swap(tensor, tensor->ndim - 3);
}

/* Swaps the heads of query, key and value. False, and nothing is swapped, if one has no heads. */
static bool
swap_all_heads(ca_torch_sdpa *sdpa)
{
    if (sdpa->query.ndim < 3 || sdpa->key.ndim < 3 || sdpa->value.ndim < 3) {
        return false;
    }
    ca_py_swap_heads(&sdpa->query);
    ca_py_swap_heads(&sdpa->key);
    ca_py_swap_heads(&sdpa->value);
    return true;
}

ca_status
ca_py_sdpa_check(ca_torch_sdpa *sdpa, bool rows_first, bool advises, int *ndim,
                 int64_t shape[CA_MAX_DIMS], ca_error *error)
{
    CA_NEW_ERROR(other);
    if (rows_first && !swap_all_heads(sdpa)) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "query, key and value have shapes %s, %s and %s; expected three "
                            "dimensions or more with layout=\"BLHE\"",
                            CA_SHAPE_OF(&sdpa->query), CA_SHAPE_OF(&sdpa->key),
                            CA_SHAPE_OF(&sdpa->value));
    }
    const ca_status status = ca_torch_sdpa_check(sdpa, ndim, shape, error);
    if (status != CA_ERROR_VALUE || !advises) {
        return status;
    }
    const char *advice = rows_first ? " (in this message rows come after heads, as with "
                                      "layout=\"BHLE\")"
                                    : "";
    const char *turned = sdpa->mods != NULL ? "; arrays (B, L, H, E) need swapaxes(1, 2)"
                                            : "; arrays (B, L, H, E) take layout=\"BLHE\"";
    if (swap_all_heads(sdpa) && ca_torch_sdpa_check(sdpa, ndim, shape, &other) == CA_OK) {
        advice = rows_first ? "; arrays (B, H, L, E) take layout=\"BHLE\"" : turned;
    }
    const size_t used = strlen(error->message);
    (void)snprintf(error->message + used, sizeof error->message - used, "%s", advice);
    return status;
}

/* View log-sum-exps (…, L) as (…, L, 1), or bases and sums (2, …, L) as (…, L, 2). */
static void
move_numbers_last(ca_tensor *lse, bool are_split)
{
    if (!are_split) {
        ca_tensor_add_dim(lse, 1, 0);
        return;
    }
    for (int d = 0; d + 1 < lse->ndim; d++) {
        ca_tensor_swap(lse, d);
    }
}

static bool
overlaps(const ca_extent *output, const ca_tensor *input)
{
    if (input->data == NULL) {
        return false;
    }
    ca_extent memory = ca_tensor_extent(input);
    return ca_extents_overlap(output, &memory);
}

/* True if the kernel can write to `out` itself. Otherwise the result is copied to `out`: because it
   is spread out, swapped, misaligned or shares memory with an input. */
static bool
is_direct(const ca_torch_sdpa *sdpa, const ca_py_out *out)
{
    const ca_extent memory = ca_tensor_extent(&out->tensor);
    const ca_tensor *tensor = &out->tensor;
    const ca_tensor *inputs[] = {&sdpa->query,          &sdpa->key,         &sdpa->value,
                                 &sdpa->attn_mask,      &sdpa->sinks,       &sdpa->offsets,
                                 &sdpa->blocks.entries, &sdpa->key_scale,   &sdpa->value_scale,
                                 &sdpa->key_offset,     &sdpa->value_offset};
    for (size_t n = 0; n < sizeof inputs / sizeof inputs[0]; n++) {
        if (overlaps(&memory, inputs[n])) {
            return false;
        }
    }
    const ca_sequences *sequences = sdpa->sequences;
    for (int n = 0; sequences != NULL && n < CA_PAGED_OPERANDS; n++) {
        if (sequences->paged[n] != NULL && overlaps(&memory, sequences->paged[n])) {
            return false;
        }
    }
    for (int t = 0; sdpa->mods != NULL && t < CA_TABLES; t++) {
        if (overlaps(&memory, &sdpa->mods->tables[t])) {
            return false;
        }
    }
    return out->usable && ca_tensor_is_nested(tensor) && ca_tensor_fills_extent(tensor);
}

PyObject *
ca_py_sdpa_run(const ca_py_call *call, const ca_torch_sdpa *sdpa, const ca_cache *cache,
               const ca_py_sdpa_results *wanted, int ndim, const int64_t *shape)
{
    enum { OUTPUT, RESULTS = 3 };
    ca_dtype dtype = sdpa->query.dtype;
    ca_dtype lse_dtype = dtype == CA_FLOAT64 ? CA_FLOAT64 : CA_FLOAT32;
    PyObject *out = wanted->out;
    PyObject *answer = NULL;
    ca_py_out opened;
    opened.shell = NULL;
    opened.target = NULL;
    ca_tensor output;
    ca_tensor lse;
    ca_tensor weights;
    int64_t output_shape[CA_MAX_DIMS];
    int64_t lse_shape[CA_MAX_DIMS + 1] = {2};
    int64_t weights_shape[CA_MAX_DIMS];
    int count = 1;
    ca_attention attention;
    ca_tensor views[CA_ATTENTION_OPERANDS];
    ca_py_output results[RESULTS] = {{.result = NULL}};
    memcpy(output_shape, shape, (size_t)ndim * sizeof(*shape));
    if (wanted->rows_first) {
        output_shape[ndim - 3] = shape[ndim - 2];
        output_shape[ndim - 2] = shape[ndim - 3];
    }
    if (out != NULL &&
        ca_py_out_open(call->state, out, dtype, "that of query", ndim, output_shape, &opened) < 0) {
        goto done;
    }
    bool direct = out != NULL && is_direct(sdpa, &opened);
    results[OUTPUT] = ca_py_output_of(!direct, out != NULL ? out : wanted->query, dtype, ndim,
                                      output_shape, &output);
    results[OUTPUT].out = out;
    ca_tensor_set_absent(&lse);
    ca_tensor_set_absent(&weights);
    if (wanted->return_lse) {
        memcpy(lse_shape + 1, shape, (size_t)(ndim - 1) * sizeof(*shape));
        results[count++] =
            ca_py_output_of(true, wanted->query, lse_dtype, ndim - !wanted->splits_lse,
                            lse_shape + !wanted->splits_lse, &lse);
    }
    if (sdpa->returns_weights) {
        memcpy(weights_shape, shape, (size_t)ndim * sizeof(*shape));
        weights_shape[ndim - 1] = ca_tensor_size(&sdpa->key, 2);
        results[count++] =
            ca_py_output_of(true, wanted->query, dtype, ndim, weights_shape, &weights);
    }
    if (ca_py_call_outputs(call, results, count) < 0) {
        goto done;
    }
    ca_tensor *written = direct ? &opened.tensor : &output;
    if (wanted->rows_first) {
        ca_py_swap_heads(written);
    }
    if (lse.data != NULL) {
        move_numbers_last(&lse, wanted->splits_lse);
    }
    ca_torch_sdpa_views(sdpa, written, &lse, &weights, &attention, views);
    if (cache != NULL) {
        ca_cache_attend_positions(cache, sdpa, written, &attention, views);
    }
    if (ca_py_call_attention(call, &attention, views) < 0) {
        goto done;
    }
    if (out == NULL || direct ||
        ca_py_call_copy(call, opened.target, results[OUTPUT].result) == 0) {
        answer = ca_py_call_give_all(call, results, count);
    }
done:
    ca_py_out_close(&opened);
    ca_py_call_clear(results, RESULTS);
    return answer;
}

static PyObject *
scaled_dot_product_attention(PyObject *module, PyObject *const *given, Py_ssize_t count,
                             PyObject *names)
{
    PyObject *args[ARGUMENTS];
    PyObject *answer = NULL;
    ca_py_call call;
    ca_torch_sdpa sdpa;
    ca_mods mods;
    mods.numbers = NULL;
    CA_NEW_ERROR(error);
    ca_py_sdpa_results wanted = {.query = NULL};
    int ndim = 0;
    int64_t shape[CA_MAX_DIMS] = {0};
    ca_py_call_begin(&call, module, "scaled_dot_product_attention");
    ca_torch_sdpa_init(&sdpa);
    if (ca_py_arguments(call.state, CA_PY_SDPA, given, count, names, args) == 0 &&
        ca_py_call_note_out(&call, args[OUT]) == 0 &&
        ca_py_sdpa_parse(args, &call, CA_TAKES_FLOATS, &sdpa, &mods, &wanted.rows_first) == 0 &&
        parse_results(args, call.state, &sdpa, &wanted) == 0 &&
        ca_py_call_ready(&call, args[DEVICE]) == 0 &&
        ca_py_error_check(
            call.state,
            /* the doors that only check have no layout */
            ca_py_sdpa_check(&sdpa, wanted.rows_first, !wanted.only_check, &ndim, shape, &error),
            &error) == 0) {
        wanted.query = args[QUERY];
        wanted.out = args[OUT] != Py_None ? args[OUT] : NULL;
        answer = wanted.only_check ? ca_py_tuple(ndim, shape, 1)
                                   : ca_py_sdpa_run(&call, &sdpa, NULL, &wanted, ndim, shape);
    }
    ca_py_mods_free(&mods);
    ca_py_call_end(&call);
    return answer;
}

PyMethodDef ca_py_torch_methods[] = {
    {"scaled_dot_product_attention", CA_PY_NAMED(scaled_dot_product_attention),
     CA_PY_SIGNATURE("scaled_dot_product_attention", "$module", SDPA)},
    {NULL, NULL, 0, NULL},
};
