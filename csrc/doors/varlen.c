/* SPDX-License-Identifier: MIT
 *
 * The door of packed sequences: offsets, lengths, pages.
 */
#include "doors/varlen.h"

#include <stdlib.h>

#include "doors/common.h"
#include "kernels/attention/params.h" /* CA_KERNEL_INT4 */

static const int64_t *
numbers_of(const ca_tensor *tensor)
{
    return tensor->data;
}

/* Check the shapes of query, key and value. */
static ca_status
check_arrays(const ca_varlen *varlen, const ca_torch_sdpa *call, ca_error *error)
{
    bool paged = varlen->block_table.data != NULL;
    const char *pages = varlen->heads_first ? "(num_pages, Hk, page_size, size)"
                                            : "(num_pages, page_size, Hk, size)";
    const struct {
        const char *name;
        const ca_tensor *tensor;
        int ndim;
        const char *expected;
    } arrays[] = {
        {"query", &call->query, 3, "(total_q, Hq, E)"},
        {"key", &call->key, paged ? 4 : 3, paged ? pages : "(total_k, Hk, E)"},
        {"value", &call->value, paged ? 4 : 3, paged ? pages : "(total_k, Hk, Ev)"},
    };
    for (size_t n = 0; n < sizeof arrays / sizeof arrays[0]; n++) {
        if (arrays[n].tensor->ndim != arrays[n].ndim) {
            return ca_error_set(error, CA_ERROR_VALUE, "%s has shape %s; expected %s%s",
                                arrays[n].name, CA_SHAPE_OF(arrays[n].tensor), arrays[n].expected,
                                paged && n > 0 ? ", with block_table" : "");
        }
    }
    return CA_OK;
}

/* Check that the heads of query, key and value broadcast. Tensor n has them in dimension at[n]. */
static ca_status
check_heads(const ca_torch_sdpa *call, const int at[3], ca_error *error)
{
    const char *const names[] = {"query", "key", "value"};
    const ca_tensor *const tensors[] = {&call->query, &call->key, &call->value};
    int64_t common = 1;
    for (int n = 0; n < 3; n++) {
        int64_t heads = tensors[n]->shape[at[n]];
        if (common == 1) {
            common = heads;
        } else if (heads != 1 && heads != common) {
            return ca_error_set(error, CA_ERROR_VALUE,
                                "%s has %lld heads (shape %s); expected %lld, or one (for grouped "
                                "heads: enable_gqa=True)",
                                names[n], (long long)heads, CA_SHAPE_OF(tensors[n]),
                                (long long)common);
        }
    }
    return CA_OK;
}

/* Check the sizes that query, key and value share, so that messages show the shapes that the user passed.
   ca_torch_sdpa_check, which runs later, sees views with heads first, and only one page. */
static ca_status
check_sizes(const ca_varlen *varlen, const ca_torch_sdpa *call, ca_error *error)
{
    ca_status status = CA_OK;
    const ca_tensor *query = &call->query;
    const ca_tensor *key = &call->key;
    const ca_tensor *value = &call->value;
    const bool paged = varlen->block_table.data != NULL;
    const int head = !paged || varlen->heads_first ? 1 : 2;
    const int64_t E = ca_tensor_size(query, 1);
    const ca_door_equal columns = {"key", key, "head size", ca_tensor_size(key, 1), "query",
                                   query, E};
    const ca_door_equal rows = {"value", value, "length",     value->shape[0],
                                "key",   key,   key->shape[0]};
    if (call->code != CA_KERNEL_INT4) { /* whose sizes are those of a cache */
        CA_TRY(ca_door_check_equal(&columns, error));
        CA_TRY(ca_door_check_head_size("value", value, ca_tensor_size(value, 1), error));
    }
    CA_TRY(ca_door_check_head_size("query", query, E, error));
    if (!paged) {
        CA_TRY(ca_door_check_equal(&rows, error));
    }
    if (!call->enable_gqa) {
        CA_TRY(check_heads(call, (int[]){1, head, head}, error));
    }
done:
    return status;
}

/* Check offsets: the first is 0, none is below the one before, the last is `total` at most (-1: any). */
static ca_status
check_offsets(const ca_tensor *offsets, const char *name, int64_t total, const char *rows,
              ca_error *error)
{
    const int64_t *numbers = numbers_of(offsets);
    int64_t count = offsets->shape[0];
    if (count == 0 || numbers[0] != 0) {
        return count == 0
                   ? ca_error_set(error, CA_ERROR_VALUE,
                                  "%s has shape (0,); expected (n + 1,), for n sequences", name)
                   : ca_error_set(error, CA_ERROR_VALUE, "%s[0] is %lld; expected 0", name,
                                  (long long)numbers[0]);
    }
    for (int64_t b = 1; b < count; b++) {
        if (numbers[b] < numbers[b - 1]) {
            return ca_error_set(error, CA_ERROR_VALUE,
                                "%s[%lld] is %lld; expected %lld or more, which %s[%lld] is", name,
                                (long long)b, (long long)numbers[b], (long long)numbers[b - 1],
                                name, (long long)(b - 1));
        }
    }
    if (total >= 0 && numbers[count - 1] > total) {
        return ca_error_set(error, CA_ERROR_VALUE, "%s[%lld] is %lld; expected at most %lld, %s",
                            name, (long long)(count - 1), (long long)numbers[count - 1],
                            (long long)total, rows);
    }
    return CA_OK;
}

/* Check that an array has one number for each of `count`. */
static ca_status
check_count(const ca_tensor *tensor, const char *name, int64_t count, const char *why,
            ca_error *error)
{
    return tensor->shape[0] == count
               ? CA_OK
               : ca_error_set(error, CA_ERROR_VALUE,
                              "%s has shape (%lld,%s); expected (%lld,%s), %s", name,
                              (long long)tensor->shape[0], tensor->ndim > 1 ? " …" : "",
                              (long long)count, tensor->ndim > 1 ? " …" : "", why);
}

static ca_status
check_numbers(const ca_varlen *varlen, const ca_torch_sdpa *call, ca_error *error)
{
    ca_status status = CA_OK;
    bool paged = varlen->block_table.data != NULL;
    CA_TRY(check_offsets(&varlen->cu_seq_q, "cu_seq_q", call->query.shape[0], "the rows of query",
                         error));
    int64_t count = varlen->cu_seq_q.shape[0] - 1;
    if (varlen->cu_seq_k.data != NULL) {
        CA_TRY(check_count(&varlen->cu_seq_k, "cu_seq_k", count + 1, "as cu_seq_q", error));
        CA_TRY(check_offsets(&varlen->cu_seq_k, "cu_seq_k", paged ? -1 : call->key.shape[0],
                             "the rows of key", error));
    } else if (!paged || varlen->seqused_k.data == NULL) {
        CA_TRY(ca_error_set(error, CA_ERROR_VALUE, "cu_seq_k is None; expected offsets%s",
                            paged ? ", or seqused_k, with block_table" : ""));
    }
    if (varlen->seqused_k.data != NULL) {
        CA_TRY(check_count(&varlen->seqused_k, "seqused_k", count, "one for each sequence", error));
    }
    if (paged) {
        CA_TRY(check_count(&varlen->block_table, "block_table", count, "a row for each sequence",
                           error));
    }
done:
    return status;
}

/* A sequence has at most so many keys. A block_table may name a page many times, so memory does not limit them. Kernels
   add this number, a number of rows and a bound of a window in 64 bits. */
#define MOST_KEYS (INT64_MAX / 4)

/* Returns how many keys the pages of a row of block_table hold. */
static int64_t
room_of(const ca_varlen *varlen, int64_t page_size)
{
    int64_t most = varlen->block_table.shape[1];
    return most > 0 && page_size > MOST_KEYS / most ? MOST_KEYS : most * page_size;
}

/* Find the number of keys of each sequence. */
static ca_status
find_lengths(const ca_varlen *varlen, int64_t page_size, int64_t *lengths, ca_error *error)
{
    bool paged = varlen->block_table.data != NULL;
    const int64_t *offsets = numbers_of(&varlen->cu_seq_k);
    const int64_t *used = numbers_of(&varlen->seqused_k);
    for (int64_t b = 0; b + 1 < varlen->cu_seq_q.shape[0]; b++) {
        int64_t there = paged ? room_of(varlen, page_size) : offsets[b + 1] - offsets[b];
        there = there < MOST_KEYS ? there : MOST_KEYS;
        lengths[b] = used != NULL ? used[b] : offsets[b + 1] - offsets[b];
        if (lengths[b] < 0 || lengths[b] > there) {
            return ca_error_set(error, CA_ERROR_VALUE,
                                used != NULL ? "seqused_k[%lld] is %lld; expected 0 to %lld, %s"
                                             : "sequence %lld has %lld keys by cu_seq_k; expected "
                                               "at most %lld, %s",
                                (long long)b, (long long)lengths[b], (long long)there,
                                paged ? "which the row of block_table has room for"
                                      : "the keys of the sequence");
        }
    }
    return CA_OK;
}

/* Copy the pages that keys need from the table. */
static ca_status
find_pages(const ca_varlen *varlen, int64_t num_pages, int64_t *pages, ca_sequences *sequences,
           int64_t *keys, ca_error *error)
{
    const int64_t *table = numbers_of(&varlen->block_table);
    sequences->pages = pages;
    for (int64_t b = 0; b < sequences->count; b++) {
        int64_t length = sequences->lengths[b];
        int64_t needed =
            length / sequences->page_size + (length % sequences->page_size != 0 ? 1 : 0);
        keys[b] = sequences->page_count;
        for (int64_t n = 0; n < needed; n++) {
            int64_t page = table[b * varlen->block_table.shape[1] + n];
            if (page < 0 || page >= num_pages) {
                return ca_error_set(error, CA_ERROR_VALUE,
                                    "block_table[%lld, %lld] is %lld; expected 0 to %lld, a page "
                                    "of key",
                                    (long long)b, (long long)n, (long long)page,
                                    (long long)num_pages - 1);
            }
            pages[sequences->page_count++] = page;
        }
    }
    return CA_OK;
}

/* View the first of some pages (num_pages, page_size, Hk, …), or with heads first, as (page_size, Hk, …). */
static ca_tensor
first_page(const ca_tensor *pages, bool heads_first)
{
    ca_tensor view;
    const int row = heads_first ? 2 : 1;
    const int head = heads_first ? 1 : 2;
    ca_tensor_start_view(pages, &view);
    ca_tensor_add_dim(&view, pages->shape[row], pages->strides[row]);
    ca_tensor_add_dim(&view, pages->shape[head], pages->strides[head]);
    for (int d = 3; d < pages->ndim; d++) {
        ca_tensor_add_dim(&view, pages->shape[d], pages->strides[d]);
    }
    return view;
}

/* View a scale as one for each element of `array` but for the last dimension. It is (), (Hk), or has this
   shape. */
static ca_status
set_scale(const ca_tensor *scale, const char *name, const ca_tensor *array, bool paged,
          bool heads_first, ca_tensor *view, ca_error *error)
{
    const int head = paged && heads_first ? 1 : array->ndim - 2;
    const int64_t Hk = array->shape[head];
    bool whole = scale->ndim == array->ndim - 1;
    if (scale->data == NULL) {
        return CA_OK;
    }
    for (int d = 0; d < scale->ndim && whole; d++) {
        whole = scale->shape[d] == array->shape[d];
    }
    if (!whole && (scale->ndim > 1 || (scale->ndim == 1 && scale->shape[0] != Hk))) {
        return ca_error_set(error, CA_ERROR_VALUE, "%s has shape %s; expected (), (%lld,) or %s",
                            name, CA_SHAPE_OF(scale), (long long)Hk,
                            CA_SHAPE_WORDS(array->ndim - 1, array->shape));
    }
    ca_tensor_start_view(scale, view);
    for (int d = 0; d + 1 < array->ndim; d++) {
        int64_t of_head = scale->ndim == 1 && d == head ? scale->strides[0] : 0;
        ca_tensor_add_dim(view, array->shape[d], whole ? scale->strides[d] : of_head);
    }
    return CA_OK;
}

/* View (S, Hk) as (Hk, S, 1), and (S, Hk, groups) as (Hk, S, groups). */
static void
turn_factor(ca_tensor *factor)
{
    ca_tensor_swap(factor, 0);
    if (factor->ndim == 2) {
        ca_tensor_add_dim(factor, 1, 0);
    }
}

/* Check that values have as many pages as keys, and that pages have rows. */
static ca_status
check_pages(const ca_torch_sdpa *call, bool heads_first, ca_error *error)
{
    const int row = heads_first ? 2 : 1;
    const ca_tensor *key = &call->key;
    const ca_tensor *value = &call->value;
    if (key->shape[row] < 1) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "key has shape %s; expected a page_size of 1 or more",
                            CA_SHAPE_OF(key));
    }
    if (value->shape[0] != key->shape[0] || value->shape[row] != key->shape[row]) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "value has shape %s; expected as many pages of as many rows as key, "
                            "whose shape is %s",
                            CA_SHAPE_OF(value), CA_SHAPE_OF(key));
    }
    return CA_OK;
}

/* Allocate the numbers of the sequences, and fill those that need no table. */
static ca_status
find_sequences(const ca_varlen *varlen, const ca_torch_sdpa *call, ca_varlen_sequences *found,
               ca_error *error)
{
    ca_status status = CA_OK;
    bool paged = varlen->block_table.data != NULL;
    int64_t count = varlen->cu_seq_q.shape[0] - 1;
    int64_t most = paged ? varlen->block_table.shape[1] : 0;
    found->memory = calloc((size_t)(count * (3 + most) + 2), sizeof(*found->memory));
    if (found->memory == NULL) {
        return ca_error_set(error, CA_ERROR_MEMORY, "no memory for %lld sequences",
                            (long long)count);
    }
    int64_t *rows = found->memory;
    int64_t *lengths = rows + count + 1;
    int64_t *keys = lengths + count;
    ca_sequences *sequences = &found->sequences;
    *sequences =
        (ca_sequences){.count = count,
                       .rows = rows,
                       .keys = keys,
                       .lengths = lengths,
                       .left = call->window_left,
                       .right = call->causal == CA_CAUSAL_LOWER_RIGHT ? 0 : call->window_right,
                       .causal = call->causal == CA_CAUSAL_UPPER_LEFT,
                       .rows_are_last = varlen->rows_are_last,
                       .page_size = paged ? call->key.shape[varlen->heads_first ? 2 : 1] : 0};
    for (int64_t b = 0; b <= count; b++) {
        rows[b] = numbers_of(&varlen->cu_seq_q)[b];
    }
    CA_TRY(find_lengths(varlen, sequences->page_size, lengths, error));
    for (int64_t b = 0; b < count; b++) {
        bool longer = lengths[b] > sequences->most_keys;
        sequences->most_keys = longer ? lengths[b] : sequences->most_keys;
        keys[b] = paged ? 0 : numbers_of(&varlen->cu_seq_k)[b];
    }
    if (paged) {
        CA_TRY(find_pages(varlen, call->key.shape[0], keys + count, sequences, keys, error));
    }
done:
    return status;
}

/* Set the scales of keys and values. Those of int4 come with offsets, and have the shape of the pages but for
   the last dimension. */
static ca_status
set_scales(const ca_varlen *varlen, ca_torch_sdpa *call, ca_error *error)
{
    ca_status status = CA_OK;
    bool paged = varlen->block_table.data != NULL;
    if (call->code == CA_KERNEL_INT4) {
        call->key_scale = varlen->key_scale;
        call->value_scale = varlen->value_scale;
        call->key_offset = varlen->key_offset;
        call->value_offset = varlen->value_offset;
        return CA_OK;
    }
    CA_TRY(set_scale(&varlen->key_scale, "key_scale", &call->key, paged, varlen->heads_first,
                     &call->key_scale, error));
    CA_TRY(set_scale(&varlen->value_scale, "value_scale", &call->value, paged, varlen->heads_first,
                     &call->value_scale, error));
done:
    return status;
}

ca_status
ca_varlen_find(const ca_varlen *varlen, ca_torch_sdpa *call, ca_varlen_sequences *found,
               ca_error *error)
{
    ca_status status = CA_OK;
    bool paged = varlen->block_table.data != NULL;
    ca_tensor *operands[CA_PAGED_OPERANDS] = {&call->key,        &call->value,
                                              &call->key_scale,  &call->value_scale,
                                              &call->key_offset, &call->value_offset};
    CA_TRY(check_arrays(varlen, call, error));
    CA_TRY(check_numbers(varlen, call, error));
    if (paged) {
        CA_TRY(check_pages(call, varlen->heads_first, error));
    }
    CA_TRY(check_sizes(varlen, call, error));
    CA_TRY(find_sequences(varlen, call, found, error));
    CA_TRY(set_scales(varlen, call, error));
    for (int n = 0; n < CA_PAGED_OPERANDS; n++) {
        ca_tensor *operand = operands[n];
        bool is_factor = n > 1;
        if (operand->data == NULL) {
            continue;
        }
        if (paged) {
            found->pages[n] = *operand;
            found->sequences.paged[n] = &found->pages[n];
            *operand = first_page(&found->pages[n], varlen->heads_first);
        }
        if (is_factor) { /* (S, Hk, …) */
            turn_factor(operand);
        }
    }
    if (call->code == CA_KERNEL_INT4) { /* two in a byte */
        call->key.shape[2] = call->query.shape[2];
        call->value.shape[2] = varlen->value_size;
    }
    call->sequences = &found->sequences;
done:
    return status;
}
