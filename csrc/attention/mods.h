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

/* Belongs to one call, which owns the text, the numbers and the tables. */
typedef struct {
    const char *text; /* kernels/attention/mods.clh says what it defines */
    uint64_t hash[2]; /* of the text */
    bool has_score;
    bool has_mask;
    int64_t *numbers; /* as kernels/attention/params.h lists them */
    int64_t count;
    ca_tensor tables[CA_TABLES]; /* of 1 to CA_TABLE_DIMS dimensions; data NULL: absent */
} ca_mods;

#endif
