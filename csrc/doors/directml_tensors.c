/* SPDX-License-Identifier: MIT */
#include "doors/directml_tensors.h"

#include <stddef.h>
#include <stdio.h>

#include "doors/common.h"

#define SOURCES (CA_DIRECTML_STACKED_QUERY_KEY_VALUE + 1)

static const struct {
    const char *name;
    int rank;  /* the lowest; dimensions before those are 1 */
    int first; /* the first part that a source holds, and how many it holds */
    int parts;
} facts[CA_DIRECTML_TENSORS] = {
    [CA_DIRECTML_QUERY] = {"query", 3, CA_DIRECTML_PART_QUERY, 1},
    [CA_DIRECTML_KEY] = {"key", 3, CA_DIRECTML_PART_KEY, 1},
    [CA_DIRECTML_VALUE] = {"value", 3, CA_DIRECTML_PART_VALUE, 1},
    [CA_DIRECTML_STACKED_QUERY_KEY] = {"stacked_query_key", 5, CA_DIRECTML_PART_QUERY,
                                       2},
    [CA_DIRECTML_STACKED_KEY_VALUE] = {"stacked_key_value", 5, CA_DIRECTML_PART_KEY, 2},
    [CA_DIRECTML_STACKED_QUERY_KEY_VALUE] = {"stacked_query_key_value", 5,
                                             CA_DIRECTML_PART_QUERY, 3},
    [CA_DIRECTML_BIAS] = {"bias", 1, 0, 0},
    [CA_DIRECTML_MASK] = {"mask", 1, 0, 0},
    [CA_DIRECTML_RELATIVE_POSITION_BIAS] = {"relative_position_bias", 4, 0, 0},
    [CA_DIRECTML_PAST_KEY] = {"past_key", 4, 0, 0},
    [CA_DIRECTML_PAST_VALUE] = {"past_value", 4, 0, 0},
};

const char *
ca_directml_name(ca_directml_tensor t)
{
    return facts[t].name;
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
                                "%s has dtype %s; expected %s, the dtype of %s",
                                facts[t].name, ca_dtype_name(tensors[t].dtype),
                                ca_dtype_name(tensors[first].dtype), facts[first].name);
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
            (tensor->ndim >= facts[t].rank && tensor->ndim <= CA_DIRECTML_MAX_DIMS &&
             ca_spec_has_leading_ones(tensor, facts[t].rank))) {
            continue;
        }
        char given[CA_SHAPE_TEXT];
        ca_spec_shape_text(tensor, given);
        return facts[t].rank == CA_DIRECTML_MAX_DIMS
                   ? ca_error_set(error, CA_ERROR_VALUE,
                                  "%s has shape %s; expected %d dimensions",
                                  facts[t].name, given, facts[t].rank)
                   : ca_error_set(error, CA_ERROR_VALUE,
                                  "%s has shape %s; expected %d to %d dimensions, all "
                                  "but the last %d of size 1",
                                  facts[t].name, given, facts[t].rank,
                                  CA_DIRECTML_MAX_DIMS, facts[t].rank);
    }
    return CA_OK;
}

/* ---- the sources of query, key and value ---- */

static bool
is_stacked(ca_directml_tensor source)
{
    return facts[source].parts > 1;
}

static bool
holds(int source, int part)
{
    int index = part - facts[source].first;
    return index >= 0 && index < facts[source].parts;
}

/* The tensors that hold a part, all of them or those given, as "a, b, c". */
static const char *
holders_text(const ca_directml_attention *call, int part, bool all,
             char text[CA_SHAPE_TEXT])
{
    int length = 0;
    for (int t = 0; t < SOURCES; t++) {
        if (holds(t, part) && (all || call->tensors[t].data != NULL)) {
            length += snprintf(text + length, (size_t)(CA_SHAPE_TEXT - length), "%s%s",
                               length > 0 ? ", " : "", facts[t].name);
        }
    }
    return text;
}

static ca_status
find_source(const ca_directml_attention *call, int part, ca_directml_tensor *source,
            ca_error *error)
{
    int found = 0;
    for (int t = 0; t < SOURCES; t++) {
        if (holds(t, part) && call->tensors[t].data != NULL) {
            *source = (ca_directml_tensor)t;
            found++;
        }
    }
    if (found == 1) {
        return CA_OK;
    }
    char given[CA_SHAPE_TEXT];
    char all[CA_SHAPE_TEXT];
    holders_text(call, part, true, all);
    return found == 0
               ? ca_error_set(error, CA_ERROR_VALUE,
                              "%s is missing; expected exactly one of %s",
                              facts[part].name, all)
               : ca_error_set(error, CA_ERROR_VALUE,
                              "%s is given %d times, in %s; expected exactly one of %s",
                              facts[part].name, found,
                              holders_text(call, part, false, given), all);
}

/* Matrix `index` of (B, N, H, parts, X) as (B, H, N, X). */
static void
unstack(const ca_tensor *tensor, int index, ca_tensor *view)
{
    static const int from_end[] = {5, 3, 4, 1};
    ptrdiff_t size = (ptrdiff_t)ca_dtype_size(tensor->dtype);
    ca_tensor_start_view(tensor, view);
    view->data = (char *)tensor->data + index * ca_tensor_stride(tensor, 2) * size;
    for (int d = 0; d < 4; d++) {
        ca_spec_add_dim(view, ca_tensor_size(tensor, from_end[d]),
                        ca_tensor_stride(tensor, from_end[d]));
    }
}

void
ca_directml_view_part(const ca_directml_attention *call, ca_directml_tensor source,
                      ca_directml_part part, ca_tensor *view)
{
    const ca_tensor *tensor = &call->tensors[source];
    if (is_stacked(source)) {
        unstack(tensor, (int)part - facts[source].first, view);
    } else {
        ca_spec_split_heads(tensor, call->head_count, view);
    }
}

static ca_status
check_heads(const ca_directml_attention *call, ca_directml_tensor source,
            ca_error *error)
{
    const ca_tensor *tensor = &call->tensors[source];
    int64_t H = call->head_count;
    int parts = facts[source].parts;
    char given[CA_SHAPE_TEXT];
    if (is_stacked(source) &&
        (ca_tensor_size(tensor, 3) != H || ca_tensor_size(tensor, 2) != parts)) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "%s has shape %s; expected head_count, %lld, in dimension "
                            "2 and %d in dimension 3",
                            facts[source].name, ca_spec_shape_text(tensor, given),
                            (long long)H, parts);
    }
    if (!is_stacked(source) && ca_tensor_size(tensor, 1) % H != 0) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "%s has hidden size %lld (shape %s); expected a multiple "
                            "of head_count, %lld",
                            facts[source].name, (long long)ca_tensor_size(tensor, 1),
                            ca_spec_shape_text(tensor, given), (long long)H);
    }
    return CA_OK;
}

ca_status
ca_directml_tensors_check(const ca_directml_attention *call,
                          ca_directml_tensor sources[CA_DIRECTML_PARTS],
                          ca_tensor parts[CA_DIRECTML_PARTS], ca_error *error)
{
    /* Which dimension of whose view is that of another one. */
    static const struct {
        ca_directml_part part;
        ca_directml_part other;
        int dimension;
        const char *name;
    } equal[] = {
        {CA_DIRECTML_PART_KEY, CA_DIRECTML_PART_QUERY, 0, "batch size"},
        {CA_DIRECTML_PART_KEY, CA_DIRECTML_PART_QUERY, 3, "head size"},
        {CA_DIRECTML_PART_VALUE, CA_DIRECTML_PART_QUERY, 0, "batch size"},
        {CA_DIRECTML_PART_VALUE, CA_DIRECTML_PART_KEY, 2, "length"},
    };
    ca_status status = CA_OK;
    CA_TRY(check_dtypes(call, error));
    CA_TRY(check_ranks(call, error));
    for (int part = 0; part < CA_DIRECTML_PARTS; part++) {
        CA_TRY(find_source(call, part, &sources[part], error));
    }
    for (int part = 0; part < CA_DIRECTML_PARTS; part++) {
        CA_TRY(check_heads(call, sources[part], error));
        ca_directml_view_part(call, sources[part], (ca_directml_part)part,
                              &parts[part]);
    }
    for (size_t n = 0; n < sizeof(equal) / sizeof(equal[0]); n++) {
        ca_directml_tensor source = sources[equal[n].part];
        ca_directml_tensor other = sources[equal[n].other];
        const ca_spec_equal rule = {
            .name = facts[source].name,
            .tensor = &call->tensors[source],
            .what = equal[n].name,
            .size = parts[equal[n].part].shape[equal[n].dimension],
            .other_name = facts[other].name,
            .other = &call->tensors[other],
            .expected = parts[equal[n].other].shape[equal[n].dimension],
        };
        CA_TRY(ca_spec_check_equal(&rule, error));
    }
done:
    return status;
}
