/* SPDX-License-Identifier: MIT
 *
 * Present keys and values as attention_decode_gpu.cl copies them: a work-group copies
 * rows together, neighbours neighbouring elements, or 16 bytes where all rows allow it.
 */
#ifndef CLATTN_ATTENTION_DECODE_GPU_PRESENT_CL
#define CLATTN_ATTENTION_DECODE_GPU_PRESENT_CL

#include "attention_decode_gpu_steps.cl" /* is_aligned, HEAD_E, WG */
#include "attention_present.cl"          /* present_share_of, storage_bits */

#if PRESENT

#define DEFINE_COPY_ROWS(name, type, bits_type, chunk)                                 \
    static inline void name(__global type *to, const ca_view *to_view,                 \
                            __global const type *from, const ca_view *from_view,       \
                            int rows, int size)                                        \
    {                                                                                  \
        const int item = (int)get_local_id(0);                                         \
        const ca_int64 bytes = (ca_int64)sizeof(type);                                 \
        if (size % chunk == 0 && to_view->column == 1 && from_view->column == 1 &&     \
            is_aligned((size_t)to, to_view->row * bytes) &&                            \
            is_aligned((size_t)from, from_view->row * bytes)) {                        \
            const int chunks = size / chunk;                                           \
            for (int n = item; n < rows * chunks; n += WG) {                           \
                const int row = n / chunks;                                            \
                const int c = n - row * chunks;                                        \
                ((__global uint4 *)(to + row * to_view->row))[c] =                     \
                    ((__global const uint4 *)(from + row * from_view->row))[c];        \
            }                                                                          \
            return;                                                                    \
        }                                                                              \
        __global bits_type *to_bits = (__global bits_type *)to;                        \
        __global const bits_type *from_bits = (__global const bits_type *)from;        \
        for (int n = item; n < rows * size; n += WG) {                                 \
            const int row = n / size;                                                  \
            const int c = n - row * size;                                              \
            to_bits[row * to_view->row + c * to_view->column] =                        \
                from_bits[row * from_view->row + c * from_view->column];               \
        }                                                                              \
    }

DEFINE_COPY_ROWS(copy_key_rows, storage, storage_bits, KEY_CHUNK)
DEFINE_COPY_ROWS(copy_value_rows, value_storage, value_bits, CHUNK)

/* Copy keys first … end - 1 and their values. */
static inline void
copy_present_rows(const attention_call *call, const ca_int64 *batch, ca_int64 first,
                  ca_int64 end)
{
    const ca_attention_params *params = call->params;
    for (int s = 0; s < SEGMENTS; s++) {
        const key_segment segment = segment_at(call, batch, s);
        for (ca_int64 j = max(first, segment.start); j < min(end, segment.end);
             j += BN) {
            const int rows = (int)min((ca_int64)BN, min(end, segment.end) - j);
            const ca_int64 from = j - segment.start;
            copy_key_rows(
                call->present_key + ca_offset(&params->present_key, batch, j, 0),
                &params->present_key, segment.key + from * segment.key_view->row,
                segment.key_view, rows, HEAD_E);
            copy_value_rows(
                call->present_value + ca_offset(&params->present_value, batch, j, 0),
                &params->present_value, segment.value + from * segment.value_view->row,
                segment.value_view, rows, HEAD_EV);
        }
    }
}

#endif

#endif
