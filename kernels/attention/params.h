/* SPDX-License-Identifier: MIT
 *
 * The params of one attention problem. Host C and OpenCL C include the same text.
 * Everything that may grow with a sequence is data here. All sizes and strides count
 * elements, in 64 bits.
 *
 *     key, value  = past ones, then new ones                    P + S = T of each
 *     score[i, j] = scale * dot(query[i, :], key[j, :])
 *     score       = softcap * tanh(score / softcap)             where softcap > 0
 *     score      += mask[i, j] + bias[i, j]
 *     row i attends to key j only where lower <= j - i <= upper, j < limit and the mask
 *     allows it
 *     weight[i, j] = exp(score[i, j]) / (sum_j exp(score[i, j]) + exp(sink))
 *     output[i]   = sum_j weight[i, j] * value[j, :]            0 for an empty row
 *     lse[i]      = log(sum_j exp(score[i, j]) + exp(sink))     without a sink, it is -inf
 *     or lse[i, 0] = base, lse[i, 1] = sum_j exp(score[i, j] - base)    any base near the
 *                    highest score; no sink; -inf and 0 for an empty row
 */
#pragma once

#include "kernels/attention/operands.h"  /* CA_OPTIONAL_VIEWS */
#include "kernels/support/view_params.h" /* ca_view, CA_BATCH_DIMS, ca_int64 */

/* -DUSUAL. The first program is for calls without options. The second is for calls whose only option
 * is a bool mask, without a band or key counts, and whose keys lie in a cache. Other programs have 0. */
#define CA_USUAL        1
#define CA_USUAL_MASKED 2

/* -DARRAYS: how many optional operands a program takes. Programs that read a call's options as data
   take as many as a call may have. Drivers bind each argument, and copy the params for each
   work-group. */
#ifdef ARRAYS
#define CA_VIEWS_TAKEN (ARRAYS > 0 ? ARRAYS : 1)
#else
#define CA_VIEWS_TAKEN CA_OPTIONAL_VIEWS
#endif

typedef struct {
    ca_int64 first_group;          /* that this launch runs: see group_of */
    ca_int64 batch[CA_BATCH_DIMS]; /* sizes of the leading dimensions */
    ca_int64 L;                    /* query rows */
    ca_int64 P;                    /* past keys */
    ca_int64 T;                    /* keys, past and new */
    ca_int64 E;                    /* head size of query and key */
    ca_int64 Ev;                   /* head size of value and output */
    ca_int64 lower;                /* the band: lower <= j - i <= upper, -(L+T) … L+T */
    ca_int64 upper;                /* (… L+2T with key counts, which shift the band; any
                                      numbers with offsets, which shift it too) */
    ca_int64 limit;                /* keys that may be attended to */
    ca_view query;                 /* (L, E) */
    ca_view key;                   /* (S, E) */
    ca_view value;                 /* (S, Ev) */
    ca_view output;                /* (L, Ev) */
    ca_view lse;                   /* (L), or (L, 2) with CA_SPLITS_LSE */
    ca_view key_counts;            /* batch strides only: a count lowers `limit` */
    ca_int64 options;              /* CA_USES (…), and the stage of scores */
    ca_int64 heads;                /* query heads of a work-item, which share keys */
    ca_uint32 tiles;    /* of a work-item, on CPUs for each key head; in attention_reference and
                        attention_inputs, rows; in attention_cpu_backward, keys of a block */
    ca_uint32 own;      /* attention_decode_cpu: cores that take turns at neighbouring heads, or 1;
                        attention_backward: CA_BACKWARD_…, and a dtype */
    ca_int64 first_row; /* dropout's number of row [0, 0, 0, 0] */
    ca_int64 seed;
    ca_int64 scale;   /* the bits of a `real`, as in softcap and kept_scale */
    ca_int64 softcap; /* 0: none */
    ca_int64 inverse_softcap;
    ca_int64 kept_scale;    /* dropout: the factor of the weights that are kept */
    float filter;           /* added where the mask's condition is false; may be -inf */
    ca_uint32 last_dropped; /* the highest random word whose weight is dropped */
    ca_uint32 mask_dtype;
    ca_uint32 flags;     /* CA_HAS_LSE … CA_MERGES */
    ca_uint32 redo_slot; /* redo[redo_slot] = redo_mark asks for rows to be redone */
    ca_uint32 redo_mark;
    ca_uint32 block_keys;             /* on CPUs, of a block, at most: whole strips */
    ca_uint32 key_heads;              /* on CPUs, of a work-item */
    ca_uint32 splits;                 /* parts that the keys are divided into */
    ca_view optional[CA_VIEWS_TAKEN]; /* in the order of attention/operands.h */
} ca_attention_params;

/* The argument `numbers`: of the whole call, of the tables' sizes, and the user's own. */
#define CA_NUMBER_OF_ROWS       0 /* query rows */
#define CA_NUMBER_OF_HEADS      1 /* query heads */
#define CA_NUMBER_OF_POSITION   2 /* where row 0 stands */
#define CA_NUMBER_OF_BLOCK_ROWS 3 /* rows and keys of an entry of `blocks` */
#define CA_NUMBER_OF_BLOCK_KEYS 4
#define CA_NUMBERS_OF_TABLES    5
#define CA_TABLE_DIMS           5
#define CA_TABLES               4
#define CA_NUMBERS_OF_MODS      (CA_NUMBERS_OF_TABLES + CA_TABLES * CA_TABLE_DIMS)

/* The values of `blocks`: which keys of a block its rows attend to. */
#define CA_BLOCK_EMPTY   0 /* none */
#define CA_BLOCK_PARTIAL 1
#define CA_BLOCK_FULL    2 /* all */

/* Flags, which are data on every device. */
#define CA_HAS_LSE           1u
#define CA_HAS_KEY_COUNTS    2u
#define CA_COUNTS_SHIFT_BAND 4u
#define CA_FETCHES_ROWS      8u    /* CPUs prefetch rows of keys and values, */
#define CA_REDOES            16u   /* compute rows that are not finite, if the mark is set */
#define CA_MERGES            32u   /* merge the partial rows of splits */
#define CA_KEYS_IN_PLACE     64u   /* attention_cpu reads keys where they lie */
#define CA_VALUES_IN_PLACE   128u  /* and values */
#define CA_FETCHES_STARTS    256u  /* or their starts, or neither */
#define CA_KEYS_ARE_FAR      512u  /* they and values come from memory, not from a cache */
#define CA_SPLITS_LSE        1024u /* lse is two numbers, base and sum */

/* What a step of attention_backward computes. */
#define CA_BACKWARD_ROWS   1u
#define CA_BACKWARD_DELTAS 2u
#define CA_BACKWARD_QUERY  3u
#define CA_BACKWARD_KEY    4u
#define CA_BACKWARD_VALUE  5u
#define CA_BACKWARD_MASK   6u
#define CA_BACKWARD_SINKS  7u
/* Steps of the gradient of an array that a score_mod reads. */
#define CA_BACKWARD_CLEAR    8u
#define CA_BACKWARD_CAPTURED 9u
#define CA_BACKWARD_TOTAL    10u
/* Steps of attention_cpu_backward. attention_tiled_backward has the first one, and QUERY and KEY, as
   attention_mma_backward has. */
#define CA_BACKWARD_NUMBERS   11u /* of rows: base, sum and delta */
#define CA_BACKWARD_GRADIENTS 12u /* of query, key and value */
#define CA_BACKWARD_PARTS     13u /* the sums of the query's gradients */
#define CA_BACKWARD_STEPS     15u /* the bits of these */
#define CA_BACKWARD_ADDS      16u /* the step adds to what stands in its result */
#define CA_BACKWARD_DTYPE     32u /* times the dtype of the result, */
#define CA_BACKWARD_DTYPES    16u /* which is one of so many */
/* Rows of other batch entries add to other elements of the array. The two bits above say the same of heads, and
   of the rows of a head. */
#define CA_BACKWARD_APART          512u
#define CA_BACKWARD_CAPTURED_ARRAY 4096u /* times the array's number */

/* A bound, or the negative of one, that offsets do not shift. */
#define CA_UNBOUNDED 0x7fffffffffffffff

/* Limits of kernels for CPUs, because drivers limit the private memory of a work-item. */
#define CA_CPU_HEAD_SIZE    512         /* E and Ev, at most */
#define CA_CPU_STRIPS       16          /* of MR keys in a block, at most */
#define CA_CPU_TILES        32          /* of a work-item, at most */
#define CA_CPU_TILES_BYTES  (512 << 10) /* of their queries and results; they stay in a cache */
#define CA_CPU_COLUMNS      2176        /* of packed keys and values of a work-item, at most */
#define CA_BACKWARD_SIZE    256         /* E and Ev of attention_cpu_backward, at most */
#define CA_BACKWARD_COLUMNS 4608        /* of its packed keys and values, and of their gradients */

/* The reference computes so many columns of the output at a time, and keeps the weights of so many
 * keys. A row that sees more keys has its scores computed again for each part of its columns. */
#define CA_REFERENCE_COLUMNS 64
#define CA_REFERENCE_KEYS    128

/* The bytes behind a packed row of values. The second product reads a few vectors of each row, of all keys,
 * again and again. If rows were 512 bytes apart, half of the first cache's sets would hold these vectors. */
#define CA_BYTES_BEHIND(row) ((row) % 512 == 0 ? 64 : 0)

/* The arguments of every attention kernel, in this order:
 *     query, key, value, key_counts, output, lse
 *                            __global pointers; those that a call lacks are NULL
 *     ARRAYS optional ones   those that the call has, in the order of attention/operands.h; the rest NULL
 *     partial                the rows of the splits, for the merge, or NULL
 *     redo                   the device's marks (csrc/opencl/marks.h): calls with rows to redo
 *     params                 ca_attention_params by value
 */

/* -DDTYPE, -DVALUE_DTYPE and -DMASK_DTYPE. The values are ca_dtype's. */
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

/* -DKEY_DTYPE and -DVALUE_DTYPE may be these too, of bytes that stand for numbers. */
#define CA_KERNEL_FLOAT8_E4M3FN 13
#define CA_KERNEL_FLOAT8_E5M2   14
#define CA_KERNEL_INT4          15 /* two in a byte, the first one in its low half */

/* Neighbours of a row of int4 that share a scale and an offset. The last ones may be fewer. */
#define CA_INT4_GROUP 32

/* -DWARP: how the operations of support/warp.clh are made. */
#define CA_WARP_EMULATED   0
#define CA_WARP_PTX        1
#define CA_WARP_PTX_GROUPS 2 /* with products of four warps */

/* -DQUERIES of attention/mma.cl: where the queries of a work-group stay. */
#define CA_QUERIES_IN_REGISTERS    1
#define CA_QUERIES_IN_LOCAL_MEMORY 2

/* -DPAGED of attention/mma.cl: what lies in one page. 0: keys do not lie in pages. */
#define CA_BLOCKS_IN_PAGES 1 /* each block of keys */
#define CA_ROWS_IN_PAGES   2 /* each key */

#define CA_ATTENTION_PARAMS_SIZE 880
