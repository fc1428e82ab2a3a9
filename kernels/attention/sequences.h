/* SPDX-License-Identifier: MIT
 *
 * The operand `sequences` of a ragged problem, whose rows and keys are those of several sequences, packed one
 * behind the other. Host C and OpenCL C include the same text. The operand is an array of int64:
 *
 *     header      numbers of the whole step, CA_HEADER_…; the view of the operand begins here
 *     ranges      the rows of each work-item or work-group, CA_RANGE_…
 *     sequences   CA_SEQUENCE_…
 *     pages       of each sequence, in the order of its keys: where the page lies among all pages
 *
 * A place in a header is an index of the array. Rows are numbered over all sequences; so are the keys of
 * `key` and `value`, unless they lie in pages. j counts the keys of a sequence.
 */
#pragma once

#define CA_HEADER_RANGES       0  /* the place of the ranges */
#define CA_HEADER_SEQUENCES    1  /* the place of the sequences */
#define CA_HEADER_COUNT        2  /* sequences */
#define CA_HEADER_PAGES        3  /* the place of the pages */
#define CA_HEADER_PAGE_SIZE    4  /* keys of a page; 0: keys do not lie in pages */
#define CA_HEADER_KEY_PAGE     5  /* elements from a page to the next one, in `key` */
#define CA_HEADER_VALUE_PAGE   6  /* and in `value` */
#define CA_HEADER_PARTIAL      7  /* partial rows of a head */
#define CA_HEADER_KEY_SCALE    8  /* elements from a page to the next one, in `key_scale` */
#define CA_HEADER_VALUE_SCALE  9  /* and in `value_scale` */
#define CA_HEADER_KEY_OFFSET   10 /* and in `key_offset` */
#define CA_HEADER_VALUE_OFFSET 11
#define CA_HEADER_NUMBERS      12

/* Rows of one sequence, of the heads that share keys: those numbered `first` … `first` + `count` - 1 in the
   order of the kernel. */
#define CA_RANGE_SEQUENCE 0
#define CA_RANGE_FIRST    1
#define CA_RANGE_COUNT    2
#define CA_RANGE_SPLIT    3
#define CA_RANGE_NUMBERS  4

/* Row i, of all rows, sees key j where lower <= j - i <= upper and j < keys. */
#define CA_SEQUENCE_ROW     0 /* its first row */
#define CA_SEQUENCE_ROWS    1
#define CA_SEQUENCE_KEY     2 /* its first key; in pages, its first page */
#define CA_SEQUENCE_KEYS    3
#define CA_SEQUENCE_LOWER   4
#define CA_SEQUENCE_UPPER   5
#define CA_SEQUENCE_SPLITS  6 /* of its keys */
#define CA_SEQUENCE_PARTIAL 7 /* its first partial row of a head */
/* Row i, of all rows, stands at position i + this number for score_mod and mask_mod. */
#define CA_SEQUENCE_POSITION 8
#define CA_SEQUENCE_NUMBERS  9
