/* SPDX-License-Identifier: MIT
 *
 * The params of one attention problem. Host C and OpenCL C include the same text.
 * Everything that may grow with a sequence is data here; dtypes, head sizes and
 * features are -D macros. All sizes and strides count elements, in 64 bits.
 *
 *     key, value  = past ones, then new ones                    P + S = T of each
 *     score[i, j] = scale * dot(query[i, :], key[j, :])
 *     score       = softcap * tanh(score / softcap)             where softcap > 0
 *     score      += mask[i, j] + bias[i, j]
 *     row i attends to key j only where lower <= j - i <= upper, j < limit and the mask
 *     allows it
 *     output[i]   = sum_j softmax_j(score[i, :])[j] * value[j, :]
 *     lse[i]      = log sum_j exp(score[i, j])                  -inf for an empty row
 */
#ifndef CLATTN_ATTENTION_PARAMS_H
#define CLATTN_ATTENTION_PARAMS_H

#include "kernels/support/view_params.h" /* ca_view, CA_BATCH_DIMS, ca_int64 */

typedef struct {
    ca_int64 batch[CA_BATCH_DIMS]; /* sizes of the leading dimensions */
    ca_int64 L;                    /* query rows */
    ca_int64 P;                    /* past keys */
    ca_int64 T;                    /* keys, past and new */
    ca_int64 E;                    /* head size of query and key */
    ca_int64 Ev;                   /* head size of value and output */
    ca_int64 lower;                /* the band: lower <= j - i <= upper, -(L+T) … L+T */
    ca_int64 upper;                /* (… L+2T with key counts, which shift the band) */
    ca_int64 limit;                /* keys that may be attended to */
    ca_view query;                 /* (L, E) */
    ca_view key;                   /* (S, E) */
    ca_view value;                 /* (S, Ev) */
    ca_view past_key;              /* (P, E) */
    ca_view past_value;            /* (P, Ev) */
    ca_view input_bias;            /* (E + E + Ev), for query, key and value */
    ca_view mask;                  /* (L, T), row or column stride 0 if it broadcasts */
    ca_view bias;                  /* like mask */
    ca_view key_counts;            /* batch strides only: a count lowers `limit` */
    ca_view output;                /* (L, Ev) */
    ca_view lse;                   /* (L), column unused */
    ca_view present_key;           /* (T, E); where batch[2] is 0 in both, the heads */
    ca_view present_value;         /* (T, Ev)                  divide the copy */
    ca_view scores;                /* (L, T) */
    ca_int64 heads;                /* query heads of a work-item, which share keys */
    ca_int64 splits;               /* into which the keys are divided */
    ca_int64 first_row;            /* dropout's number of row [0, 0, 0, 0] */
    ca_int64 seed;
    ca_int64 scale_bits;      /* bits of a double, for kernels that compute in double */
    ca_int64 softcap_bits;    /* likewise */
    ca_int64 kept_scale_bits; /* likewise */
    float scale;
    float softcap;          /* 0: none */
    float filter;           /* added to a score where a bool mask is false, or -inf */
    float kept_scale;       /* dropout: the factor of the weights that are kept */
    ca_uint32 last_dropped; /* the highest random word whose weight is dropped */
    ca_uint32 flags;        /* CA_HAS_… */
} ca_attention_params;

#define CA_HAS_LSE           1u
#define CA_HAS_KEY_COUNTS    2u
#define CA_COUNTS_SHIFT_BAND 4u
#define CA_KEYS_ARE_FAR      8u /* a head's keys and values do not stay in a cache */

/* The arguments of every attention kernel, in this order:
 *     query, key, value, past_key, past_value, input_bias, mask, bias, key_counts,
 *     output, lse, present_key, present_value, scores
 *                            __global pointers; those that a call lacks are NULL
 *     partial                the rows of the splits, for the merge, or NULL
 *     params                 ca_attention_params by value
 */

/* -DDTYPE, -DVALUE_DTYPE and -DMASK. The values are ca_dtype's. */
#define CA_KERNEL_BOOL     0
#define CA_KERNEL_FLOAT16  1
#define CA_KERNEL_BFLOAT16 2
#define CA_KERNEL_FLOAT32  3
#define CA_KERNEL_FLOAT64  4
#define CA_KERNEL_INT8     5
#define CA_KERNEL_INT16    6
#define CA_KERNEL_INT32    7
#define CA_KERNEL_INT64    8
#define CA_KERNEL_UINT8    9
#define CA_KERNEL_UINT16   10
#define CA_KERNEL_UINT32   11
#define CA_KERNEL_UINT64   12
#define CA_KERNEL_NO_MASK  -1

#define CA_ATTENTION_PARAMS_SIZE 840

#endif
