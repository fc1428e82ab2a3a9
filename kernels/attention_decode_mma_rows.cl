/* SPDX-License-Identifier: MIT
 *
 * How a work-group of attention_decode_mma.cl ends its rows: its warps, each of which has
 * a softmax of its own over some of the keys, are merged by log-sum-exp, and the rows are
 * written, or left to attention_decode_gpu_merge.cl.
 */
#ifndef CLATTN_ATTENTION_DECODE_MMA_ROWS_CL
#define CLATTN_ATTENTION_DECODE_MMA_ROWS_CL

#include "attention_decode_mma_tiles.cl"
#include "attention_keys.cl"  /* TO_LOG2, TO_NATURAL */
#include "attention_parts.cl" /* base_of, partial_row */

/* A unit of a result is half the rows and 64 columns: two numbers of each lane for each
   of 8 tiles. */
#define UNITS       (2 * VALUE_LOADS)
#define UNIT_PAIRS  (8 * WARP_LANES)
#define RESULT_SIZE (WARPS * UNITS * UNIT_PAIRS / 2) /* in chunks of 16 bytes */

/* Local memory of the end. */
typedef struct {
    __local float *highest; /* [WARPS * TILE_ROWS], of each warp's scores */
    __local float *sum;     /* the same, of its weights */
    __local float2 *result; /* [WARPS * UNITS * UNIT_PAIRS] */
    __local int *redo;      /* [TILE_ROWS], 0 at the start */
} end_memory;

/* The highest score of all warps. */
static inline float
highest_of(const end_memory *memory, int row)
{
    float highest = -INFINITY;
    for (int w = 0; w < WARPS; w++) {
        highest = fmax(highest, memory->highest[w * TILE_ROWS + row]);
    }
    return highest;
}

static inline float
sum_of(const end_memory *memory, int row)
{
    float sum = 0.0f;
    for (int w = 0; w < WARPS; w++) {
        sum += memory->sum[w * TILE_ROWS + row];
    }
    return sum;
}

/* Put the warp's rows where all read them, relative to the highest score of all warps,
   and as if weights had not been rounded: the rounding of a row's sum cancels its
   weights', but the log-sum-exp wants the exact one. */
static inline void
share_rows(const warp_state *warp, const part_source *part, const end_memory *memory,
           const softmax_state *softmax, float4 *result)
{
    bool seen[2];
    float scale[2];
    WARP_UNROLL
    for (int r = 0; r < 2; r++) {
        seen[r] =
            sum_of_four(warp, (softmax->seen >> r & 1u) != 0u ? 1.0f : 0.0f) != 0.0f;
        if (part->t == 0) {
            memory->highest[warp->index * TILE_ROWS + part->g + 8 * r] =
                seen[r] ? softmax->base[r] : -INFINITY;
        }
    }
    /* highest scores, before they are compared; queries are read, before results take
       their place */
    barrier(CLK_LOCAL_MEM_FENCE);
    WARP_UNROLL
    for (int r = 0; r < 2; r++) {
        const int row = part->g + 8 * r;
        const float rounded = r == 0 ? softmax->rounded[0].x : softmax->rounded[0].z;
        const float factor =
            warp_exp2(TO_LOG2(softmax->base[r] - base_of(highest_of(memory, row))));
        const float sum = sum_of_four(warp, softmax->sum[r]) * factor;
        scale[r] = sum / rounded;
        if (part->t == 0) {
            memory->sum[warp->index * TILE_ROWS + row] = seen[r] ? sum : 0.0f;
        }
    }
    __local float2 *own = memory->result + warp->index * (UNITS * UNIT_PAIRS);
    WARP_UNROLL
    for (int c = 0; c < EV_TILES; c++) {
        __local float2 *to = own + (c / 8 * 16 + c % 8) * WARP_LANES + warp->lane;
        to[0] = seen[0] ? result[c].xy * scale[0] : (float2)0.0f;
        to[UNIT_PAIRS] = seen[1] ? result[c].zw * scale[1] : (float2)0.0f;
    }
}

/* Write 16 columns of a row from `column` on. One that is not finite is marked to be
   computed again: it may have met a NaN or infinity of a key that another row attends
   to, as 0 * NaN. */
static inline void
write_columns(const attention_call *call, const ca_int64 *batch, ca_int64 i, int column,
              const float *x, float inverse, __local int *redo)
{
    const ca_view *view = &call->params->output;
    __global storage *row = call->output + ca_offset(view, batch, i, 0);
    const int count = min(16, HEAD_EV - column);
    bool finite = true;
    for (int n = 0; n < count; n++) {
        const float quotient = x[n] * inverse;
        finite = finite && quotient * 0.0f == 0.0f;
        store(quotient, row + (column + n) * view->column);
    }
    if (!finite) {
        atomic_or(redo, 1);
    }
}

/* Leave them to the merge: attention_decode_gpu_merge.cl. */
static inline void
leave_columns(__global float *partial, int column, const float *x)
{
    for (int n = 0; n < 16 && column + n < HEAD_EV; n += 4) {
        vstore4(vload4(0, x + n), 0, partial + column + n);
    }
}

/* Write a part of the rows, or leave it to the merge. */
static inline void
write_rows(const warp_state *warp, const part_source *part, const end_memory *memory,
           const ca_int64 *batch, ca_int64 row0, int rows, ca_int64 split)
{
    const attention_call *call = part->call;
    const ca_attention_params *params = call->params;
    for (int unit = (int)warp->index; unit < UNITS; unit += WARPS) {
        const int row = part->g + unit % 2 * 8;
        const int column = unit / 2 * 64 + part->t * 16;
        float x[16];
        WARP_UNROLL
        for (int c = 0; c < 8; c++) {
            float2 sum = (float2)0.0f;
            for (int w = 0; w < WARPS; w++) {
                sum += memory->result[(w * UNITS + unit) * UNIT_PAIRS + c * WARP_LANES +
                                      warp->lane];
            }
            x[c] = sum.x;
            x[8 + c] = sum.y;
        }
        if (row >= rows) {
            continue;
        }
        const float highest = highest_of(memory, row);
        const float sum = sum_of(memory, row);
        ca_int64 row_batch[CA_BATCH_DIMS];
        const ca_int64 i = row_of(params, batch, row0 + row, row_batch);
        if (params->splits > 1) {
            __global float *partial =
                partial_row(call, row_batch, i, split, HEAD_EV + 4);
            leave_columns(partial, column, x);
            if (column == 0) {
                vstore4((float4)(highest, sum, 0.0f, 0.0f), 0, partial + HEAD_EV);
            }
        } else {
            /* a row without keys, all of whose x are 0, has no highest score */
            const float inverse = highest == -INFINITY ? 0.0f : 1.0f / sum;
            write_columns(call, row_batch, i, column, x, inverse, memory->redo + row);
            if (column == 0 && (params->flags & CA_HAS_LSE)) {
                call->lse[ca_offset(&params->lse, row_batch, i, 0)] =
                    TO_NATURAL(base_of(highest)) + log(sum);
            }
        }
    }
}

#endif
