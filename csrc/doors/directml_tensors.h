/* SPDX-License-Identifier: MIT
 *
 * DirectML's tensors: their names, dtypes and ranks, and which of them hold query, key
 * and value.
 */
#ifndef CLATTN_SPEC_DIRECTML_TENSORS_H
#define CLATTN_SPEC_DIRECTML_TENSORS_H

#include "base/status.h"
#include "base/tensor.h"
#include "doors/directml.h"

/* In the order of the first three tensors, which hold one each, and of
   CA_ATTENTION_QUERY and those after it. */
typedef enum {
    CA_DIRECTML_PART_QUERY,
    CA_DIRECTML_PART_KEY,
    CA_DIRECTML_PART_VALUE,
    CA_DIRECTML_PARTS,
} ca_directml_part;

/* Query (B, H, L, E), key (B, H, S, E) or value (B, H, S, Ev), without bias, where they
   lie in `source`, which holds them. */
void ca_directml_view_part(const ca_directml_attention *call, ca_directml_tensor source,
                           ca_directml_part part, ca_tensor *view);

/* Check dtypes and ranks of all tensors but the mask; that query, key and value have
   one source each, written to `sources`; and that their sizes agree, with their views
   in `parts`. CA_ERROR_TYPE or CA_ERROR_VALUE naming the argument. */
ca_status ca_directml_tensors_check(const ca_directml_attention *call,
                                    ca_directml_tensor sources[CA_DIRECTML_PARTS],
                                    ca_tensor parts[CA_DIRECTML_PARTS],
                                    ca_error *error);

#endif
