/* SPDX-License-Identifier: MIT
 *
 * The diagonal kernel's parameters, one text for host C and OpenCL C. All sizes and
 * strides count elements, in 64 bits.
 *
 *     inside  = lower <= x - y < upper          column x, row y
 */
#pragma once

#include "kernels/support/view_params.h" /* ca_view, CA_BATCH_DIMS, ca_int64 */

typedef struct {
    ca_int64 first_group;          /* that this launch runs: it counts its groups from 0 */
    ca_int64 batch[CA_BATCH_DIMS]; /* sizes of the leading dimensions */
    ca_int64 rows;
    ca_int64 columns;
    ca_int64 lower; /* -rows … columns, so that y + lower does not overflow */
    ca_int64 upper; /* lower … columns */
    ca_view input;
    ca_view output;        /* its columns have stride 1 */
    ca_int64 inside_bits;  /* of the element that CA_DIAGONAL_FILL writes inside */
    ca_int64 outside_bits; /* and outside */
    ca_int64 tiles;        /* side by side in a row */
    ca_int64 tile_rows;    /* of a tile; rows are counted through all matrices */
    ca_int64 tile_columns; /* of a tile; with CA_DIAGONAL_SHORT its elements */
} ca_diagonal_params;

#define CA_DIAGONAL_PARAMS_SIZE 200

/* Kernel arguments, in this order:
 *     input   __global const pointer, NULL if nothing is copied
 *     output  __global pointer; the same as the input's if the call is in place
 *     params  ca_diagonal_params by value
 */

/* -DINSIDE and -DOUTSIDE: what becomes of an element there. */
#define CA_DIAGONAL_FILL 0 /* it becomes the params' bits */
#define CA_DIAGONAL_COPY 1 /* it becomes the input's element */
#define CA_DIAGONAL_SKIP 2 /* it stays as it is */

/* -DLAYOUT: how elements lie in memory, and in which order they are written. */
#define CA_DIAGONAL_ROWS   0 /* contiguous rows, one after the other */
#define CA_DIAGONAL_BLOCKS 1 /* the input's columns are strided: block by block */
#define CA_DIAGONAL_SHORT  2 /* small matrices without gaps, with a pattern */

/* -DBLOCK: rows and columns of a block of CA_DIAGONAL_BLOCKS, a power of two. The largest is a
   multiple of all. The smallest fits the local memory of every device, 1 KiB, in which a row is
   followed by CA_DIAGONAL_GAP bytes. */
#define CA_DIAGONAL_LARGEST_BLOCK             64
#define CA_DIAGONAL_SMALLEST_BLOCK            8
#define CA_DIAGONAL_GAP                       16
#define CA_DIAGONAL_BLOCK_BYTES(block, width) ((block) * ((block) * (width) + CA_DIAGONAL_GAP))

/* The largest matrix of CA_DIAGONAL_SHORT, in bytes, and the local memory for its pattern: a matrix
   and at most four vectors of 64 bytes. */
#define CA_DIAGONAL_SHORT_BYTES   4096
#define CA_DIAGONAL_PATTERN_BYTES (CA_DIAGONAL_SHORT_BYTES + 4 * 64)
