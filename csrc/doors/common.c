/* SPDX-License-Identifier: MIT */
#include "doors/common.h"

#include <float.h>
#include <math.h>

void
ca_door_view_grouped(const ca_tensor *tensor, int trailing, int nleading, const int64_t *shape,
                     int64_t Hk, ca_tensor *view)
{
    ca_tensor_start_view(tensor, view);
    if (tensor->data == NULL) {
        return;
    }
    for (int d = 0; d < nleading - 1; d++) {
        ca_tensor_add_dim(view, shape[d], ca_tensor_stride(tensor, nleading - d + trailing));
    }
    if (nleading > 0) {
        int64_t Hq = shape[nleading - 1];
        int64_t group = Hk > 0 ? Hq / Hk : 1;
        int64_t stride = ca_tensor_stride(tensor, 1 + trailing);
        bool shared = ca_tensor_size(tensor, 1 + trailing) != Hq;
        ca_tensor_add_dim(view, Hk, shared ? stride : stride * group);
        ca_tensor_add_dim(view, group, shared ? 0 : stride);
    }
    for (int from_end = trailing; from_end > 0; from_end--) {
        ca_tensor_add_dim(view, ca_tensor_size(tensor, from_end),
                          ca_tensor_stride(tensor, from_end));
    }
}

void
ca_door_split_heads(const ca_tensor *tensor, int64_t H, ca_tensor *view)
{
    int64_t X = ca_tensor_size(tensor, 1) / H;
    int64_t column = ca_tensor_stride(tensor, 1);
    ca_tensor_start_view(tensor, view);
    ca_tensor_add_dim(view, ca_tensor_size(tensor, 3), ca_tensor_stride(tensor, 3));
    ca_tensor_add_dim(view, H, X * column);
    ca_tensor_add_dim(view, ca_tensor_size(tensor, 2), ca_tensor_stride(tensor, 2));
    ca_tensor_add_dim(view, X, column);
}

void
ca_door_broadcast_dim(ca_tensor *view, int from_end, int64_t size)
{
    if (view->data != NULL && ca_tensor_size(view, from_end) == 1) {
        view->shape[view->ndim - from_end] = size;
        view->strides[view->ndim - from_end] = 0;
    }
}

bool
ca_door_broadcast(const ca_tensor *tensor, int ndim, const int64_t *shape, ca_tensor *view)
{
    ca_tensor_start_view(tensor, view);
    for (int d = 0; d < ndim; d++) {
        int64_t size = ca_tensor_size(tensor, ndim - d);
        if (size != 1 && size != shape[d]) {
            return false;
        }
        ca_tensor_add_dim(view, shape[d], ca_tensor_stride(tensor, ndim - d));
    }
    return ca_door_has_leading_ones(tensor, ndim);
}

bool
ca_door_has_leading_ones(const ca_tensor *tensor, int trailing)
{
    for (int from_end = tensor->ndim; from_end > trailing; from_end--) {
        if (ca_tensor_size(tensor, from_end) != 1) {
            return false;
        }
    }
    return true;
}

ca_status
ca_door_check_dtypes(const ca_tensor *query, const ca_tensor *key, const ca_tensor *value,
                     ca_error *error)
{
    bool is_key = key->dtype != query->dtype;
    const ca_tensor *other = is_key ? key : value;
    if (other->dtype != query->dtype) {
        return ca_error_set(
            error, CA_ERROR_TYPE, "%s has dtype %s; expected %s, the dtype of query",
            is_key ? "key" : "value", ca_dtype_name(other->dtype), ca_dtype_name(query->dtype));
    }
    return CA_OK;
}

static ca_status
check_rank(const ca_tensor *tensor, const char *name, int lowest, ca_error *error)
{
    if (tensor->ndim < lowest) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "%s has shape %s; expected %d dimensions or more", name,
                            CA_SHAPE_OF(tensor), lowest);
    }
    return CA_OK;
}

ca_status
ca_door_check_equal(const ca_door_equal *rule, ca_error *error)
{
    if (rule->size != rule->expected) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "%s has %s %lld (shape %s); expected %lld, that of %s (shape %s)",
                            rule->name, rule->what, (long long)rule->size,
                            CA_SHAPE_OF(rule->tensor), (long long)rule->expected, rule->other_name,
                            CA_SHAPE_OF(rule->other));
    }
    return CA_OK;
}

ca_status
ca_door_check_head_size(const char *name, const ca_tensor *tensor, int64_t size, ca_error *error)
{
    if (size > CA_MOST_HEAD_SIZE) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "%s has head size %lld (shape %s); expected %d at most", name,
                            (long long)size, CA_SHAPE_OF(tensor), CA_MOST_HEAD_SIZE);
    }
    return CA_OK;
}

ca_status
ca_door_check_matrices(const ca_tensor *query, const ca_tensor *key, const ca_tensor *value,
                       int lowest_rank, ca_error *error)
{
    ca_status status = CA_OK;
    const ca_door_equal equal[] = {
        {"key", key, "head size", ca_tensor_size(key, 1), "query", query, ca_tensor_size(query, 1)},
        {"value", value, "length", ca_tensor_size(value, 2), "key", key, ca_tensor_size(key, 2)},
    };
    CA_TRY(check_rank(query, "query", lowest_rank, error));
    CA_TRY(check_rank(key, "key", lowest_rank, error));
    CA_TRY(check_rank(value, "value", lowest_rank, error));
    CA_TRY(ca_door_check_equal(&equal[0], error));
    CA_TRY(ca_door_check_equal(&equal[1], error));
    CA_TRY(ca_door_check_head_size("query", query, ca_tensor_size(query, 1), error));
    CA_TRY(ca_door_check_head_size("value", value, ca_tensor_size(value, 1), error));
done:
    return status;
}

ca_status
ca_door_check_scale(bool given, double scale, ca_dtype dtype, ca_error *error)
{
    if (given && !isfinite(scale)) {
        return ca_error_set(error, CA_ERROR_VALUE, "scale is %g; expected a finite number", scale);
    }
    if (given && dtype != CA_FLOAT64 && fabs(scale) > FLT_MAX / 2) {
        return ca_error_set(
            error, CA_ERROR_VALUE,
            "scale is %g; expected a magnitude of %.3g at most: scores of %s are float32", scale,
            FLT_MAX / 2, ca_dtype_name(dtype));
    }
    return CA_OK;
}

ca_status
ca_door_check_softcap(double softcap, ca_error *error)
{
    if (!(softcap >= 0) || isinf(softcap)) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "softcap is %g; expected a finite number of 0 (none) or more", softcap);
    }
    return CA_OK;
}

double
ca_door_default_scale(int64_t E)
{
    return E > 0 ? 1 / sqrt((double)E) : 1;
}

int64_t
ca_door_add_places(int64_t a, int64_t b)
{
    bool high = a > 0 && b > INT64_MAX - a;
    bool low = a < 0 && b < -INT64_MAX - a;
    return high ? INT64_MAX : low ? -INT64_MAX : a + b;
}

/* No row or key is farther away, and the sum of this and a length does not overflow. */
#define FARTHEST (INT64_MAX / 2)

static int64_t
within_reach(int64_t distance)
{
    return distance > FARTHEST ? FARTHEST : distance < -FARTHEST ? -FARTHEST : distance;
}

void
ca_door_set_band(ca_attention *attention, int64_t left, int64_t right, bool causal, int64_t shift)
{
    int64_t first = within_reach(ca_door_add_places(shift, -left));
    int64_t last = within_reach(ca_door_add_places(shift, right));
    attention->below = left != CA_BAND_UNBOUNDED ? -first : CA_BAND_UNBOUNDED;
    attention->above = right != CA_BAND_UNBOUNDED ? last : CA_BAND_UNBOUNDED;
    if (causal && within_reach(shift) < attention->above) {
        attention->above = within_reach(shift);
    }
}
