/* SPDX-License-Identifier: MIT
 *
 * What the diagonal kernel is told about one call, one text for host C and OpenCL C.
 * All sizes and strides count elements, in 64 bits.
 *
 *     inside  = lower <= x - y < upper          column x, row y
 */
#ifndef CLATTN_DIAGONAL_PARAMS_H
#define CLATTN_DIAGONAL_PARAMS_H

#include "kernels/support/view_params.h" /* ca_view, CA_BATCH_DIMS, ca_int64 */

typedef struct {
    ca_int64 batch[CA_BATCH_DIMS]; /* sizes of the leading dimensions */
    ca_int64 rows;
    ca_int64 columns;
    ca_int64 lower; /* -rows … columns, so that adding a row does not overflow */
    ca_int64 upper; /* lower … columns */
    ca_view input;
    ca_view output;        /* column 1 */
    ca_int64 inside_bits;  /* of an element to fill with */
    ca_int64 outside_bits; /* the same */
    ca_int64 tiles;        /* tiles side by side in a row */
    ca_int64 tile_rows;    /* of the rows of all batches, one after the other */
    ca_int64 tile_columns; /* with CA_DIAGONAL_SHORT: elements of a tile */
} ca_diagonal_params;

#define CA_DIAGONAL_PARAMS_SIZE 192

/* Kernel arguments, in this order:
 *     input   __global const pointer, NULL if nothing is copied
 *     output  __global pointer; the input's too, where the call is in place
 *     params  ca_diagonal_params by value
 */

/* -DINSIDE and -DOUTSIDE: what becomes of an element. */
#define CA_DIAGONAL_FILL 0 /* the bits above */
#define CA_DIAGONAL_COPY 1 /* the input's element */
#define CA_DIAGONAL_SKIP 2 /* it stays as it is */

/* -DLAYOUT: how elements lie in memory, and how they are walked. */
#define CA_DIAGONAL_ROWS   0 /* rows of contiguous elements, one after the other */
#define CA_DIAGONAL_BLOCKS 1 /* the input's columns are strided: by way of blocks */
#define CA_DIAGONAL_SHORT  2 /* small matrices without gaps: by way of a pattern */

/* Rows and columns that CA_DIAGONAL_BLOCKS copies at once, by an element's bytes, and a
   multiple of them all. */
#define CA_DIAGONAL_BLOCK(width)  ((width) == 8 ? 32 : 64)
#define CA_DIAGONAL_LARGEST_BLOCK 64

/* Bytes of a matrix that CA_DIAGONAL_SHORT takes at most. */
#define CA_DIAGONAL_SHORT_BYTES 4096

#endif
