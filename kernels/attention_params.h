/* SPDX-License-Identifier: MIT
 *
 * What a kernel is told about one attention call, one text for host C and OpenCL C.
 * Everything that may grow with a sequence is data here; dtypes, head sizes and
 * feature flags are -D macros. All sizes and strides count elements, in 64 bits.
 *
 *     score[i, j] = scale * dot(query[i, :], key[j, :])
 *     score       = softcap * tanh(score / softcap)             where softcap > 0
 *     score      += mask[i, j]                                  (bool: False excludes)
 *     row i attends key j only where lower <= j - i <= upper    and the mask allows it
 *     output[i]   = sum_j softmax_j(score[i, :])[j] * value[j, :]
 *     lse[i]      = log sum_j exp(score[i, j])                  -inf for an empty row
 */
#ifndef CLATTN_ATTENTION_PARAMS_H
#define CLATTN_ATTENTION_PARAMS_H

#ifdef __OPENCL_C_VERSION__
typedef long ca_int64;
#else
#include <stdint.h>
typedef int64_t ca_int64;
#endif

/* Leading dimensions a kernel walks; the host folds what it can and halves a call that
   has more. A grouped query (GQA) is a dimension with stride 0 in key and value. */
#define CA_BATCH_DIMS 3

/* Where element [b0, b1, b2, row, column] of a tensor lies from its pointer:
   offset + sum(b[n] * batch[n]) + r * row + c * column. */
typedef struct {
    ca_int64 offset;
    ca_int64 batch[CA_BATCH_DIMS];
    ca_int64 row;
    ca_int64 column;
} ca_view;

typedef struct {
    ca_int64 batch[CA_BATCH_DIMS]; /* sizes of the leading dimensions */
    ca_int64 L;                    /* query rows */
    ca_int64 S;                    /* keys */
    ca_int64 E;                    /* head size of query and key */
    ca_int64 Ev;                   /* head size of value and output */
    ca_int64 lower;                /* the band of keys a row may see, -(L+S) … L+S */
    ca_int64 upper;
    ca_view query;  /* (L, E) */
    ca_view key;    /* (S, E) */
    ca_view value;  /* (S, Ev) */
    ca_view mask;   /* (L, S), row or column stride 0 where it broadcasts */
    ca_view output; /* (L, Ev) */
    ca_view lse;    /* (L), column unused */
    ca_int64 has_lse;
    ca_int64 scale_bits;   /* bits of a double, for kernels that compute in double */
    ca_int64 softcap_bits; /* the same */
    float scale;
    float softcap; /* 0: none */
} ca_attention_params;

/* Kernel arguments, in this order, in every attention kernel:
 *     query, key, value, mask, output, lse  __global pointers (unused ones are NULL)
 *     params                                ca_attention_params by value
 */

/* -DDTYPE (query, key, value, output) and -DMASK. The values are ca_dtype's. */
#define CA_KERNEL_BOOL     0
#define CA_KERNEL_FLOAT16  1
#define CA_KERNEL_BFLOAT16 2
#define CA_KERNEL_FLOAT32  3
#define CA_KERNEL_FLOAT64  4
#define CA_KERNEL_NO_MASK  -1

#define CA_ATTENTION_PARAMS_SIZE 392

#endif
