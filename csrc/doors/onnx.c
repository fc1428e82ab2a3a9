/* SPDX-License-Identifier: MIT */
#include "doors/onnx.h"

#include "doors/common.h"

/* View (B, H, rows, size), or (B, rows, H size), as (B, Hk, H / Hk, rows, size). */
static void
view_heads(const ca_tensor *tensor, int64_t heads, const ca_onnx_sizes *sizes,
           ca_tensor *view)
{
    int64_t leading[] = {sizes->B, sizes->Hq};
    ca_tensor split;
    if (tensor->ndim != 3 || tensor->data == NULL) {
        ca_spec_view_grouped(tensor, 2, 2, leading, sizes->Hk, view);
        return;
    }
    ca_spec_split_heads(tensor, heads, &split);
    ca_spec_view_grouped(&split, 2, 2, leading, sizes->Hk, view);
}

/* Rows of a mask broadcast, columns do where a shorter mask is not padded. */
static void
view_mask(const ca_onnx_attention *call, const ca_onnx_sizes *sizes, ca_tensor *view)
{
    int64_t leading[] = {sizes->B, sizes->Hq};
    ca_spec_view_grouped(&call->attn_mask, 2, 2, leading, sizes->Hk, view);
    ca_spec_broadcast_rows(view, sizes->L);
    if (call->opset < 24 || call->attn_mask.ndim == 0) {
        ca_spec_broadcast_columns(view, sizes->T);
    }
}

/* A window that is wider than any tensor is no window. */
#define WIDEST_WINDOW (INT64_MAX / 4)

static int64_t
window_side(int64_t size)
{
    return size >= 0 && size < WIDEST_WINDOW ? size : CA_BAND_UNBOUNDED;
}

/* Row i stands at key i + offset; the core adds nonpad_kv_seqlen. */
static void
set_band(const ca_onnx_attention *call, const ca_onnx_sizes *sizes,
         ca_attention *attention)
{
    bool has_nonpad = call->nonpad_kv_seqlen.data != NULL;
    int64_t offset = 0;
    if (!call->pre_errata) {
        offset = has_nonpad ? -sizes->L : sizes->P;
        attention->band_follows_counts = has_nonpad;
    }
    ca_spec_set_band(attention, window_side(call->left_window_size),
                     window_side(call->right_window_size), call->is_causal, offset);
}

int64_t
ca_onnx_attention_problem(const ca_onnx_attention *call, const ca_onnx_sizes *sizes,
                          const ca_onnx_outputs *outputs, int64_t index,
                          ca_attention *attention)
{
    ca_tensor views[CA_ATTENTION_OPERANDS];
    ca_attention_init(attention, views);
    view_heads(&call->Q, sizes->Hq, sizes, &views[CA_ATTENTION_QUERY]);
    view_heads(&call->K, sizes->Hk, sizes, &views[CA_ATTENTION_KEY]);
    view_heads(&call->V, sizes->Hk, sizes, &views[CA_ATTENTION_VALUE]);
    view_heads(&call->past_key, sizes->Hk, sizes, &views[CA_ATTENTION_PAST_KEY]);
    view_heads(&call->past_value, sizes->Hk, sizes, &views[CA_ATTENTION_PAST_VALUE]);
    view_heads(&outputs->Y, sizes->Hq, sizes, &views[CA_ATTENTION_OUTPUT]);
    view_heads(&outputs->present_key, sizes->Hk, sizes,
               &views[CA_ATTENTION_PRESENT_KEY]);
    view_heads(&outputs->present_value, sizes->Hk, sizes,
               &views[CA_ATTENTION_PRESENT_VALUE]);
    view_heads(&outputs->qk, sizes->Hq, sizes, &views[CA_ATTENTION_SCORES]);
    view_mask(call, sizes, &views[CA_ATTENTION_MASK]);
    if (call->nonpad_kv_seqlen.data != NULL) {
        ca_tensor *counts = &views[CA_ATTENTION_KEY_COUNTS];
        int64_t leading[] = {sizes->B, sizes->Hq};
        ca_tensor row = call->nonpad_kv_seqlen; /* (B, 1) */
        row.ndim = 2;
        row.shape[1] = 1;
        ca_spec_view_grouped(&row, 0, 2, leading, sizes->Hk, counts);
    }
    attention->mask_is_added = call->attn_mask.dtype != CA_BOOL;
    set_band(call, sizes, attention);
    attention->scale = call->has_scale ? call->scale : ca_spec_default_scale(sizes->E);
    attention->softcap = call->softcap;
    attention->mask_before_softcap = call->pre_errata;
    attention->in_float64 = call->softmax_precision == CA_ONNX_DOUBLE;
    attention->stage = (ca_scores_stage)call->qk_matmul_output_mode;
    return ca_attention_fold(attention, views, index);
}
