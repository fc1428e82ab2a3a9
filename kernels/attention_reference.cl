/* SPDX-License-Identifier: MIT
 *
 * The shortest correct attention: every case, any OpenCL 1.2 device, O(1) memory. Kept
 * as the oracle on the device and as the fallback where a faster kernel does not apply.
 *
 *     global size  batch[0] * batch[1] * batch[2] * L, rounded up as the host likes
 *     work-item    one row [b0, b1, b2, i]; groups share nothing
 *     macros       DTYPE, MASK (common.cl); E, Ev and the softcap are data
 */
#include "attention_row.cl"

__kernel void
attention_reference(__global const storage *query, __global const storage *key,
                    __global const storage *value, __global const mask_storage *mask,
                    __global storage *output, __global real *lse,
                    const ca_attention_params params)
{
    const ca_int64 rows =
        params.batch[0] * params.batch[1] * params.batch[2] * params.L;
    const ca_int64 item = (ca_int64)get_global_id(0);
    if (item >= rows) {
        return;
    }
    ca_int64 batch[CA_BATCH_DIMS];
    const ca_int64 linear = item / params.L;
    const ca_int64 i = item - linear * params.L;
    ca_unravel(linear, &params, batch);
    attention_row(query, key, value, mask, output, lse, &params, batch, i);
}
