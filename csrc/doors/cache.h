/* SPDX-License-Identifier: MIT
 *
 * clattn.KVCache: keys and values (B, Hk, capacity, size). A sequence of length n has filled its
 * first n positions.
 */
#ifndef CLATTN_DOORS_CACHE_H
#define CLATTN_DOORS_CACHE_H

#include "attention/problem.h"
#include "base/status.h"
#include "base/tensor.h"
#include "doors/torch.h"

typedef struct {
    ca_tensor key;
    ca_tensor value;
    int64_t length;         /* of the longest sequence */
    const int64_t *lengths; /* of each, in host memory; NULL: all have that length */
} ca_cache;

int64_t ca_cache_length(const ca_cache *cache, int64_t b);

/* Set the lengths of all sequences. If they are unequal, the cache keeps the pointer. */
void ca_cache_set_lengths(ca_cache *cache, const int64_t *lengths);

/* New positions. Sequence b takes the last counts[b] of them; NULL: all. */
typedef struct {
    ca_tensor key;   /* (B, Hk, n, E) */
    ca_tensor value; /* (B, Hk, n, Ev) */
    const int64_t *counts;
    int64_t ncounts;
} ca_cache_append;

/* Check dtypes, shapes and counts, and that no sequence exceeds the capacity. */
ca_status ca_cache_append_check(const ca_cache *cache, const ca_cache_append *append,
                                ca_error *error);

/* Make the sequences longer, once everything is copied. Writes the B new lengths to `lengths`. If
   the sequences have unequal lengths, the cache keeps the pointer. */
void ca_cache_append_done(ca_cache *cache, const ca_cache_append *append, int64_t *lengths);

/* Returns the number of copies that move the new positions. Copy `index` moves `from` to `to`: an
   even copy moves keys, an odd copy moves values. */
int64_t ca_cache_append_copies(const ca_cache *cache, const ca_cache_append *append);
void ca_cache_append_copy(const ca_cache *cache, const ca_cache_append *append, int64_t index,
                          ca_tensor *from, ca_tensor *to);

/* Forget the positions from a number on. */
typedef struct {
    const int64_t *numbers; /* for each sequence; NULL: `number`, for sequences longer than that */
    int64_t count;
    int64_t number;
} ca_cache_cut;

ca_status ca_cache_cut_check(const ca_cache *cache, const ca_cache_cut *cut, ca_error *error);
void ca_cache_cut_done(ca_cache *cache, const ca_cache_cut *cut, int64_t *lengths);

/* Sequence b becomes what sequence indices[b] was. The elements are copied before `done`, which
   writes the B new lengths to `lengths`; `before` are the old ones, in other memory. */
ca_status ca_cache_reorder_check(const ca_cache *cache, const int64_t *indices, int64_t count,
                                 ca_error *error);
void ca_cache_reorder_done(ca_cache *cache, const int64_t *indices, const int64_t *before,
                           int64_t *lengths);

/* View positions 0 … length - 1 of sequence b, or of all sequences, -1, of a tensor (B, Hk, n,
   size). */
ca_tensor ca_cache_positions(const ca_tensor *tensor, int64_t b, int64_t length);

/* The queries are the last positions: row i of sequence b stands at position
   i + length - L. `call` comes without key and value, which the check sets. ca_torch_sdpa_views
   makes its problem and views, which then get these positions; `output` has the result's shape. */
ca_status ca_cache_attend_check(const ca_cache *cache, ca_torch_sdpa *call, int64_t shape[4],
                                ca_error *error);
void ca_cache_attend_positions(const ca_cache *cache, const ca_torch_sdpa *call,
                               const ca_tensor *output, ca_attention *attention,
                               ca_tensor views[CA_ATTENTION_OPERANDS]);

#endif
