/* SPDX-License-Identifier: MIT
 *
 * How the work-groups of attention_decode_gpu.cl and attention_decode_gpu_merge.cl end a
 * row: their slices, each of which has a softmax of its own over some of the keys, are
 * merged by log-sum-exp, and the row is written.
 *
 *     slice     ROW_LANES neighbouring work-items, among which its columns are divided
 *     a lane's  PER_LANE chunks of CHUNK columns, ROW_LANES chunks apart
 *
 *     -DHEAD_EV  head size Ev, 1 … 512
 *     -DWG       work-items of a group
 *     -DRT       rows of a group
 *     CHUNK      columns side by side that one lane has
 */
#ifndef CLATTN_ATTENTION_DECODE_GPU_ROWS_CL
#define CLATTN_ATTENTION_DECODE_GPU_ROWS_CL

#include "attention_decode_gpu_forms.cl" /* score_exp2 */
#include "attention_keys.cl"             /* TO_LOG2, TO_NATURAL */
#include "attention_parts.cl"            /* base_of, partial_row */
#include "attention_row.cl"              /* attention_row */

#define ROW_CHUNKS ((HEAD_EV + CHUNK - 1) / CHUNK)
#define PER_LANE   ((ROW_CHUNKS + WG - 1) / WG)
#define ROW_LANES  ((ROW_CHUNKS + PER_LANE - 1) / PER_LANE)
#define SLICES   (WG / ROW_LANES) /* the work-items that are left have nothing to do */
#define COLUMNS  (PER_LANE * CHUNK)
#define ROW_SIZE (ROW_LANES * COLUMNS) /* Ev, rounded up */

/* 16 bytes of reals, the vectors of local memory and of partial rows: the sums, rounded
   up, then the highest score and the sum of weights. */
#if REAL64
#define PIECE 2
typedef double2 real_piece;
#else
#define PIECE 4
typedef float4 real_piece;
#endif
#define PARTIAL_SUMS ((HEAD_EV + PIECE - 1) / PIECE * PIECE)
#define PARTIAL_SIZE (PARTIAL_SUMS + PIECE)

/* The softmax of a slice so far. */
typedef struct {
    real highest[RT];           /* score */
    real sum[RT];               /* of weights */
    real columns[RT * COLUMNS]; /* of weights times values */
} slice_state;

static inline void
start_slice(slice_state *state)
{
#pragma unroll
    for (int r = 0; r < RT; r++) {
        state->highest[r] = -INFINITY;
        state->sum[r] = REAL(0.0);
    }
#pragma unroll
    for (int n = 0; n < RT * COLUMNS; n++) {
        state->columns[n] = REAL(0.0);
    }
}

/* Local memory of the end. `columns` are the slices' of one row, ROW_SIZE each. */
typedef struct {
    __local real *highest; /* [SLICES * RT] */
    __local real *sum;     /* the same */
    __local real *columns; /* [SLICES * ROW_SIZE] */
    __local int *redo;     /* [RT], 0 at the start */
} slice_memory;

/* Merge the slices' highest scores and sums of weights, and scale their columns. */
static inline void
merge_slices(slice_state *state, const slice_memory *memory, int slice, int lane)
{
    const bool speaks = slice < SLICES && lane == 0;
    real own[RT];
#pragma unroll
    for (int r = 0; r < RT; r++) {
        own[r] = state->highest[r];
        if (speaks) {
            memory->highest[slice * RT + r] = own[r];
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* highest scores, before they are compared */
#pragma unroll
    for (int r = 0; r < RT; r++) {
        for (int s = 0; s < SLICES; s++) {
            state->highest[r] = max(state->highest[r], memory->highest[s * RT + r]);
        }
        const real factor = score_exp2(TO_LOG2(own[r] - base_of(state->highest[r])));
        if (speaks) {
            memory->sum[slice * RT + r] = state->sum[r] * factor;
        }
#pragma unroll
        for (int n = 0; n < COLUMNS; n++) {
            state->columns[r * COLUMNS + n] *= factor;
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* sums of weights, before they are added */
#pragma unroll
    for (int r = 0; r < RT; r++) {
        real sum = REAL(0.0);
        for (int s = 0; s < SLICES; s++) {
            sum += memory->sum[s * RT + r];
        }
        state->sum[r] = sum;
    }
}

/* x[r * step], of an array that has to stay in registers. */
static inline real
pick(const real *x, int r, int step)
{
    real picked = x[0];
#pragma unroll
    for (int n = 1; n < RT; n++) {
        const real next = x[n * step];
        picked = r == n ? next : picked;
    }
    return picked;
}

/* Column c of a row, from all slices, after share_columns. */
static inline real
column_of_slices(const slice_memory *memory, int c)
{
    real sum = REAL(0.0);
    for (int s = 0; s < SLICES; s++) {
        sum += memory->columns[s * ROW_SIZE + c];
    }
    return sum;
}

/* Put the columns of row r where all work-items can read them. */
static inline void
share_columns(const slice_memory *memory, const slice_state *state, int r, int slice,
              int lane)
{
    barrier(CLK_LOCAL_MEM_FENCE); /* the row before is read, before this is written */
    if (slice < SLICES) {
#pragma unroll
        for (int n = 0; n < COLUMNS; n++) {
            const int c = (n / CHUNK * ROW_LANES + lane) * CHUNK + n % CHUNK;
            memory->columns[slice * ROW_SIZE + c] =
                pick(state->columns + n, r, COLUMNS);
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* columns, before they are added */
}

/* Write row i from its shared columns; zeros where it has no keys, so that its columns
   are of others' alone. One that is not finite is marked to be computed again: it may
   have met a NaN or infinity of an excluded key, as 0 * NaN. */
static inline void
write_row(const attention_call *call, const ca_int64 *batch, ca_int64 i,
          const slice_memory *memory, int r, real highest, real sum)
{
    const ca_attention_params *params = call->params;
    __global storage *row = call->output + ca_offset(&params->output, batch, i, 0);
    const int item = (int)get_local_id(0);
    const bool empty = highest == -INFINITY && sum == REAL(0.0);
    const real inverse = REAL(1.0) / sum;
    bool finite = true;
    for (int c = item; c < HEAD_EV; c += WG) {
        const real x = empty ? REAL(0.0) : column_of_slices(memory, c) * inverse;
        finite = finite && x * REAL(0.0) == REAL(0.0);
        store(x, row + c * params->output.column);
    }
    if (item == 0 && (params->flags & CA_HAS_LSE)) {
        call->lse[ca_offset(&params->lse, batch, i, 0)] =
            TO_NATURAL(base_of(highest)) + log(sum);
    }
    if (!finite) {
        atomic_or(&memory->redo[r], 1);
    }
}

/* Leave a part's row, from its shared columns, to the merge. */
static inline void
leave_row(__global real *partial, const slice_memory *memory, real highest, real sum)
{
    const int item = (int)get_local_id(0);
    for (int c = item; c < PARTIAL_SIZE; c += WG) {
        partial[c] = c < PARTIAL_SUMS        ? column_of_slices(memory, c)
                     : c == PARTIAL_SUMS     ? highest
                     : c == PARTIAL_SUMS + 1 ? sum
                                             : REAL(0.0);
    }
}

#endif
