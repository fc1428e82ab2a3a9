/* SPDX-License-Identifier: MIT
 *
 * Diagonal matrices: the rules of the torch-like functions and of DirectML's operators.
 */
#ifndef CLATTN_DOORS_DIAGONAL_H
#define CLATTN_DOORS_DIAGONAL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "base/tensor.h"

/* What a matrix is made from: an input, or a shape and a dtype, or all of them if they agree. */
typedef struct {
    const char *input_name; /* of the argument, for messages */
    const char *shape_name;
    ca_tensor input;
    bool has_input; /* true for an empty input too */
    bool has_shape;
    int ndim;
    int64_t shape[CA_MAX_DIMS];
    bool has_dtype;
    ca_dtype dtype;
    int64_t count; /* of elements, once the source is checked */
} ca_diagonal_source;

/* Checks a source and completes its shape, dtype and count. It needs two dimensions or
   more. The default dtype is float32. CA_ERROR_VALUE naming the argument. */
ca_status ca_torch_diagonal_check(ca_diagonal_source *source, ca_error *error);

/* The same, for two to four dimensions, and without the dtypes bool and bfloat16. A
   source without an input needs sizes and dtype. CA_ERROR_TYPE for a wrong dtype. */
ca_status ca_directml_diagonal_check(ca_diagonal_source *source, ca_error *error);

#endif
