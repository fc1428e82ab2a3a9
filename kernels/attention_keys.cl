/* SPDX-License-Identifier: MIT
 *
 * What the kernels that walk keys block by block share: the two segments of keys, past
 * and new, and the unit of scores.
 */
#ifndef CLATTN_ATTENTION_KEYS_CL
#define CLATTN_ATTENTION_KEYS_CL

#include "common.cl"

/* Scores are in units of log 2, so that exp2 needs no factor; but natural where numbers
   are added to them, so that adding the lowest float does not overflow to -inf, and
   where they are written. */
#if MASK_ADDS || FILTER || BIAS || SCORES >= 0
#define SCORE_UNIT    REAL(1.0) /* what a natural score is multiplied by */
#define TO_LOG2(x)    ((x) * LOG2_E)
#define TO_NATURAL(x) (x)
#else
#define SCORE_UNIT    LOG2_E
#define TO_LOG2(x)    (x)
#define TO_NATURAL(x) ((x) * LN_2)
#endif

/* Keys start … end - 1, which lie in one tensor: the past ones or the new ones. */
typedef struct {
    __global const storage *key; /* key `start` */
    __global const value_storage *value;
    const ca_view *key_view;
    const ca_view *value_view;
    __global const storage *key_bias; /* NULL: none */
    __global const storage *value_bias;
    ca_int64 start;
    ca_int64 end;
} key_segment;

#define SEGMENTS (PAST + 1)

static inline key_segment
segment_at(const attention_call *call, const ca_int64 *batch, int index)
{
    const ca_attention_params *params = call->params;
    const bool past = index < SEGMENTS - 1;
    key_segment segment;
    segment.key_view = past ? &params->past_key : &params->key;
    segment.value_view = past ? &params->past_value : &params->value;
    segment.key =
        (past ? call->past_key : call->key) + ca_offset(segment.key_view, batch, 0, 0);
    segment.value = (past ? call->past_value : call->value) +
                    ca_offset(segment.value_view, batch, 0, 0);
    segment.key_bias = 0;
    segment.value_bias = 0;
#if INPUT_BIAS
    if (!past) {
        segment.key_bias =
            call->input_bias + ca_offset(&params->input_bias, batch, 0, 0) + params->E;
        segment.value_bias = segment.key_bias + params->E;
    }
#endif
    segment.start = past ? 0 : PAST ? params->P : 0;
    segment.end = past ? params->P : params->T;
    return segment;
}

#endif
