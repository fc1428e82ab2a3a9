/* SPDX-License-Identifier: MIT
 *
 * Attention on GPUs, few rows and many keys: a work-group reads one split of a head's
 * keys once, for all query heads that share them. A load is 16 bytes.
 *
 *     global size  batches * params.splits * groups of RT rows * WG, local size WG
 *     work-group   RT rows that attend to the same keys, and one split of these keys
 *
 * A batch here is an index of the leading dimensions without the query heads. Keys come
 * in blocks of BN:
 *
 *     scores   KEY_LANES neighbours share a key. Each multiplies its chunks of 16 bytes
 *              with the queries, which are in local memory, and they add up the
 *              products. Blocks of scores alternate between two buffers in local memory
 *     values   ROW_LANES neighbours, a slice, share a value. Each has some columns,
 *              their sums for all rows in registers, and the softmax of the slice's
 *              keys
 *
 * The next block's keys are on their way while values are added up, its values while
 * scores are computed. There is one barrier a block.
 *
 *     -DHEAD_E -DHEAD_EV  head sizes E and Ev, 1 … 512
 *     -DWG                work-items of a group; default 128
 *     -DRT                rows of a group, a power of 2; default 1
 *     -DBN                keys of a block, WG / KEY_LANES times a power of 2; default
 *                         WG / KEY_LANES
 *     -DKEY_LANES         work-items that share a key, a power of 2; default 1
 *     -DWIDE              1: rows of keys and values, past and present ones too, are
 *                         whole aligned 16 bytes; default 0
 *     EXCHANGE and SUB_GROUP of support/exchange.clh, and the macros of
 *     support/common.clh; OPTIONS has no input bias, scores, late softcap or dropout
 */
#define SCORE_PLACE ca_int64
#include "kernels/attention/gpu.clh" /* OPTIONS */

#include "kernels/attention/decode_gpu/steps.clh"

/* Local memory for the columns of the slices, and before the end for exchanges. */
#define SCRATCH_SIZE (SLICES * ROW_SIZE > EXCHANGE_SIZE ? SLICES * ROW_SIZE : EXCHANGE_SIZE)

/* A work-item's share of a block: chunks of keys `key`, `key` + KEYS_AT_ONCE, … and of
   values `slice`, `slice` + SLICES, … */
typedef struct {
    int key;
    int key_lane;
    int slice;
    int lane;
} lane_share;

/* Local memory while the group goes over the blocks. */
typedef struct {
    const __local real_vector *queries; /* [RT][QUERY_VECTORS] */
    const __local group_row *rows;      /* [RT] */
    __local real *scores;               /* [2][BN][RT] */
    __local real *scratch;
    int buffer; /* for the next block's scores: 0 or 1 */
} block_memory;

/* Sets what mask and bias add to this work-item's scores of keys j0 … j0 + count - 1,
   -inf where a row does not attend. */
static inline void
load_addends(real *added, const attention_call *call, const __local group_row *rows,
             const lane_share *mine, ca_int64 j0, int count)
{
    UNROLLED_FOR (int n = 0; n < OWN_SUMS; n++) {
        const int t = own_term(mine->key_lane, n);
        const int k = t / RT * KEYS_AT_ONCE + mine->key;
        added[n] = k < count ? addend_of_row(call, rows + t % RT, j0 + k) : EXCLUDED;
    }
}

/* Writes this work-item's scores of a block to local memory. */
static inline void
store_scores(__local real *block, const ca_attention_params *params, const real *sums,
             const real *added, const lane_share *mine)
{
    UNROLLED_FOR (int n = 0; n < OWN_SUMS; n++) {
        const int t = own_term(mine->key_lane, n);
        const int k = t / RT * KEYS_AT_ONCE + mine->key;
        if (mine->key_lane % SAME_LANES == 0) {
            real kept;
            const real score = finish_score(params, sums[n], added[n], &kept);
            block[k * RT + t % RT] = distinct_score(score, added[n]);
        }
    }
}

/* The group's rows attend to keys start … end - 1, which are in one run. */
static inline void
attend_keys(slice_state *state, const attention_call *call, const ca_int64 *batch,
            const key_run *run, ca_int64 start, ca_int64 end, present_share share,
            const lane_share *mine, block_memory *memory)
{
    const ca_view *key_view = run->key_view;
    const ca_view *value_view = run->value_view;
    __global const storage *keys = run->key;
    __global const value_storage *values = run->value;
    uint4 key_chunks[KEYS_PER_LANE * KEY_PER_LANE];
    uint4 value_chunks[VALUES_PER_LANE * PER_LANE];
    int count = (int)min((ca_int64)BN, end - start);
    load_keys(key_chunks, keys, key_view, mine->key, mine->key_lane, count);
    load_values(value_chunks, values, value_view, mine->slice, mine->lane, count);
    for (ca_int64 j0 = start; j0 < end; j0 += BN) {
        real added[OWN_SUMS];
        real terms[TERMS];
        load_addends(added, call, memory->rows, mine, j0, count);
        multiply_keys(terms, key_chunks, memory->queries, mine->key_lane);
        const int next = (int)min((ca_int64)BN, end - j0 - BN);
        keys += BN * key_view->row;
        values += BN * value_view->row;
        if (next > 0) {
            load_keys(key_chunks, keys, key_view, mine->key, mine->key_lane, next);
        }
        __local real *block = memory->scores + memory->buffer * BN * RT;
        sums_over_lanes(terms, mine->key_lane, memory->scratch);
        store_scores(block, call->params, terms, added, mine);
        if (USES(call->params, PRESENT)) {
            copy_present_rows(call, batch, max(share.first, j0), min(share.end, j0 + count));
        }
        /* Orders the writes of this block's scores before their reads. The scores of
           two blocks ago, which the writes replace, were read before the last
           barrier. */
        barrier(CLK_LOCAL_MEM_FENCE);
        add_values(call->params, state, value_chunks, block, mine->slice);
        if (next > 0) {
            load_values(value_chunks, values, value_view, mine->slice, mine->lane, next);
        }
        memory->buffer ^= 1;
        count = next;
    }
}

/* The group's rows attend to their split of the keys. */
static inline void
attend_split(slice_state *state, const attention_call *call, const split_share *group,
             const lane_share *mine, block_memory *memory)
{
    const ca_attention_params *params = call->params;
    const ca_int64 *batch = group->batch;
    const key_range range = keys_of_group(params, memory->rows, RT, group->split);
    const present_share share = present_share_of(params, batch, group->part, group->parts);
    if (USES(params, PRESENT)) {
        copy_present_rows(call, batch, share.first, min(share.end, range.start));
        copy_present_rows(call, batch, max(share.first, range.end), share.end);
    }
    ca_int64 end;
    for (ca_int64 start = range.start; start < range.end; start = end) {
        const key_run run = key_run_at(call, batch, start);
        end = USES(params, PAST) ? min(range.end, start + run.count) : range.end;
        attend_keys(state, call, batch, &run, start, end, share, mine, memory);
    }
}

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) EXCHANGE_ATTRIBUTE void
attention_decode_gpu(ATTENTION_ARGUMENTS)
{
    __local real_vector queries[RT * QUERY_VECTORS];
    __local real blocks[2 * BN * RT] __attribute__((aligned(64)));
    __local real scratch[SCRATCH_SIZE];
    __local real slice_highest[SLICES * RT];
    __local real slice_sum[SLICES * RT];
    __local group_row group_rows[RT];
    const part_memory ends = {slice_highest, slice_sum, scratch};
    block_memory memory = {queries, group_rows, blocks, scratch, 0};
    const attention_call call = ATTENTION_CALL;
    const int item = (int)get_local_id(0);
    const int slice = item / ROW_LANES;
    const lane_share mine = {item / KEY_LANES, item % KEY_LANES, slice, item - slice * ROW_LANES};

    const split_share group = split_share_of(&params, (ca_int64)get_group_id(0), RT);
    ca_int64 batch[CA_BATCH_DIMS];
    PLAIN_FOR (int r = 0; r < RT; r++) {
        const ca_int64 i = row_of_share(&params, &group, r, batch);
        share_query(queries + r * QUERY_VECTORS, query + ca_offset(&params.query, batch, i, 0),
                    params.query.column, score_scale(&params));
        if (item == 0) {
            group_rows[r] = group_row_of(&call, batch, i);
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* writes of queries and rows: their reads */

    slice_state state;
    start_slice(&state);
    attend_split(&state, &call, &group, &mine, &memory);

    merge_slices(&params, &state, &ends, slice, mine.lane);
    PLAIN_FOR (int r = 0; r < group.count; r++) {
        share_columns(&ends, &state, r, slice, mine.lane);
        end_row(&call, &group, &ends, r, 0, item, WG);
    }
}
