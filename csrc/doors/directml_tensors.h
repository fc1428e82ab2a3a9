/* SPDX-License-Identifier: MIT
 *
 * DirectML's tensors: their names, dtypes and ranks, and which of them hold query, key and value.
 */
#ifndef CLATTN_DOORS_DIRECTML_TENSORS_H
#define CLATTN_DOORS_DIRECTML_TENSORS_H

#include "base/status.h"
#include "base/tensor.h"
#include "doors/directml_mask.h" /* ca_directml_mask_type */

#define CA_DIRECTML_MAX_DIMS 5

/* H is the head count; leading dimensions beyond these are 1, up to five in all. */
typedef enum {
    CA_DIRECTML_QUERY,                   /* (B, L, H * E) */
    CA_DIRECTML_KEY,                     /* (B, S, H * E) */
    CA_DIRECTML_VALUE,                   /* (B, S, H * Ev) */
    CA_DIRECTML_STACKED_QUERY_KEY,       /* (B, L, H, 2, E) */
    CA_DIRECTML_STACKED_KEY_VALUE,       /* (B, S, H, 2, E) */
    CA_DIRECTML_STACKED_QUERY_KEY_VALUE, /* (B, L, H, 3, E) */
    CA_DIRECTML_BIAS,                    /* (H * E + H * E + H * Ev) */
    CA_DIRECTML_MASK,                    /* int32, see ca_directml_mask_type */
    CA_DIRECTML_RELATIVE_POSITION_BIAS,  /* broadcasts to (B, H, L, T) */
    CA_DIRECTML_PAST_KEY,                /* (B, H, P, E) */
    CA_DIRECTML_PAST_VALUE,              /* (B, H, P, Ev) */
    CA_DIRECTML_TENSORS,
} ca_directml_tensor;

/* The argument's name. */
const char *ca_directml_name(ca_directml_tensor t);

typedef struct {
    ca_tensor tensors[CA_DIRECTML_TENSORS]; /* absent: not given */
    ca_directml_mask_type mask_type;
    double scale;
    double mask_filter_value;
    int64_t head_count; /* 1 or more */
} ca_directml_attention;

/* The matrices, in the order of the first three tensors, which hold one each, and of
   CA_ATTENTION_QUERY and the roles after it. */
typedef enum {
    CA_DIRECTML_MATRIX_QUERY,
    CA_DIRECTML_MATRIX_KEY,
    CA_DIRECTML_MATRIX_VALUE,
    CA_DIRECTML_MATRICES,
} ca_directml_matrix;

/* View query (B, H, L, E), key (B, H, S, E) or value (B, H, S, Ev) inside `source`, without
   bias. */
void ca_directml_view_matrix(const ca_directml_attention *call, ca_directml_tensor source,
                             ca_directml_matrix matrix, ca_tensor *view);

/* Check dtypes and ranks of all tensors but the mask, that query, key and value have one
   source each, and that their sizes agree. Writes the sources and the views. CA_ERROR_TYPE
   or CA_ERROR_VALUE naming the argument. */
ca_status ca_directml_tensors_check(const ca_directml_attention *call,
                                    ca_directml_tensor sources[CA_DIRECTML_MATRICES],
                                    ca_tensor matrices[CA_DIRECTML_MATRICES], ca_error *error);

#endif
