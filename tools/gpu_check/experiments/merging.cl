/* SPDX-License-Identifier: MIT
 *
 * Decoding with splits of the keys, which the last work-group of a row merges: one launch, not two. float16, head
 * size 128, one row for each head.
 *
 *     global size  rows * splits * 128, local size 128; of merge_splits: rows * 128
 *     work-group   one split of the keys of a row
 *     slice        16 neighbours, which take every 8th key; a lane has 8 columns
 *
 *     query, output  (rows, 128)
 *     key, value     (rows, S, 128)
 *     partial        (rows, splits, 132): sums of columns, the highest score, the sum of weights
 *     counters       (rows): how many splits are there; 0 before a launch and after it
 *
 *     -DMERGES  1: attend merges; 0: it leaves the splits to merge_splits
 */
#define DTYPE          CA_KERNEL_FLOAT16
#define VALUE_DTYPE    DTYPE
#define REAL64         0
#define WARP_SHUFFLES  1
#define SCORES_IN_LOG2 1
#include "kernels/support/exchange.clh"

#define THREADS 128
#define E       128
#define LANES   16 /* of a slice */
#define SLICES  (THREADS / LANES)
#define COLUMNS (E / LANES) /* of a lane */
#define PARTIAL (E + 4)

/* What this work-item has written before a barrier, and what others of its group have: before what follows, for
   all work-groups. */
#define FENCE_ALL() __asm__ volatile("fence.acq_rel.gpu;" ::: "memory")

/* Adds 1, or makes `last` 0. Returns the number before. */
INLINED uint
count_up(__global uint *counter, uint last)
{
    uint before;
    __asm__ volatile("atom.global.inc.u32 %0, [%1], %2;"
                     : "=r"(before)
                     : "l"(counter), "r"(last)
                     : "memory");
    return before;
}

/* The softmax of a slice. */
typedef struct {
    float highest;
    float sum;
    float columns[COLUMNS];
} slice_state;

INLINED void
load_row(__global const half *row, float *x)
{
    const uint4 raw = *(__global const uint4 *)row;
    const uint words[4] = {raw.s0, raw.s1, raw.s2, raw.s3};
    UNROLLED_FOR (int n = 0; n < COLUMNS; n++) {
        const uint word = words[n / 2];
        x[n] = vload_half(n % 2, (const half *)&word);
    }
}

/* state += a part with this highest score and sum of weights. */
INLINED void
add_part(slice_state *state, float highest, float sum, const float *columns)
{
    const float old = state->highest;
    state->highest = max(old, highest);
    const float decay = score_exp2(old - state->highest);
    const float factor = score_exp2(highest - state->highest);
    state->sum = fma(sum, factor, state->sum * decay);
    UNROLLED_FOR (int n = 0; n < COLUMNS; n++) {
        state->columns[n] = fma(columns[n], factor, state->columns[n] * decay);
    }
}

/* Joins the slices of the group in local memory. Work-item c has the sum of column c. */
INLINED float
join_slices(__local float *memory, const slice_state *state, int item, float *highest, float *sum)
{
    const int slice = item / LANES;
    const int lane = item % LANES;
    __local float *row = memory + slice * PARTIAL;
    UNROLLED_FOR (int n = 0; n < COLUMNS; n++) {
        row[lane * COLUMNS + n] = state->columns[n];
    }
    if (lane == 0) {
        row[E] = state->highest;
        row[E + 1] = state->sum;
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* these writes: their reads */
    float column = 0.0f;
    *highest = -INFINITY;
    *sum = 0.0f;
    for (int s = 0; s < SLICES; s++) {
        *highest = max(*highest, memory[s * PARTIAL + E]);
    }
    for (int s = 0; s < SLICES; s++) {
        const float factor = score_exp2(memory[s * PARTIAL + E] - *highest);
        *sum = fma(memory[s * PARTIAL + E + 1], factor, *sum);
        column = fma(memory[s * PARTIAL + item], factor, column);
    }
    return column;
}

/* Merges the splits of a row, and writes the row. */
INLINED void
merge(__local float *memory, __global const float *partial, int splits, __global half *output,
      int item)
{
    slice_state state = {.highest = -1e30f, .sum = 0.0f, .columns = {0.0f}};
    for (int split = item / LANES; split < splits; split += SLICES) {
        __global const float *part = partial + split * PARTIAL;
        float columns[COLUMNS];
        UNROLLED_FOR (int n = 0; n < COLUMNS; n++) {
            columns[n] = part[item % LANES * COLUMNS + n];
        }
        add_part(&state, part[E], part[E + 1], columns);
    }
    float highest;
    float sum;
    const float column = join_slices(memory, &state, item, &highest, &sum);
    vstore_half(column / sum, item, output);
}

__kernel __attribute__((reqd_work_group_size(THREADS, 1, 1))) void
attend(__global const half *query, __global const half *key, __global const half *value,
       __global half *output, __global float *partial, __global uint *counters, int S, int splits,
       float scale)
{
    __local float memory[SLICES * PARTIAL];
    __local uint before;
    const int item = (int)get_local_id(0);
    const int slice = item / LANES;
    const int column = item % LANES * COLUMNS;
    const int row = (int)get_group_id(0) / splits;
    const int split = (int)get_group_id(0) % splits;
    const int first = (int)((long)S * split / splits);
    const int end = (int)((long)S * (split + 1) / splits);
    float q[COLUMNS];
    load_row(query + row * E + column, q);
    slice_state state = {.highest = -1e30f, .sum = 0.0f, .columns = {0.0f}};
    for (int j = first; j < end; j += SLICES) {
        const size_t at = ((size_t)row * S + min(j + slice, end - 1)) * E + column;
        float k[COLUMNS];
        float v[COLUMNS];
        load_row(key + at, k);
        load_row(value + at, v);
        float score = 0.0f;
        UNROLLED_FOR (int n = 0; n < COLUMNS; n++) {
            score = fma(q[n], k[n], score);
        }
        UNROLLED_FOR (int apart = 1; apart < LANES; apart *= 2) {
            score += exchange(score, apart);
        }
        if (j + slice < end) {
            add_part(&state, score * scale, 1.0f, v);
        }
    }
    float highest;
    float sum;
    const float joined = join_slices(memory, &state, item, &highest, &sum);
    __global float *parts = partial + (size_t)row * splits * PARTIAL;
    __global float *own = parts + split * PARTIAL;
    own[item] = joined;
    if (item == 0) {
        own[E] = highest;
        own[E + 1] = sum;
    }
#if MERGES
    barrier(CLK_GLOBAL_MEM_FENCE); /* the group's writes: the fence of one work-item */
    if (item == 0) {
        FENCE_ALL(); /* the split: the count */
        before = count_up(counters + row, (uint)splits - 1u);
        FENCE_ALL(); /* the count: reads of other splits */
    }
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (before == (uint)splits - 1u) {
        merge(memory, parts, splits, output + row * E, item);
    }
#endif
}

__kernel __attribute__((reqd_work_group_size(THREADS, 1, 1))) void
merge_splits(__global half *output, __global const float *partial, int splits)
{
    __local float memory[SLICES * PARTIAL];
    const int row = (int)get_group_id(0);
    merge(memory, partial + (size_t)row * splits * PARTIAL, splits, output + row * E,
          (int)get_local_id(0));
}
