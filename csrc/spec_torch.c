/* SPDX-License-Identifier: MIT
 *
 * The torch-like front door: shapes, broadcasting, grouped heads, causality, windows.
 */
#include "spec_torch.h"

#include <float.h>
#include <math.h>
#include <string.h>

/* Sizes counted from the end: shape[-1] is size_at(tensor, 1). A missing dimension is
   1, as in broadcasting. */
static int64_t
size_at(const ca_tensor *tensor, int from_end)
{
    return from_end <= tensor->ndim ? tensor->shape[tensor->ndim - from_end] : 1;
}

static int64_t
stride_at(const ca_tensor *tensor, int from_end)
{
    bool broadcasts = from_end > tensor->ndim || size_at(tensor, from_end) == 1;
    return broadcasts ? 0 : tensor->strides[tensor->ndim - from_end];
}

#define SHAPE_TEXT 160

static const char *
shape_text(const ca_tensor *tensor, char text[SHAPE_TEXT])
{
    return ca_shape_format(tensor->ndim, tensor->shape, text, SHAPE_TEXT);
}

static ca_status
check_dtypes(const ca_torch_sdpa *call, ca_error *error)
{
    const struct {
        const char *name;
        const ca_tensor *tensor;
    } inputs[] = {
        {"query", &call->query}, {"key", &call->key}, {"value", &call->value}};
    for (int t = 0; t < 3; t++) {
        ca_dtype dtype = inputs[t].tensor->dtype;
        if (dtype == CA_BOOL) {
            return ca_error_set(error, CA_ERROR_TYPE,
                                "%s has dtype bool; expected float16, bfloat16, "
                                "float32 or float64",
                                inputs[t].name);
        }
        if (dtype != call->query.dtype) {
            return ca_error_set(error, CA_ERROR_TYPE,
                                "%s has dtype %s; expected %s, the dtype of query",
                                inputs[t].name, ca_dtype_name(dtype),
                                ca_dtype_name(call->query.dtype));
        }
        if (inputs[t].tensor->ndim < 2) {
            char text[SHAPE_TEXT];
            return ca_error_set(error, CA_ERROR_VALUE,
                                "%s has shape %s; expected two dimensions or more",
                                inputs[t].name, shape_text(inputs[t].tensor, text));
        }
    }
    return CA_OK;
}

static ca_status
check_matrices(const ca_torch_sdpa *call, ca_error *error)
{
    char given[SHAPE_TEXT];
    char other[SHAPE_TEXT];
    if (size_at(&call->key, 1) != size_at(&call->query, 1)) {
        return ca_error_set(
            error, CA_ERROR_VALUE,
            "key has head size %lld (shape %s); expected %lld, that of "
            "query (shape %s)",
            (long long)size_at(&call->key, 1), shape_text(&call->key, given),
            (long long)size_at(&call->query, 1), shape_text(&call->query, other));
    }
    if (size_at(&call->value, 2) != size_at(&call->key, 2)) {
        return ca_error_set(
            error, CA_ERROR_VALUE,
            "value has length %lld (shape %s); expected %lld, that of "
            "key (shape %s)",
            (long long)size_at(&call->value, 2), shape_text(&call->value, given),
            (long long)size_at(&call->key, 2), shape_text(&call->key, other));
    }
    return CA_OK;
}

static ca_status
check_heads(const ca_torch_sdpa *call, ca_error *error)
{
    int64_t Hq = size_at(&call->query, 3);
    int64_t Hk = size_at(&call->key, 3);
    if (size_at(&call->value, 3) != Hk) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "value has %lld heads; expected %lld, as many as key, with "
                            "enable_gqa",
                            (long long)size_at(&call->value, 3), (long long)Hk);
    }
    if (Hk == 0 ? Hq != 0 : Hq % Hk != 0) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "query has %lld heads; expected a multiple of key's %lld, "
                            "with enable_gqa",
                            (long long)Hq, (long long)Hk);
    }
    return CA_OK;
}

/* Widen `common`, counted from the end from dimension `first` on, by `tensor`'s. */
static ca_status
broadcast_leading(const ca_tensor *tensor, const char *name, int first, int ndim,
                  int64_t *shape, ca_error *error)
{
    for (int d = first; d <= tensor->ndim; d++) {
        int64_t *common = &shape[ndim - d];
        int64_t size = size_at(tensor, d);
        if (*common == 1) {
            *common = size;
        } else if (size != 1 && size != *common) {
            char given[SHAPE_TEXT];
            return ca_error_set(error, CA_ERROR_VALUE,
                                "%s has shape %s, whose dimension %d of size %lld does "
                                "not broadcast with the others' %lld%s",
                                name, shape_text(tensor, given), -d, (long long)size,
                                (long long)*common,
                                d == 3 ? " (for grouped heads: enable_gqa=True)" : "");
        }
    }
    return CA_OK;
}

static ca_status
check_mask(const ca_tensor *mask, int ndim, const int64_t *shape, int64_t S,
           ca_error *error)
{
    int64_t scores[CA_MAX_DIMS];
    memcpy(scores, shape, (size_t)ndim * sizeof(*scores));
    scores[ndim - 1] = S;
    bool fits = mask->ndim <= ndim;
    for (int d = 1; fits && d <= mask->ndim; d++) {
        int64_t size = size_at(mask, d);
        fits = size == 1 || size == scores[ndim - d];
    }
    if (!fits) {
        char given[SHAPE_TEXT];
        char expected[SHAPE_TEXT];
        return ca_error_set(
            error, CA_ERROR_VALUE,
            "attn_mask has shape %s; expected one that broadcasts to %s",
            shape_text(mask, given),
            ca_shape_format(ndim, scores, expected, sizeof(expected)));
    }
    return CA_OK;
}

static ca_status
check_scalars(const ca_torch_sdpa *call, ca_error *error)
{
    if (call->has_scale && !isfinite(call->scale)) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "scale is %g; expected a finite number", call->scale);
    }
    if (call->has_scale && call->query.dtype != CA_FLOAT64 &&
        fabs(call->scale) > FLT_MAX / 2) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "scale is %g; expected a number that float32 holds, in "
                            "which %s is computed",
                            call->scale, ca_dtype_name(call->query.dtype));
    }
    if (!(call->softcap >= 0) || isinf(call->softcap)) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "softcap is %g; expected a finite number of 0 (none) or "
                            "more",
                            call->softcap);
    }
    if (call->window_left < 0 || call->window_right < 0) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "window has the bound %lld; expected 0 or more, or None",
                            (long long)(call->window_left < 0 ? call->window_left
                                                              : call->window_right));
    }
    return CA_OK;
}

ca_status
ca_torch_sdpa_check(const ca_torch_sdpa *call, int *ndim, int64_t shape[CA_MAX_DIMS],
                    ca_error *error)
{
    ca_status status = CA_OK;
    CA_TRY(check_dtypes(call, error));
    CA_TRY(check_matrices(call, error));
    CA_TRY(check_scalars(call, error));

    int n = call->query.ndim;
    n = call->key.ndim > n ? call->key.ndim : n;
    n = call->value.ndim > n ? call->value.ndim : n;
    for (int d = 0; d < n; d++) {
        shape[d] = 1;
    }
    int first = 3; /* from the end: the first dimension that broadcasts */
    if (call->enable_gqa) {
        CA_TRY(check_heads(call, error));
        first = 4;
        if (n >= 3) {
            shape[n - 3] = size_at(&call->query, 3);
        }
    }
    CA_TRY(broadcast_leading(&call->query, "query", first, n, shape, error));
    CA_TRY(broadcast_leading(&call->key, "key", first, n, shape, error));
    CA_TRY(broadcast_leading(&call->value, "value", first, n, shape, error));
    shape[n - 2] = size_at(&call->query, 2);
    shape[n - 1] = size_at(&call->value, 1);
    *ndim = n;
    if (call->has_mask) {
        CA_TRY(check_mask(&call->attn_mask, n, shape, size_at(&call->key, 2), error));
    }
    int64_t count;
    CA_TRY(ca_shape_count(n, shape, "the result", &count, error));
done:
    return status;
}

/* View `tensor` as (…, Hk, group, rows, columns): its leading dimensions follow
   `shape`, its heads are split in groups; a head dimension with one head for each
   group (key, value) repeats it. `trailing` is 2, or 1 for lse. */
static ca_tensor
grouped_view(const ca_tensor *tensor, int trailing, int nleading, int64_t Hq,
             int64_t Hk, const int64_t *shape)
{
    ca_tensor view = {.dtype = tensor->dtype, .data = tensor->data};
    if (tensor->data == NULL) {
        return view;
    }
    int64_t group = Hk > 0 ? Hq / Hk : 1;
    for (int d = 0; d < nleading; d++) {
        int from_end = nleading - d + trailing;
        int64_t stride = stride_at(tensor, from_end);
        if (d < nleading - 1) {
            view.shape[view.ndim] = shape[d];
            view.strides[view.ndim++] = stride;
            continue;
        }
        bool shared = size_at(tensor, from_end) != Hq; /* key and value heads */
        view.shape[view.ndim] = Hk;
        view.strides[view.ndim++] = shared ? stride : stride * group;
        view.shape[view.ndim] = group;
        view.strides[view.ndim++] = shared ? 0 : stride;
    }
    for (int from_end = trailing; from_end > 0; from_end--) {
        view.shape[view.ndim] = size_at(tensor, from_end);
        view.strides[view.ndim++] = stride_at(tensor, from_end);
    }
    return view;
}

void
ca_torch_sdpa_problem(const ca_torch_sdpa *call, const ca_tensor *output,
                      const ca_tensor *lse, ca_attention *attention)
{
    int nleading = output->ndim - 2;
    const int64_t *shape = output->shape;
    int64_t Hq = size_at(output, 3);
    int64_t Hk = call->enable_gqa ? size_at(&call->key, 3) : Hq;
    int64_t L = size_at(&call->query, 2);
    int64_t S = size_at(&call->key, 2);
    int64_t E = size_at(&call->query, 1);

    attention->query = grouped_view(&call->query, 2, nleading, Hq, Hk, shape);
    attention->key = grouped_view(&call->key, 2, nleading, Hq, Hk, shape);
    attention->value = grouped_view(&call->value, 2, nleading, Hq, Hk, shape);
    attention->mask = grouped_view(&call->attn_mask, 2, nleading, Hq, Hk, shape);
    attention->output = grouped_view(output, 2, nleading, Hq, Hk, shape);
    attention->lse = grouped_view(lse, 1, nleading, Hq, Hk, shape);
    attention->scale = call->has_scale ? call->scale : E > 0 ? 1 / sqrt((double)E) : 1;
    attention->softcap = call->softcap;

    int64_t shift = call->causal == CA_CAUSAL_LOWER_RIGHT ? S - L : 0;
    attention->below = CA_BAND_UNBOUNDED;
    attention->above = CA_BAND_UNBOUNDED;
    if (call->window_left != CA_BAND_UNBOUNDED) {
        attention->below = call->window_left - shift;
    }
    if (call->window_right != CA_BAND_UNBOUNDED) {
        attention->above = call->window_right + shift;
    }
    if (call->causal != CA_CAUSAL_NONE && shift < attention->above) {
        attention->above = shift;
    }
}
