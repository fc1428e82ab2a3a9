/* SPDX-License-Identifier: MIT
 *
 * The shortest correct attention: every case, any OpenCL 1.2 device, O(1) memory. Kept
 * as the oracle on the device and as the fallback where a faster kernel does not apply.
 *
 *     global size  batch[0] * batch[1] * batch[2] * L, rounded up as the host likes
 *     work-item    one row [b0, b1, b2, i]; groups share nothing
 *     macros       those of support/common.clh; E, Ev and the softcap are data
 */
#include "kernels/attention/present.clh"
#include "kernels/attention/row.clh"

__kernel void
attention_reference(ATTENTION_ARGUMENTS)
{
    const attention_call call = ATTENTION_CALL;
    const ca_int64 rows =
        params.batch[0] * params.batch[1] * params.batch[2] * params.L;
    const ca_int64 item = (ca_int64)get_global_id(0);
    if (item >= rows) {
        return;
    }
    ca_int64 batch[CA_BATCH_DIMS];
    const ca_int64 linear = item / params.L;
    const ca_int64 i = item - linear * params.L;
    ca_unravel(linear, params.batch, batch);
#if PRESENT
    const present_share share = present_share_of(&params, batch, i, params.L);
    copy_present(&call, batch, share.first, share.end);
#endif
    attention_row(&call, batch, i);
}
