/* SPDX-License-Identifier: MIT
 *
 * The shortest correct attention, in every case, on any OpenCL 1.2 device, in O(1)
 * memory. It is the fallback where no faster kernel can run, and the oracle on the
 * device.
 *
 *     global size  at least batch[0] * batch[1] * batch[2] * L
 *     work-item    one row [b0, b1, b2, i], and a share of present keys and values
 *
 * attention/row.clh has the formula. Macros: those of support/common.clh, without
 * HEAD_E, HEAD_EV and SOFTCAP, which are data here.
 */
#include "kernels/attention/present.clh"
#include "kernels/attention/row.clh"

__kernel void
attention_reference(ATTENTION_ARGUMENTS)
{
    const attention_call call = ATTENTION_CALL;
    const ca_int64 rows = params.batch[0] * params.batch[1] * params.batch[2] * params.L;
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
