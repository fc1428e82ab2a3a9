/* SPDX-License-Identifier: MIT */
#include "doors/directml_tensors.h"

#include <stddef.h>
#include <stdio.h>

#include "doors/common.h"

#define NAMES_TEXT 160

#define SOURCES (CA_DIRECTML_STACKED_QUERY_KEY_VALUE + 1)

static const struct {
    const char *name;
    int rank;  /* the lowest; more dimensions have size 1 */
    int first; /* the first matrix that a source holds, and how many it holds */
    int matrices;
} table[CA_DIRECTML_TENSORS] = {
    [CA_DIRECTML_QUERY] = {"query", 3, CA_DIRECTML_MATRIX_QUERY, 1},
    [CA_DIRECTML_KEY] = {"key", 3, CA_DIRECTML_MATRIX_KEY, 1},
    [CA_DIRECTML_VALUE] = {"value", 3, CA_DIRECTML_MATRIX_VALUE, 1},
    [CA_DIRECTML_STACKED_QUERY_KEY] = {"stacked_query_key", 5, CA_DIRECTML_MATRIX_QUERY, 2},
    [CA_DIRECTML_STACKED_KEY_VALUE] = {"stacked_key_value", 5, CA_DIRECTML_MATRIX_KEY, 2},
    [CA_DIRECTML_STACKED_QUERY_KEY_VALUE] = {"stacked_query_key_value", 5, CA_DIRECTML_MATRIX_QUERY,
                                             3},
    [CA_DIRECTML_BIAS] = {"bias", 1, 0, 0},
    [CA_DIRECTML_MASK] = {"mask", 1, 0, 0},
    [CA_DIRECTML_RELATIVE_POSITION_BIAS] = {"relative_position_bias", 4, 0, 0},
    [CA_DIRECTML_PAST_KEY] = {"past_key", 4, 0, 0},
    [CA_DIRECTML_PAST_VALUE] = {"past_value", 4, 0, 0},
};

const char *
ca_directml_name(ca_directml_tensor t)
{
    return table[t].name;
}

/* ---- dtypes and ranks ---- */

static ca_status
check_dtypes(const ca_directml_attention *call, ca_error *error)
{
    const ca_tensor *tensors = call->tensors;
    int first = -1;
    for (int t = 0; t < CA_DIRECTML_TENSORS; t++) {
        if (tensors[t].data == NULL || t == CA_DIRECTML_MASK) {
            continue;
        }
        first = first < 0 ? t : first;
        if (tensors[t].dtype != tensors[first].dtype) {
            return ca_error_set(error, CA_ERROR_TYPE,
                                "%s has dtype %s; expected %s, the dtype of %s", table[t].name,
                                ca_dtype_name(tensors[t].dtype),
                                ca_dtype_name(tensors[first].dtype), table[first].name);
        }
    }
    return CA_OK;
}

static ca_status
check_ranks(const ca_directml_attention *call, ca_error *error)
{
    for (int t = 0; t < CA_DIRECTML_TENSORS; t++) {
        const ca_tensor *tensor = &call->tensors[t];
        if (tensor->data == NULL || t == CA_DIRECTML_MASK ||
            (tensor->ndim >= table[t].rank && tensor->ndim <= CA_DIRECTML_MAX_DIMS &&
             ca_door_has_leading_ones(tensor, table[t].rank))) {
            continue;
        }
        return table[t].rank == CA_DIRECTML_MAX_DIMS
                   ? ca_error_set(error, CA_ERROR_VALUE, "%s has shape %s; expected %d dimensions",
                                  table[t].name, CA_SHAPE_OF(tensor), table[t].rank)
                   : ca_error_set(error, CA_ERROR_VALUE,
                                  "%s has shape %s; expected %d to %d dimensions, all but the last "
                                  "%d of size 1",
                                  table[t].name, CA_SHAPE_OF(tensor), table[t].rank,
                                  CA_DIRECTML_MAX_DIMS, table[t].rank);
    }
    return CA_OK;
}

/* ---- the sources of query, key and value ---- */

static bool
is_stacked(ca_directml_tensor source)
{
    return table[source].matrices > 1;
}

static bool
holds(int source, int matrix)
{
    int index = matrix - table[source].first;
    return index >= 0 && index < table[source].matrices;
}

/* Write the names of the tensors that may hold a matrix, or of those given, as "a, b". */
static const char *
holders_text(const ca_directml_attention *call, int matrix, bool all, char text[NAMES_TEXT])
{
    int length = 0;
    for (int t = 0; t < SOURCES; t++) {
        if (holds(t, matrix) && (all || call->tensors[t].data != NULL)) {
            length += snprintf(text + length, (size_t)(NAMES_TEXT - length), "%s%s",
                               length > 0 ? ", " : "", table[t].name);
        }
    }
    return text;
}

static ca_status
find_source(const ca_directml_attention *call, int matrix, ca_directml_tensor *source,
            ca_error *error)
{
    int found = 0;
    for (int t = 0; t < SOURCES; t++) {
        if (holds(t, matrix) && call->tensors[t].data != NULL) {
            *source = (ca_directml_tensor)t;
            found++;
        }
    }
    if (found == 1) {
        return CA_OK;
    }
    char given[NAMES_TEXT];
    char all[NAMES_TEXT];
    holders_text(call, matrix, true, all);
    return found == 0
               ? ca_error_set(error, CA_ERROR_VALUE, "%s is missing; expected exactly one of %s",
                              table[matrix].name, all)
               : ca_error_set(error, CA_ERROR_VALUE,
                              "%s is given %d times, in %s; expected exactly one of %s",
                              table[matrix].name, found, holders_text(call, matrix, false, given),
                              all);
}

/* Matrix `index` of (B, N, H, matrices, X) as (B, H, N, X). */
static void
unstack(const ca_tensor *tensor, int index, ca_tensor *view)
{
    static const int from_end[] = {5, 3, 4, 1};
    ptrdiff_t size = (ptrdiff_t)ca_dtype_size(tensor->dtype);
    ca_tensor_start_view(tensor, view);
    view->data = (char *)tensor->data + index * ca_tensor_stride(tensor, 2) * size;
    for (int d = 0; d < 4; d++) {
        ca_tensor_add_dim(view, ca_tensor_size(tensor, from_end[d]),
                          ca_tensor_stride(tensor, from_end[d]));
    }
}

void
ca_directml_view_matrix(const ca_directml_attention *call, ca_directml_tensor source,
                        ca_directml_matrix matrix, ca_tensor *view)
{
    const ca_tensor *tensor = &call->tensors[source];
    if (is_stacked(source)) {
        unstack(tensor, (int)matrix - table[source].first, view);
    } else {
        ca_door_split_heads(tensor, call->head_count, view);
    }
}

static ca_status
check_heads(const ca_directml_attention *call, ca_directml_tensor source, ca_error *error)
{
    const ca_tensor *tensor = &call->tensors[source];
    int64_t H = call->head_count;
    int matrices = table[source].matrices;
    if (is_stacked(source) &&
        (ca_tensor_size(tensor, 3) != H || ca_tensor_size(tensor, 2) != matrices)) {
        return ca_error_set(
            error, CA_ERROR_VALUE,
            "%s has shape %s; expected head_count, %lld, in dimension 2 and %d in dimension 3",
            table[source].name, CA_SHAPE_OF(tensor), (long long)H, matrices);
    }
    if (!is_stacked(source) && ca_tensor_size(tensor, 1) % H != 0) {
        return ca_error_set(
            error, CA_ERROR_VALUE,
            "%s has hidden size %lld (shape %s); expected a multiple of head_count, %lld",
            table[source].name, (long long)ca_tensor_size(tensor, 1), CA_SHAPE_OF(tensor),
            (long long)H);
    }
    return CA_OK;
}

ca_status
ca_directml_tensors_check(const ca_directml_attention *call,
                          ca_directml_tensor sources[CA_DIRECTML_MATRICES],
                          ca_tensor matrices[CA_DIRECTML_MATRICES], ca_error *error)
{
    /* Dimensions of two views that have to be equal. */
    static const struct {
        ca_directml_matrix matrix;
        ca_directml_matrix other;
        int dimension;
        const char *name;
    } equal[] = {
        {CA_DIRECTML_MATRIX_KEY, CA_DIRECTML_MATRIX_QUERY, 0, "batch size"},
        {CA_DIRECTML_MATRIX_KEY, CA_DIRECTML_MATRIX_QUERY, 3, "head size"},
        {CA_DIRECTML_MATRIX_VALUE, CA_DIRECTML_MATRIX_QUERY, 0, "batch size"},
        {CA_DIRECTML_MATRIX_VALUE, CA_DIRECTML_MATRIX_KEY, 2, "length"},
    };
    ca_status status = CA_OK;
    CA_TRY(check_dtypes(call, error));
    CA_TRY(check_ranks(call, error));
    for (int matrix = 0; matrix < CA_DIRECTML_MATRICES; matrix++) {
        CA_TRY(find_source(call, matrix, &sources[matrix], error));
    }
    for (int matrix = 0; matrix < CA_DIRECTML_MATRICES; matrix++) {
        CA_TRY(check_heads(call, sources[matrix], error));
        ca_directml_view_matrix(call, sources[matrix], (ca_directml_matrix)matrix,
                                &matrices[matrix]);
    }
    for (size_t n = 0; n < sizeof(equal) / sizeof(equal[0]); n++) {
        ca_directml_tensor source = sources[equal[n].matrix];
        ca_directml_tensor other = sources[equal[n].other];
        const ca_door_equal rule = {
            .name = table[source].name,
            .tensor = &call->tensors[source],
            .what = equal[n].name,
            .size = matrices[equal[n].matrix].shape[equal[n].dimension],
            .other_name = table[other].name,
            .other = &call->tensors[other],
            .expected = matrices[equal[n].other].shape[equal[n].dimension],
        };
        CA_TRY(ca_door_check_equal(&rule, error));
    }
    for (int matrix = 0; matrix < CA_DIRECTML_MATRICES; matrix++) {
        CA_TRY(ca_door_check_head_size(table[sources[matrix]].name, &call->tensors[sources[matrix]],
                                       matrices[matrix].shape[3], error));
    }
done:
    return status;
}
