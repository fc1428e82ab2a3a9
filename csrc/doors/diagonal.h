/* SPDX-License-Identifier: MIT
 *
 * Diagonal matrices: the rules of the torch-like functions and of DirectML's operators.
 */
#ifndef CLATTN_SPEC_DIAGONAL_H
#define CLATTN_SPEC_DIAGONAL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "base/tensor.h"

/* What a matrix is made from: an input, a shape and a dtype, or both where they
   agree. */
typedef struct {
    const char *input_name; /* of the argument, for messages */
    const char *shape_name;
    ca_tensor input;
    bool has_input; /* an empty one has no elements, but counts */
    bool has_shape;
    int ndim;
    int64_t shape[CA_MAX_DIMS];
    bool has_dtype;
    ca_dtype dtype;
    int64_t count; /* of elements, once the source is checked */
} ca_diagonal_source;

/* Two dimensions or more; float32 where nothing says another dtype. Afterwards the
   source has shape and dtype. CA_ERROR_VALUE naming the argument. */
ca_status ca_torch_diagonal_check(ca_diagonal_source *source, ca_error *error);

/* Two to four dimensions; neither bool nor bfloat16; sizes and dtype are needed without
   an input. The same. */
ca_status ca_directml_diagonal_check(ca_diagonal_source *source, ca_error *error);

#endif
