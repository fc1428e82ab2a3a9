/* SPDX-License-Identifier: MIT
 *
 * Attention with matrix units, few rows and many keys: the rows of the query heads that
 * share their keys, filled up to tiles of 16.
 *
 *     global size  batches * params.splits * ceil(rows / 16) * THREADS, local size
 *                  THREADS
 *     work-group   WARPS warps, with the same 16 rows and one split of the keys
 *     warp         every WARPS'th 16 keys of the split, with a softmax of its own
 *
 * A batch here is an index of the leading dimensions without the query heads; its rows
 * are params.heads * L. Keys and values go from global memory straight to the registers
 * that are multiplied, 16 bytes a load. Lane 4 g + t loads
 *
 *     keys g and g + 8             chunks t, t + 4, t + 8, … of 8 numbers
 *     values 2 t, 2 t + 1, and     chunks g, g + 8, …
 *            2 t + 8, 2 t + 9
 *
 * and multiplies its chunks in the order of their loads: a product may sum over columns
 * in any order if queries and keys have the same order, and a tile of the result may have
 * any columns. A warp loads the next keys while it weighs scores and multiplies values,
 * and the next values while it multiplies keys. No warp waits for another one before the
 * end.
 *
 *     -DHEAD_E -DHEAD_EV   head sizes E and Ev, multiples of 8, filled up with zeros to
 *                          multiples of 32 and 64
 *     -DWARPS              warps of a group
 *     -DPAGED              1: keys and values lie in pages. A lane looks up the page of each key and value
 *     and the macros of support/warp.clh
 *
 * Rows of key and value are whole aligned 16 bytes. L and T are at most 2^28.
 */
#define CAP            warp_tanh
#define SCORES_IN_LOG2 1
#include "kernels/support/warp.clh"

#define TILE_ROWS   16
#define KEY_LOADS   ((HEAD_E + 31) / 32)  /* of a lane, for one key */
#define VALUE_LOADS ((HEAD_EV + 63) / 64) /* for one value */
#define EV_TILES    (8 * VALUE_LOADS)     /* of 8 columns */

#define MT      1
#define STRIP   16
#define GROUPED 0
#define LSE     1 /* the merge needs the exact sum of weights */

/* The result of a warp in local memory: rows are longer than 64 * VALUE_LOADS, so that
   two rows begin in different banks. */
#define ROW_SIZE  (64 * VALUE_LOADS + 4)
#define PARTS     WARPS
#define PART_ROWS TILE_ROWS
#define PART_SIZE (TILE_ROWS * ROW_SIZE)

#include "kernels/attention/mma/softmax.clh" /* THREADS, round_weights */

#include "kernels/attention/decode_gpu/rows.clh" /* group_row, part_memory */

/* Sizes in local memory, in chunks of 16 bytes: the queries, in the order of the lanes'
   loads, are replaced by the results of all warps. */
#define QUERY_SIZE (2 * KEY_LOADS * WARP_LANES)
#define PARTS_SIZE (PARTS * PART_SIZE / 4)
#define LOCAL_SIZE (QUERY_SIZE > PARTS_SIZE ? QUERY_SIZE : PARTS_SIZE)

/* The keys and values of the group's split, and this lane's share of them. */
typedef struct {
    const attention_call *call;
    const __local group_row *rows; /* of the rows */
    key_run run;
    ca_int64 start; /* the number of the split's first key */
    int count;      /* of keys */
#if PAGED
    __global const long
        *pages; /* where the sequence's pages lie; the run begins at row 0 of page 0 */
    int page_size;
    ca_int64 key_page; /* elements from a page to the next one */
    ca_int64 value_page;
#endif
    int g; /* lane / 4 */
    int t; /* lane % 4 */
} split_source;

/* Returns a chunk of a row, zeros behind the row's end. */
INLINED uint4
load_chunk(__global const storage *row, int chunk, int columns)
{
    return chunk * 8 < columns ? ((__global const uint4 *)row)[chunk] : (uint4)0u;
}

#if PAGED
/* Returns how far the row of a key of the split is from row 0 of page 0. */
INLINED ca_int64
distance_of_key(const split_source *source, int key, ca_int64 page, ca_int64 row)
{
    const uint j = (uint)source->start + (uint)key;
    const uint number = j / (uint)source->page_size;
    return source->pages[number] * page + (j - number * (uint)source->page_size) * row;
}
#define KEY_DISTANCE(source, key, name, row)                                                       \
    distance_of_key(source, key, (source)->name##_page, row)
#else
#define KEY_DISTANCE(source, key, name, row) ((key) * (row))
#endif

/* Loads this lane's chunks of the 16 keys that begin with key j. In the place of a key
   behind the end, the last key is loaded again. */
INLINED void
load_keys(uint4 (*keys)[KEY_LOADS], const split_source *source, int j)
{
    const row_strides strides = STRIDES_OF_RUN(&source->run, source->call->params, key);
    WARP_FOR (int k = 0; k < 2; k++) {
        const int key = min(j + source->g + 8 * k, source->count - 1);
        __global const storage *row = source->run.key + KEY_DISTANCE(source, key, key, strides.row);
        WARP_FOR (int n = 0; n < KEY_LOADS; n++) {
            keys[k][n] = load_chunk(row, source->t + 4 * n, HEAD_E);
        }
    }
}

/* Returns which of 16 keys, 0 … 15, is number n of this lane's four. The lane holds the
   scores of these four keys. */
INLINED int
key_of(const split_source *source, int n)
{
    return 2 * source->t + n % 2 + n / 2 * 8;
}

/* Loads this lane's chunks of the values of its keys. */
INLINED void
load_values(uint4 (*values)[VALUE_LOADS], const split_source *source, int j)
{
    const row_strides strides = STRIDES_OF_RUN(&source->run, source->call->params, value);
    WARP_FOR (int k = 0; k < 4; k++) {
        const int key = min(j + key_of(source, k), source->count - 1);
        __global const storage *row =
            source->run.value + KEY_DISTANCE(source, key, value, strides.row);
        WARP_FOR (int n = 0; n < VALUE_LOADS; n++) {
            values[k][n] = load_chunk(row, source->g + 8 * n, HEAD_EV);
        }
    }
}

/* scores += rows * 16 keys. */
INLINED void
multiply_keys(const warp_state *warp, __local const uint4 *queries, uint4 (*keys)[KEY_LOADS],
              float4 *scores)
{
    WARP_FOR (int n = 0; n < KEY_LOADS; n++) {
        const uint4 low = queries[2 * n * WARP_LANES + warp->lane];
        const uint4 high = queries[(2 * n + 1) * WARP_LANES + warp->lane];
        const uint4 a0 = (uint4)(low.x, high.x, low.y, high.y);
        const uint4 a1 = (uint4)(low.z, high.z, low.w, high.w);
        WARP_FOR (int k = 0; k < 2; k++) {
            scores[k] = warp_multiply(warp, scores[k], a0, keys[k][n].xy);
            scores[k] = warp_multiply(warp, scores[k], a1, keys[k][n].zw);
        }
    }
}

/* Returns column c of 8 of two rows, joined in a word. */
INLINED uint
pair_of(uint4 low, uint4 high, int c)
{
    const ushort2 x = as_ushort2(((const uint *)&low)[c / 2]);
    const ushort2 y = as_ushort2(((const uint *)&high)[c / 2]);
    return as_uint(c % 2 == 0 ? (ushort2)(x.x, y.x) : (ushort2)(x.y, y.y));
}

/* result += weights * values of 16 keys. A value that no row attends to may hold a NaN,
   so it is replaced by zeros. */
INLINED void
multiply_values(const warp_state *warp, uint4 (*values)[VALUE_LOADS], uint used,
                const float4 *weights, softmax_state *softmax, float4 *result)
{
    const uint4 a = round_weights(warp, softmax, 0, weights[0], weights[1]);
    if (used != 15u) {
        WARP_FOR (int k = 0; k < 4; k++) {
            WARP_FOR (int n = 0; n < VALUE_LOADS; n++) {
                values[k][n] = used >> k & 1u ? values[k][n] : (uint4)0u;
            }
        }
    }
    WARP_FOR (int c = 0; c < EV_TILES; c++) {
        const int n = c / 8;
        const uint2 b = (uint2)(pair_of(values[0][n], values[1][n], c % 8),
                                pair_of(values[2][n], values[3][n], c % 8));
        result[c] = warp_multiply(warp, result[c], a, b);
    }
}

/* Copies the 16 rows of the group into local memory, in the order in which lanes load
   keys: for each load, the chunks of rows 0 … 7, then the chunks of rows 8 … 15. A
   negative scale would reverse the order of scores, so the queries take its sign. */
INLINED void
share_queries(__local uint4 *queries, const attention_call *call, const split_share *group)
{
    const ca_attention_params *params = call->params;
    const uint signs = query_signs(params);
    for (int n = (int)get_local_id(0); n < QUERY_SIZE; n += THREADS) {
        const int row = n / (4 * KEY_LOADS);
        const int chunk = n - row * (4 * KEY_LOADS);
        ca_int64 batch[CA_BATCH_DIMS];
        const ca_int64 i = row_of_share(params, group, row, batch);
        __global const ushort *from =
            (__global const ushort *)(call->query + ca_offset(&params->query, batch, i, 0));
        const int at = (chunk / 4 * 2 + row / 8) * WARP_LANES + row % 8 * 4;
        queries[at + chunk % 4] = signs ^ gather_chunk(from + chunk * 8 * params->query.column,
                                                       params->query.column, HEAD_E - chunk * 8);
    }
}

/* Sets where the keys of a split lie. */
INLINED void
start_source(split_source *source, const split_share *group)
{
    const attention_call *call = source->call;
#if PAGED
    const ca_attention_params *params = call->params;
    __global const long *header = sequences_header(call);
    __global const long *numbers = sequence_numbers(call, group->batch[0]);
    start_run(&source->run, call->key, &params->key, call->value, &params->value, group->batch, 0);
    source->pages = call->sequences + header[CA_HEADER_PAGES] + numbers[CA_SEQUENCE_KEY];
    source->page_size = (int)header[CA_HEADER_PAGE_SIZE];
    source->key_page = header[CA_HEADER_KEY_PAGE];
    source->value_page = header[CA_HEADER_VALUE_PAGE];
#else
    find_key_run(&source->run, call, group->batch, source->start);
#endif
}

/* Turns products with the 16 keys from j on into scores, -inf where a row does not
   attend. Returns a bit for each of the lane's four values that at least one row
   attends to. */
INLINED uint
finish_scores(const warp_state *warp, const split_source *source, int j,
              float4 (*scores)[KEY_TILES], softmax_state *softmax)
{
    const int key = j + key_of(source, 0);
    uint used = 0u;
    WARP_FOR (int r = 0; r < 2; r++) {
        const group_row row = source->rows[source->g + 8 * r];
        score_bounds bounds = count_from(row.bounds, 0, (int)source->start + key);
        bounds.limit = min(bounds.limit, source->count - key);
        attended_keys attended;
        attended.words[r][0] = allowed_keys(&bounds, 0, 0);
        const uint seen =
            finish_row(source->call, &row.addends, source->start + key, &attended, r, scores);
        used |= seen;
        softmax->seen |= seen != 0u ? 1u << r : 0u;
    }
    WARP_FOR (uint mask = 4u; mask < WARP_LANES; mask *= 2u) {
        used |= as_uint(warp_exchange(warp, as_float(used), mask));
    }
    return used;
}

/* The warp attends to its share of the split. All warps pass over the same keys that the blocks of a
   mask exclude. */
INLINED void
attend_split(const warp_state *warp, const split_source *source, const split_share *group,
             __local const uint4 *queries, softmax_state *softmax, float4 (*result)[EV_TILES])
{
    const ca_attention_params *params = source->call->params;
    const float factor = late_factor(params);
    const int turn = WARPS * STRIP;
    int ahead = keys_ahead(source->call, group, source->rows, source->start, source->count, turn);
    int j = (int)warp->index * STRIP + ahead;
    uint4 keys[2][KEY_LOADS];
    uint4 values[4][VALUE_LOADS];
    load_keys(keys, source, j);
    load_values(values, source, j);
    for (int j0 = ahead; j0 < source->count; j0 += ahead, j += ahead) {
        if (WARP_SKIPS && j >= source->count) {
            break;
        }
        const int left = source->count - j0 - turn;
        ahead = turn + keys_ahead(source->call, group, source->rows, source->start + j0 + turn,
                                  left, turn);
        float4 scores[1][KEY_TILES] = {{(float4)0.0f}};
        multiply_keys(warp, queries, keys, scores[0]);
        if (j + ahead < source->count) {
            load_keys(keys, source, j + ahead);
        }
        const uint used = finish_scores(warp, source, j, scores, softmax);
        weigh_strip(warp, params, softmax, scores, factor, result);
        multiply_values(warp, values, used, scores[0], softmax, result[0]);
        if (j + ahead < source->count) {
            load_values(values, source, j + ahead);
        }
    }
}

/* Puts the warp's rows into local memory, relative to the highest score of all warps.
   The result is scaled from the sum of rounded weights to the exact sum: the division
   by the rounded sum cancels the rounding of the weights, but the log-sum-exp needs the
   exact one. */
INLINED void
share_rows(const warp_state *warp, const split_source *source, const part_memory *memory,
           const softmax_state *softmax, float4 *result)
{
    const int first = (int)warp->index * TILE_ROWS + source->g;
    bool seen[2];
    float scale[2];
    WARP_FOR (int r = 0; r < 2; r++) {
        seen[r] = row_is_seen(warp, softmax, r);
        if (source->t == 0) {
            memory->highest[first + 8 * r] = seen[r] ? softmax->base[r] : -INFINITY;
        }
    }
    /* Behind this barrier, warps read the highest scores that other warps have written.
       They also write their results over the queries, which no warp reads any more. */
    barrier(CLK_LOCAL_MEM_FENCE);
    WARP_FOR (int r = 0; r < 2; r++) {
        const float factor =
            factor_of_part(source->call->params, memory, source->g + 8 * r, softmax->base[r]);
        const float sum = sum_of_four(warp, softmax->sum[r]) * factor;
        scale[r] = sum / rounded_sum(softmax, r);
        if (source->t == 0) {
            memory->sum[first + 8 * r] = seen[r] ? sum : 0.0f;
        }
    }
    WARP_FOR (int c = 0; c < EV_TILES; c += 4) {
        /* Tile c has every 8th of 64 columns, from column c % 8 on. */
        const int column = c / 8 * 64 + source->t * 16 + c % 8;
        WARP_FOR (int r = 0; r < 2; r++) {
            __local float *row = memory->columns + (first + 8 * r) * ROW_SIZE + column;
            WARP_FOR (int n = 0; n < 4; n++) {
                const float4 sums = result[c + n];
                const float2 x = (r == 0 ? sums.xy : sums.zw) * scale[r];
                row[n] = seen[r] ? x.x : 0.0f;
                row[n + 8] = seen[r] ? x.y : 0.0f;
            }
        }
    }
}

__kernel
WARP_KERNEL(THREADS) void attention_decode_mma(ATTENTION_ARGUMENTS)
{
    WARP_DECLARE(warp, WARPS, memory, LOCAL_SIZE);
    __local group_row group_rows[TILE_ROWS];
    __local float highest[WARPS * TILE_ROWS];
    __local float sums[WARPS * TILE_ROWS];
    const part_memory ends = {highest, sums, (__local float *)memory};
    DEFINE_CALL(call);
    const int item = (int)get_local_id(0);

    split_share group;
    find_share(&group, &call, group_of(&params), 0, TILE_ROWS);
    share_queries(memory, &call, &group);
    if (item < TILE_ROWS) {
        ca_int64 batch[CA_BATCH_DIMS];
        const ca_int64 i = row_of_share(&params, &group, item, batch);
        start_group_row(&group_rows[item], &call, batch, i);
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* writes of queries and rows: their reads */

    const key_range keys = keys_of_group(&params, group_rows, TILE_ROWS, &group);
    split_source source = {.call = &call,
                           .rows = group_rows,
                           .start = keys.start,
                           .count = (int)(keys.end - keys.start),
                           .g = (int)warp.lane / 4,
                           .t = (int)warp.lane % 4};
    start_source(&source, &group);
    softmax_state softmax;
    float4 result[1][EV_TILES] = {{(float4)0.0f}};
    start_softmax(&softmax);
    if (source.count > 0) {
        attend_split(&warp, &source, &group, memory, &softmax, result);
    }

    share_rows(&warp, &source, &ends, &softmax, result[0]);
    barrier(CLK_LOCAL_MEM_FENCE); /* writes of the warps' rows: their reads */
    for (int r = (int)warp.index; r < group.count; r += WARPS) {
        end_row(&call, &group, &group_rows[r], &ends, r, r * ROW_SIZE, (int)warp.lane, WARP_LANES);
    }
}
