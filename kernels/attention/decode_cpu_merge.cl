/* SPDX-License-Identifier: MIT
 *
 * Merges the partial rows that attention/decode_cpu.cl leaves where it splits the keys.
 *
 *     global size  batch[0] * batch[1] * batch[2] * L, local size 1
 *     work-item    one row
 *
 *     highest = max_s highest[s]
 *     sum     = sum_s sum[s] * exp(highest[s] - highest), and likewise each column
 *
 *     -DHEAD_EV -DLANES and the macros of attention/row.clh: those of
 *     attention_decode_cpu
 */
#include "kernels/attention/decode_cpu/rows.clh"

__kernel __attribute__((reqd_work_group_size(1, 1, 1), vec_type_hint(realv))) void
attention_decode_cpu_merge(ATTENTION_ARGUMENTS)
{
    const attention_call call = ATTENTION_CALL;
    const ca_int64 item = (ca_int64)get_global_id(0);
    const ca_int64 linear = item / params.L;
    const ca_int64 i = item - linear * params.L;
    ca_int64 batch[CA_BATCH_DIMS];
    ca_unravel(linear, params.batch, batch);

    real highest = -INFINITY;
    for (ca_int64 split = 0; split < params.splits; split++) {
        highest = max(highest, partial_row(&call, batch, i, split, PARTIAL_SIZE)[HEAD_EV]);
    }
    const real base = base_of(highest);
    realv result[EV_CHUNKS];
    for (int n = 0; n < EV_CHUNKS; n++) {
        result[n] = (realv)REAL(0.0);
    }
    real sum = REAL(0.0);
    for (ca_int64 split = 0; split < params.splits; split++) {
        __global const real *row = partial_row(&call, batch, i, split, PARTIAL_SIZE);
        const real factor = exp2(TO_LOG2(row[HEAD_EV] - base));
        sum += row[HEAD_EV + 1] * factor;
        for (int n = 0; n < EV_CHUNKS; n++) {
            result[n] = fma(WIDE(vload)(0, row + COLUMN(n, HEAD_EV)), (realv)factor, result[n]);
        }
    }
    finish_row(&call, batch, i, result, highest, sum);
}
