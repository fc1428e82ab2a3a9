/* SPDX-License-Identifier: MIT
 *
 * Fills a band of each matrix and copies the rest, or the other way round:
 *
 *     output[…, y, x] = lower <= x - y < upper ? INSIDE : OUTSIDE
 *
 * INSIDE and OUTSIDE are each a constant, input[…, y, x], or the output's own element.
 * Elements are only moved, so their width stands for their dtype. In a row the inside is
 * one interval. A vector is wholly inside, wholly outside, or contains an end of the
 * interval.
 *
 *     global size  tiles * LOCAL
 *     work-group   owns a tile of rows and columns; its items own vectors side by side
 *
 *     -DWIDTH              bytes of an element: 1, 2, 4, 8
 *     -DLANES              elements of a vector: 2, 4, 8, 16
 *     -DLOCAL              work-items of a group; 1: an item owns a tile alone
 *     -DLAYOUT             CA_DIAGONAL_ROWS, …
 *     -DBLOCK              rows and columns of a block of CA_DIAGONAL_BLOCKS
 *     -DINSIDE, -DOUTSIDE  CA_DIAGONAL_FILL, …
 *     -DSTREAM             1: stores that bypass the caches, if the compiler has them
 *     -DSUB_GROUP          see support/sub_group.clh
 */
#include "kernels/diagonal/params.h"
#include "kernels/support/sub_group.clh" /* SUB_GROUP_ATTRIBUTE */
#include "kernels/support/view.clh"      /* ca_offset, ca_unravel */

/* --- a row, in vectors ------------------------------------------------------------ */

#define JOIN_(a, b) a##b
#define JOIN(a, b)  JOIN_(a, b)
#define WIDE(name)  JOIN(name, LANES)

#if WIDTH == 1
typedef uchar element;
typedef WIDE(uchar) vector;
#define as_vector WIDE(as_uchar)
#define to_masks  WIDE(convert_char)
#elif WIDTH == 2
typedef ushort element;
typedef WIDE(ushort) vector;
#define as_vector WIDE(as_ushort)
#define to_masks  WIDE(convert_short)
#elif WIDTH == 4
typedef uint element;
typedef WIDE(uint) vector;
#define as_vector WIDE(as_uint)
#define to_masks  WIDE(convert_int)
#else
typedef ulong element;
typedef WIDE(ulong) vector;
#define as_vector WIDE(as_ulong)
#define to_masks  WIDE(convert_long)
#endif
typedef WIDE(int) indices;

/* The item's number among those that share a tile. */
#if LOCAL == 1
#define ITEM 0
#else
#define ITEM ((int)get_local_id(0))
#endif

#if STREAM && defined(__has_builtin)
#if __has_builtin(__builtin_nontemporal_store)
#define STORES_STREAM 1
#endif
#endif

/* With STREAM, `to` has to be aligned to the vector. */
INLINED void
store_vector(vector value, __global element *to)
{
#ifdef STORES_STREAM
    __builtin_nontemporal_store(value, (__global vector *)to);
#else
    WIDE(vstore)(value, 0, to);
#endif
}

/* Returns how many of `count` elements come before the first address to which a vector
   can be streamed. */
INLINED ca_int64
unaligned_elements(__global const element *to, ca_int64 count)
{
#ifdef STORES_STREAM
    const size_t past = (size_t)to & (sizeof(vector) - 1);
    const ca_int64 before = past == 0 ? 0 : (ca_int64)((sizeof(vector) - past) / sizeof(element));
    return min(before, count);
#else
    return 0;
#endif
}

INLINED indices
lane_indices(void)
{
    indices lanes;
    for (int n = 0; n < LANES; n++) {
        ((int *)&lanes)[n] = n;
    }
    return lanes;
}

/* The elements to fill with, and the columns of a row that are inside: begin … end - 1. */
typedef struct {
    element inside;
    element outside;
    ca_int64 begin;
    ca_int64 end;
} row_band;

#if INSIDE == CA_DIAGONAL_COPY
#define INSIDE_ONE(from, band)  (*(from))
#define INSIDE_MANY(from, band) WIDE(vload)(0, from)
#else
#define INSIDE_ONE(from, band)  ((band)->inside)
#define INSIDE_MANY(from, band) ((vector)((band)->inside))
#endif
#if OUTSIDE == CA_DIAGONAL_COPY
#define OUTSIDE_ONE(from, band)  (*(from))
#define OUTSIDE_MANY(from, band) WIDE(vload)(0, from)
#else
#define OUTSIDE_ONE(from, band)  ((band)->outside)
#define OUTSIDE_MANY(from, band) ((vector)((band)->outside))
#endif

#if LAYOUT == CA_DIAGONAL_BLOCKS
#define INPUT_SPACE __local
#else
#define INPUT_SPACE __global
#endif

INLINED element
choose_one(INPUT_SPACE const element *from, ca_int64 x, const row_band *band)
{
    return x >= band->begin && x < band->end ? INSIDE_ONE(from + x, band)
                                             : OUTSIDE_ONE(from + x, band);
}

/* Returns the vector of columns x … x + LANES - 1. */
INLINED vector
choose_many(INPUT_SPACE const element *from, ca_int64 x, const row_band *band)
{
    if (x >= band->end || x + LANES <= band->begin) {
        return OUTSIDE_MANY(from + x, band);
    }
    if (x >= band->begin && x + LANES <= band->end) {
        return INSIDE_MANY(from + x, band);
    }
    const int begin = (int)max(band->begin - x, (ca_int64)0);
    const int end = (int)min(band->end - x, (ca_int64)LANES);
    const indices lanes = lane_indices();
    /* The sign of: lanes >= begin and lanes < end. Comparisons would take a scalar register a lane. */
    const indices is_inside = (~(lanes - (indices)begin) & (lanes - (indices)end)) >> 31;
    return bitselect(OUTSIDE_MANY(from + x, band), INSIDE_MANY(from + x, band),
                     as_vector(to_masks(is_inside)));
}

/* Writes columns first … last - 1 of a row. `from` is the row of the input. */
INLINED void
write_columns(__global element *to, INPUT_SPACE const element *from, ca_int64 first, ca_int64 last,
              const row_band *band)
{
    const ca_int64 head = first + unaligned_elements(to + first, last - first);
    for (ca_int64 x = first + ITEM; x < head; x += LOCAL) {
        to[x] = choose_one(from, x, band);
    }
    const ca_int64 tail = head + (last - head) / LANES * LANES;
    for (ca_int64 x = head + ITEM * LANES; x < tail; x += LOCAL * LANES) {
        store_vector(choose_many(from, x, band), to + x);
    }
#if LOCAL == 1 && STREAM == 0
    if (tail > head && tail < last) {
        /* writes some elements twice rather than the rest one by one */
        store_vector(choose_many(from, last - LANES, band), to + last - LANES);
        return;
    }
#endif
    for (ca_int64 x = tail + ITEM; x < last; x += LOCAL) {
        to[x] = choose_one(from, x, band);
    }
}

/* Writes columns first … last - 1 of a row, but leaves a skipped region as it is. */
INLINED void
write_row(__global element *to, INPUT_SPACE const element *from, ca_int64 first, ca_int64 last,
          const row_band *band)
{
#if OUTSIDE == CA_DIAGONAL_SKIP
    write_columns(to, from, band->begin, band->end, band);
#elif INSIDE == CA_DIAGONAL_SKIP
    write_columns(to, from, first, band->begin, band);
    write_columns(to, from, band->end, last, band);
#else
    write_columns(to, from, first, last, band);
#endif
}

/* --- tiles of rows ---------------------------------------------------------------- */

/* A tile's columns and its next row. */
typedef struct {
    const ca_diagonal_params *params;
    ca_int64 first; /* column */
    ca_int64 last;
    ca_int64 rows; /* that are left */
    ca_int64 batch[CA_BATCH_DIMS];
    ca_int64 y;
} tile_walk;

INLINED void
tile_start(tile_walk *walk, const ca_diagonal_params *params)
{
    const ca_int64 group = params->first_group + (ca_int64)get_group_id(0);
    const ca_int64 row_of_tiles = group / params->tiles;
    const ca_int64 row = row_of_tiles * params->tile_rows;
    const ca_int64 matrix = row / params->rows;
    const ca_int64 matrices = params->batch[0] * params->batch[1] * params->batch[2];
    walk->params = params;
    walk->first = (group - row_of_tiles * params->tiles) * params->tile_columns;
    walk->last = min(walk->first + params->tile_columns, params->columns);
    walk->rows = min(params->tile_rows, matrices * params->rows - row);
    walk->y = row - matrix * params->rows;
    ca_unravel(matrix, params->batch, walk->batch);
}

/* Returns how many of the rows that are left belong to the same matrix. */
INLINED ca_int64
tile_rows_of_matrix(const tile_walk *walk)
{
    return min(walk->rows, walk->params->rows - walk->y);
}

INLINED void
tile_advance(tile_walk *walk, ca_int64 count)
{
    walk->rows -= count;
    walk->y += count;
    if (walk->y == walk->params->rows) {
        walk->y = 0;
        /* Without a loop that ends early, which would keep the indices in memory. */
        const bool next1 = ++walk->batch[2] == walk->params->batch[2];
        walk->batch[2] = next1 ? 0 : walk->batch[2];
        const bool next0 = next1 && ++walk->batch[1] == walk->params->batch[1];
        walk->batch[1] = next0 ? 0 : walk->batch[1];
        walk->batch[0] += next0 ? 1 : 0;
    }
}

/* Finds the band of row y between columns first and last, counted from `origin`. */
INLINED void
find_band(row_band *band, const ca_diagonal_params *params, ca_int64 y, ca_int64 first,
          ca_int64 last, ca_int64 origin)
{
    band->inside = (element)params->inside_bits;
    band->outside = (element)params->outside_bits;
    band->begin = clamp(y + params->lower, first, last) - origin;
    band->end = clamp(y + params->upper, first, last) - origin;
}

#if LAYOUT == CA_DIAGONAL_ROWS
INLINED void
write_tile(__global element *output, __global const element *input,
           const ca_diagonal_params *params)
{
    tile_walk walk;
    tile_start(&walk, params);
    while (walk.rows > 0) {
        const ca_int64 count = tile_rows_of_matrix(&walk);
        __global element *to = output + ca_offset(&params->output, walk.batch, 0, 0);
        __global const element *from = input + ca_offset(&params->input, walk.batch, 0, 0);
        for (ca_int64 y = walk.y; y < walk.y + count; y++) {
            row_band band;
            find_band(&band, params, y, walk.first, walk.last, 0);
            write_row(to + y * params->output.row, from + y * params->input.row, walk.first,
                      walk.last, &band);
        }
        tile_advance(&walk, count);
    }
}
#endif

/* --- blocks, for a strided input -------------------------------------------------- */

#if LAYOUT == CA_DIAGONAL_BLOCKS
#define PITCH (BLOCK + CA_DIAGONAL_GAP / WIDTH) /* puts rows into different banks of memory */

/* True if a block contains an element that is copied. The band moves right from row to
   row. */
INLINED bool
is_copied(const ca_diagonal_params *params, ca_int64 y, ca_int64 rows, ca_int64 x, ca_int64 columns)
{
    const ca_int64 from_end = y + params->upper; /* in the first row */
    const ca_int64 to_begin = y + rows - 1 + params->lower;
    const bool whole = to_begin <= x && from_end >= x + columns;
    const bool none = params->lower >= params->upper || y + params->lower >= x + columns ||
                      y + rows - 1 + params->upper <= x;
#if INSIDE == OUTSIDE
    return true;
#elif OUTSIDE == CA_DIAGONAL_COPY
    return !whole;
#else
    return !none;
#endif
}

/* block[i * i_pitch + j * j_pitch] = from[i * i_stride + j * j_stride]
   Neighbouring items have neighbouring j. */
INLINED void
load_block(__local element *block, int i_pitch, int j_pitch, __global const element *from,
           ca_int64 i_stride, ca_int64 j_stride, int I, int J)
{
    const int across = LOCAL < BLOCK ? LOCAL : BLOCK;
    for (int i = ITEM / across; i < I; i += LOCAL / across) {
        for (int j = ITEM & (across - 1); j < J; j += across) {
            block[i * i_pitch + j * j_pitch] = from[i * i_stride + j * j_stride];
        }
    }
}

INLINED void
write_block(__global element *to, __global const element *from, __local element *block,
            const ca_diagonal_params *params, ca_int64 y, int rows, ca_int64 x, int columns)
{
    const ca_view *input = &params->input;
    if (is_copied(params, y, rows, x, columns)) {
        if (abs(input->row) < abs(input->column)) {
            load_block(block, 1, PITCH, from, input->column, input->row, columns, rows);
        } else {
            load_block(block, PITCH, 1, from, input->row, input->column, rows, columns);
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* each item loads, then reads what others loaded */
    for (int n = 0; n < rows; n++) {
        row_band band;
        find_band(&band, params, y + n, x, x + columns, x);
        write_row(to + n * params->output.row, block + n * PITCH, 0, columns, &band);
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* all items have read, then they load again */
}

INLINED void
write_tile(__global element *output, __global const element *input, __local element *block,
           const ca_diagonal_params *params)
{
    tile_walk walk;
    tile_start(&walk, params);
    while (walk.rows > 0) {
        const int rows = (int)min(tile_rows_of_matrix(&walk), (ca_int64)BLOCK);
        for (ca_int64 x = walk.first; x < walk.last; x += BLOCK) {
            const int columns = (int)min(walk.last - x, (ca_int64)BLOCK);
            write_block(output + ca_offset(&params->output, walk.batch, walk.y, x),
                        input + ca_offset(&params->input, walk.batch, walk.y, x), block, params,
                        walk.y, rows, x, columns);
        }
        tile_advance(&walk, rows);
    }
}
#endif

/* --- a pattern, for many small matrices ------------------------------------------- */

#if LAYOUT == CA_DIAGONAL_SHORT
/* Elements that an item writes at once: several vectors if it is alone. */
#define STRETCH      (LOCAL == 1 ? 4 * LANES : LANES)
#define PATTERN_SIZE (CA_DIAGONAL_SHORT_BYTES / WIDTH + STRETCH)

/* For each element of a matrix: all bits if it is inside, else none. The pattern is a
   stretch longer than a matrix, for stretches that begin in one matrix and end in a
   later one. */
INLINED void
load_pattern(__local element *pattern, const ca_diagonal_params *params)
{
    const int rows = (int)params->rows;
    const int columns = (int)params->columns;
    const int size = rows * columns + STRETCH;
    for (int n = ITEM; n * columns < size; n += LOCAL) {
        const int y = n - n / rows * rows;
        row_band band;
        find_band(&band, params, y, 0, columns, 0);
        for (int x = 0; x < columns && n * columns + x < size; x++) {
            pattern[n * columns + x] = (element)(x >= band.begin && x < band.end ? -1 : 0);
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* each item loads, then reads what others loaded */
}

/* Writes elements in the order of memory, across matrices. */
INLINED void
write_tile(__global element *output, __global const element *input, __local element *pattern,
           const ca_diagonal_params *params)
{
    const ca_int64 matrices = params->batch[0] * params->batch[1] * params->batch[2];
    const ca_int64 period = params->rows * params->columns;
    const ca_int64 group = params->first_group + (ca_int64)get_group_id(0);
    const ca_int64 first = group * params->tile_columns;
    const ca_int64 last = min(first + params->tile_columns, matrices * period);
    row_band band;
    find_band(&band, params, 0, 0, 0, 0);
    __global element *to = output + params->output.offset;
    __global const element *from = input + params->input.offset;
    load_pattern(pattern, params);

    const ca_int64 head = first + unaligned_elements(to + first, last - first);
    const ca_int64 tail = head + (last - head) / STRETCH * STRETCH;
    const ca_int64 start = head + ITEM * STRETCH;
    const int step = (int)(LOCAL * STRETCH - LOCAL * STRETCH / period * period);
    int at = (int)(start - start / period * period);
    for (ca_int64 x = start; x < tail; x += LOCAL * STRETCH) {
#pragma unroll
        for (int n = 0; n < STRETCH; n += LANES) {
            store_vector(bitselect(OUTSIDE_MANY(from + x + n, &band),
                                   INSIDE_MANY(from + x + n, &band),
                                   WIDE(vload)(0, pattern + at + n)),
                         to + x + n);
        }
        at += step;
        at -= at >= period ? (int)period : 0;
    }
    /* elements before the first stretch and after the last */
    for (ca_int64 n = ITEM; n < head - first + last - tail; n += LOCAL) {
        const ca_int64 x = n < head - first ? first + n : tail + n - (head - first);
        to[x] = pattern[x - x / period * period] != 0 ? INSIDE_ONE(from + x, &band)
                                                      : OUTSIDE_ONE(from + x, &band);
    }
}
#endif

__kernel __attribute__((reqd_work_group_size(LOCAL, 1, 1)))
SUB_GROUP_ATTRIBUTE(vector) void diagonal_band(__global const element *input,
                                               __global element *output, ca_diagonal_params params)
{
#if LAYOUT == CA_DIAGONAL_ROWS
    write_tile(output, input, &params);
#elif LAYOUT == CA_DIAGONAL_BLOCKS
    __local element block[BLOCK * PITCH];
    write_tile(output, input, block, &params);
#else
    __local element pattern[PATTERN_SIZE];
    write_tile(output, input, pattern, &params);
#endif
}
