/* SPDX-License-Identifier: MIT
 *
 * The caches of keys and values, clattn.KVCache and clattn.PagedKVCache. Both write rows to pages
 * (num_pages, Hk, page_size, …). In a KVCache sequence b has page b, and its positions are the page's first rows.
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

/* Add the appended positions to the lengths of the sequences. The caller has written all rows before. Writes the
   B new lengths to `lengths`. If they differ, the cache keeps the pointer. */
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

/* Make sequence b what sequence indices[b] was. The caller copies the rows between check and `done`. `done` reads
   the B old lengths from `before` and writes the new ones to `lengths`, which is other memory. Where the copying
   has failed, `failed` lets the sequences forget their positions whose rows may be others' now. */
ca_status ca_cache_reorder_check(const ca_cache *cache, const int64_t *indices, int64_t count,
                                 ca_error *error);
void ca_cache_reorder_done(ca_cache *cache, const int64_t *indices, const int64_t *before,
                           int64_t *lengths);
void ca_cache_reorder_failed(ca_cache *cache, const int64_t *indices, int64_t *lengths);

/* Write the moves of a reorder, for ca_rows_copy. Rows first move to spare pages of `room` rows each, then from
   there to their sequences; `moves` gets the moves to the spare pages, then those from them. Sequences that keep
   their place have none. Returns how many rows move. With moves NULL it only counts them. */
int64_t ca_cache_reorder_moves(const ca_cache *cache, const int64_t *indices, int64_t room,
                               int64_t *moves);

/* Write the moves of all rows to another cache of the same sizes, for ca_rows_copy. Returns how many rows move. With
   moves NULL it only counts them. */
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
