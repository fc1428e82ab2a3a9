/* SPDX-License-Identifier: MIT */
#include "doors/cache.h"

#include <string.h>

#include "doors/common.h"

int64_t
ca_cache_length(const ca_cache *cache, int64_t b)
{
    return cache->lengths != NULL ? cache->lengths[b] : cache->length;
}

/* ---- append ---- */

static int64_t
count_of(const ca_cache_append *append, int64_t b)
{
    return append->counts != NULL ? append->counts[b] : append->key.shape[2];
}

/* `given` has to be (B, Hk, n, size), with the dtype of `held`, which is (B, Hk, capacity,
   size). */
static ca_status
check_positions(const ca_tensor *given, const char *name, const ca_tensor *held, ca_error *error)
{
    if (given->dtype != held->dtype) {
        return ca_error_set(error, CA_ERROR_TYPE, "%s has dtype %s; expected %s, that of the cache",
                            name, ca_dtype_name(given->dtype), ca_dtype_name(held->dtype));
    }
    if (given->ndim != 4 || given->shape[0] != held->shape[0] ||
        given->shape[1] != held->shape[1] || given->shape[3] != held->shape[3]) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "%s has shape %s; expected (%lld, %lld, n, %lld)", name,
                            CA_SHAPE_OF(given), (long long)held->shape[0],
                            (long long)held->shape[1], (long long)held->shape[3]);
    }
    return CA_OK;
}

static ca_status
check_counts(const ca_cache *cache, const ca_cache_append *append, ca_error *error)
{
    int64_t B = cache->key.shape[0];
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
    int64_t capacity = cache->key.shape[2];
    CA_TRY(check_positions(&append->key, "key", &cache->key, error));
    CA_TRY(check_positions(&append->value, "value", &cache->value, error));
    if (append->key.shape[2] != append->value.shape[2]) {
        CA_TRY(ca_error_set(error, CA_ERROR_VALUE,
                            "value has %lld positions; expected %lld, as many as key",
                            (long long)append->value.shape[2], (long long)append->key.shape[2]));
    }
    CA_TRY(check_counts(cache, append, error));
    for (int64_t b = 0; b < cache->key.shape[0]; b++) {
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
    for (int64_t b = 1; b < cache->key.shape[0]; b++) {
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
    for (int64_t b = 0; b < cache->key.shape[0]; b++) {
        lengths[b] = ca_cache_length(cache, b) + count_of(append, b);
    }
    ca_cache_set_lengths(cache, lengths);
}

/* True if one copy moves all sequences: they have one length and grow by one count. */
static bool
is_even(const ca_cache *cache, const ca_cache_append *append)
{
    return cache->lengths == NULL && append->counts == NULL;
}

int64_t
ca_cache_append_copies(const ca_cache *cache, const ca_cache_append *append)
{
    return is_even(cache, append) ? 2 : 2 * cache->key.shape[0];
}

void
ca_cache_append_copy(const ca_cache *cache, const ca_cache_append *append, int64_t index,
                     ca_tensor *from, ca_tensor *to)
{
    int64_t n = append->key.shape[2];
    int64_t b = index / 2;
    *from = index % 2 == 0 ? append->key : append->value;
    *to = index % 2 == 0 ? cache->key : cache->value;
    if (!is_even(cache, append)) {
        ca_tensor_take(from, 0, b, 1);
        ca_tensor_take(to, 0, b, 1);
    }
    int64_t count = count_of(append, b);
    ca_tensor_take(from, 2, n - count, count);
    ca_tensor_take(to, 2, ca_cache_length(cache, b), count);
}

/* ---- truncate ---- */

ca_status
ca_cache_cut_check(const ca_cache *cache, const ca_cache_cut *cut, ca_error *error)
{
    int64_t B = cache->key.shape[0];
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
    for (int64_t b = 0; b < cache->key.shape[0]; b++) {
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
    int64_t B = cache->key.shape[0];
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
    for (int64_t b = 0; b < cache->key.shape[0]; b++) {
        lengths[b] = before[indices[b]];
    }
    ca_cache_set_lengths(cache, lengths);
}

ca_tensor
ca_cache_positions(const ca_tensor *tensor, int64_t b, int64_t length)
{
    ca_tensor view = *tensor;
    if (b >= 0) {
        ca_tensor_take(&view, 0, b, 1);
    }
    ca_tensor_take(&view, 2, 0, length);
    return view;
}

/* ---- attend ---- */

ca_status
ca_cache_attend_check(const ca_cache *cache, ca_torch_sdpa *call, int64_t shape[4], ca_error *error)
{
    const ca_tensor *query = &call->query;
    const int64_t *sizes = cache->key.shape;
    int ndim;
    int64_t found[CA_MAX_DIMS];
    ca_status status = CA_OK;
    if (query->dtype != cache->key.dtype) {
        CA_TRY(ca_error_set(error, CA_ERROR_TYPE,
                            "query has dtype %s; expected %s, that of the cache",
                            ca_dtype_name(query->dtype), ca_dtype_name(cache->key.dtype)));
    }
    if (query->ndim != 4 || query->shape[0] != sizes[0] || query->shape[1] % sizes[1] != 0 ||
        query->shape[3] != sizes[3]) {
        CA_TRY(ca_error_set(error, CA_ERROR_VALUE,
                            "query has shape %s; expected (%lld, Hq, L, %lld), Hq a multiple of "
                            "the cache's %lld heads",
                            CA_SHAPE_OF(query), (long long)sizes[0], (long long)sizes[3],
                            (long long)sizes[1]));
    }
    call->key = cache->key;
    call->value = cache->value;
    ca_tensor_take(&call->key, 2, 0, cache->length);
    ca_tensor_take(&call->value, 2, 0, cache->length);
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
    int64_t B = cache->key.shape[0];
    bool uneven = cache->lengths != NULL;
    if (uneven) {
        const ca_tensor counts = {.dtype = CA_INT64,
                                  .ndim = 2,
                                  .data = (void *)cache->lengths,
                                  .shape = {B, 1},
                                  .strides = {1, 0}};
        ca_door_view_grouped(&counts, 0, 2, output->shape, cache->key.shape[1],
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
