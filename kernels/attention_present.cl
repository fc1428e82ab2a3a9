/* SPDX-License-Identifier: MIT
 *
 * Present keys and values, the past ones followed by the new ones with their bias:
 * written by the work-items that attend to them, each a share, so that the past is not
 * read by a pass of its own.
 */
#ifndef CLATTN_ATTENTION_PRESENT_CL
#define CLATTN_ATTENTION_PRESENT_CL

#include "common.cl"

/* Elements are copied as bits: half is no type to compute with. */
#if DTYPE == CA_KERNEL_FLOAT16
typedef ushort storage_bits;
#else
typedef storage storage_bits;
#endif
#if VALUE_DTYPE == CA_KERNEL_FLOAT16
typedef ushort value_bits;
#else
typedef value_storage value_bits;
#endif

/* Keys first … end - 1. */
typedef struct {
    ca_int64 first;
    ca_int64 end;
} present_share;

/* The share of work-item `index` out of `count` of params->heads heads of one batch. The
   last leading dimension is one of query heads with the same keys where neither tensor
   moves along it; an empty one, of E = 0 or Ev = 0, never does. */
static inline present_share
present_share_of(const ca_attention_params *params, const ca_int64 *batch,
                 ca_int64 index, ca_int64 count)
{
    const int heads = CA_BATCH_DIMS - 1;
    if (params->present_key.batch[heads] == 0 &&
        params->present_value.batch[heads] == 0) {
        index += batch[heads] / params->heads * count;
        count *= params->batch[heads] / params->heads;
    }
    const present_share share = {params->T * index / count,
                                 params->T * (index + 1) / count};
    return share;
}

/* A row of contiguous elements goes 16 at a time. */
#define DEFINE_COPY_ROW(name, bits)                                                    \
    static inline void name(__global bits *to, ca_int64 to_column,                     \
                            __global const bits *from, ca_int64 from_column,           \
                            ca_int64 columns)                                          \
    {                                                                                  \
        ca_int64 c = 0;                                                                \
        if (to_column == 1 && from_column == 1) {                                      \
            for (; c + 16 <= columns; c += 16) {                                       \
                vstore16(vload16(0, from + c), 0, to + c);                             \
            }                                                                          \
        }                                                                              \
        for (; c < columns; c++) {                                                     \
            to[c * to_column] = from[c * from_column];                                 \
        }                                                                              \
    }

DEFINE_COPY_ROW(copy_key_row, storage_bits)
DEFINE_COPY_ROW(copy_value_row, value_bits)

#if INPUT_BIAS
/* A new row and its bias, which is of one dtype with it; only under the same dtypes. */
static inline void
copy_biased_row(__global storage *to, ca_int64 to_column, __global const storage *from,
                ca_int64 from_column, __global const storage *bias, ca_int64 columns)
{
    for (ca_int64 c = 0; c < columns; c++) {
        store(load(from + c * from_column) + load(bias + c), to + c * to_column);
    }
}
#endif

static inline void
copy_present(const attention_call *call, const ca_int64 *batch, ca_int64 first,
             ca_int64 end)
{
    const ca_attention_params *params = call->params;
    const ca_view *keys = &params->present_key;
    const ca_view *values = &params->present_value;
    __global const storage *bias =
        call->input_bias + ca_offset(&params->input_bias, batch, 0, 0);
    for (ca_int64 j = first; j < end; j++) {
        const bool past = PAST && j < params->P;
        const ca_int64 row = past ? j : j - params->P;
        const ca_view *key_view = past ? &params->past_key : &params->key;
        const ca_view *value_view = past ? &params->past_value : &params->value;
        __global const storage *key =
            (past ? call->past_key : call->key) + ca_offset(key_view, batch, row, 0);
        __global const value_storage *value = (past ? call->past_value : call->value) +
                                              ca_offset(value_view, batch, row, 0);
        __global storage *to_key = call->present_key + ca_offset(keys, batch, j, 0);
        __global value_storage *to_value =
            call->present_value + ca_offset(values, batch, j, 0);
#if INPUT_BIAS
        if (!past) {
            copy_biased_row(to_key, keys->column, key, key_view->column,
                            bias + params->E, params->E);
            copy_biased_row(to_value, values->column, value, value_view->column,
                            bias + 2 * params->E, params->Ev);
            continue;
        }
#endif
        copy_key_row((__global storage_bits *)to_key, keys->column,
                     (__global const storage_bits *)key, key_view->column, params->E);
        copy_value_row((__global value_bits *)to_value, values->column,
                       (__global const value_bits *)value, value_view->column,
                       params->Ev);
    }
}

#endif
