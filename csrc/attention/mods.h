/* SPDX-License-Identifier: MIT
 *
 * Functions of scores and masks that the user writes, as OpenCL C, and the data that they read.
 */
#ifndef CLATTN_ATTENTION_MODS_H
#define CLATTN_ATTENTION_MODS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/tensor.h"
#include "kernels/attention/params.h" /* CA_TABLES, CA_NUMBERS_OF_MODS */

/* An array that the text reads, and whose gradient a backward pass gives. */
typedef struct {
    ca_tensor gradient; /* contiguous */
    uint32_t number;    /* that the text gives it */
    uint32_t apart;     /* times CA_BACKWARD_APART: which rows add to other elements than others */
} ca_captured;

/* Belongs to one call, which owns the text, the numbers and the tables. */
typedef struct {
    const char *text; /* kernels/attention/mods.clh says what it defines */
    uint64_t hash[2]; /* of the text */
    bool has_score;
    bool has_mask;
    int64_t *numbers; /* as kernels/attention/params.h lists them */
    int64_t count;
    ca_tensor tables[CA_TABLES]; /* of 1 to CA_TABLE_DIMS dimensions; data NULL: absent */
    const ca_captured *captured;
    int captured_count;
} ca_mods;

#endif
