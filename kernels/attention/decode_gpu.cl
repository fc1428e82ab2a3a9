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
 *     -DWG                work-items of a group
 *     -DRT                rows of a group, a power of 2
 *     -DBN                keys of a block, WG / KEY_LANES times a power of 2
 *     -DKEY_LANES         work-items that share a key, a power of 2
 *     -DWIDE              1: rows of keys and values, past and present ones too, are
 *                         whole aligned 16 bytes
 *     and the macros of support/exchange.clh, support/sub_group.clh and support/common.clh;
 *     OPTIONS never asks for an input bias, scores, a late softcap or dropout
 */
#define SCORE_PLACE    ca_int64
#define SCORES_IN_LOG2 1

/* Elements of a load, which is 16 bytes, of each dtype. */
#define ELEMENTS_1  8
#define ELEMENTS_2  8
#define ELEMENTS_3  4
#define ELEMENTS_4  2
#define ELEMENTS_5  16
#define ELEMENTS_13 16
#define ELEMENTS_14 16
#define KEY_CHUNK   JOIN(ELEMENTS_, KEY_DTYPE)
#define CHUNK       JOIN(ELEMENTS_, VALUE_DTYPE)

#include "kernels/attention/decode_gpu/slices.clh" /* slice_state, SLICES, VECTOR, group_row */
#include "kernels/attention/keys.clh"              /* find_key_run */
#include "kernels/support/sub_group.clh"           /* SUB_GROUP_ATTRIBUTE */

/* A lane has KEY_PER_LANE chunks of a key, KEY_LANES chunks apart, and KEYS_PER_LANE
   keys of a block. Its TERMS products are those of these keys with RT rows. */
#define KEY_CHUNKS    ((HEAD_E + KEY_CHUNK - 1) / KEY_CHUNK)
#define KEY_PER_LANE  ((KEY_CHUNKS + KEY_LANES - 1) / KEY_LANES)
#define KEYS_AT_ONCE  (WG / KEY_LANES)
#define KEYS_PER_LANE (BN / KEYS_AT_ONCE)
#define TERMS         (KEYS_PER_LANE * RT)

#define VALUES_PER_LANE ((BN + SLICES - 1) / SLICES)

/* Vectors of a chunk of a query, and of a query in local memory, where neighbours
   belong to neighbouring lanes. */
#define KEY_VECTORS   (KEY_CHUNK / VECTOR)
#define QUERY_VECTORS (KEY_PER_LANE * KEY_VECTORS * KEY_LANES)

/* --- 16 bytes of a row ------------------------------------------------------------ */

/* raw_1(x) is 16 bytes of elements of dtype 1, where x(n) reads element n as bits.
   unpack_1 turns them into reals. */
#define raw_2(x) as_uint4((ushort8)(x(0), x(1), x(2), x(3), x(4), x(5), x(6), x(7)))
#define raw_1(x) raw_2(x)
#define raw_3(x) ((uint4)(x(0), x(1), x(2), x(3)))
#define raw_4(x) as_uint4((ulong2)(x(0), x(1)))
#define raw_5(x)                                                                                   \
    as_uint4((uchar16)(x(0), x(1), x(2), x(3), x(4), x(5), x(6), x(7), x(8), x(9), x(10), x(11),   \
                       x(12), x(13), x(14), x(15)))
#define raw_13(x) raw_5(x)
#define raw_14(x) raw_5(x)

/* Unpacks word by word: clang would keep an array of four words in memory. */
#define DEFINE_UNPACK(dtype, value)                                                                \
    INLINED void unpack_##dtype(uint4 raw, real *x)                                                \
    {                                                                                              \
        const uint words[4] = {raw.s0, raw.s1, raw.s2, raw.s3};                                    \
        UNROLLED_FOR (int n = 0; n < ELEMENTS_##dtype; n++) {                                      \
            const uint word = words[n * 4 / ELEMENTS_##dtype];                                     \
            x[n] = (real)(value);                                                                  \
        }                                                                                          \
    }

/* Returns byte n of a word of int8 without a conversion, which GPUs have few units for: 2^23 + the byte + 128
   has the byte and 128 as its lowest bits. */
INLINED float
int8_of_word(uint word, int n)
{
    return as_float(0x4b000000u | ((word ^ 0x80808080u) >> 8 * n & 0xffu)) - 8388736.0f;
}

/* These return number n of a word of four float8. The byte of a float8_e5m2 is the upper byte of the float16 that
   equals it. A float8_e4m3fn has one exponent bit less: its bits, but the sign, are shifted right by one, and the float16 is
   multiplied by 2^8. That makes 480 of its NaN. */
INLINED float
float8_e5m2_of_word(uint word, int n)
{
    const uint halves = n % 2 == 0 ? word << 8 & 0xff00ff00u : word & 0xff00ff00u;
    return vload_half(n / 2, (const half *)&halves);
}

INLINED float
float8_e4m3fn_of_word(uint word, int n)
{
    const uint bytes = n % 2 == 0 ? word << 8 : word;
    const uint halves = (bytes & 0x80008000u) | (bytes >> 1 & 0x3f803f80u);
    const float x = vload_half(n / 2, (const half *)&halves) * 256.0f;
    return fabs(x) == 480.0f ? NAN : x; /* what the bits of a NaN would be */
}

DEFINE_UNPACK(1, vload_half(n % 2, (const half *)&word))
DEFINE_UNPACK(2, as_float(n % 2 == 0 ? word << 16 : word & 0xffff0000u))
DEFINE_UNPACK(3, as_float(word))
#if REAL64
DEFINE_UNPACK(4, as_double((uint2)(word, words[2 * n + 1])))
#endif

DEFINE_UNPACK(5, int8_of_word(word, n % 4))
DEFINE_UNPACK(13, float8_e4m3fn_of_word(word, n % 4))
DEFINE_UNPACK(14, float8_e5m2_of_word(word, n % 4))

#define unpack_key   JOIN(unpack_, KEY_DTYPE)
#define unpack_value JOIN(unpack_, VALUE_DTYPE)

/* Defines a function: x[k * chunks + n] = chunk n * lanes + lane of row k * step + first,
   for `own` rows and `chunks` chunks of a lane. Rows from `count` on repeat the last one.
   Behind the `size` elements of a row are zeros. */
#define DEFINE_LOAD_ROWS(name, dtype, size, own, step, chunks, lanes)                              \
    INLINED void name(uint4 *x, __global const JOIN(storage_, dtype) * rows,                       \
                      const row_strides *strides, int first, int lane, int count)                  \
    {                                                                                              \
        const int end = size;                                                                      \
        UNROLLED_FOR (int k = 0; k < own; k++) {                                                   \
            __global const JOIN(bits_, dtype) *row =                                               \
                (__global const JOIN(bits_, dtype) *)rows +                                        \
                min(k * step + first, count - 1) * strides -> row;                                 \
            UNROLLED_FOR (int n = 0; n < chunks; n++) {                                            \
                const int e = (n * lanes + lane) * JOIN(ELEMENTS_, dtype);                         \
                x[k * chunks + n] = !WIDE     ? JOIN(raw_, dtype)(ELEMENT)                         \
                                    : e < end ? *(__global const uint4 *)(row + e)                 \
                                              : (uint4)0u;                                         \
            }                                                                                      \
        }                                                                                          \
    }

#define ELEMENT(n) (e + (n) < end ? row[(e + (n)) * strides->column] : 0)

DEFINE_LOAD_ROWS(load_keys, KEY_DTYPE, HEAD_E, KEYS_PER_LANE, KEYS_AT_ONCE, KEY_PER_LANE, KEY_LANES)
DEFINE_LOAD_ROWS(load_values, VALUE_DTYPE, HEAD_EV, VALUES_PER_LANE, SLICES, PER_LANE, ROW_LANES)

/* --- sums over lanes -------------------------------------------------------------- */

/* The KEY_LANES neighbours that share a key have TERMS numbers each. One lane needs a sum,
   not every lane. So with each exchange the two lanes of a pair divide the numbers that
   they still have: each hands one half over, and adds what it receives to the other half.
   TERMS numbers take TERMS - 1 exchanges, not TERMS * log2(KEY_LANES).

       lane         0          1          2          3
       2 apart      a b        a b        c d        c d
       1 apart      a          b          c          d                                  */

/* The sums that a lane ends up with, and the lanes that end up with the same sums. */
#define OWN_SUMS   (TERMS > KEY_LANES ? TERMS / KEY_LANES : 1)
#define SAME_LANES (TERMS > KEY_LANES ? 1 : KEY_LANES / TERMS)

/* Returns the term of sum n of lane `lane`. */
INLINED int
own_term(int lane, int n)
{
    return lane / SAME_LANES * OWN_SUMS + n;
}

/* Numbers that are exchanged at once, and reals of local memory for them. */
#define HALF_TERMS    ((TERMS + 1) / 2)
#define EXCHANGE_SIZE (WARP_SHUFFLES ? 1 : HALF_TERMS * WG)

/* Replaces numbers by those of the work-item whose number differs in the bit `apart`. */
INLINED void
exchange_terms(real *x, int count, int apart, __local real *scratch)
{
#if WARP_SHUFFLES
    UNROLLED_FOR (int n = 0; n < HALF_TERMS; n++) {
        x[n] = n < count ? exchange(x[n], apart) : x[n];
    }
#else
    const int item = (int)get_local_id(0);
    barrier(CLK_LOCAL_MEM_FENCE); /* reads of the numbers before: these writes */
    for (int n = 0; n < count; n++) {
        scratch[n * WG + item] = x[n];
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* these writes: their reads */
    for (int n = 0; n < count; n++) {
        x[n] = scratch[n * WG + (item ^ apart)];
    }
#endif
}

/* Leaves a lane's sums in the first OWN_SUMS terms. */
INLINED void
sums_over_lanes(real *terms, int lane, __local real *scratch)
{
    UNROLLED_FOR (int apart = KEY_LANES / 2; apart > 0; apart /= 2) {
        const int kept = TERMS * apart / KEY_LANES; /* 0: both lanes keep the last one */
        const bool upper = kept > 0 && (lane & apart) != 0;
        real handed[HALF_TERMS];
        UNROLLED_FOR (int n = 0; n < HALF_TERMS; n++) {
            const real high = terms[min(n + kept, TERMS - 1)];
            handed[n] = upper ? terms[n] : high;
            terms[n] = upper ? high : terms[n];
        }
        exchange_terms(handed, max(kept, 1), apart, scratch);
        UNROLLED_FOR (int n = 0; n < HALF_TERMS; n++) {
            terms[n] += handed[n];
        }
    }
}

/* --- scores ----------------------------------------------------------------------- */

/* Puts a query, times the scale, into local memory, in the order of QUERY_VECTORS. */
INLINED void
share_query(__local real_vector *queries, __global const storage *query, ca_int64 column,
            real scale)
{
    for (int p = (int)get_local_id(0); p < QUERY_VECTORS; p += WG) {
        const int row = p / KEY_LANES;
        const int c = row / KEY_VECTORS * KEY_LANES + p - row * KEY_LANES;
        const int e0 = c * KEY_CHUNK + row % KEY_VECTORS * VECTOR;
        real x[VECTOR];
        UNROLLED_FOR (int n = 0; n < VECTOR; n++) {
            const int e = e0 + n;
            x[n] = e < HEAD_E ? load(query + e * column) * scale : REAL(0.0);
        }
        queries[p] = JOIN(vload, VECTOR)(0, x);
    }
}

/* terms[k * RT + r] = this lane's share of the product of its key k and row r. */
INLINED void
multiply_keys(real *terms, const uint4 *keys, const __local real_vector *queries, int lane)
{
    UNROLLED_FOR (int t = 0; t < TERMS; t++) {
        terms[t] = REAL(0.0);
    }
    UNROLLED_FOR (int n = 0; n < KEY_PER_LANE; n++) {
        real x[KEYS_PER_LANE * KEY_CHUNK];
        UNROLLED_FOR (int k = 0; k < KEYS_PER_LANE; k++) {
            unpack_key(keys[k * KEY_PER_LANE + n], x + k * KEY_CHUNK);
        }
        UNROLLED_FOR (int r = 0; r < RT; r++) {
            UNROLLED_FOR (int p = 0; p < KEY_VECTORS; p++) {
                real q[VECTOR];
                JOIN(vstore, VECTOR)(
                    queries[r * QUERY_VECTORS + (n * KEY_VECTORS + p) * KEY_LANES + lane], 0, q);
                UNROLLED_FOR (int k = 0; k < KEYS_PER_LANE; k++) {
                    UNROLLED_FOR (int e = 0; e < VECTOR; e++) {
                        terms[k * RT + r] =
                            fma(x[k * KEY_CHUNK + p * VECTOR + e], q[e], terms[k * RT + r]);
                    }
                }
            }
        }
    }
}

/* The score of a key that masks and bounds exclude from a row, and of no other key. */
#define EXCLUDED (-INFINITY)

/* --- values ----------------------------------------------------------------------- */

/* Loads the scores of this slice's key k, EXCLUDED where the block has no such key. */
INLINED void
load_scores(real *x, const __local real *scores, int k, int slice)
{
    const int j = k * SLICES + slice;
    UNROLLED_FOR (int r = 0; r < RT; r++) {
        x[r] = scores[min(j, BN - 1) * RT + r];
#if BN % SLICES || WG % ROW_LANES
        x[r] = j < BN ? x[r] : EXCLUDED;
#endif
    }
}

/* Continues the softmax of each row with this slice's keys of a block. A key that all
   rows exclude is passed over, whatever its value holds. A key whose weights are 0 is
   not: a NaN in its value has to show. */
INLINED void
add_values(const ca_attention_params *params, slice_state *state, const uint4 *values,
           const real *scales, const __local real *scores, int slice)
{
    real highest[RT];
    real decay[RT];
    bool rises = false;
    UNROLLED_FOR (int r = 0; r < RT; r++) {
        highest[r] = state->highest[r];
    }
    UNROLLED_FOR (int k = 0; k < VALUES_PER_LANE; k++) {
        real x[RT];
        load_scores(x, scores, k, slice);
        UNROLLED_FOR (int r = 0; r < RT; r++) {
            highest[r] = x[r] > highest[r] ? x[r] : highest[r];
        }
    }
    UNROLLED_FOR (int r = 0; r < RT; r++) {
        decay[r] = score_exp2(TO_LOG2(params, state->highest[r] - base_of(highest[r])));
        rises = rises || highest[r] > state->highest[r];
        state->highest[r] = highest[r];
        state->sum[r] *= decay[r];
    }
    if (rises) {
        UNROLLED_FOR (int n = 0; n < RT * COLUMNS; n++) {
            state->columns[n] *= decay[n / COLUMNS];
        }
    }
    UNROLLED_FOR (int k = 0; k < VALUES_PER_LANE; k++) {
        real weights[RT];
        bool attends = false;
        load_scores(weights, scores, k, slice);
        UNROLLED_FOR (int r = 0; r < RT; r++) {
            attends = attends || weights[r] != EXCLUDED;
            weights[r] = score_exp2(TO_LOG2(params, weights[r] - base_of(highest[r])));
            state->sum[r] += weights[r];
        }
        if (!attends) {
            continue;
        }
        if (SCALES(params, VALUE_SCALE)) {
            UNROLLED_FOR (int r = 0; r < RT; r++) {
                weights[r] *= scales[k];
            }
        }
        UNROLLED_FOR (int n = 0; n < PER_LANE; n++) {
            real x[CHUNK];
            unpack_value(values[k * PER_LANE + n], x);
            UNROLLED_FOR (int r = 0; r < RT; r++) {
                UNROLLED_FOR (int e = 0; e < CHUNK; e++) {
                    real *sum = &state->columns[r * COLUMNS + n * CHUNK + e];
                    *sum = fma(weights[r], x[e], *sum);
                }
            }
        }
    }
}

/* --- a work-group ----------------------------------------------------------------- */

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

/* The scales of a work-item's sums and values of a block, in calls that have them. */
typedef struct {
    real key[OWN_SUMS];
    real value[VALUES_PER_LANE];
} block_scales;

/* Loads the scales of keys `first` … `first` + count - 1 of a run. Those behind repeat the last one. */
INLINED void
load_scales(block_scales *scales, const ca_attention_params *params, const key_run *run,
            const lane_share *mine, ca_int64 first, int count)
{
    if (SCALES(params, KEY_SCALE)) {
        UNROLLED_FOR (int n = 0; n < OWN_SUMS; n++) {
            const int k = own_term(mine->key_lane, n) / RT * KEYS_AT_ONCE + mine->key;
            scales->key[n] = key_scale_of(params, run, first + min(k, count - 1));
        }
    }
    if (SCALES(params, VALUE_SCALE)) {
        UNROLLED_FOR (int k = 0; k < VALUES_PER_LANE; k++) {
            const int j = k * SLICES + mine->slice;
            scales->value[k] = value_scale_of(params, run, first + min(j, count - 1));
        }
    }
}

/* Sets what mask and bias add to this work-item's scores of keys j0 … j0 + count - 1,
   -inf where a row does not attend. */
INLINED void
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
INLINED void
store_scores(__local real *block, const attention_call *call, const __local group_row *rows,
             const real *sums, const real *added, const lane_share *mine, int j0)
{
    UNROLLED_FOR (int n = 0; n < OWN_SUMS; n++) {
        const int t = own_term(mine->key_lane, n);
        const int k = t / RT * KEYS_AT_ONCE + mine->key;
        if (mine->key_lane % SAME_LANES == 0) {
            real addend = added[n];
#if HAS_SCORE_MOD
            const mod_row mod = rows[t % RT].addends.mod;
#endif
            real score = MODIFY_SCORE(call, &mod, j0 + k, sums[n], &addend);
            score = finish_score(call->params, score, addend);
            block[k * RT + t % RT] = distinct_score(score, addend);
        }
    }
}

/* The group's rows attend to keys start … end - 1, which are in one run. */
INLINED void
attend_keys(slice_state *state, const attention_call *call, const split_share *group,
            const key_run *run, ca_int64 start, ca_int64 end, const lane_share *mine,
            block_memory *memory)
{
    const row_strides key_strides = run->key_strides;
    const row_strides value_strides = run->value_strides;
    const ca_int64 *batch = group->batch;
    int ahead = keys_ahead(call, group, memory->rows, start, end - start, BN);
    __global const key_storage *keys = run->key + ahead * key_strides.row;
    __global const value_storage *values = run->value + ahead * value_strides.row;
    uint4 key_chunks[KEYS_PER_LANE * KEY_PER_LANE];
    uint4 value_chunks[VALUES_PER_LANE * PER_LANE];
    block_scales scales;
    int count = (int)min((ca_int64)BN, end - start - ahead);
    if (count > 0) {
        load_keys(key_chunks, keys, &key_strides, mine->key, mine->key_lane, count);
        load_values(value_chunks, values, &value_strides, mine->slice, mine->lane, count);
        load_scales(&scales, call->params, run, mine, ahead, count);
    }
    for (ca_int64 j0 = start + ahead; j0 < end; j0 += ahead) {
        real added[OWN_SUMS];
        real terms[TERMS];
        load_addends(added, call, memory->rows, mine, j0, count);
        multiply_keys(terms, key_chunks, memory->queries, mine->key_lane);
        ahead = BN + keys_ahead(call, group, memory->rows, j0 + BN, end - j0 - BN, BN);
        const int next = (int)min((ca_int64)BN, end - j0 - ahead);
        keys += ahead * key_strides.row;
        values += ahead * value_strides.row;
        if (next > 0) {
            load_keys(key_chunks, keys, &key_strides, mine->key, mine->key_lane, next);
        }
        __local real *block = memory->scores + memory->buffer * BN * RT;
        sums_over_lanes(terms, mine->key_lane, memory->scratch);
        if (SCALES(call->params, KEY_SCALE)) {
            UNROLLED_FOR (int n = 0; n < OWN_SUMS; n++) {
                terms[n] *= scales.key[n];
            }
        }
        store_scores(block, call, memory->rows, terms, added, mine, (int)j0);
        /* Orders the writes of this block's scores before their reads. The scores of
           two blocks ago, which the writes replace, were read before the last
           barrier. */
        barrier(CLK_LOCAL_MEM_FENCE);
        add_values(call->params, state, value_chunks, scales.value, block, mine->slice);
        if (next > 0) {
            load_values(value_chunks, values, &value_strides, mine->slice, mine->lane, next);
            load_scales(&scales, call->params, run, mine, j0 + ahead - start, next);
        }
        memory->buffer ^= 1;
        count = next;
    }
}

/* The group's rows attend to their split of the keys. */
INLINED void
attend_split(slice_state *state, const attention_call *call, const split_share *group,
             const lane_share *mine, block_memory *memory)
{
    const ca_attention_params *params = call->params;
    const ca_int64 *batch = group->batch;
    const key_range range = keys_of_group(params, memory->rows, RT, group);
    ca_int64 end;
    for (ca_int64 start = range.start; start < range.end; start = end) {
        key_run run;
        find_key_run(&run, call, batch, start);
        end = KEYS_HAVE_RUNS(params) ? min(range.end, start + run.count) : range.end;
        attend_keys(state, call, group, &run, start, end, mine, memory);
    }
}

__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
SUB_GROUP_ATTRIBUTE(float4) void attention_decode_gpu(ATTENTION_ARGUMENTS)
{
    __local real_vector queries[RT * QUERY_VECTORS];
    __local real blocks[2 * BN * RT] __attribute__((aligned(64)));
    __local real scratch[SCRATCH_SIZE];
    __local real slice_highest[SLICES * RT];
    __local real slice_sum[SLICES * RT];
    __local group_row group_rows[RT];
    const part_memory ends = {slice_highest, slice_sum, scratch};
    block_memory memory = {queries, group_rows, blocks, scratch, 0};
    DEFINE_CALL(call);
    const int item = (int)get_local_id(0);
    const int slice = item / ROW_LANES;
    const lane_share mine = {item / KEY_LANES, item % KEY_LANES, slice, item - slice * ROW_LANES};

    split_share group;
    find_share(&group, &call, group_of(&params), 0, RT);
    if (item < RT) {
        ca_int64 batch[CA_BATCH_DIMS];
        const ca_int64 i = row_of_share(&params, &group, item, batch);
        start_group_row(&group_rows[item], &call, batch, i);
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* writes of rows: their reads */
    PLAIN_FOR (int r = 0; r < RT; r++) {
        share_query(queries + r * QUERY_VECTORS, query + group_rows[r].query, params.query.column,
                    score_scale(&params));
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* writes of queries: their reads */

    slice_state state;
    start_slice(&state);
    attend_split(&state, &call, &group, &mine, &memory);

    merge_slices(&params, &state, &ends, slice, mine.lane);
    PLAIN_FOR (int r = 0; r < group.count; r++) {
        share_columns(&ends, &state, r, slice, mine.lane);
        end_row(&call, &group, &group_rows[r], &ends, r, 0, item, WG);
    }
}
