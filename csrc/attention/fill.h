/* SPDX-License-Identifier: MIT
 *
 * Results that no kernel computes.
 */
#ifndef CLATTN_ATTENTION_FILL_H
#define CLATTN_ATTENTION_FILL_H

#include "base/status.h"
#include "base/tensor.h"

/* Fill the memory of a result with `value`: all bytes of the extent, in `block` or, if that is NULL, on the
   host. Types other than float32 and float64 take only 0. */
ca_status ca_fill_extent(const ca_extent *extent, ca_block *block, ca_dtype dtype, double value,
                         ca_error *error);

#endif
