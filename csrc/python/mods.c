/* SPDX-License-Identifier: MIT */
#include "python/mods.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "attention/blocks.h"
#include "opencl/cache.h" /* ca_cache_hash */
#include "python/error.h"
#include "python/methods.h"
#include "python/scalars.h"
#include "python/tensor.h"

/* Reads a number into the 64 bits that kernels read. A finite number stays finite, as that of a
   table does. */
static int
parse_number(PyObject *number, bool in_float64, int64_t *bits)
{
    if (PyFloat_Check(number)) {
        double wide = PyFloat_AS_DOUBLE(number);
        float single = (float)(isfinite(wide) ? fmax(fmin(wide, FLT_MAX), -FLT_MAX) : wide);
        *bits = 0;
        memcpy(bits, in_float64 ? (void *)&wide : (void *)&single,
               in_float64 ? sizeof wide : sizeof single);
        return 0;
    }
    *bits = PyLong_AsLongLong(number);
    return *bits == -1 && PyErr_Occurred() ? -1 : 0;
}

/* Reads table `t`, and puts its sizes among the numbers. Kernels find an element by a 32-bit
   number. A table without elements reads another memory, of which no element is used. */
static int
parse_table(ca_py_call *call, PyObject *object, int t, ca_mods *mods)
{
    ca_tensor *table = &mods->tables[t];
    if (ca_py_call_array(call, object, "a table of score_mod or mask_mod", CA_TAKES_NUMBERS,
                         table) < 0) {
        return -1;
    }
    int64_t *sizes = &mods->numbers[CA_NUMBERS_OF_TABLES + t * CA_TABLE_DIMS];
    int64_t count = 1;
    int64_t reach = 0;
    for (int d = 0; d < table->ndim; d++) {
        int64_t stride = table->strides[d] < 0 ? -table->strides[d] : table->strides[d];
        sizes[d] = table->shape[d];
        count *= sizes[d];
        reach += sizes[d] == 0 ? 0 : (sizes[d] - 1) * stride;
    }
    if (reach > INT32_MAX) {
        return ca_py_raise(PyExc_ValueError,
                           "a table of score_mod or mask_mod has shape %s and reaches over %lld "
                           "elements; expected at most 2**31",
                           CA_SHAPE_OF(table), (long long)reach + 1);
    }
    if (count == 0) {
        table->block = NULL;
        table->data = mods->numbers;
        for (int d = 0; d < table->ndim; d++) {
            table->shape[d] = 1;
            table->strides[d] = 0;
        }
    }
    return 0;
}

int
ca_py_mods_parse(ca_py_call *call, PyObject *object, bool in_float64, ca_mods *mods)
{
    PyObject *text;
    PyObject *numbers;
    PyObject *tables;
    int has_score;
    int has_mask;
    Py_ssize_t length;
    if (object == Py_None) {
        return 0;
    }
    *mods = (ca_mods){.text = NULL};
    if (!PyArg_ParseTuple(object, "UppO!O!", &text, &has_score, &has_mask, &PyTuple_Type, &numbers,
                          &PyTuple_Type, &tables)) {
        return -1;
    }
    mods->text = PyUnicode_AsUTF8AndSize(text, &length);
    mods->count = CA_NUMBERS_OF_MODS + PyTuple_GET_SIZE(numbers);
    mods->numbers = PyMem_Calloc((size_t)mods->count, sizeof(*mods->numbers));
    if (mods->text == NULL || mods->numbers == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    const ca_hash hash = ca_cache_hash(mods->text, (size_t)length);
    memcpy(mods->hash, hash.words, sizeof(mods->hash));
    mods->has_score = has_score;
    mods->has_mask = has_mask;
    for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(numbers); n++) {
        if (parse_number(PyTuple_GET_ITEM(numbers, n), in_float64,
                         &mods->numbers[CA_NUMBERS_OF_MODS + n]) < 0) {
            return -1;
        }
    }
    if (PyTuple_GET_SIZE(tables) > CA_TABLES) {
        return ca_py_raise(PyExc_TypeError, "score_mod and mask_mod have %zd tables; at most %d",
                           PyTuple_GET_SIZE(tables), CA_TABLES);
    }
    for (int t = 0; t < (int)PyTuple_GET_SIZE(tables); t++) {
        if (parse_table(call, PyTuple_GET_ITEM(tables, t), t, mods) < 0) {
            return -1;
        }
    }
    return 0;
}

void
ca_py_mods_free(ca_mods *mods)
{
    PyMem_Free(mods->numbers);
}

/* Reads the sizes of a mask. Kernels number its rows and keys by 32 bits. */
static int
parse_sizes(PyObject *const *args, ca_mask_sizes *sizes)
{
    const struct {
        const char *name;
        int64_t *value;
    } numbers[] = {
        {"B", &sizes->B},
        {"H", &sizes->H},
        {"Q_LEN", &sizes->rows},
        {"KV_LEN", &sizes->keys},
        {"BLOCK_SIZE", &sizes->block_rows},
        {"BLOCK_SIZE", &sizes->block_keys},
    };
    for (size_t n = 0; n < sizeof(numbers) / sizeof(numbers[0]); n++) {
        if (ca_py_int(args[n], numbers[n].name, 1, INT32_MAX / 2, numbers[n].value) < 0) {
            return -1;
        }
    }
    return 0;
}

/* find_blocks(mods, B, H, Q_LEN, KV_LEN, block_rows, block_keys, device, /) -> Tensor, uint8 */
static PyObject *
find_blocks(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    enum { MODS, SIZES, DEVICE = SIZES + 6, ARGUMENTS };
    PyObject *entries = NULL;
    ca_py_call call;
    ca_mods mods = {.text = NULL};
    ca_mask_sizes sizes;
    ca_device *device;
    CA_NEW_ERROR(error);
    ca_py_work work;
    ca_status status;
    ca_py_call_begin(&call, module, "create_block_mask");
    if (ca_py_check_count(nargs, ARGUMENTS) < 0) {
        goto done;
    }
    if (args[MODS] == Py_None) {
        ca_py_wrong_type("mods", "the tuple of a traced mask_mod", args[MODS]);
        goto done;
    }
    if (parse_sizes(args + SIZES, &sizes) < 0 ||
        ca_py_mods_parse(&call, args[MODS], false, &mods) < 0 ||
        ca_py_call_ready(&call, args[DEVICE]) < 0 || ca_py_call_device(&call, &device) < 0) {
        goto done;
    }
    const int64_t shape[] = {sizes.B, sizes.H,
                             (sizes.rows + sizes.block_rows - 1) / sizes.block_rows,
                             (sizes.keys + sizes.block_keys - 1) / sizes.block_keys};
    entries = ca_py_tensor_empty(call.state, device, CA_UINT8, 4, shape);
    if (entries == NULL) {
        goto done;
    }
    const ca_tensor *view = &((ca_py_tensor *)entries)->view;
    ca_py_work_begin(&work, call.state, &error);
    status = ca_attention_find_blocks(device, &mods, &sizes, view, &error);
    ca_py_work_end(&work);
    if (ca_py_error_check(call.state, status, &error) < 0) {
        Py_CLEAR(entries);
    }
done:
    ca_py_mods_free(&mods);
    ca_py_call_end(&call);
    return entries;
}

PyMethodDef ca_py_mods_methods[] = {
    {"find_blocks", CA_PY_FASTCALL(find_blocks), NULL},
    {NULL, NULL, 0, NULL},
};
