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

#include "kernels/support/view_params.h" /* ca_view, CA_BATCH_DIMS, ca_int64 */

/* Arrays that few calls have. A call has at most CA_OPTIONAL_VIEWS of them, so that the
   arguments of a kernel fit the 1,024 bytes that every device takes. */
#define CA_PAST_KEY       0 /* (P, E) */
#define CA_PAST_VALUE     1 /* (P, Ev) */
#define CA_INPUT_BIAS     2 /* (E + E + Ev), for query, key and value */
#define CA_MASK           3 /* (L, T), row or column stride 0 if it broadcasts */
#define CA_BIAS           4 /* like mask */
#define CA_PRESENT_KEY    5 /* (T, E); heads that share present keys and values, */
#define CA_PRESENT_VALUE  6 /* (T, Ev)   with stride 0, divide the copying */
#define CA_SCORES         7 /* (L, T) */
#define CA_SINKS          8 /* batch strides only, as in offsets; in natural units */
#define CA_OFFSETS        9
#define CA_BLOCKS         10 /* (blocks of rows, blocks of keys) */
#define CA_TABLE0         11 /* up to 5 dimensions: batch, row and column are their strides */
#define CA_TABLE1         12
#define CA_TABLE2         13
#define CA_TABLE3         14
#define CA_OPTIONAL_ROLES 16
#define CA_OPTIONAL_VIEWS 7

/* -DUSUAL. The first program is for calls without options. The second is for calls whose only option
 * is a bool mask, without a band or key counts, and whose keys lie in a cache. Other programs have 0. */
#define CA_USUAL        1
#define CA_USUAL_MASKED 2

/* Drivers copy the params for each work-group. Usual programs use at most the mask's view. So their
   params have one of the optional views. */
#if USUAL
#define CA_VIEWS_TAKEN 1
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
    ca_int64 slots;                /* 4 bits for each of CA_PAST_KEY …: the index of its view */
    ca_int64 heads;                /* query heads of a work-item, which share keys */
    ca_uint32 tiles; /* of a work-item, on CPUs for each key head; a row in attention_reference */
    ca_uint32 turns; /* attention_decode_cpu: cores that take turns at neighbouring heads, or 1 */
    ca_int64 first_row; /* dropout's number of row [0, 0, 0, 0] */
    ca_int64 seed;
    ca_int64 scale;   /* the bits of a `real`, as in softcap and kept_scale */
    ca_int64 softcap; /* 0: none */
    ca_int64 inverse_softcap;
    ca_int64 kept_scale;    /* dropout: the factor of the weights that are kept */
    float filter;           /* added where the mask's condition is false; may be -inf */
    ca_uint32 last_dropped; /* the highest random word whose weight is dropped */
    ca_uint32 mask_dtype;
    ca_uint32 options;   /* CA_USES_… and a stage */
    ca_uint32 flags;     /* CA_HAS_LSE … CA_MERGES */
    ca_uint32 redo_slot; /* redo[redo_slot] = redo_mark asks for rows to be redone */
    ca_uint32 redo_mark;
    ca_uint32 block_keys; /* on CPUs, of a block, at most: whole chunks */
    ca_uint32 key_heads;  /* on CPUs, of a work-item */
    ca_uint32 splits;     /* parts that the keys are divided into */
    ca_view optional[CA_VIEWS_TAKEN];
} ca_attention_params;

/* The options of a call, as bits. Kernels for CPUs read params.options. Kernels for GPUs
   have the bits as the macro OPTIONS, so that options that are not used take no registers. */
#define CA_USES_MASK         1u
#define CA_USES_ADDED_MASK   2u /* the mask's values are added; else they are conditions */
#define CA_USES_FILTER       4u /* a false condition adds `filter`, a finite number */
#define CA_USES_BIAS         8u
#define CA_USES_INPUT_BIAS   16u
#define CA_USES_PAST         32u
#define CA_USES_PRESENT      64u
#define CA_USES_SOFTCAP      128u
#define CA_USES_LATE_SOFTCAP 256u /* the softcap comes after mask and bias */
#define CA_USES_DROPOUT      512u
#define CA_USES_SCORES       1024u /* scores are written, those of a stage */
#define CA_STAGE_SHIFT       11u   /* bits 11 and 12: the stage, a ca_scores_stage */
#define CA_USES_SINKS        8192u
#define CA_USES_OFFSETS      16384u /* the offset of a batch shifts its band */
#define CA_USES_BLOCKS       32768u /* blocks tell where a mask that the user writes is known */

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

/* A bound, or the negative of one, that offsets do not shift. */
#define CA_UNBOUNDED 0x7fffffffffffffff

/* Limits of kernels for CPUs, because drivers limit the private memory of a work-item. */
#define CA_CPU_HEAD_SIZE   512         /* E and Ev, at most */
#define CA_CPU_CHUNKS      16          /* of MR keys in a block, at most */
#define CA_CPU_TILES       32          /* of a work-item, at most */
#define CA_CPU_TILES_BYTES (512 << 10) /* of their queries and results; they stay in a cache */
#define CA_CPU_COLUMNS     2176        /* of packed keys and values of a work-item, at most */

/* The bytes behind a packed row of values. The second product reads a few vectors of each row, of all keys,
 * again and again. If rows were 512 bytes apart, half of the first cache's sets would hold these vectors. */
#define CA_BYTES_BEHIND(row) ((row) % 512 == 0 ? 64 : 0)

/* The arguments of every attention kernel, in this order. Only programs with mods take
 * mask_blocks … table3:
 *     query, key, value, past_key, past_value, input_bias, mask, bias, key_counts, sinks,
 *     offsets, mask_blocks, numbers, table0 … table3, output, lse, present_key, present_value,
 *     scores
 *                            __global pointers; those that a call lacks are NULL
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

/* -DWARP: how the operations of support/warp.clh are made. */
#define CA_WARP_EMULATED    0
#define CA_WARP_PTX         1
#define CA_WARP_PTX_WAITING 2 /* without asynchronous copies */
#define CA_WARP_PTX_GROUPS  3 /* with products of four warps */

/* -DQUERIES of attention/mma.cl: where the queries of a work-group stay. */
#define CA_QUERIES_IN_REGISTERS    1
#define CA_QUERIES_IN_LOCAL_MEMORY 2

#define CA_ATTENTION_PARAMS_SIZE 832
#define CA_USUAL_PARAMS_SIZE (CA_ATTENTION_PARAMS_SIZE - (CA_OPTIONAL_VIEWS - 1) * sizeof(ca_view))
