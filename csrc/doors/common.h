/* SPDX-License-Identifier: MIT
 *
 * What the specifications share: views by heads, and checks.
 */
#ifndef CLATTN_SPEC_COMMON_H
#define CLATTN_SPEC_COMMON_H

#include <stdint.h>

#include "attention/problem.h"
#include "base/status.h"
#include "base/tensor.h"

#define CA_SHAPE_TEXT 160

/* The shape for a message, cut to fit. Returns `text`. */
const char *ca_spec_shape_text(const ca_tensor *tensor, char text[CA_SHAPE_TEXT]);

/* Append a dimension to a view. */
void ca_spec_add_dim(ca_tensor *view, int64_t size, int64_t stride);

/* View `tensor` (…, H, and `trailing` dimensions) as (…, Hk, Hq / Hk, and those): its
   leading dimensions follow `shape`, of nleading sizes of which the last is Hq, and
   broadcast to it; Hk heads are each repeated for a group. An absent tensor stays
   so. */
void ca_spec_view_grouped(const ca_tensor *tensor, int trailing, int nleading,
                          const int64_t *shape, int64_t Hk, ca_tensor *view);

/* View (…, B, N, H * X) as (B, H, N, X). */
void ca_spec_split_heads(const ca_tensor *tensor, int64_t H, ca_tensor *view);

/* Broadcast the last two dimensions of a view, where they are of size 1. */
void ca_spec_broadcast_rows(ca_tensor *view, int64_t rows);
void ca_spec_broadcast_columns(ca_tensor *view, int64_t columns);

/* View `tensor` as `shape` of ndim sizes, to which it broadcasts; leading dimensions of
   size 1 beyond those are dropped. False where it does not. */
bool ca_spec_broadcast(const ca_tensor *tensor, int ndim, const int64_t *shape,
                       ca_tensor *view);

/* Are all dimensions but the last `trailing` of size 1? */
bool ca_spec_has_leading_ones(const ca_tensor *tensor, int trailing);

/* A size of one tensor that has to be that of another one. */
typedef struct {
    const char *name;
    const ca_tensor *tensor;
    const char *what; /* "head size" */
    int64_t size;
    const char *other_name;
    const ca_tensor *other;
    int64_t expected;
} ca_spec_equal;

ca_status ca_spec_check_equal(const ca_spec_equal *rule, ca_error *error);

/* The dtype of key and value is query's. */
ca_status ca_spec_check_dtypes(const ca_tensor *query, const ca_tensor *key,
                               const ca_tensor *value, ca_error *error);

/* So many dimensions or more, at least two; E of query and key, S of key and value are
   equal. */
ca_status ca_spec_check_matrices(const ca_tensor *query, const ca_tensor *key,
                                 const ca_tensor *value, int lowest_rank,
                                 ca_error *error);
/* The band of a problem whose row i stands at key i + shift: it attends that many keys
   to the left and to the right, CA_BAND_UNBOUNDED for all; `causal`: none to the
   right. */
void ca_spec_set_band(ca_attention *attention, int64_t left, int64_t right, bool causal,
                      int64_t shift);

/* A finite number within the range of what `dtype` is computed in, if it is given. */
ca_status ca_spec_check_scale(bool given, double scale, ca_dtype dtype,
                              ca_error *error);

/* A finite number of 0 or more. */
ca_status ca_spec_check_softcap(double softcap, ca_error *error);

/* 1 / sqrt(E), 1 for E = 0. */
double ca_spec_default_scale(int64_t E);

#endif
