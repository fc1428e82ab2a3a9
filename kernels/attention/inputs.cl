/* SPDX-License-Identifier: MIT
 *
 * Inputs that a call computes before it attends: keys and values behind those of the past, and sums
 * with an input bias.
 *
 *     present_key[j] = past_key[j] for j < P, else key[j - P] + bias      T rows; values likewise
 *     output[i]      = query[i] + bias                                    L rows of E columns
 *
 * Without an input bias L is 0, and the kernel copies the bits of each row. Where entries of the batch
 * share a result, by a stride of 0, the first entry writes it.
 *
 *     global size  batch[0] * batch[1] * batch[2] * ceil(max(L, T) / params.tiles) groups, or more
 *     work-group   params.tiles rows of an entry of the batch; its work-items take pieces of rows by turns
 *
 *     -DWIDE  1: all rows are whole 16 bytes, at multiples of 16 bytes
 *     and the macros of support/common.clh
 */
#include "kernels/attention/keys.clh"

/* Pieces of a row, of bits. A core copies vectors from any place. Work-items of a GPU copy 16 bytes each,
   or neighbouring elements. */
#if ON_CPU
typedef ushort16 piece_1 __attribute__((aligned(2)));
typedef ushort16 piece_2 __attribute__((aligned(2)));
typedef uint16 piece_3 __attribute__((aligned(4)));
typedef ulong16 piece_4 __attribute__((aligned(8)));
#elif WIDE
typedef ushort8 piece_1;
typedef ushort8 piece_2;
typedef uint4 piece_3;
typedef ulong2 piece_4;
#else
typedef ushort piece_1;
typedef ushort piece_2;
typedef uint piece_3;
typedef ulong piece_4;
#endif

/* Defines a function by which a work-group copies rows. */
#define DEFINE_COPY_ROWS(name, bits, piece)                                                        \
    SMALL void name(__global bits *to, const row_strides *to_strides, __global const bits *from,   \
                    const row_strides *from_strides, int rows, int columns)                        \
    {                                                                                              \
        const int length = sizeof(piece) / sizeof(bits);                                           \
        const bool whole = to_strides->column == 1 && from_strides->column == 1;                   \
        const int pieces = max(1, (columns + length - 1) / length);                                \
        int row = (int)get_local_id(0) / pieces;                                                   \
        int n = (int)get_local_id(0) - row * pieces;                                               \
        PLAIN_FOR (; row < rows;) {                                                                \
            __global bits *at = to + row * to_strides->row;                                        \
            __global const bits *source = from + row * from_strides->row;                          \
            const int end = min(n * length + length, columns);                                     \
            if (whole && end == n * length + length) {                                             \
                *(__global piece *)(at + n * length) =                                             \
                    *(__global const piece *)(source + n * length);                                \
            } else {                                                                               \
                PLAIN_FOR (int c = n * length; c < end; c++) {                                     \
                    at[c * to_strides->column] = source[c * from_strides->column];                 \
                }                                                                                  \
            }                                                                                      \
            for (n += (int)get_local_size(0); n >= pieces; n -= pieces) {                          \
                row++;                                                                             \
            }                                                                                      \
        }                                                                                          \
    }

typedef JOIN(bits_, DTYPE) key_bits;
typedef JOIN(bits_, VALUE_DTYPE) value_bits;
DEFINE_COPY_ROWS(copy_key_rows, key_bits, JOIN(piece_, DTYPE))
#if VALUE_DTYPE == DTYPE
#define copy_value_rows copy_key_rows
#else
DEFINE_COPY_ROWS(copy_value_rows, value_bits, JOIN(piece_, VALUE_DTYPE))
#endif

#if VALUE_DTYPE == DTYPE
/* Writes the sums of rows and a bias, which come with values of DTYPE. */
SMALL void
add_to_rows(__global storage *to, const row_strides *to_strides, __global const storage *from,
            const row_strides *from_strides, __global const storage *bias, int rows, int columns)
{
    int row = columns > 0 ? (int)get_local_id(0) / columns : rows;
    int c = (int)get_local_id(0) - row * columns;
    PLAIN_FOR (; row < rows;) {
        store(load(from + row * from_strides->row + c * from_strides->column) + load(bias + c),
              to + row * to_strides->row + c * to_strides->column);
        for (c += (int)get_local_size(0); c >= columns; c -= columns) {
            row++;
        }
    }
}
#endif

/* True if no earlier entry of the batch has the same result. */
INLINED bool
is_first(const ca_view *view, const ca_int64 *batch)
{
    bool first = true;
    for (int n = 0; n < CA_BATCH_DIMS; n++) {
        first = first && (view->batch[n] != 0 || batch[n] == 0);
    }
    return first;
}

/* Writes `rows` present keys and values from key j on. They are of the past, or all new. The entry of
   the batch may write only one of the two. */
INLINED void
write_keys(const attention_call *call, const ca_int64 *batch, ca_int64 j, int rows,
           bool writes_keys, bool writes_values)
{
    const ca_attention_params *params = call->params;
    const ca_view *keys = VIEW(params, PRESENT_KEY);
    const ca_view *values = VIEW(params, PRESENT_VALUE);
    const row_strides to_keys = CA_STRIDES(keys);
    const row_strides to_values = CA_STRIDES(values);
    __global storage *to_key = call->present_key + ca_offset(keys, batch, j, 0);
    __global value_storage *to_value = call->present_value + ca_offset(values, batch, j, 0);
    const int key_rows = writes_keys ? rows : 0;
    const int value_rows = writes_values ? rows : 0;
    key_run run;
    find_key_run(&run, call, batch, j);
#if VALUE_DTYPE == DTYPE
    if (USES(params, INPUT_BIAS) && j >= params->P) {
        __global const storage *bias =
            call->input_bias + ca_offset(VIEW(params, INPUT_BIAS), batch, 0, 0) + params->E;
        add_to_rows(to_key, &to_keys, run.key, &run.key_strides, bias, key_rows, (int)params->E);
        add_to_rows(to_value, &to_values, run.value, &run.value_strides, bias + params->E,
                    value_rows, (int)params->Ev);
        return;
    }
#endif
    copy_key_rows((__global key_bits *)to_key, &to_keys, (__global const key_bits *)run.key,
                  &run.key_strides, key_rows, (int)params->E);
    copy_value_rows((__global value_bits *)to_value, &to_values,
                    (__global const value_bits *)run.value, &run.value_strides, value_rows,
                    (int)params->Ev);
}

__kernel __attribute__((vec_type_hint(float4))) void
attention_inputs(ATTENTION_ARGUMENTS)
{
    DEFINE_CALL(call);
    const ca_int64 tile = params.tiles; /* rows */
    const ca_int64 shares = ca_divide(max(params.L, params.T) + tile - 1, tile);
    const ca_int64 group = group_of(&params);
    const ca_int64 linear = ca_divide(group, shares);
    const ca_int64 first = (group - linear * shares) * tile;
    const ca_int64 end = min(first + tile, params.T);
    const ca_int64 past = clamp(params.P, first, max(first, end)); /* where new keys begin */
    ca_int64 batch[CA_BATCH_DIMS];
    if (linear >= params.batch[0] * params.batch[1] * params.batch[2]) {
        return;
    }
    ca_unravel(linear, params.batch, batch);
    const bool keys = is_first(VIEW(&params, PRESENT_KEY), batch);
    const bool values = is_first(VIEW(&params, PRESENT_VALUE), batch);
    if (first < past) {
        write_keys(&call, batch, first, (int)(past - first), keys, values);
    }
    if (past < end) {
        write_keys(&call, batch, past, (int)(end - past), keys, values);
    }
#if VALUE_DTYPE == DTYPE
    if (first < params.L && is_first(&params.output, batch)) {
        const row_strides from = CA_STRIDES(&params.query);
        const row_strides to = CA_STRIDES(&params.output);
        add_to_rows(output + ca_offset(&params.output, batch, first, 0), &to,
                    query + ca_offset(&params.query, batch, first, 0), &from,
                    call.input_bias + ca_offset(VIEW(&params, INPUT_BIAS), batch, 0, 0),
                    (int)min(tile, params.L - first), (int)params.E);
    }
#endif
}
