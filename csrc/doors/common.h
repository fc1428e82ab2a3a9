/* SPDX-License-Identifier: MIT
 *
 * What the doors share: views by heads, and checks.
 */
#ifndef CLATTN_DOORS_COMMON_H
#define CLATTN_DOORS_COMMON_H

#include <stdint.h>

#include "attention/problem.h"
#include "base/status.h"
#include "base/tensor.h"

/* View a tensor of heads and `trailing` dimensions (…, H, trailing) as (…, Hk, Hq / Hk, trailing).
   The dimensions up to the heads broadcast to `shape`, which has nleading sizes, the last of them
   Hq. Each of Hk heads is repeated for its group. The view of an absent tensor is absent. */
void ca_door_view_grouped(const ca_tensor *tensor, int trailing, int nleading, const int64_t *shape,
                          int64_t Hk, ca_tensor *view);

/* View (…, B, N, H * X) as (B, H, N, X). */
void ca_door_split_heads(const ca_tensor *tensor, int64_t H, ca_tensor *view);

/* Broadcast a dimension of a view, counted from the end, to `size` if its size is 1. */
void ca_door_broadcast_dim(ca_tensor *view, int from_end, int64_t size);

/* View `tensor` broadcast to `shape`, of ndim sizes. More leading dimensions, of size 1,
   are dropped. False if the tensor does not broadcast. */
bool ca_door_broadcast(const ca_tensor *tensor, int ndim, const int64_t *shape, ca_tensor *view);

/* True if all dimensions but the last `trailing` have size 1. */
bool ca_door_has_leading_ones(const ca_tensor *tensor, int trailing);

/* A size that two tensors have to share. */
typedef struct {
    const char *name;
    const ca_tensor *tensor;
    const char *what; /* "head size" */
    int64_t size;
    const char *other_name;
    const ca_tensor *other;
    int64_t expected;
} ca_door_equal;

ca_status ca_door_check_equal(const ca_door_equal *rule, ca_error *error);

/* Check that key and value have query's dtype. */
ca_status ca_door_check_dtypes(const ca_tensor *query, const ca_tensor *key, const ca_tensor *value,
                               ca_error *error);

/* The largest head size of a call. The time of a kernel that takes any head size grows with E for each
   part of the columns of a row (kernels/attention/reference.cl). */
#define CA_MOST_HEAD_SIZE 65536

/* Check the head size of an input, E or Ev. */
ca_status ca_door_check_head_size(const char *name, const ca_tensor *tensor, int64_t size,
                                  ca_error *error);

/* Check that each has lowest_rank dimensions or more, query and key one E, key and value one S,
   and no head size is too large. */
ca_status ca_door_check_matrices(const ca_tensor *query, const ca_tensor *key,
                                 const ca_tensor *value, int lowest_rank, ca_error *error);

/* Returns a + b, or the nearest number that 64 bits hold. */
int64_t ca_door_add_places(int64_t a, int64_t b);

/* Set the band: row i stands at key i + shift, and attends `left` keys before and `right`
   keys after that key, CA_BAND_UNBOUNDED for all. With `causal`, none after. */
void ca_door_set_band(ca_attention *attention, int64_t left, int64_t right, bool causal,
                      int64_t shift);

/* Check a scale that the caller gave: it must be finite, and fit the type that computes `dtype`. */
ca_status ca_door_check_scale(bool given, double scale, ca_dtype dtype, ca_error *error);

/* Check that the softcap is finite, and 0 or more. */
ca_status ca_door_check_softcap(double softcap, ca_error *error);

/* Returns 1 / sqrt(E), 1 for E = 0. */
double ca_door_default_scale(int64_t E);

#endif
