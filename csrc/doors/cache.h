/* SPDX-License-Identifier: MIT
 *
 * The caches of keys and values. What both have: pages (num_pages, Hk, page_size, …), and rows that are written
 * to them. What clattn.KVCache has beside it: sequence b is page b, and has filled its first positions.
 */
#ifndef CLATTN_DOORS_CACHE_H
#define CLATTN_DOORS_CACHE_H

#include "attention/problem.h"
#include "base/status.h"
#include "base/tensor.h"
#include "doors/torch.h"
#include "pages/rows.h"

typedef struct {
    ca_kept key;
    ca_kept value;
    /* Of KVCache: */
    int64_t length;         /* of the longest sequence */
    const int64_t *lengths; /* of each, in host memory; NULL: all have that length */
} ca_cache;

/* Check dtypes and shapes of new keys and values: of 4 dimensions, (B, Hk, n, size), or of 3, (n, Hk, size). */
ca_status ca_cache_rows_check(const ca_cache *cache, const ca_tensor *key, const ca_tensor *value,
                              int ndim, ca_error *error);

/* Write the tensors that have memory for each row of keys and values. Returns how many there are. */
#define CA_CACHE_TENSORS (2 * CA_KEPT_TENSORS)
int ca_cache_tensors(const ca_cache *cache, ca_tensor tensors[CA_CACHE_TENSORS]);

/* ---- clattn.KVCache ---- */

/* Returns how many sequences there are, B, and how many positions of each fit. */
static inline int64_t
ca_cache_batch(const ca_cache *cache)
{
    return cache->key.pages.shape[0];
}

static inline int64_t
ca_cache_capacity(const ca_cache *cache)
{
    return cache->key.pages.shape[2];
}

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

/* Make the sequences longer, once everything is written. Writes the B new lengths to `lengths`. If
   the sequences have unequal lengths, the cache keeps the pointer. */
void ca_cache_append_done(ca_cache *cache, const ca_cache_append *append, int64_t *lengths);

/* Leave out the positions of a checked append that no sequence takes. Returns how many rows are left, B * n. */
int64_t ca_cache_append_trim(ca_cache_append *append);

/* Write the places of these rows, for csrc/pages/rows.h. */
void ca_cache_append_places(const ca_cache *cache, const ca_cache_append *append, int64_t *places);

/* Forget the positions from a number on. */
typedef struct {
    const int64_t *numbers; /* for each sequence; NULL: `number`, for sequences longer than that */
    int64_t count;
    int64_t number;
} ca_cache_cut;

ca_status ca_cache_cut_check(const ca_cache *cache, const ca_cache_cut *cut, ca_error *error);
void ca_cache_cut_done(ca_cache *cache, const ca_cache_cut *cut, int64_t *lengths);

/* Sequence b becomes what sequence indices[b] was. The rows are copied before `done`, which writes the B new
   lengths to `lengths`; `before` are the old ones, in other memory. */
ca_status ca_cache_reorder_check(const ca_cache *cache, const int64_t *indices, int64_t count,
                                 ca_error *error);
void ca_cache_reorder_done(ca_cache *cache, const int64_t *indices, const int64_t *before,
                           int64_t *lengths);

/* Write how the rows go from sequence indices[b] to sequence b, for each b, by way of a room of pages that
   `room` rows fit: ca_rows_copy's moves to the room and, behind them, those from there. Sequences that stay
   are left out. Returns the number of rows that move. With moves NULL only counts them. */
int64_t ca_cache_reorder_moves(const ca_cache *cache, const int64_t *indices, int64_t room,
                               int64_t *moves);

/* Write ca_rows_copy's moves of all rows to pages of the same size. Returns their number, or only counts them. */
int64_t ca_cache_copy_moves(const ca_cache *cache, int64_t *moves);

/* The queries are the last positions: row i of sequence b stands at position
   i + length - L. `call` comes without key and value, which the check sets. ca_torch_sdpa_views
   makes its problem and views, which then get these positions; `output` has the result's shape. */
ca_status ca_cache_attend_check(const ca_cache *cache, ca_torch_sdpa *call, int64_t shape[4],
                                ca_error *error);
void ca_cache_attend_positions(const ca_cache *cache, const ca_torch_sdpa *call,
                               const ca_tensor *output, ca_attention *attention,
                               ca_tensor views[CA_ATTENTION_OPERANDS]);

#endif
