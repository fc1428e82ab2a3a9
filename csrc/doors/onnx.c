/* SPDX-License-Identifier: MIT
 *
 * The rules of https://onnx.ai/onnx/operators/onnx__Attention.html, as corrected in
 * ONNX 1.23 and as first published (pre_errata).
 */
#include "doors/onnx.h"

#include "doors/common.h"

static bool
given(const ca_tensor *tensor)
{
    return tensor->data != NULL;
}

static ca_status
check_dtypes(const ca_onnx_attention *call, ca_error *error)
{
    const struct {
        const char *name;
        const ca_tensor *tensor;
        ca_dtype dtype;
        const char *like;
    } rules[] = {
        {"K", &call->K, call->Q.dtype, "that of Q"},
        {"past_key", &call->past_key, call->Q.dtype, "that of Q"},
        {"past_value", &call->past_value, call->V.dtype, "that of V"},
        {"nonpad_kv_seqlen", &call->nonpad_kv_seqlen, CA_INT64, "as lengths are"},
    };
    for (size_t i = 0; i < sizeof(rules) / sizeof(rules[0]); i++) {
        if (rules[i].tensor->data != NULL && rules[i].tensor->dtype != rules[i].dtype) {
            return ca_error_set(error, CA_ERROR_TYPE, "%s has dtype %s; expected %s, %s",
                                rules[i].name, ca_dtype_name(rules[i].tensor->dtype),
                                ca_dtype_name(rules[i].dtype), rules[i].like);
        }
    }
    return CA_OK;
}

/* Refuse what the opset, or the operator as first published, does not have. */
static ca_status
check_edition(const ca_onnx_attention *call, ca_error *error)
{
    long long opset = (long long)call->opset;
    if (call->pre_errata && call->opset == 25) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "pre_errata is True with opset 25, which was published corrected; "
                            "expected opset 23 or 24");
    }
    if (call->pre_errata && call->opset == 23 && call->is_causal && given(&call->attn_mask)) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "attn_mask is given with is_causal, which opset 23 as first published "
                            "excludes; expected one of them");
    }
    if (given(&call->nonpad_kv_seqlen) && call->opset < 24) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "nonpad_kv_seqlen is given with opset %lld; expected 24 or later",
                            opset);
    }
    if (call->opset < 25 && (call->left_window_size != -1 || call->right_window_size != -1)) {
        bool left = call->left_window_size != -1;
        return ca_error_set(
            error, CA_ERROR_VALUE, "%s is %lld with opset %lld; expected -1 before 25",
            left ? "left_window_size" : "right_window_size",
            (long long)(left ? call->left_window_size : call->right_window_size), opset);
    }
    return CA_OK;
}

static ca_status
check_scalars(const ca_onnx_attention *call, ca_error *error)
{
    ca_status status = CA_OK;
    ca_dtype dtype = call->softmax_precision == CA_ONNX_DOUBLE ? CA_FLOAT64
                     : call->V.dtype == CA_FLOAT64             ? CA_FLOAT64
                                                               : call->Q.dtype;
    CA_TRY(ca_door_check_scale(call->has_scale, call->scale, dtype, error));
    if (call->has_scale && call->scale < 0) {
        CA_TRY(ca_error_set(
            error, CA_ERROR_VALUE,
            "scale is %g; expected 0 or more, as Q and K are scaled by its square root",
            call->scale));
    }
    CA_TRY(ca_door_check_softcap(call->softcap, error));
done:
    return status;
}

/* Find the heads of one input and their size. `heads` is the attribute's number of heads;
   0: not given. */
static ca_status
split_heads(const ca_tensor *tensor, const char *name, const char *attribute, int64_t heads,
            int64_t *count, int64_t *size, ca_error *error)
{
    int64_t last = ca_tensor_size(tensor, 1);
    if (tensor->ndim == 4) {
        *count = tensor->shape[1];
        *size = last;
        if (heads != 0 && heads != *count) {
            return ca_error_set(error, CA_ERROR_VALUE,
                                "%s is %lld; expected %lld, the heads of %s (shape %s)", attribute,
                                (long long)heads, (long long)*count, name, CA_SHAPE_OF(tensor));
        }
        return CA_OK;
    }
    if (heads == 0) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "%s is not given; expected the number of heads of %s, which has three "
                            "dimensions (shape %s)",
                            attribute, name, CA_SHAPE_OF(tensor));
    }
    if (last % heads != 0) {
        return ca_error_set(
            error, CA_ERROR_VALUE,
            "%s has last dimension %lld (shape %s); expected a multiple of %s, %lld", name,
            (long long)last, CA_SHAPE_OF(tensor), attribute, (long long)heads);
    }
    *count = heads;
    *size = last / heads;
    return CA_OK;
}

/* Check that Q, K and V agree, and find all sizes but P and T. */
static ca_status
check_inputs(const ca_onnx_attention *call, ca_onnx_sizes *sizes, ca_error *error)
{
    ca_status status = CA_OK;
    const struct {
        const char *name;
        const ca_tensor *tensor;
    } inputs[] = {{"Q", &call->Q}, {"K", &call->K}, {"V", &call->V}};
    for (int i = 0; i < 3; i++) {
        int ndim = inputs[i].tensor->ndim;
        if ((ndim != 3 && ndim != 4) || ndim != call->Q.ndim) {
            CA_TRY(
                ca_error_set(error, CA_ERROR_VALUE,
                             "%s has shape %s; expected three or four dimensions, as many as Q's",
                             inputs[i].name, CA_SHAPE_OF(inputs[i].tensor)));
        }
    }
    int64_t key_size;
    int64_t value_heads;
    CA_TRY(
        split_heads(&call->Q, "Q", "q_num_heads", call->q_num_heads, &sizes->Hq, &sizes->E, error));
    CA_TRY(split_heads(&call->K, "K", "kv_num_heads", call->kv_num_heads, &sizes->Hk, &key_size,
                       error));
    CA_TRY(split_heads(&call->V, "V", "kv_num_heads", call->kv_num_heads, &value_heads, &sizes->Ev,
                       error));
    sizes->B = call->Q.shape[0];
    sizes->L = ca_tensor_size(&call->Q, 2);
    sizes->S = ca_tensor_size(&call->K, 2);
    if (call->Q.ndim == 3) {
        sizes->L = call->Q.shape[1];
        sizes->S = call->K.shape[1];
    }
    const ca_door_equal equal[] = {
        {"K", &call->K, "batch size", call->K.shape[0], "Q", &call->Q, sizes->B},
        {"V", &call->V, "batch size", call->V.shape[0], "Q", &call->Q, sizes->B},
        {"K", &call->K, "head size", key_size, "Q", &call->Q, sizes->E},
        {"V", &call->V, "number of heads", value_heads, "K", &call->K, sizes->Hk},
        {"V", &call->V, "length", ca_tensor_size(&call->V, 2), "K", &call->K, sizes->S},
    };
    for (size_t i = 0; i < sizeof(equal) / sizeof(equal[0]); i++) {
        CA_TRY(ca_door_check_equal(&equal[i], error));
    }
    CA_TRY(ca_door_check_head_size("Q", &call->Q, sizes->E, error));
    CA_TRY(ca_door_check_head_size("V", &call->V, sizes->Ev, error));
    if (sizes->Hk == 0 ? sizes->Hq != 0 : sizes->Hq == 0 || sizes->Hq % sizes->Hk != 0) {
        CA_TRY(ca_error_set(error, CA_ERROR_VALUE,
                            "Q has %lld heads; expected K's %lld or a multiple",
                            (long long)sizes->Hq, (long long)sizes->Hk));
    }
done:
    return status;
}

static ca_status
check_past(const ca_onnx_attention *call, ca_onnx_sizes *sizes, ca_error *error)
{
    sizes->P = 0;
    sizes->T = sizes->S;
    if (given(&call->past_key) != given(&call->past_value)) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "%s is given without %s; expected both or neither",
                            given(&call->past_key) ? "past_key" : "past_value",
                            given(&call->past_key) ? "past_value" : "past_key");
    }
    if (!given(&call->past_key)) {
        return CA_OK;
    }
    if (given(&call->nonpad_kv_seqlen)) {
        return ca_error_set(
            error, CA_ERROR_VALUE,
            "nonpad_kv_seqlen is given with past_key and past_value; expected one kind of cache");
    }
    const struct {
        const char *name;
        const ca_tensor *tensor;
        int64_t size;
    } inputs[] = {{"past_key", &call->past_key, sizes->E},
                  {"past_value", &call->past_value, sizes->Ev}};
    sizes->P = ca_tensor_size(&call->past_key, 2);
    for (int i = 0; i < 2; i++) {
        int64_t expected[] = {sizes->B, sizes->Hk, sizes->P, inputs[i].size};
        bool fits = inputs[i].tensor->ndim == 4;
        for (int d = 0; fits && d < 4; d++) {
            fits = inputs[i].tensor->shape[d] == expected[d];
        }
        if (!fits) {
            return ca_error_set(error, CA_ERROR_VALUE, "%s has shape %s; expected %s",
                                inputs[i].name, CA_SHAPE_OF(inputs[i].tensor),
                                CA_SHAPE_WORDS(4, expected));
        }
    }
    sizes->T = sizes->P + sizes->S;
    return CA_OK;
}

/* Check the numbers, on the host; *longest is the largest. */
static ca_status
check_nonpad(const ca_onnx_attention *call, const ca_onnx_sizes *sizes, int64_t *longest,
             ca_error *error)
{
    const ca_tensor *nonpad = &call->nonpad_kv_seqlen;
    *longest = 0;
    if (!given(&call->nonpad_kv_seqlen)) {
        return CA_OK;
    }
    if (nonpad->ndim != 1 || nonpad->shape[0] != sizes->B) {
        return ca_error_set(
            error, CA_ERROR_VALUE,
            "nonpad_kv_seqlen has shape %s; expected (%lld,), one number for each batch",
            CA_SHAPE_OF(nonpad), (long long)sizes->B);
    }
    const int64_t *counts = nonpad->data;
    for (int64_t b = 0; b < sizes->B; b++) {
        int64_t count = counts[b * nonpad->strides[0]];
        if (count < 0 || count > sizes->S) {
            return ca_error_set(
                error, CA_ERROR_VALUE,
                "nonpad_kv_seqlen[%lld] is %lld; expected 0 to %lld, the length of K", (long long)b,
                (long long)count, (long long)sizes->S);
        }
        *longest = count > *longest ? count : *longest;
    }
    return CA_OK;
}

static ca_status
check_mask(const ca_onnx_attention *call, const ca_onnx_sizes *sizes, int64_t longest,
           ca_error *error)
{
    const ca_tensor *mask = &call->attn_mask;
    if (!given(&call->attn_mask)) {
        return CA_OK;
    }
    int64_t scores[] = {sizes->B, sizes->Hq, sizes->L, sizes->T};
    int64_t columns = ca_tensor_size(mask, 1);
    bool short_allowed = call->opset >= 24 && mask->ndim > 0;
    bool fits = mask->ndim <= 4 &&
                (columns == sizes->T || (short_allowed ? columns < sizes->T : columns == 1));
    for (int from_end = 2; fits && from_end <= mask->ndim; from_end++) {
        int64_t size = ca_tensor_size(mask, from_end);
        fits = size == 1 || size == scores[4 - from_end];
    }
    if (!fits) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "attn_mask has shape %s; expected one that broadcasts to %s%s",
                            CA_SHAPE_OF(mask), CA_SHAPE_WORDS(4, scores),
                            short_allowed ? ", or a shorter last dimension" : "");
    }
    if (short_allowed && columns < longest) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "attn_mask has shape %s; expected a last dimension of %lld or more, "
                            "the largest nonpad_kv_seqlen",
                            CA_SHAPE_OF(mask), (long long)longest);
    }
    return CA_OK;
}

ca_status
ca_onnx_attention_check(const ca_onnx_attention *call, ca_onnx_sizes *sizes, ca_error *error)
{
    ca_status status = CA_OK;
    int64_t longest;
    int64_t count;
    CA_TRY(check_dtypes(call, error));
    CA_TRY(check_edition(call, error));
    CA_TRY(check_scalars(call, error));
    CA_TRY(check_inputs(call, sizes, error));
    CA_TRY(check_past(call, sizes, error));
    CA_TRY(check_nonpad(call, sizes, &longest, error));
    CA_TRY(check_mask(call, sizes, longest, error));
    int64_t Y[] = {sizes->B, sizes->Hq, sizes->L, sizes->Ev};
    CA_TRY(ca_shape_count(4, Y, "Y", &count, error));
    int64_t scores[] = {sizes->B, sizes->Hq, sizes->L, sizes->T};
    CA_TRY(ca_shape_count(4, scores, "qk_matmul_output", &count, error));
done:
    return status;
}

/* ---- the problem ---- */

/* View (B, H, rows, size), or (B, rows, H size), as (B, Hk, H / Hk, rows, size). */
static void
view_heads(const ca_tensor *tensor, int64_t heads, const ca_onnx_sizes *sizes, ca_tensor *view)
{
    int64_t leading[] = {sizes->B, sizes->Hq};
    ca_tensor split;
    if (tensor->ndim == 3 && given(tensor)) {
        ca_door_split_heads(tensor, heads, &split);
        tensor = &split;
    }
    ca_door_view_grouped(tensor, 2, 2, leading, sizes->Hk, view);
}

/* A mask of one row broadcasts. One of one column does where the opset does not allow
   masks that are shorter than the keys. */
static void
view_mask(const ca_onnx_attention *call, const ca_onnx_sizes *sizes, ca_tensor *view)
{
    int64_t leading[] = {sizes->B, sizes->Hq};
    ca_door_view_grouped(&call->attn_mask, 2, 2, leading, sizes->Hk, view);
    ca_door_broadcast_dim(view, 2, sizes->L);
    if (call->opset < 24 || call->attn_mask.ndim == 0) {
        ca_door_broadcast_dim(view, 1, sizes->T);
    }
}

/* A window that is wider than any tensor is no window. */
#define WIDEST_WINDOW (INT64_MAX / 4)

static int64_t
window_side(int64_t size)
{
    return size >= 0 && size < WIDEST_WINDOW ? size : CA_BAND_UNBOUNDED;
}

/* Row i stands at key i + offset; kernels add nonpad_kv_seqlen. */
static void
set_band(const ca_onnx_attention *call, const ca_onnx_sizes *sizes, ca_attention *attention)
{
    bool has_nonpad = given(&call->nonpad_kv_seqlen);
    int64_t offset = 0;
    if (!call->pre_errata) {
        offset = has_nonpad ? -sizes->L : sizes->P;
        attention->band_follows_counts = has_nonpad;
    }
    ca_door_set_band(attention, window_side(call->left_window_size),
                     window_side(call->right_window_size), call->is_causal, offset);
}

void
ca_onnx_attention_views(const ca_onnx_attention *call, const ca_onnx_sizes *sizes,
                        const ca_onnx_outputs *outputs, ca_attention *attention,
                        ca_tensor views[CA_ATTENTION_OPERANDS])
{
    ca_attention_init(attention, views);
    view_heads(&call->Q, sizes->Hq, sizes, &views[CA_ATTENTION_QUERY]);
    view_heads(&call->K, sizes->Hk, sizes, &views[CA_ATTENTION_KEY]);
    view_heads(&call->V, sizes->Hk, sizes, &views[CA_ATTENTION_VALUE]);
    view_heads(&call->past_key, sizes->Hk, sizes, &views[CA_ATTENTION_PAST_KEY]);
    view_heads(&call->past_value, sizes->Hk, sizes, &views[CA_ATTENTION_PAST_VALUE]);
    view_heads(&outputs->Y, sizes->Hq, sizes, &views[CA_ATTENTION_OUTPUT]);
    view_heads(&outputs->present_key, sizes->Hk, sizes, &views[CA_ATTENTION_PRESENT_KEY]);
    view_heads(&outputs->present_value, sizes->Hk, sizes, &views[CA_ATTENTION_PRESENT_VALUE]);
    view_heads(&outputs->qk, sizes->Hq, sizes, &views[CA_ATTENTION_SCORES]);
    view_mask(call, sizes, &views[CA_ATTENTION_MASK]);
    if (given(&call->nonpad_kv_seqlen)) {
        int64_t leading[] = {sizes->B, sizes->Hq};
        ca_tensor row = call->nonpad_kv_seqlen; /* (B, 1) */
        row.ndim = 2;
        row.shape[1] = 1;
        ca_door_view_grouped(&row, 0, 2, leading, sizes->Hk, &views[CA_ATTENTION_KEY_COUNTS]);
    }
    attention->mask_is_added = call->attn_mask.dtype != CA_BOOL;
    set_band(call, sizes, attention);
    attention->scale = call->has_scale ? call->scale : ca_door_default_scale(sizes->E);
    attention->softcap = call->softcap;
    attention->mask_before_softcap = call->pre_errata;
    attention->in_float64 = call->softmax_precision == CA_ONNX_DOUBLE;
    attention->stage = (ca_scores_stage)call->qk_matmul_output_mode;
}
