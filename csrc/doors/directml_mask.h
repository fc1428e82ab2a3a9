/* SPDX-License-Identifier: MIT
 *
 * DML_MULTIHEAD_ATTENTION_MASK_TYPE: which positions an int32 tensor says are padding.
 */
#ifndef CLATTN_DOORS_DIRECTML_MASK_H
#define CLATTN_DOORS_DIRECTML_MASK_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "base/tensor.h"

/* Leading dimensions of 1 are allowed, up to five dimensions in all. */
typedef enum {
    CA_DIRECTML_MASK_NONE,
    /* 0 is padding. (B, T), (B, L, T), or a shape that broadcasts to (B, H, L, T) */
    CA_DIRECTML_MASK_BOOLEAN,
    /* (B) lengths: later keys are padding */
    CA_DIRECTML_MASK_KEY_SEQUENCE_LENGTH,
    /* (2, B) or (2 * B): ends, then starts; keys outside are padding */
    CA_DIRECTML_MASK_KEY_SEQUENCE_END_START,
    /* (3 * B + 2): B key lengths as above, and running totals of a packed batch: B
       query starts and the last end, B key starts and the last end */
    CA_DIRECTML_MASK_KEY_QUERY_SEQUENCE_LENGTH_START_END,
    CA_DIRECTML_MASK_TYPES,
} ca_directml_mask_type;

/* The words for mask_type. */
extern const char *const ca_directml_mask_words[CA_DIRECTML_MASK_TYPES];

/* Check shape and numbers of `mask`, which is absent for CA_DIRECTML_MASK_NONE alone.
   `scores` is the shape (B, H, L, T). CA_ERROR_VALUE naming the argument. */
ca_status ca_directml_mask_check(ca_directml_mask_type type, const ca_tensor *mask,
                                 const int64_t scores[4], ca_error *error);

/* True if the mask has numbers of keys, which ca_directml_mask_view turns into flags. */
bool ca_directml_mask_is_counted(ca_directml_mask_type type);

/* View the checked mask as (B, H, L, T), where 0 is padding. A mask of numbers is written
   to `flags`, which has B * T bytes. */
void ca_directml_mask_view(ca_directml_mask_type type, const ca_tensor *mask,
                           const int64_t scores[4], void *flags, ca_tensor *view);

#endif
