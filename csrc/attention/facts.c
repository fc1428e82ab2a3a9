/* SPDX-License-Identifier: MIT
 *
 * Facts of an attention problem by which variants are chosen and planned.
 */
#include <float.h>
#include <math.h>

#include "attention/params.h" /* ca_attention_keys */
#include "attention/variants.h"

bool
ca_attention_in_float64(const ca_attention *attention)
{
    return attention->in_float64 ||
           attention->tensors[CA_ATTENTION_QUERY].dtype == CA_FLOAT64 ||
           attention->tensors[CA_ATTENTION_VALUE].dtype == CA_FLOAT64;
}

bool
ca_attention_has(const ca_attention *attention, ca_attention_tensor t)
{
    return attention->tensors[t].data != NULL;
}

double
ca_attention_softcap(const ca_attention *attention)
{
    double softcap = attention->softcap;
    if (ca_attention_in_float64(attention) || softcap == 0) {
        return softcap;
    }
    return softcap > FLT_MAX / 64 ? 0 : softcap < FLT_MIN ? FLT_MIN : softcap;
}

bool
ca_attention_caps_last(const ca_attention *attention)
{
    return attention->mask_before_softcap && ca_attention_softcap(attention) > 0;
}

bool
ca_attention_drops(const ca_attention *attention)
{
    return nearbyint(ldexp(attention->dropout, 32)) >= 1;
}

int64_t
ca_attention_head_size(const ca_attention *attention)
{
    return ca_tensor_size(&attention->tensors[CA_ATTENTION_QUERY], 1);
}

int64_t
ca_attention_value_head_size(const ca_attention *attention)
{
    return ca_tensor_size(&attention->tensors[CA_ATTENTION_VALUE], 1);
}

int64_t
ca_attention_rows(const ca_attention *attention)
{
    return ca_tensor_size(&attention->tensors[CA_ATTENTION_QUERY], 2);
}

int64_t
ca_attention_lanes(const ca_device_info *info, const ca_attention *attention)
{
    int64_t lanes = info->float_width >= 16 ? 16 : info->float_width >= 8 ? 8 : 4;
    return ca_attention_in_float64(attention) && lanes > 4 ? lanes / 2 : lanes;
}

bool
ca_attention_has_rows(const ca_tensor *tensor)
{
    return tensor->data != NULL && ca_tensor_size(tensor, 2) > 0;
}

bool
ca_attention_rows_contiguous(const ca_tensor *tensor)
{
    return !ca_attention_has_rows(tensor) || ca_tensor_size(tensor, 1) == 1 ||
           ca_tensor_stride(tensor, 1) == 1;
}

bool
ca_attention_rows_adjoin(const ca_tensor *tensor)
{
    return ca_attention_rows_contiguous(tensor) &&
           (!ca_attention_has_rows(tensor) || ca_tensor_size(tensor, 2) == 1 ||
            tensor->strides[tensor->ndim - 2] == ca_tensor_size(tensor, 1));
}

bool
ca_attention_is_wide(const ca_tensor *tensor)
{
    if (!ca_attention_has_rows(tensor)) {
        return true;
    }
    int64_t size = (int64_t)ca_dtype_size(tensor->dtype);
    int rows = tensor->ndim - 2; /* that dimension's stride is used even for one row */
    bool wide = ca_tensor_size(tensor, 1) * size % CA_WIDE_BYTES == 0 &&
                ca_attention_rows_contiguous(tensor) &&
                (uintptr_t)tensor->data % CA_WIDE_BYTES == 0;
    for (int d = 0; d <= rows; d++) {
        wide = wide && ((d < rows && tensor->shape[d] == 1) ||
                        tensor->strides[d] * size % CA_WIDE_BYTES == 0);
    }
    return wide;
}

int64_t
ca_attention_heads_together(const ca_leading_dims *dims)
{
    static const ca_attention_tensor shared[] = {
        CA_ATTENTION_KEY,          CA_ATTENTION_VALUE,      CA_ATTENTION_PAST_KEY,
        CA_ATTENTION_PAST_VALUE,   CA_ATTENTION_KEY_COUNTS, CA_ATTENTION_PRESENT_KEY,
        CA_ATTENTION_PRESENT_VALUE};
    if (dims->count == 0) {
        return 1;
    }
    int last = dims->count - 1;
    for (size_t n = 0; n < sizeof(shared) / sizeof(shared[0]); n++) {
        if (dims->stride[last][shared[n]] != 0) {
            return 1;
        }
    }
    return dims->size[last];
}

int64_t
ca_attention_visible_keys(const ca_attention *attention)
{
    int64_t T = ca_attention_keys(attention);
    if (attention->below >= T || attention->above >= T) {
        return T;
    }
    int64_t band = attention->below + attention->above + ca_attention_rows(attention);
    return band < 0 ? 0 : ca_smaller(band, T);
}
