/* SPDX-License-Identifier: MIT
 *
 * Parts of an attention problem, where one launch cannot hold it all.
 */
#ifndef CLATTN_OP_ATTENTION_PARTS_H
#define CLATTN_OP_ATTENTION_PARTS_H

#include "attention/problem.h"

/* Part of leading dimension `d`, or of the rows where d is the number of leading
   dimensions: the band moves along with them. */
ca_attention ca_attention_part(const ca_attention *attention, int d, int64_t first,
                               int64_t count);

/* The outermost dimension above 1, the rows as a last resort; but where only the number
   of dimensions is too large (`fits`), the smallest one. Dropout numbers rows in order,
   which halves of the outermost dimension keep. */
int ca_attention_dimension_to_halve(const ca_attention *attention, bool fits);

#endif
