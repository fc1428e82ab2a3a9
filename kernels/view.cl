/* SPDX-License-Identifier: MIT
 *
 * Where the elements of a tensor are: offsets, batches. No macros.
 */
#ifndef CLATTN_VIEW_CL
#define CLATTN_VIEW_CL

#include "view_params.h"

/* The offset of element [batch, row, column] of a tensor, in elements from its pointer.
 */
static inline ca_int64
ca_offset(const ca_view *view, const ca_int64 *batch, ca_int64 row, ca_int64 column)
{
    ca_int64 offset = view->offset + row * view->row + column * view->column;
    for (int n = 0; n < CA_BATCH_DIMS; n++) {
        offset += batch[n] * view->batch[n];
    }
    return offset;
}

/* Splits a linear batch index; the last dimension runs fastest. No %: beside /
   compilers turn it into a `freeze`, which Oclgrind's check for uninitialised values
   refuses. */
static inline void
ca_unravel(ca_int64 linear, const ca_int64 *sizes, ca_int64 *batch)
{
    for (int n = CA_BATCH_DIMS - 1; n >= 0; n--) {
        const ca_int64 rest = linear;
        linear = rest / sizes[n];
        batch[n] = rest - linear * sizes[n];
    }
}

#endif
