/* SPDX-License-Identifier: MIT */
#include "doors/diagonal.h"

#include <stdint.h>
#include <string.h>

/* Returns the name of the argument that the shape comes from. */
static const char *
shape_origin(const ca_diagonal_source *source)
{
    return source->has_input ? source->input_name : source->shape_name;
}

/* Takes shape and dtype from the input, if there is one. The caller's shape and dtype
   have to agree with it. */
static ca_status
settle(ca_diagonal_source *source, ca_error *error)
{
    const ca_tensor *input = &source->input;
    if (!source->has_input) {
        return CA_OK;
    }
    if (source->has_dtype && source->dtype != input->dtype) {
        return ca_error_set(error, CA_ERROR_VALUE, "dtype is %s; expected %s, that of %s",
                            ca_dtype_name(source->dtype), ca_dtype_name(input->dtype),
                            source->input_name);
    }
    size_t bytes = (size_t)input->ndim * sizeof(*input->shape);
    if (source->has_shape &&
        (source->ndim != input->ndim || memcmp(source->shape, input->shape, bytes) != 0)) {
        return ca_error_set(error, CA_ERROR_VALUE, "%s is %s; expected %s, that of %s",
                            source->shape_name, CA_SHAPE_WORDS(source->ndim, source->shape),
                            CA_SHAPE_OF(input), source->input_name);
    }
    source->dtype = input->dtype;
    source->ndim = input->ndim;
    memcpy(source->shape, input->shape, bytes);
    return CA_OK;
}

/* Counts the elements. No result is larger than half of the address space, so that later
   sums of sizes and bounds do not overflow. */
static ca_status
check_count(ca_diagonal_source *source, ca_error *error)
{
    ca_status status =
        ca_shape_count(source->ndim, source->shape, shape_origin(source), &source->count, error);
    int64_t size = (int64_t)ca_dtype_size(source->dtype);
    if (status == CA_OK && source->count > PTRDIFF_MAX / 2 / size) {
        return ca_error_set(error, CA_ERROR_MEMORY,
                            "no memory for a result of shape %s and dtype %s; compute it in parts",
                            CA_SHAPE_WORDS(source->ndim, source->shape),
                            ca_dtype_name(source->dtype));
    }
    return status;
}

ca_status
ca_torch_diagonal_check(ca_diagonal_source *source, ca_error *error)
{
    ca_status status = CA_OK;
    if (!source->has_input && !source->has_dtype) {
        source->dtype = CA_FLOAT32;
    }
    CA_TRY(settle(source, error));
    if (source->ndim < 2) {
        CA_TRY(ca_error_set(error, CA_ERROR_VALUE,
                            "%s has shape %s; expected two dimensions or more",
                            shape_origin(source), CA_SHAPE_WORDS(source->ndim, source->shape)));
    }
    CA_TRY(check_count(source, error));
done:
    return status;
}

ca_status
ca_directml_diagonal_check(ca_diagonal_source *source, ca_error *error)
{
    ca_status status = CA_OK;
    if (!source->has_input && !(source->has_shape && source->has_dtype)) {
        CA_TRY(ca_error_set(error, CA_ERROR_VALUE,
                            "%s is None; expected it where there is no input",
                            source->has_shape ? "dtype" : source->shape_name));
    }
    const ca_dtype dtype = source->has_input ? source->input.dtype : source->dtype;
    if (dtype == CA_BOOL || dtype == CA_BFLOAT16) {
        CA_TRY(ca_error_set(error, CA_ERROR_TYPE,
                            "%s %s %s; expected an integer type, float16, float32 or float64",
                            source->has_input ? source->input_name : "dtype",
                            source->has_input ? "has dtype" : "is", ca_dtype_name(dtype)));
    }
    CA_TRY(settle(source, error));
    if (source->ndim < 2 || source->ndim > 4) {
        CA_TRY(ca_error_set(error, CA_ERROR_VALUE,
                            "%s has shape %s; expected two to four dimensions",
                            shape_origin(source), CA_SHAPE_WORDS(source->ndim, source->shape)));
    }
    CA_TRY(check_count(source, error));
done:
    return status;
}
