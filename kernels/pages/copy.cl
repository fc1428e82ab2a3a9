/* SPDX-License-Identifier: MIT
 *
 * Copies vectors to their places in pages, bit for bit:
 *
 *     to[place[r], head] = from[r, head]          where new rows are read
 *     to[place[r], head] = from[source[r], head]  where pages are read
 *
 * Elements are only moved, so their width stands for their dtype. Where vectors are whole 16 bytes, at
 * multiples of 16 bytes, an element is 16 bytes.
 *
 *     global size  ceil(entries * heads * rows / params.tile) groups
 *     work-group   params.tile vectors; params.across neighbouring work-items share one
 *
 *     -DWIDTH  bytes of an element: 1, 2, 4, 8, 16
 */
#include "kernels/pages/places.clh"

#if WIDTH == 1
typedef uchar element;
#elif WIDTH == 2
typedef ushort element;
#elif WIDTH == 4
typedef uint element;
#elif WIDTH == 8
typedef ulong element;
#else
typedef uint4 element;
#endif

/* A work-item moves 64 bytes at a time, which are so many elements. */
#define TOGETHER (64 / WIDTH)
typedef ulong8 chunk __attribute__((aligned(WIDTH)));

SMALL void
copy_elements(__global const element *read, __global element *written, ca_int64 size)
{
    ca_int64 c = 0;
    PLAIN_FOR (; c + TOGETHER <= size; c += TOGETHER) {
        *(__global chunk *)(written + c) = *(__global const chunk *)(read + c);
    }
    PLAIN_FOR (; c < size; c++) {
        written[c] = read[c];
    }
}

__kernel void
pages_copy(__global const element *from, __global element *to, __global const ca_int64 *places,
           const ca_pages_params params)
{
    const ca_int64 across = params.across;
    const ca_int64 lane = (ca_int64)get_local_id(0) & (across - 1); /* across is a power of two */
    vector_walk walk;
    start_walk(&walk, &params);
    const bool alone = across == 1 && params.column == 1;
    const bool adjoin = alone && walk.step == 1 && params.heads_adjoin == 0 &&
                        (params.source_size != 0 || params.row == params.size);
    ca_int64 count; /* vectors that lie behind each other, in both memories */
    PLAIN_FOR (ca_int64 number = walk.first; number < walk.end; number += count * walk.step) {
        vector_place vector;
        find_vector(&vector, &params, places, number);
        count = 1;
        if (vector.place < 0) {
            continue;
        }
        if (adjoin) {
            count = count_adjoining(&vector, &params, places, walk.end - number);
        }
        __global const element *read = from + vector.from;
        __global element *written = to + vector.to * params.size;
        if (alone) {
            copy_elements(read, written, count * params.size);
            continue;
        }
        PLAIN_FOR (ca_int64 c = lane; c < params.size; c += across) {
            written[c] = read[c * params.column];
        }
    }
}
