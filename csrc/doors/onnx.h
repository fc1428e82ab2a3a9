/* SPDX-License-Identifier: MIT
 *
 * ONNX Attention, opsets 23, 24 and 25: its rules, and its inputs and attributes as an
 * attention problem.
 */
#ifndef CLATTN_DOORS_ONNX_H
#define CLATTN_DOORS_ONNX_H

#include <stdbool.h>
#include <stdint.h>

#include "attention/problem.h"
#include "base/status.h"
#include "base/tensor.h"

/* Inputs that are not given are absent. Attributes are within their ranges. */
typedef struct {
    ca_tensor Q;                /* (B, Hq, L, E) or (B, L, Hq E) */
    ca_tensor K;                /* (B, Hk, S, E) or (B, S, Hk E) */
    ca_tensor V;                /* (B, Hk, S, Ev) or (B, S, Hk Ev) */
    ca_tensor attn_mask;        /* broadcasts to (B, Hq, L, T) */
    ca_tensor past_key;         /* (B, Hk, P, E) */
    ca_tensor past_value;       /* (B, Hk, P, Ev) */
    ca_tensor nonpad_kv_seqlen; /* (B) int64 */
    bool is_causal;
    bool has_scale; /* else 1/sqrt(E) */
    bool pre_errata;
    int64_t q_num_heads; /* 0: not given */
    int64_t kv_num_heads;
    int64_t qk_matmul_output_mode; /* 0 … 3, as ca_scores_stage */
    int64_t softmax_precision;     /* a TensorProto data type; 0: not given */
    int64_t left_window_size;      /* -1: no bound */
    int64_t right_window_size;
    int64_t opset;
    double scale;
    double softcap; /* 0: none */
} ca_onnx_attention;

/* TensorProto.DataType, as softmax_precision has it. */
enum {
    CA_ONNX_FLOAT = 1,
    CA_ONNX_FLOAT16 = 10,
    CA_ONNX_DOUBLE = 11,
    CA_ONNX_BFLOAT16 = 16,
};

typedef struct {
    int64_t B, Hq, Hk, L, S, P, T, E, Ev;
} ca_onnx_sizes;

/* Check every rule. CA_ERROR_TYPE or CA_ERROR_VALUE naming the argument. */
ca_status ca_onnx_attention_check(const ca_onnx_attention *call, ca_onnx_sizes *sizes,
                                  ca_error *error);

/* The outputs of a checked call: Y (B, Hq, L, Ev), or (B, L, Hq Ev) for inputs of three
   dimensions; present_key (B, Hk, T, E); present_value (B, Hk, T, Ev); qk (B, Hq, L,
   T). An output that is not wanted is absent. */
typedef struct {
    ca_tensor Y;
    ca_tensor present_key;
    ca_tensor present_value;
    ca_tensor qk;
} ca_onnx_outputs;

/* Set the options and views of the checked call, which are to be folded. */
void ca_onnx_attention_views(const ca_onnx_attention *call, const ca_onnx_sizes *sizes,
                             const ca_onnx_outputs *outputs, ca_attention *attention,
                             ca_tensor views[CA_ATTENTION_OPERANDS]);

#endif
