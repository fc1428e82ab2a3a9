/* SPDX-License-Identifier: MIT
 *
 * Copies vectors to their places in pages, bit for bit:
 *
 *     to[place[r], head] = from[r, head]      or to[source[r], head]
 *
 * Elements are only moved, so their width stands for their dtype. Where vectors are whole 16 bytes, at
 * multiples of 16 bytes, an element is 16 bytes.
 *
 *     global size  ceil(rows * heads / params.tile) groups
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

__kernel void
pages_copy(__global const element *from, __global element *to, __global const ca_int64 *places,
           const ca_pages_params params)
{
    const ca_int64 across = params.across;
    const ca_int64 lane = (ca_int64)get_local_id(0) & (across - 1); /* across is a power of two */
    vector_walk walk;
    start_walk(&walk, &params);
    PLAIN_FOR (ca_int64 number = walk.first; number < walk.end; number += walk.step) {
        vector_place vector;
        find_vector(&vector, &params, places, number);
        __global const element *read = from + vector.from;
        __global element *written = to + vector.to * params.size;
        PLAIN_FOR (ca_int64 c = lane; c < params.size; c += across) {
            written[c] = read[c * params.column];
        }
    }
}
