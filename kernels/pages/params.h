/* SPDX-License-Identifier: MIT
 *
 * The parameters of kernels that write to pages, one text for host C and OpenCL C. All sizes and strides
 * count elements, in 64 bits. A vector is a key or a value of one head.
 *
 *     pages  (num_pages, heads, page_size), a vector each, without gaps
 */
#pragma once

#include "kernels/support/view_params.h" /* ca_int64 */

typedef struct {
    ca_int64 first_group; /* that this launch runs: it counts its groups from 0 */
    ca_int64 entries;     /* of the batch that is read */
    ca_int64 heads;
    ca_int64 rows;   /* of an entry. A row has a vector for each head */
    ca_int64 size;   /* elements of a vector that is read */
    ca_int64 offset; /* of the first vector that is read, and its strides */
    ca_int64 entry;
    ca_int64 head;
    ca_int64 row;
    ca_int64 column;
    ca_int64 page_size; /* rows of a page */
    ca_int64
        source_size; /* rows of a page that is read, whose places follow the others; 0: none is */
    ca_int64 heads_adjoin; /* 1: the heads of a row follow each other, else the rows of a head */
    ca_int64 tile;         /* vectors of a work-group */
    ca_int64 across;       /* neighbouring work-items that share a vector */
} ca_pages_params;

#define CA_PAGES_PARAMS_SIZE 120

/* Kernels write row r, counted over all entries, to row place[r] % page_size of page place[r] / page_size. They do
   not write a row whose place is below 0. */

/* -DCODES: what becomes of the elements. */
#define CA_CODES_NONE   0 /* their bits are kept */
#define CA_CODES_INT8   1
#define CA_CODES_E4M3FN 2 /* float8 */
#define CA_CODES_E5M2   3
#define CA_CODES_INT4   4

/* Elements of int4 that share a scale and an offset; the last ones of a vector may be fewer. */
#define CA_INT4_GROUP 32
