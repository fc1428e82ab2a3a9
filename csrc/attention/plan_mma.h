/* SPDX-License-Identifier: MIT
 *
 * What the plans of attention/mma.cl and attention/mma_backward.cl share: how warps take matrices.
 */
#ifndef CLATTN_ATTENTION_PLAN_MMA_H
#define CLATTN_ATTENTION_PLAN_MMA_H

#include <stdbool.h>
#include <stdint.h>

#include "attention/problem.h"
#include "opencl/info.h" /* ca_device_info */

/* Work-items of a warp, and rows of its matrix tile. A warp has one tile or two. */
#define CA_MMA_LANES     32
#define CA_MMA_TILE_ROWS 16

/* The rule for the warps of a group. Devices with fewer work-items are refused. */
#define CA_MMA_WARPS 4

/* Local memory that every device with matrix units gives a group. */
#define CA_MMA_LOCAL_BYTES (48 << 10)

/* True if the operand's rows are whole aligned 16 bytes, and not far apart. */
bool ca_mma_rows_are_aligned(const ca_operand *operand);

/* True if a score is a scaled product, so that most strips look at no single key. */
bool ca_mma_is_plain(const ca_attention *attention);

/* Two tiles of rows halve the reads of what they are multiplied with. True if `length` rows of so many heads fill
   them, and leave enough groups for all units. */
bool ca_mma_fills_two_tiles(const ca_device_info *info, int64_t length, double heads);

/* Returns the next of a few head sizes, so that few programs are built. */
int64_t ca_mma_padded_head(int64_t head);

#endif
