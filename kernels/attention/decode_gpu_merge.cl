/* SPDX-License-Identifier: MIT
 *
 * Merges the partial rows that attention/decode_gpu.cl and attention/decode_mma.cl
 * leave where they split the keys, by log-sum-exp.
 *
 *     global size  batch[0] * batch[1] * batch[2] * L * WG, local size WG
 *     work-group   one row
 *     slice        ROW_LANES neighbours, which take every SLICES'th split; a lane takes
 *                  VECTOR columns at a time
 *
 *     -DWG       work-items of a group
 *     -DHEAD_EV  head size Ev of the kernel that leaves the rows
 *     and the macros of support/exchange.clh and support/common.clh
 */
#define SCORES_IN_LOG2 1
#define RT             1
#define CHUNK          VECTOR
#include "kernels/attention/decode_gpu/slices.clh"

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
attention_decode_gpu_merge(ATTENTION_ARGUMENTS)
{
    __local real highest[SLICES];
    __local real sums[SLICES];
    __local real columns[SLICES * ROW_SIZE];
    const part_memory memory = {highest, sums, columns};
    DEFINE_CALL(call);
    const int item = (int)get_local_id(0);
    const int slice = item / ROW_LANES;
    const int lane = item - slice * ROW_LANES;
    ca_int64 batch[CA_BATCH_DIMS];
    const ca_int64 i = merged_row(&call, group_of(&params), batch);

    slice_state state;
    start_slice(&state);
    const ca_int64 splits = slice < SLICES ? splits_of(&call, batch) : 0;
#pragma unroll 4
    for (ca_int64 split = slice; split < splits; split += SLICES) {
        __global const real *row = partial_row(&call, batch, i, split, PARTIAL_SIZE);
        const real old = state.highest[0];
        state.highest[0] = max(old, row[PARTIAL_SUMS]);
        const real base = base_of(state.highest[0]);
        const real decay = score_exp2(TO_LOG2(&params, old - base));
        const real factor = score_exp2(TO_LOG2(&params, row[PARTIAL_SUMS] - base));
        state.sum[0] = fma(row[PARTIAL_SUMS + 1], factor, state.sum[0] * decay);
        UNROLLED_FOR (int n = 0; n < PER_LANE; n++) {
            const int vector = n * ROW_LANES + lane;
            if (vector < ROW_CHUNKS) {
                const real_vector x = ((__global const real_vector *)row)[vector];
                UNROLLED_FOR (int k = 0; k < VECTOR; k++) {
                    real *sum = &state.columns[n * VECTOR + k];
                    *sum = fma(((const real *)&x)[k], factor, *sum * decay);
                }
            }
        }
    }

    merge_slices(&params, &state, &memory, slice, lane);
    share_columns(&memory, &state, 0, slice, lane);
    write_row(&call, batch, ca_offset(&params.output, batch, i, 0),
              ca_offset(&params.lse, batch, i, 0), &memory, 0, 0, item, WG);
}
