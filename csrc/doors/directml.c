/* SPDX-License-Identifier: MIT */
#include "doors/directml.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "doors/common.h"
#include "doors/directml_tensors.h"

/* ---- checks ---- */

/* A past tensor has this shape, after leading dimensions of 1. */
static ca_status
check_past(const ca_directml_attention *call, ca_directml_tensor t, const int64_t shape[4],
           ca_error *error)
{
    const ca_tensor *tensor = &call->tensors[t];
    for (int d = 0; d < 4; d++) {
        if (ca_tensor_size(tensor, 4 - d) != shape[d]) {
            return ca_error_set(error, CA_ERROR_VALUE, "%s has shape %s; expected %s",
                                ca_directml_name(t), CA_SHAPE_OF(tensor), CA_SHAPE_WORDS(4, shape));
        }
    }
    return CA_OK;
}

/* Check the past tensors, and find the shapes of the present ones. */
static ca_status
check_cache(const ca_directml_attention *call, const ca_tensor *key, const ca_tensor *value,
            ca_directml_shapes *shapes, ca_error *error)
{
    ca_status status = CA_OK;
    const ca_tensor *past = &call->tensors[CA_DIRECTML_PAST_KEY];
    bool has_past = past->data != NULL;
    if (has_past != (call->tensors[CA_DIRECTML_PAST_VALUE].data != NULL)) {
        CA_TRY(ca_error_set(error, CA_ERROR_VALUE,
                            "%s is missing; expected past_key and past_value, or neither",
                            has_past ? "past_value" : "past_key"));
    }
    int64_t P = has_past ? ca_tensor_size(past, 2) : 0;
    int64_t S = key->shape[2];
    if (P > INT64_MAX - S) {
        CA_TRY(ca_error_set(
            error, CA_ERROR_VALUE,
            "past_key has length %lld; expected one that 64 bits hold together with %lld new keys",
            (long long)P, (long long)S));
    }
    for (int d = 0; d < 4; d++) {
        shapes->present_key[d] = d == 2 ? P : key->shape[d];
        shapes->present_value[d] = d == 2 ? P : value->shape[d];
    }
    if (has_past) {
        CA_TRY(check_past(call, CA_DIRECTML_PAST_KEY, shapes->present_key, error));
        CA_TRY(check_past(call, CA_DIRECTML_PAST_VALUE, shapes->present_value, error));
    }
    shapes->present_key[2] = P + S;
    shapes->present_value[2] = P + S;
    int64_t count;
    CA_TRY(ca_shape_count(4, shapes->present_key, "present_key", &count, error));
    CA_TRY(ca_shape_count(4, shapes->present_value, "present_value", &count, error));
done:
    return status;
}

/* hidden is H * E, value_hidden H * Ev. */
static ca_status
check_bias(const ca_tensor *bias, int64_t hidden, int64_t value_hidden, ca_error *error)
{
    int64_t rest = ca_tensor_size(bias, 1) - hidden; /* a sum might overflow */
    if (bias->data != NULL && (rest < hidden || rest - hidden != value_hidden)) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "bias has shape %s; expected %lld + %lld + %lld elements, the hidden "
                            "sizes of query, key and value",
                            CA_SHAPE_OF(bias), (long long)hidden, (long long)hidden,
                            (long long)value_hidden);
    }
    return CA_OK;
}

static ca_status
check_relative_position_bias(const ca_tensor *bias, const int64_t scores[4], ca_error *error)
{
    ca_tensor view;
    if (bias->data != NULL && !ca_door_broadcast(bias, 4, scores, &view)) {
        return ca_error_set(
            error, CA_ERROR_VALUE,
            "relative_position_bias has shape %s; expected one that broadcasts to %s",
            CA_SHAPE_OF(bias), CA_SHAPE_WORDS(4, scores));
    }
    return CA_OK;
}

static ca_status
check_scalars(const ca_directml_attention *call, ca_error *error)
{
    ca_status status = CA_OK;
    CA_TRY(ca_door_check_scale(true, call->scale, CA_FLOAT32, error));
    if (!(fabs(call->mask_filter_value) <= FLT_MAX)) {
        CA_TRY(ca_error_set(error, CA_ERROR_VALUE,
                            "mask_filter_value is %g; expected a finite number that float32 holds",
                            call->mask_filter_value));
    }
done:
    return status;
}

ca_status
ca_directml_attention_check(const ca_directml_attention *call, ca_directml_shapes *shapes,
                            ca_error *error)
{
    ca_status status = CA_OK;
    const ca_tensor *tensors = call->tensors;
    ca_tensor matrices[CA_DIRECTML_MATRICES];
    CA_TRY(ca_directml_tensors_check(call, shapes->sources, matrices, error));
    const ca_tensor *query = &matrices[CA_DIRECTML_MATRIX_QUERY];
    const ca_tensor *key = &matrices[CA_DIRECTML_MATRIX_KEY];
    const ca_tensor *value = &matrices[CA_DIRECTML_MATRIX_VALUE];
    CA_TRY(check_cache(call, key, value, shapes, error));

    int64_t hidden;
    int64_t value_hidden;
    const int64_t heads[] = {query->shape[1], query->shape[3]};
    const int64_t value_heads[] = {value->shape[1], value->shape[3]};
    CA_TRY(ca_shape_count(2, heads, "query", &hidden, error));
    CA_TRY(ca_shape_count(2, value_heads, "value", &value_hidden, error));
    CA_TRY(check_bias(&tensors[CA_DIRECTML_BIAS], hidden, value_hidden, error));

    bool separate = shapes->sources[CA_DIRECTML_MATRIX_QUERY] == CA_DIRECTML_QUERY;
    int n = separate ? tensors[CA_DIRECTML_QUERY].ndim : 3;
    const int64_t output[] = {1, 1, query->shape[0], query->shape[2], value_hidden};
    int64_t count;
    shapes->output_ndim = n;
    memcpy(shapes->output, output + CA_DIRECTML_MAX_DIMS - n, (size_t)n * sizeof(*output));
    CA_TRY(ca_shape_count(n, shapes->output, "the result", &count, error));

    shapes->scores[0] = query->shape[0];
    shapes->scores[1] = query->shape[1];
    shapes->scores[2] = query->shape[2];
    shapes->scores[3] = shapes->present_key[2];
    CA_TRY(check_relative_position_bias(&tensors[CA_DIRECTML_RELATIVE_POSITION_BIAS],
                                        shapes->scores, error));
    CA_TRY(
        ca_directml_mask_check(call->mask_type, &tensors[CA_DIRECTML_MASK], shapes->scores, error));
    CA_TRY(check_scalars(call, error));
done:
    return status;
}

/* ---- the problem ---- */

/* Copy `count` elements, `step` bytes apart, next to each other. Returns the end. */
static char *
gather(char *to, const char *from, int64_t count, ptrdiff_t step, size_t size)
{
    if (step == (ptrdiff_t)size) {
        memcpy(to, from, (size_t)count * size);
        return to + (size_t)count * size;
    }
    for (int64_t n = 0; n < count; n++) {
        memcpy(to, from + n * step, size);
        to += size;
    }
    return to;
}

/* Write for each head its elements for query, key and value, which lie apart in `bias`. */
static void
sort_bias(const ca_tensor *bias, int64_t H, int64_t E, int64_t Ev, char *to)
{
    size_t size = ca_dtype_size(bias->dtype);
    ptrdiff_t step = (ptrdiff_t)(ca_tensor_stride(bias, 1) * (int64_t)size);
    const char *query = bias->data;
    const char *key = query + H * E * step;
    const char *value = key + H * E * step;
    for (int64_t h = 0; h < H; h++) {
        to = gather(to, query + h * E * step, E, step, size);
        to = gather(to, key + h * E * step, E, step, size);
        to = gather(to, value + h * Ev * step, Ev, step, size);
    }
}

/* Make the scratch memory: the bias sorted by heads, then the flags of a mask of numbers. */
static ca_status
view_scratch(const ca_directml_attention *call, const ca_directml_shapes *shapes,
             ca_tensor *input_bias, ca_tensor *mask_view, void **scratch, ca_error *error)
{
    ca_status status = CA_OK;
    const ca_tensor *bias = &call->tensors[CA_DIRECTML_BIAS];
    const ca_tensor *mask = &call->tensors[CA_DIRECTML_MASK];
    bool has_rows = shapes->scores[2] > 0; /* without rows no mask matters */
    bool counted = has_rows && ca_directml_mask_is_counted(call->mask_type);
    int64_t B = shapes->scores[0];
    int64_t H = shapes->scores[1];
    const int64_t flags_shape[] = {B, counted ? shapes->scores[3] : 0};
    int64_t flags;
    CA_TRY(ca_shape_count(2, flags_shape, "mask", &flags, error));
    size_t bias_bytes =
        bias->data == NULL ? 0 : (size_t)ca_tensor_size(bias, 1) * ca_dtype_size(bias->dtype);
    if (bias->data != NULL || counted) {
        *scratch = malloc(bias_bytes + (size_t)flags + 1);
        if (*scratch == NULL) {
            CA_TRY(ca_error_set(error, CA_ERROR_MEMORY,
                                "no memory for a bias of %zu and a mask of %lld bytes", bias_bytes,
                                (long long)flags));
        }
    }
    if (bias->data != NULL) {
        int64_t E = shapes->present_key[3];
        int64_t Ev = shapes->present_value[3];
        if (bias_bytes > 0) {
            sort_bias(bias, H, E, Ev, *scratch);
        }
        *input_bias = (ca_tensor){.dtype = bias->dtype,
                                  .ndim = 3,
                                  .data = *scratch,
                                  .shape = {B, H, E + E + Ev},
                                  .strides = {0, E + E + Ev, 1}};
    }
    if (has_rows && mask->data != NULL) {
        ca_directml_mask_view(call->mask_type, mask, shapes->scores,
                              counted ? (char *)*scratch + bias_bytes : NULL, mask_view);
    }
done:
    return status;
}

ca_status
ca_directml_attention_views(const ca_directml_attention *call, const ca_directml_shapes *shapes,
                            const ca_tensor *output, const ca_tensor *present_key,
                            const ca_tensor *present_value, ca_attention *attention,
                            ca_tensor views[CA_ATTENTION_OPERANDS], void **scratch, ca_error *error)
{
    ca_attention_init(attention, views);
    attention->scale = call->scale;
    attention->filter = call->mask_filter_value;
    for (int matrix = 0; matrix < CA_DIRECTML_MATRICES; matrix++) {
        ca_directml_view_matrix(call, shapes->sources[matrix], (ca_directml_matrix)matrix,
                                &views[CA_ATTENTION_QUERY + matrix]);
    }
    ca_door_split_heads(output, call->head_count, &views[CA_ATTENTION_OUTPUT]);

    const ca_tensor *tensors = call->tensors;
    const struct {
        const ca_tensor *tensor;
        ca_attention_role role;
    } four_dims[] = {{&tensors[CA_DIRECTML_PAST_KEY], CA_ATTENTION_PAST_KEY},
                     {&tensors[CA_DIRECTML_PAST_VALUE], CA_ATTENTION_PAST_VALUE},
                     {present_key, CA_ATTENTION_PRESENT_KEY},
                     {present_value, CA_ATTENTION_PRESENT_VALUE}};
    for (size_t n = 0; n < sizeof(four_dims) / sizeof(four_dims[0]); n++) {
        const ca_tensor *tensor = four_dims[n].tensor;
        if (tensor->data != NULL) {
            ca_door_broadcast(tensor, 4, tensor->shape + tensor->ndim - 4,
                              &views[four_dims[n].role]);
        }
    }
    const ca_tensor *added = &tensors[CA_DIRECTML_RELATIVE_POSITION_BIAS];
    if (added->data != NULL) {
        ca_door_broadcast(added, 4, shapes->scores, &views[CA_ATTENTION_BIAS]);
    }
    *scratch = NULL;
    return view_scratch(call, shapes, &views[CA_ATTENTION_INPUT_BIAS], &views[CA_ATTENTION_MASK],
                        scratch, error);
}
