/* SPDX-License-Identifier: MIT */
#include "doors/cache.h"

#include <string.h>

#include "doors/common.h"
#include "kernels/attention/params.h" /* CA_KERNEL_INT4 */

int64_t
ca_cache_length(const ca_cache *cache, int64_t b)
{
    return cache->lengths != NULL ? cache->lengths[b] : cache->length;
}

/* ---- rows ---- */

/* The dtype is that of the cache, unless that keeps codes. */
static ca_status
check_dtype(const ca_kept *kept, const ca_tensor *given, const char *name, ca_error *error)
{
    return kept->codes != CA_CODES_NONE || given->dtype == kept->pages.dtype
               ? CA_OK
               : ca_error_set(error, CA_ERROR_TYPE,
                              "%s has dtype %s; expected %s, that of the cache", name,
                              ca_dtype_name(given->dtype), ca_dtype_name(kept->pages.dtype));
}

static ca_status
check_rows(const ca_kept *kept, const ca_tensor *given, const char *name, int ndim, ca_error *error)
{
    ca_status status = CA_OK;
    const int64_t B = kept->pages.shape[0];
    const int64_t heads = kept->pages.shape[1];
    const bool batched = ndim == 4;
    CA_TRY(check_dtype(kept, given, name, error));
    if (given->ndim == ndim && given->shape[ndim - 1] == kept->size && given->shape[1] == heads &&
        (!batched || given->shape[0] == B)) {
        return CA_OK;
    }
    status =
        batched
            ? ca_error_set(error, CA_ERROR_VALUE, "%s has shape %s; expected (%lld, %lld, n, %lld)",
                           name, CA_SHAPE_OF(given), (long long)B, (long long)heads,
                           (long long)kept->size)
            : ca_error_set(error, CA_ERROR_VALUE, "%s has shape %s; expected (n, %lld, %lld)", name,
                           CA_SHAPE_OF(given), (long long)heads, (long long)kept->size);
done:
    return status;
}

ca_status
ca_cache_rows_check(const ca_cache *cache, const ca_tensor *key, const ca_tensor *value, int ndim,
                    ca_error *error)
{
    ca_status status = CA_OK;
    const int dimension = ndim == 4 ? 2 : 0; /* that of rows */
    CA_TRY(check_rows(&cache->key, key, "key", ndim, error));
    CA_TRY(check_rows(&cache->value, value, "value", ndim, error));
    if (key->shape[dimension] != value->shape[dimension]) {
        CA_TRY(ca_error_set(error, CA_ERROR_VALUE,
                            "value has %lld positions; expected %lld, as many as key",
                            (long long)value->shape[dimension], (long long)key->shape[dimension]));
    }
done:
    return status;
}

int
ca_cache_tensors(const ca_cache *cache, ca_tensor tensors[CA_CACHE_TENSORS])
{
    int count = ca_kept_tensors(&cache->key, tensors);
    return count + ca_kept_tensors(&cache->value, tensors + count);
}

/* ---- append ---- */

static int64_t
count_of(const ca_cache_append *append, int64_t b)
{
    return append->counts != NULL ? append->counts[b] : append->key.shape[2];
}

static ca_status
check_counts(const ca_cache *cache, const ca_cache_append *append, ca_error *error)
{
    int64_t B = ca_cache_batch(cache);
    int64_t n = append->key.shape[2];
    if (append->counts != NULL && append->ncounts != B) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "counts has %lld numbers; expected %lld, one for each sequence",
                            (long long)append->ncounts, (long long)B);
    }
    for (int64_t b = 0; b < B; b++) {
        int64_t count = count_of(append, b);
        if (count < 0 || count > n) {
            return ca_error_set(
                error, CA_ERROR_VALUE,
                "counts[%lld] is %lld; expected 0 to %lld, the positions that key has",
                (long long)b, (long long)count, (long long)n);
        }
    }
    return CA_OK;
}

ca_status
ca_cache_append_check(const ca_cache *cache, const ca_cache_append *append, ca_error *error)
{
    ca_status status = CA_OK;
    int64_t capacity = ca_cache_capacity(cache);
    CA_TRY(ca_cache_rows_check(cache, &append->key, &append->value, 4, error));
    CA_TRY(check_counts(cache, append, error));
    for (int64_t b = 0; b < ca_cache_batch(cache); b++) {
        int64_t length = ca_cache_length(cache, b);
        if (count_of(append, b) > capacity - length) {
            CA_TRY(ca_error_set(
                error, CA_ERROR_VALUE,
                "key has %lld positions for sequence %lld, whose length is %lld; "
                "expected at most %lld, as the cache's capacity is %lld: truncate or reset "
                "it, or make a larger one",
                (long long)count_of(append, b), (long long)b, (long long)length,
                (long long)(capacity - length), (long long)capacity));
        }
    }
done:
    return status;
}

void
ca_cache_set_lengths(ca_cache *cache, const int64_t *lengths)
{
    cache->length = lengths[0];
    cache->lengths = NULL;
    for (int64_t b = 1; b < ca_cache_batch(cache); b++) {
        if (lengths[b] != cache->length) {
            cache->lengths = lengths;
        }
        if (lengths[b] > cache->length) {
            cache->length = lengths[b];
        }
    }
}

void
ca_cache_append_done(ca_cache *cache, const ca_cache_append *append, int64_t *lengths)
{
    for (int64_t b = 0; b < ca_cache_batch(cache); b++) {
        lengths[b] = ca_cache_length(cache, b) + count_of(append, b);
    }
    ca_cache_set_lengths(cache, lengths);
}

int64_t
ca_cache_append_trim(ca_cache_append *append)
{
    const int64_t B = append->key.shape[0];
    const int64_t n = append->key.shape[2];
    int64_t most = 0;
    for (int64_t b = 0; b < B; b++) {
        most = count_of(append, b) > most ? count_of(append, b) : most;
    }
    ca_tensor_take(&append->key, 2, n - most, most);
    ca_tensor_take(&append->value, 2, n - most, most);
    return B * most;
}

void
ca_cache_append_places(const ca_cache *cache, const ca_cache_append *append, int64_t *places)
{
    const int64_t n = append->key.shape[2];
    const int64_t capacity = ca_cache_capacity(cache);
    for (int64_t b = 0; b < ca_cache_batch(cache); b++) {
        const int64_t skipped = n - count_of(append, b);
        const int64_t first = b * capacity + ca_cache_length(cache, b) - skipped;
        for (int64_t i = 0; i < n; i++) {
            *places++ = i < skipped ? -1 : first + i;
        }
    }
}

/* ---- truncate ---- */

ca_status
ca_cache_cut_check(const ca_cache *cache, const ca_cache_cut *cut, ca_error *error)
{
    int64_t B = ca_cache_batch(cache);
    if (cut->numbers == NULL) {
        return cut->number <= cache->length
                   ? CA_OK
                   : ca_error_set(error, CA_ERROR_VALUE,
                                  "n is %lld; expected 0 to %lld, the length",
                                  (long long)cut->number, (long long)cache->length);
    }
    if (cut->count != B) {
        return ca_error_set(error, CA_ERROR_VALUE, "n has shape (%lld,); expected (%lld,)",
                            (long long)cut->count, (long long)B);
    }
    for (int64_t b = 0; b < B; b++) {
        int64_t number = cut->numbers[b];
        int64_t length = ca_cache_length(cache, b);
        if (number < 0 || number > length) {
            return ca_error_set(error, CA_ERROR_VALUE,
                                "n[%lld] is %lld; expected 0 to %lld, the sequence's length",
                                (long long)b, (long long)number, (long long)length);
        }
    }
    return CA_OK;
}

void
ca_cache_cut_done(ca_cache *cache, const ca_cache_cut *cut, int64_t *lengths)
{
    for (int64_t b = 0; b < ca_cache_batch(cache); b++) {
        int64_t kept = cut->numbers != NULL ? cut->numbers[b] : cut->number;
        int64_t length = ca_cache_length(cache, b);
        lengths[b] = kept < length ? kept : length;
    }
    ca_cache_set_lengths(cache, lengths);
}

/* ---- reorder ---- */

ca_status
ca_cache_reorder_check(const ca_cache *cache, const int64_t *indices, int64_t count,
                       ca_error *error)
{
    int64_t B = ca_cache_batch(cache);
    if (count != B) {
        return ca_error_set(error, CA_ERROR_VALUE, "indices has shape (%lld,); expected (%lld,)",
                            (long long)count, (long long)B);
    }
    for (int64_t b = 0; b < B; b++) {
        if (indices[b] < 0 || indices[b] >= B) {
            return ca_error_set(error, CA_ERROR_VALUE,
                                "indices[%lld] is %lld; expected 0 to %lld, a sequence",
                                (long long)b, (long long)indices[b], (long long)(B - 1));
        }
    }
    return CA_OK;
}

void
ca_cache_reorder_done(ca_cache *cache, const int64_t *indices, const int64_t *before,
                      int64_t *lengths)
{
    for (int64_t b = 0; b < ca_cache_batch(cache); b++) {
        lengths[b] = before[indices[b]];
    }
    ca_cache_set_lengths(cache, lengths);
}

void
ca_cache_reorder_failed(ca_cache *cache, const int64_t *indices, int64_t *lengths)
{
    for (int64_t b = 0; b < ca_cache_batch(cache); b++) {
        lengths[b] = indices[b] == b ? ca_cache_length(cache, b) : 0;
    }
    ca_cache_set_lengths(cache, lengths);
}

int64_t
ca_cache_reorder_moves(const ca_cache *cache, const int64_t *indices, int64_t room, int64_t *moves)
{
    const int64_t capacity = ca_cache_capacity(cache);
    int64_t count = 0;
    for (int64_t b = 0; b < ca_cache_batch(cache); b++) {
        count += indices[b] != b ? ca_cache_length(cache, indices[b]) : 0;
    }
    int64_t n = 0;
    for (int64_t b = 0; moves != NULL && b < ca_cache_batch(cache); b++) {
        const int64_t length = indices[b] != b ? ca_cache_length(cache, indices[b]) : 0;
        for (int64_t i = 0; i < length; i++, n++) {
            moves[n] = moves[3 * count + n] = b * room + i;
            moves[count + n] = indices[b] * capacity + i;
            moves[2 * count + n] = b * capacity + i;
        }
    }
    return count;
}

int64_t
ca_cache_copy_moves(const ca_cache *cache, int64_t *moves)
{
    int64_t count = 0;
    for (int64_t b = 0; b < ca_cache_batch(cache); b++) {
        count += ca_cache_length(cache, b);
    }
    int64_t n = 0;
    for (int64_t b = 0; moves != NULL && b < ca_cache_batch(cache); b++) {
        for (int64_t i = 0; i < ca_cache_length(cache, b); i++, n++) {
            moves[n] = moves[count + n] = b * ca_cache_capacity(cache) + i;
        }
    }
    return count;
}

/* ---- attend ---- */

/* View the first `length` rows of keys or values, and their scales and offsets, as operands of attention. */
static void
view_rows(const ca_kept *kept, int64_t length, ca_tensor *rows, ca_tensor *scale, ca_tensor *offset)
{
    const int64_t *sizes = kept->pages.shape;
    *rows = kept->pages;
    *scale = kept->scales;
    *offset = kept->offsets;
    ca_tensor_take(rows, 2, 0, length);
    rows->shape[3] = kept->size; /* in a byte of int4 are two */
    if (kept->codes == CA_CODES_INT4) {
        ca_tensor_take(offset, 2, 0, length);
        ca_tensor_take(scale, 2, 0, length);
    } else if (kept->codes == CA_CODES_INT8) {
        ca_tensor_take(scale, 2, 0, length);
        ca_tensor_add_dim(scale, 1, 0);
    } else if (kept->codes != CA_CODES_NONE) {
        const ca_tensor of_heads = *scale;
        ca_tensor_start_view(&of_heads, scale);
        ca_tensor_add_dim(scale, sizes[0], 0);
        ca_tensor_add_dim(scale, sizes[1], of_heads.strides[0]);
        ca_tensor_add_dim(scale, length, 0);
        ca_tensor_add_dim(scale, 1, 0);
    }
}

ca_status
ca_cache_attend_check(const ca_cache *cache, ca_torch_sdpa *call, int64_t shape[4], ca_error *error)
{
    static const int64_t codes[] = {[CA_CODES_E4M3FN] = CA_KERNEL_FLOAT8_E4M3FN,
                                    [CA_CODES_E5M2] = CA_KERNEL_FLOAT8_E5M2,
                                    [CA_CODES_INT4] = CA_KERNEL_INT4};
    const ca_tensor *query = &call->query;
    const int64_t *sizes = cache->key.pages.shape;
    int ndim;
    int64_t found[CA_MAX_DIMS];
    ca_status status = CA_OK;
    CA_TRY(check_dtype(&cache->key, query, "query", error));
    if (query->ndim != 4 || query->shape[0] != sizes[0] || query->shape[1] % sizes[1] != 0 ||
        query->shape[3] != cache->key.size) {
        CA_TRY(ca_error_set(error, CA_ERROR_VALUE,
                            "query has shape %s; expected (%lld, Hq, L, %lld), Hq a multiple of "
                            "the cache's %lld heads",
                            CA_SHAPE_OF(query), (long long)sizes[0], (long long)cache->key.size,
                            (long long)sizes[1]));
    }
    view_rows(&cache->key, cache->length, &call->key, &call->key_scale, &call->key_offset);
    view_rows(&cache->value, cache->length, &call->value, &call->value_scale, &call->value_offset);
    call->code = codes[cache->key.codes];
    call->enable_gqa = true;
    CA_TRY(ca_torch_sdpa_check(call, &ndim, found, error));
    memcpy(shape, found, 4 * sizeof(*shape));
done:
    return status;
}

void
ca_cache_attend_positions(const ca_cache *cache, const ca_torch_sdpa *call, const ca_tensor *output,
                          ca_attention *attention, ca_tensor views[CA_ATTENTION_OPERANDS])
{
    int64_t L = call->query.shape[2];
    int64_t B = ca_cache_batch(cache);
    bool uneven = cache->lengths != NULL;
    if (uneven) {
        const ca_tensor counts = {.dtype = CA_INT64,
                                  .ndim = 2,
                                  .data = (void *)cache->lengths,
                                  .shape = {B, 1},
                                  .strides = {1, 0}};
        ca_door_view_grouped(&counts, 0, 2, output->shape, cache->key.pages.shape[1],
                             &views[CA_ATTENTION_KEY_COUNTS]);
        attention->band_follows_counts = true;
    }
    int64_t position = uneven ? -L : cache->length - L;
    if (call->mods != NULL) {
        call->mods->numbers[CA_NUMBER_OF_POSITION] = position;
    }
    ca_door_set_band(attention, call->window_left, call->window_right,
                     call->causal != CA_CAUSAL_NONE, position);
}
