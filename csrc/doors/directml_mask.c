/* SPDX-License-Identifier: MIT */
#include "doors/directml_mask.h"

#include "doors/common.h"

const char *const ca_directml_mask_words[CA_DIRECTML_MASK_TYPES] = {
    [CA_DIRECTML_MASK_NONE] = "none",
    [CA_DIRECTML_MASK_BOOLEAN] = "boolean",
    [CA_DIRECTML_MASK_KEY_SEQUENCE_LENGTH] = "key_sequence_length",
    [CA_DIRECTML_MASK_KEY_SEQUENCE_END_START] = "key_sequence_end_start",
    [CA_DIRECTML_MASK_KEY_QUERY_SEQUENCE_LENGTH_START_END] = "key_query_sequence_length_start_end",
};

bool
ca_directml_mask_is_counted(ca_directml_mask_type type)
{
    return type > CA_DIRECTML_MASK_BOOLEAN;
}

/* ---- boolean ---- */

/* False if the mask has none of the shapes allowed. */
static bool
view_boolean(const ca_tensor *mask, const int64_t scores[4], ca_tensor *view)
{
    int64_t B = scores[0];
    int64_t L = scores[2];
    int64_t T = scores[3];
    if (mask->ndim >= 4) {
        return ca_door_broadcast(mask, 4, scores, view);
    }
    bool by_row = mask->ndim == 3 && mask->shape[0] == B && mask->shape[1] == L;
    bool by_batch = mask->ndim == 2 || (mask->ndim == 3 && mask->shape[0] == 1);
    if (ca_tensor_size(mask, 1) != T || !(by_row || (by_batch && ca_tensor_size(mask, 2) == B))) {
        return false;
    }
    const int64_t strides[] = {ca_tensor_stride(mask, by_row ? 3 : 2), 0,
                               by_row ? ca_tensor_stride(mask, 2) : 0, ca_tensor_stride(mask, 1)};
    ca_tensor_start_view(mask, view);
    for (int d = 0; d < 4; d++) {
        ca_tensor_add_dim(view, scores[d], strides[d]);
    }
    return true;
}

static ca_status
check_boolean(const ca_tensor *mask, const int64_t scores[4], ca_error *error)
{
    ca_tensor view;
    if (view_boolean(mask, scores, &view)) {
        return CA_OK;
    }
    return ca_error_set(error, CA_ERROR_VALUE,
                        "mask has shape %s; expected (%lld, %lld), (%lld, %lld, %lld) or four "
                        "dimensions that broadcast to %s, for a mask_type of \"boolean\"",
                        CA_SHAPE_OF(mask), (long long)scores[0], (long long)scores[3],
                        (long long)scores[0], (long long)scores[2], (long long)scores[3],
                        CA_SHAPE_WORDS(4, scores));
}

/* ---- numbers ---- */

/* Number n of the last two dimensions, row by row. */
static int32_t
number_at(const ca_tensor *mask, int64_t n)
{
    int64_t columns = ca_tensor_size(mask, 1);
    const int32_t *data = mask->data;
    return data[n / columns * ca_tensor_stride(mask, 2) + n % columns * ca_tensor_stride(mask, 1)];
}

/* True if the last dimension has each * B + more numbers, or there are `each` rows of B. */
static bool
has_numbers(const ca_tensor *mask, int64_t B, int64_t each, int64_t more)
{
    int64_t columns = ca_tensor_size(mask, 1) - more;
    if (mask->ndim < 1) {
        return false;
    }
    /* `each` is not 0 for a mask of numbers. NOLINTNEXTLINE(clang-analyzer-core.DivideZero) */
    return ca_door_has_leading_ones(mask, 1) ? columns % each == 0 && columns / each == B
                                             : more == 0 && ca_door_has_leading_ones(mask, 2) &&
                                                   ca_tensor_size(mask, 2) == each && columns == B;
}

static ca_status
check_shape(ca_directml_mask_type type, const ca_tensor *mask, int64_t B, ca_error *error)
{
    static const struct {
        int64_t each;
        int64_t more;
        const char *expected;
    } shapes[CA_DIRECTML_MASK_TYPES] = {
        [CA_DIRECTML_MASK_KEY_SEQUENCE_LENGTH] = {1, 0, "(B,) or (1, B)"},
        [CA_DIRECTML_MASK_KEY_SEQUENCE_END_START] = {2, 0, "(2, B) or (2 * B,)"},
        [CA_DIRECTML_MASK_KEY_QUERY_SEQUENCE_LENGTH_START_END] = {3, 2, "(3 * B + 2,)"},
    };
    if (has_numbers(mask, B, shapes[type].each, shapes[type].more)) {
        return CA_OK;
    }
    return ca_error_set(
        error, CA_ERROR_VALUE,
        "mask has shape %s; expected %s with a batch B of %lld, for a mask_type of \"%s\"",
        CA_SHAPE_OF(mask), shapes[type].expected, (long long)B, ca_directml_mask_words[type]);
}

/* Check that numbers first … first + count - 1 are 0 to `highest`. */
static ca_status
check_range(const ca_tensor *mask, int64_t first, int64_t count, const char *what, int64_t highest,
            ca_error *error)
{
    for (int64_t n = first; n < first + count; n++) {
        int32_t number = number_at(mask, n);
        if (number < 0 || number > highest) {
            return ca_error_set(error, CA_ERROR_VALUE,
                                "mask has %d at index %lld, %s; expected 0 to %lld", (int)number,
                                (long long)n, what, (long long)highest);
        }
    }
    return CA_OK;
}

/* Check the same, and that no number is below the one before. */
static ca_status
check_totals(const ca_tensor *mask, int64_t first, int64_t count, const char *what, int64_t highest,
             ca_error *error)
{
    ca_status status = CA_OK;
    CA_TRY(check_range(mask, first, count, what, highest, error));
    for (int64_t n = first + 1; n < first + count; n++) {
        if (number_at(mask, n) < number_at(mask, n - 1)) {
            CA_TRY(ca_error_set(
                error, CA_ERROR_VALUE,
                "mask has %d at index %lld, %s, after %d; expected totals that do not decrease",
                (int)number_at(mask, n), (long long)n, what, (int)number_at(mask, n - 1)));
        }
    }
done:
    return status;
}

static ca_status
check_numbers(ca_directml_mask_type type, const ca_tensor *mask, const int64_t scores[4],
              ca_error *error)
{
    ca_status status = CA_OK;
    int64_t B = scores[0];
    int64_t T = scores[3];
    CA_TRY(check_shape(type, mask, B, error));
    if (type == CA_DIRECTML_MASK_KEY_SEQUENCE_END_START) {
        CA_TRY(check_range(mask, 0, B, "an end", T, error));
        CA_TRY(check_range(mask, B, B, "a start", T, error));
        goto done;
    }
    CA_TRY(check_range(mask, 0, B, "a key length", T, error));
    if (type == CA_DIRECTML_MASK_KEY_QUERY_SEQUENCE_LENGTH_START_END) {
        const int64_t packed_queries[] = {B, scores[2]};
        const int64_t packed_keys[] = {B, T};
        int64_t queries;
        int64_t keys;
        CA_TRY(ca_shape_count(2, packed_queries, "the queries", &queries, error));
        CA_TRY(ca_shape_count(2, packed_keys, "the keys", &keys, error));
        CA_TRY(check_totals(mask, B, B + 1, "a running total of queries", queries, error));
        CA_TRY(check_totals(mask, 2 * B + 1, B + 1, "a running total of keys", keys, error));
    }
done:
    return status;
}

/* flags[b, j] = start[b] <= j < end[b] */
static void
write_flags(ca_directml_mask_type type, const ca_tensor *mask, int64_t B, int64_t T, uint8_t *flags)
{
    bool has_starts = type == CA_DIRECTML_MASK_KEY_SEQUENCE_END_START;
    for (int64_t b = 0; b < B; b++) {
        int64_t end = number_at(mask, b);
        int64_t start = has_starts ? number_at(mask, B + b) : 0;
        for (int64_t j = 0; j < T; j++) {
            flags[b * T + j] = j >= start && j < end;
        }
    }
}

/* ---- either ---- */

ca_status
ca_directml_mask_check(ca_directml_mask_type type, const ca_tensor *mask, const int64_t scores[4],
                       ca_error *error)
{
    if (type == CA_DIRECTML_MASK_NONE) {
        return mask->data == NULL ? CA_OK
                                  : ca_error_set(error, CA_ERROR_VALUE,
                                                 "mask is given with a mask_type of \"none\"; "
                                                 "expected None, or another mask_type");
    }
    if (mask->data == NULL) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "mask is missing; expected one, for a mask_type of \"%s\"",
                            ca_directml_mask_words[type]);
    }
    if (mask->ndim > 5) {
        return ca_error_set(error, CA_ERROR_VALUE, "mask has shape %s; expected 1 to 5 dimensions",
                            CA_SHAPE_OF(mask));
    }
    return ca_directml_mask_is_counted(type) ? check_numbers(type, mask, scores, error)
                                             : check_boolean(mask, scores, error);
}

void
ca_directml_mask_view(ca_directml_mask_type type, const ca_tensor *mask, const int64_t scores[4],
                      void *flags, ca_tensor *view)
{
    if (!ca_directml_mask_is_counted(type)) {
        view_boolean(mask, scores, view);
        return;
    }
    int64_t B = scores[0];
    int64_t T = scores[3];
    write_flags(type, mask, B, T, flags);
    const ca_tensor written = {
        .dtype = CA_BOOL, .ndim = 2, .data = flags, .shape = {B, T}, .strides = {T, 1}};
    view_boolean(&written, scores, view);
}
