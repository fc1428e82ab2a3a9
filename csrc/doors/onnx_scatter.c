/* SPDX-License-Identifier: MIT
 *
 * The rules of https://onnx.ai/onnx/operators/onnx__TensorScatter.html. Where that page leaves a case
 * open, ONNX Runtime's: it refuses negative indices, and more rows than the cache has, in both modes.
 */
#include "doors/onnx_scatter.h"

static int64_t
capacity_of(const ca_onnx_scatter *call)
{
    return call->past.shape[call->axis];
}

static int64_t
rows_of(const ca_onnx_scatter *call)
{
    return call->update.shape[call->axis];
}

static ca_status
check_axis(ca_onnx_scatter *call, ca_error *error)
{
    const int64_t ndim = call->past.ndim;
    const int64_t axis = call->axis;
    if (ndim < 2) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "past_cache has shape %s; expected 2 dimensions or more, the first of "
                            "them the batch",
                            CA_SHAPE_OF(&call->past));
    }
    if (axis == 0 || axis <= -ndim || axis >= ndim) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "axis is %lld; expected 1 to %lld or %lld to -1: past_cache has %lld "
                            "dimensions, and the first is the batch",
                            (long long)axis, (long long)(ndim - 1), (long long)(1 - ndim),
                            (long long)ndim);
    }
    call->axis = axis < 0 ? axis + ndim : axis;
    return CA_OK;
}

static bool
shapes_agree(const ca_onnx_scatter *call)
{
    bool agree = call->update.ndim == call->past.ndim;
    for (int d = 0; agree && d < call->past.ndim; d++) {
        agree = d == call->axis ? call->update.shape[d] <= call->past.shape[d]
                                : call->update.shape[d] == call->past.shape[d];
    }
    return agree;
}

static ca_status
check_indices(const ca_onnx_scatter *call, ca_error *error)
{
    const ca_tensor *indices = &call->indices;
    const int64_t B = call->past.shape[0];
    if (indices->data == NULL) {
        return CA_OK;
    }
    if (indices->dtype != CA_INT32 && indices->dtype != CA_INT64) {
        return ca_error_set(error, CA_ERROR_TYPE,
                            "write_indices has dtype %s; expected int64 or int32",
                            ca_dtype_name(indices->dtype));
    }
    if (indices->ndim != 1 || indices->shape[0] != B) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "write_indices has shape %s; expected (%lld,), one number for each "
                            "batch",
                            CA_SHAPE_OF(indices), (long long)B);
    }
    return CA_OK;
}

ca_status
ca_onnx_scatter_check(ca_onnx_scatter *call, ca_error *error)
{
    ca_status status = CA_OK;
    if (call->update.dtype != call->past.dtype) {
        CA_TRY(ca_error_set(error, CA_ERROR_TYPE,
                            "update has dtype %s; expected %s, that of past_cache",
                            ca_dtype_name(call->update.dtype), ca_dtype_name(call->past.dtype)));
    }
    CA_TRY(check_axis(call, error));
    if (!shapes_agree(call)) {
        CA_TRY(ca_error_set(error, CA_ERROR_VALUE,
                            "update has shape %s; expected that of past_cache, %s, with %lld or "
                            "less at axis %lld",
                            CA_SHAPE_OF(&call->update), CA_SHAPE_OF(&call->past),
                            (long long)capacity_of(call), (long long)call->axis));
    }
    CA_TRY(check_indices(call, error));
done:
    return status;
}

static int64_t
index_at(const ca_tensor *indices, int64_t b)
{
    const int64_t place = b * indices->strides[0];
    return indices->dtype == CA_INT32 ? ((const int32_t *)indices->data)[place]
                                      : ((const int64_t *)indices->data)[place];
}

ca_status
ca_onnx_scatter_place(const ca_onnx_scatter *call, ca_error *error)
{
    const int64_t capacity = capacity_of(call);
    const int64_t last = capacity - rows_of(call);
    for (int64_t b = 0; call->places != NULL && b < call->past.shape[0]; b++) {
        const int64_t index = index_at(&call->indices, b);
        if (index < 0 && call->circular) {
            return ca_error_set(error, CA_ERROR_VALUE,
                                "write_indices[%lld] is %lld; expected 0 or more", (long long)b,
                                (long long)index);
        }
        if (index < 0 || (index > last && !call->circular)) {
            return ca_error_set(error, CA_ERROR_VALUE,
                                "write_indices[%lld] is %lld; expected 0 to %lld, as update has "
                                "%lld of the %lld positions of past_cache",
                                (long long)b, (long long)index, (long long)last,
                                (long long)rows_of(call), (long long)capacity);
        }
        call->places[b] = capacity > 0 ? index % capacity : 0;
    }
    return CA_OK;
}

static int64_t
place_of(const ca_onnx_scatter *call, int64_t b)
{
    return call->places != NULL ? call->places[b] : 0;
}

bool
ca_onnx_scatter_next(const ca_onnx_scatter *call, const ca_tensor *output, ca_onnx_copies *copies,
                     ca_tensor *from, ca_tensor *to)
{
    const int64_t B = call->past.shape[0];
    const int64_t left = rows_of(call) - copies->row;
    const int axis = (int)call->axis;
    *from = copies->begun ? call->update : call->past;
    *to = *output;
    if (!copies->begun) {
        copies->begun = true;
        return true;
    }
    if (copies->batch >= B || left == 0) {
        return false;
    }
    /* Neighbours in the batch that have one place are one copy. */
    const int64_t first = place_of(call, copies->batch);
    int64_t next = call->places != NULL ? copies->batch + 1 : B;
    while (next < B && place_of(call, next) == first) {
        next++;
    }
    /* Rows behind the last position go to the first ones. */
    const int64_t before = capacity_of(call) - first; /* rows that lie in front of it */
    const bool wraps = copies->row >= before;
    const int64_t place = wraps ? copies->row - before : first + copies->row;
    const int64_t rows = wraps || left < before ? left : before;
    ca_tensor_take(from, 0, copies->batch, next - copies->batch);
    ca_tensor_take(to, 0, copies->batch, next - copies->batch);
    ca_tensor_take(from, axis, copies->row, rows);
    ca_tensor_take(to, axis, place, rows);
    if (rows < left) {
        copies->row += rows;
    } else {
        copies->batch = next;
        copies->row = 0;
    }
    return true;
}
