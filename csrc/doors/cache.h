/* SPDX-License-Identifier: MIT
 *
 * clattn.KVCache: keys and values (B, Hk, capacity, size), of which each sequence has
 * filled as many positions as its length says.
 */
#ifndef CLATTN_SPEC_CACHE_H
#define CLATTN_SPEC_CACHE_H

#include "attention/problem.h"
#include "base/status.h"
#include "base/tensor.h"
#include "doors/torch.h"

typedef struct {
    ca_tensor key;
    ca_tensor value;
    int64_t length;         /* of the longest sequence */
    const int64_t *lengths; /* of each, in the host's memory; NULL: all are as long */
} ca_cache;

int64_t ca_cache_length(const ca_cache *cache, int64_t b);

/* New positions. Of sequence b the last counts[b] are taken; NULL: all. */
typedef struct {
    ca_tensor key;   /* (B, Hk, n, E) */
    ca_tensor value; /* (B, Hk, n, Ev) */
    const int64_t *counts;
    int64_t ncounts;
} ca_cache_append;

/* dtypes, shapes, counts, and that no sequence exceeds the capacity. */
ca_status ca_cache_append_check(const ca_cache *cache, const ca_cache_append *append,
                                ca_error *error);

/* All is copied: the sequences are longer now. `lengths`, B of them, is where the cache
   keeps those that differ. */
void ca_cache_append_done(ca_cache *cache, const ca_cache_append *append,
                          int64_t *lengths);

/* How many copies it takes, and the views that copy `part` is from and to: of keys, then
   of values. */
int64_t ca_cache_append_parts(const ca_cache *cache, const ca_cache_append *append);
void ca_cache_append_part(const ca_cache *cache, const ca_cache_append *append,
                          int64_t part, ca_tensor *from, ca_tensor *to);

/* Forget the positions from some number on. */
typedef struct {
    const int64_t *numbers; /* for each sequence; NULL: `number`, for the longer ones */
    int64_t count;
    int64_t number;
} ca_cache_cut;

ca_status ca_cache_cut_check(const ca_cache *cache, const ca_cache_cut *cut,
                             ca_error *error);
void ca_cache_cut_done(ca_cache *cache, const ca_cache_cut *cut, int64_t *lengths);

/* Queries at the end of the sequences: row i of sequence b stands at position
   i + length - L. `call` has query, mask, scale, softcap, window and whether it is
   causal; its key and value are set here. */
ca_status ca_cache_attend_check(const ca_cache *cache, ca_torch_sdpa *call,
                                int64_t shape[4], ca_error *error);
int64_t ca_cache_attend_problem(const ca_cache *cache, const ca_torch_sdpa *call,
                                const ca_tensor *output, int64_t index,
                                ca_attention *attention);

#endif
