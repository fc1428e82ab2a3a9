/* SPDX-License-Identifier: MIT
 *
 * What a mask that the user writes does to each block of rows and keys.
 */
#ifndef CLATTN_ATTENTION_BLOCKS_H
#define CLATTN_ATTENTION_BLOCKS_H

#include "attention/mods.h"
#include "base/status.h"
#include "opencl/info.h" /* ca_device */

typedef struct {
    int64_t B; /* batches and heads that have a mask of their own */
    int64_t H;
    int64_t rows;
    int64_t keys;
    int64_t block_rows; /* of a block; all these are 1 or more */
    int64_t block_keys;
} ca_mask_sizes;

/* Write CA_BLOCK_… of each block to `entries`, a storage's (B, H, blocks of rows, blocks of keys)
   bytes. Sets the numbers of `mods` that describe the call. */
ca_status ca_attention_find_blocks(ca_device *device, ca_mods *mods, const ca_mask_sizes *sizes,
                                   const ca_tensor *entries, ca_error *error);

#endif
