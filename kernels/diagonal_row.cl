/* SPDX-License-Identifier: MIT
 *
 * Part of a row of a diagonal matrix: its runs inside and outside the band, in vectors.
 * The macros are diagonal.cl's.
 */
#ifndef CLATTN_DIAGONAL_ROW_CL
#define CLATTN_DIAGONAL_ROW_CL

#include "diagonal_params.h"

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

/* The item's place among those that share a tile. */
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

/* With STREAM, `to` is aligned to the vector. */
static inline void
store_vector(vector value, __global element *to)
{
#ifdef STORES_STREAM
    __builtin_nontemporal_store(value, (__global vector *)to);
#else
    WIDE(vstore)(value, 0, to);
#endif
}

/* Elements up to the first one that a vector may be streamed to. */
static inline ca_int64
unaligned_elements(__global const element *to, ca_int64 count)
{
#ifdef STORES_STREAM
    const size_t past = (size_t)to & (sizeof(vector) - 1);
    const ca_int64 before =
        past == 0 ? 0 : (ca_int64)((sizeof(vector) - past) / sizeof(element));
    return min(before, count);
#else
    return 0;
#endif
}

static inline indices
lane_indices(void)
{
    indices lanes;
    for (int n = 0; n < LANES; n++) {
        ((int *)&lanes)[n] = n;
    }
    return lanes;
}

/* What fills, and the interval of a row that is inside. */
typedef struct {
    element inside;
    element outside;
    ca_int64 begin;
    ca_int64 end;
} row_parts;

#if INSIDE == CA_DIAGONAL_COPY
#define INSIDE_ONE(from, parts)  (*(from))
#define INSIDE_MANY(from, parts) WIDE(vload)(0, from)
#else
#define INSIDE_ONE(from, parts)  ((parts)->inside)
#define INSIDE_MANY(from, parts) ((vector)((parts)->inside))
#endif
#if OUTSIDE == CA_DIAGONAL_COPY
#define OUTSIDE_ONE(from, parts)  (*(from))
#define OUTSIDE_MANY(from, parts) WIDE(vload)(0, from)
#else
#define OUTSIDE_ONE(from, parts)  ((parts)->outside)
#define OUTSIDE_MANY(from, parts) ((vector)((parts)->outside))
#endif

/* write_part_…: elements first … last - 1 of a row, from the row of the input. */
#define DEFINE_WRITE_PART(name, space)                                                 \
    static inline element name##_one(space const element *from, ca_int64 x,            \
                                     const row_parts *parts)                           \
    {                                                                                  \
        return x >= parts->begin && x < parts->end ? INSIDE_ONE(from + x, parts)       \
                                                   : OUTSIDE_ONE(from + x, parts);     \
    }                                                                                  \
                                                                                       \
    static inline vector name##_many(space const element *from, ca_int64 x,            \
                                     const row_parts *parts)                           \
    {                                                                                  \
        if (x >= parts->end || x + LANES <= parts->begin) {                            \
            return OUTSIDE_MANY(from + x, parts);                                      \
        }                                                                              \
        if (x >= parts->begin && x + LANES <= parts->end) {                            \
            return INSIDE_MANY(from + x, parts);                                       \
        }                                                                              \
        const int begin = (int)max(parts->begin - x, (ca_int64)0);                     \
        const int end = (int)min(parts->end - x, (ca_int64)LANES);                     \
        const indices lanes = lane_indices();                                          \
        const indices is_inside = lanes >= (indices)begin & lanes < (indices)end;      \
        return bitselect(OUTSIDE_MANY(from + x, parts), INSIDE_MANY(from + x, parts),  \
                         as_vector(to_masks(is_inside)));                              \
    }                                                                                  \
                                                                                       \
    static inline void name(__global element *to, space const element *from,           \
                            ca_int64 first, ca_int64 last, const row_parts *parts)     \
    {                                                                                  \
        const ca_int64 head = first + unaligned_elements(to + first, last - first);    \
        for (ca_int64 x = first + ITEM; x < head; x += LOCAL) {                        \
            to[x] = name##_one(from, x, parts);                                        \
        }                                                                              \
        const ca_int64 tail = head + (last - head) / LANES * LANES;                    \
        for (ca_int64 x = head + ITEM * LANES; x < tail; x += LOCAL * LANES) {         \
            store_vector(name##_many(from, x, parts), to + x);                         \
        }                                                                              \
        if (LOCAL == 1 && STREAM == 0 && tail > head && tail < last) {                 \
            /* once more some of those before, rather than one by one */               \
            store_vector(name##_many(from, last - LANES, parts), to + last - LANES);   \
            return;                                                                    \
        }                                                                              \
        for (ca_int64 x = tail + ITEM; x < last; x += LOCAL) {                         \
            to[x] = name##_one(from, x, parts);                                        \
        }                                                                              \
    }

#if FORM == CA_DIAGONAL_BLOCKS
DEFINE_WRITE_PART(write_part, __local)
#define INPUT_SPACE __local
#else
DEFINE_WRITE_PART(write_part, __global)
#define INPUT_SPACE __global
#endif

/* Elements first … last - 1 of a row, but for what is skipped. */
static inline void
write_row(__global element *to, INPUT_SPACE const element *from, ca_int64 first,
          ca_int64 last, const row_parts *parts)
{
#if OUTSIDE == CA_DIAGONAL_SKIP
    write_part(to, from, parts->begin, parts->end, parts);
#elif INSIDE == CA_DIAGONAL_SKIP
    write_part(to, from, first, parts->begin, parts);
    write_part(to, from, parts->end, last, parts);
#else
    write_part(to, from, first, last, parts);
#endif
}

#endif
