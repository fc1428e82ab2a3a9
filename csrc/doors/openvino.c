/* SPDX-License-Identifier: MIT
 *
 * OpenVINO's door: masks, a scale that may be an array, batch dimensions that are repeated
 * as numpy.tile does.
 */
#include "doors/openvino.h"

#include <string.h>

#include "doors/common.h"

/* ---- rules ---- */

static ca_status
check_dtypes(const ca_openvino_sdpa *call, ca_error *error)
{
    ca_status status = CA_OK;
    const char *dtype = ca_dtype_name(call->query.dtype);
    const ca_tensor *mask = &call->attention_mask;
    const ca_tensor *scale = &call->scale_array;
    CA_TRY(ca_door_check_dtypes(&call->query, &call->key, &call->value, error));
    if (mask->data != NULL && mask->dtype != call->query.dtype) {
        if (mask->ndim == 0) {
            CA_TRY(ca_error_set(
                error, CA_ERROR_TYPE,
                "attention_mask is a scalar of dtype %s; expected %s, the dtype of query",
                ca_dtype_name(mask->dtype), dtype));
        } else if (mask->dtype != CA_BOOL) {
            CA_TRY(ca_error_set(
                error, CA_ERROR_TYPE,
                "attention_mask has dtype %s; expected bool, or %s, the dtype of query",
                ca_dtype_name(mask->dtype), dtype));
        }
    }
    if (scale->data != NULL && scale->dtype != call->query.dtype) {
        CA_TRY(
            ca_error_set(error, CA_ERROR_TYPE,
                         "scale has dtype %s; expected %s, the dtype of query, or a Python number",
                         ca_dtype_name(scale->dtype), dtype));
    }
done:
    return status;
}

static ca_status
check_scale(const ca_openvino_sdpa *call, ca_error *error)
{
    const ca_tensor *array = &call->scale_array;
    if (array->ndim > 1 || ca_tensor_size(array, 1) != 1) {
        return ca_error_set(
            error, CA_ERROR_VALUE,
            "scale has shape %s; expected a number, or an array of shape () or (1,)",
            CA_SHAPE_OF(array));
    }
    return ca_door_check_scale(call->has_scale, call->scale, call->query.dtype, error);
}

/* True if a dimension of `size` can be repeated to the common size. As in NumPy, only a
   size of 1 can be repeated to 0. */
static bool
repeats_to(int64_t size, int64_t common)
{
    return size == common || size == 1 || (size > 0 && common > 0 && common % size == 0);
}

/* Find the common size of a dimension, counted from the end. */
static ca_status
find_common_size(const ca_openvino_sdpa *call, int from_end, int64_t *common, ca_error *error)
{
    const struct {
        const char *name;
        const ca_tensor *tensor;
    } inputs[] = {{"query", &call->query}, {"key", &call->key}, {"value", &call->value}};
    *common = 1;
    for (int t = 0; t < 3; t++) {
        int64_t size = ca_tensor_size(inputs[t].tensor, from_end);
        *common = *common == 0 || size == 0 ? 0 : size > *common ? size : *common;
    }
    for (int t = 0; t < 3; t++) {
        int64_t size = ca_tensor_size(inputs[t].tensor, from_end);
        if (!repeats_to(size, *common)) {
            return ca_error_set(error, CA_ERROR_VALUE,
                                "%s has shape %s, whose dimension %d of size %lld cannot be "
                                "repeated to %lld, that of the others; expected 1 or a divisor",
                                inputs[t].name, CA_SHAPE_OF(inputs[t].tensor), -from_end,
                                (long long)size, (long long)*common);
        }
    }
    return CA_OK;
}

/* `shape` is the result's, of ndim sizes. */
static ca_status
check_mask(const ca_openvino_sdpa *call, int ndim, const int64_t *shape, ca_error *error)
{
    const ca_tensor *mask = &call->attention_mask;
    if (mask->ndim == 0) { /* a scalar; the value of an absent mask is 0 */
        return call->mask_value == 0 ? CA_OK
                                     : ca_error_set(error, CA_ERROR_VALUE,
                                                    "attention_mask is the scalar %g; expected 0 "
                                                    "(no mask), or two dimensions or more",
                                                    call->mask_value);
    }
    int64_t scores[CA_MAX_DIMS];
    memcpy(scores, shape, (size_t)ndim * sizeof(*scores));
    scores[ndim - 1] = ca_tensor_size(&call->key, 2);
    bool fits = mask->ndim >= 2 && mask->ndim <= ndim;
    for (int d = 1; fits && d <= mask->ndim; d++) {
        int64_t size = ca_tensor_size(mask, d);
        int64_t common = scores[ndim - d];
        fits = d > 2 ? repeats_to(size, common) : size == 1 || size == common;
    }
    if (!fits) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "attention_mask has shape %s; expected two dimensions or more that can "
                            "be broadcast or repeated to %s",
                            CA_SHAPE_OF(mask), CA_SHAPE_WORDS(ndim, scores));
    }
    return CA_OK;
}

ca_status
ca_openvino_sdpa_check(const ca_openvino_sdpa *call, int *ndim, int64_t shape[CA_MAX_DIMS],
                       ca_error *error)
{
    ca_status status = CA_OK;
    CA_TRY(check_dtypes(call, error));
    CA_TRY(ca_door_check_matrices(&call->query, &call->key, &call->value, 3, error));
    CA_TRY(check_scale(call, error));
    int n = call->query.ndim;
    n = call->key.ndim > n ? call->key.ndim : n;
    n = call->value.ndim > n ? call->value.ndim : n;
    for (int d = 3; d <= n; d++) {
        CA_TRY(find_common_size(call, d, &shape[n - d], error));
    }
    shape[n - 2] = ca_tensor_size(&call->query, 2);
    shape[n - 1] = ca_tensor_size(&call->value, 1);
    *ndim = n;
    CA_TRY(check_mask(call, n, shape, error));
    int64_t count;
    CA_TRY(ca_shape_count(n, shape, "the result", &count, error));
done:
    return status;
}

/* ---- repeated dimensions ---- */

/* A leading dimension of the result is cut into factors: its index is the sum of unit * index over
   the factors. If every tensor either repeats along a factor or moves through all of it, a stride
   describes the factor. Else each of its indices becomes a problem. */
typedef struct {
    int from_end; /* the dimension, counted from the end */
    int64_t unit;
    int64_t size;
    bool strided;
} factor;

/* A result that is not empty has at most 62 factors, as each doubles it or more. */
typedef struct {
    int count; /* the innermost comes first */
    factor factors[CA_MAX_DIMS];
} factorization;

#define INPUTS 4

/* True if `size` divides, or is divided by, each of the sizes. */
static bool
is_chained(int64_t size, const int64_t sizes[INPUTS])
{
    for (int t = 0; t < INPUTS; t++) {
        if (size % sizes[t] != 0 && sizes[t] % size != 0) {
            return false;
        }
    }
    return true;
}

/* Cut dimension `from_end`, of `common` indices, at the chained sizes. */
static void
factorize_dim(const int64_t sizes[INPUTS], int from_end, int64_t common, factorization *cut)
{
    int64_t unit = 1;
    while (unit < common) {
        int64_t next = common;
        for (int t = 0; t < INPUTS; t++) {
            if (sizes[t] > unit && sizes[t] < next && is_chained(sizes[t], sizes)) {
                next = sizes[t];
            }
        }
        bool strided = true;
        for (int t = 0; t < INPUTS; t++) {
            strided = strided && (sizes[t] % next == 0 || unit % sizes[t] == 0);
        }
        cut->factors[cut->count++] = (factor){from_end, unit, next / unit, strided};
        unit = next;
    }
}

static void
factorize(const ca_openvino_sdpa *call, const ca_tensor *output, factorization *cut)
{
    cut->count = 0;
    for (int d = 3; d <= output->ndim; d++) {
        const int64_t sizes[INPUTS] = {
            ca_tensor_size(&call->query, d), ca_tensor_size(&call->key, d),
            ca_tensor_size(&call->value, d), ca_tensor_size(&call->attention_mask, d)};
        factorize_dim(sizes, d, ca_tensor_size(output, d), cut);
    }
}

/* View the entries of `tensor` that turn `index` has, as the factors cut them. */
static void
view_entries(const ca_tensor *tensor, const factorization *cut, int64_t index, ca_tensor *view)
{
    int64_t first = 0; /* in elements, from the tensor's first */
    ca_tensor_start_view(tensor, view);
    for (int f = cut->count - 1; f >= 0; f--) {
        const factor *by = &cut->factors[f];
        int64_t size = ca_tensor_size(tensor, by->from_end);
        int64_t stride = ca_tensor_stride(tensor, by->from_end);
        if (by->strided) {
            bool repeats = by->unit % size == 0;
            ca_tensor_add_dim(view, by->size, repeats ? 0 : by->unit * stride);
        } else {
            first += index % by->size * by->unit % size * stride;
            index /= by->size;
        }
    }
    for (int from_end = 2; from_end > 0; from_end--) {
        ca_tensor_add_dim(view, ca_tensor_size(tensor, from_end),
                          ca_tensor_stride(tensor, from_end));
    }
    view->data = (char *)tensor->data + first * (ptrdiff_t)ca_dtype_size(tensor->dtype);
}

/* Returns the number of turns: the product of the factors that strides cannot express. */
static int64_t
count_of(const factorization *cut)
{
    int64_t count = 1;
    for (int f = 0; f < cut->count; f++) {
        count *= cut->factors[f].strided ? 1 : cut->factors[f].size;
    }
    return count;
}

int64_t
ca_openvino_sdpa_views(const ca_openvino_sdpa *call, const ca_tensor *output, int64_t index,
                       ca_attention *attention, ca_tensor views[CA_ATTENTION_OPERANDS])
{
    factorization cut;
    factorize(call, output, &cut);
    ca_attention_init(attention, views);
    view_entries(&call->query, &cut, index, &views[CA_ATTENTION_QUERY]);
    view_entries(&call->key, &cut, index, &views[CA_ATTENTION_KEY]);
    view_entries(&call->value, &cut, index, &views[CA_ATTENTION_VALUE]);
    view_entries(output, &cut, index, &views[CA_ATTENTION_OUTPUT]);
    if (call->attention_mask.ndim > 0) {
        ca_tensor *mask = &views[CA_ATTENTION_MASK];
        view_entries(&call->attention_mask, &cut, index, mask);
        ca_door_broadcast_dim(mask, 2, ca_tensor_size(&call->query, 2));
        ca_door_broadcast_dim(mask, 1, ca_tensor_size(&call->key, 2));
        attention->mask_is_added = mask->dtype != CA_BOOL;
    }
    attention->scale =
        call->has_scale ? call->scale : ca_door_default_scale(ca_tensor_size(&call->query, 1));
    if (call->causal) {
        attention->above = 0;
    }
    return count_of(&cut);
}
