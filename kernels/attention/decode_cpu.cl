/* SPDX-License-Identifier: MIT
 *
 * Attention on CPUs, few rows and many keys: the lanes of a vector are keys.
 *
 *     global size  batches * params.splits * groups of ROWS rows, local size 1
 *     work-item    ROWS rows that attend to the same keys, and one split of these keys; or
 *                  fewer rows of each of params.key_heads heads, whose keys lie side by side
 *
 * The rows are those of params.heads query heads, which share keys and values: each key
 * and value is read from memory once for all of them. A batch here is an index of the
 * leading dimensions without these heads.
 *
 *     scores   [RT][BN]  of one block of keys, LANES keys in a vector
 *     weights  [RT][BN]  exp(scores - highest score so far)
 *     result   [RT][Ev]  the sum of weights times values, LANES columns in a vector
 *
 * Where there are several splits, each leaves its rows in `partial`. A second launch of
 * the same kernel, with CA_MERGES and a work-item for each row, merges them:
 *
 *     highest = max_s highest[s]
 *     sum     = sum_s sum[s] * exp(highest[s] - highest), and likewise each column
 *
 * Head sizes, LANES … CA_CPU_HEAD_SIZE, and options are data. The kernel has no input
 * bias, no dropout and no late softcap, and writes no scores.
 *
 *     -DRT  rows that share a load of keys or values: 1, 2 or 4
 *     -DBN  keys of a block, at most. Its keys and values stay in the L2 cache
 *     LANES of support/lanes.clh and the macros of support/common.clh
 */
#define SCORE_LANES LANES_ARE_KEYS
#include "kernels/attention/addends.clh"             /* load_addends_rows */
#include "kernels/attention/decode_cpu/fetching.clh" /* find_stream, FETCH */
#include "kernels/attention/decode_cpu/runs.clh"     /* block_runs, scale_block */
#include "kernels/attention/keys.clh"                /* key_run */
#include "kernels/attention/score.clh"               /* finish_score, weight_of, write_lse */
#include "kernels/attention/splits.clh"              /* base_of, partial_row, find_share */

#define TILES 8 /* of a work-item, at most; csrc/attention/plan_decode_cpu.c knows */
#define ROWS  (TILES * RT)

/* Vectors of columns whose sums stay in registers, for RT rows each: all registers, or
   half of them at the end of a row. The result of RT rows is a sequence of passes,
   [RT][PASS] or [RT][SHORT_PASS]. Slots after a row's last vector repeat it. */
#define PASS             (RT <= 2 ? 8 : 4)
#define SHORT_PASS       (PASS / 2)
#define SLOTS_OF_ROW(Ev) ((VECTORS_OF(Ev) + SHORT_PASS - 1) / SHORT_PASS * SHORT_PASS)

/* A pass takes VALUES_AT_ONCE values if columns need several passes, or if heads take turns. With
   fewer values, loops would start more often. With more, reads of memory would be out of order. */
#define VALUES_AT_ONCE (sizeof(value_storage) == 2 ? 32 : 16)

/* One row: the keys that it may see, its softmax so far. */
typedef struct {
    ca_int64 batch[CA_BATCH_DIMS];
    ca_int64 i;
    score_bounds bounds; /* counted from this row and key 0 */
    ca_int64 first;      /* keys first … last */
    ca_int64 last;
    real highest; /* score */
    realv sum;    /* of the weights, by lanes */
#if HAS_MODS
    mod_row mod;
#endif
} decode_row;

/* --- a block of keys -------------------------------------------------------------- */

/* queries[n * RT] = vector n of a row, scaled. Columns that the last vector shares with
   the vector before are 0 in the last vector. */
INLINED void
load_query(realv *queries, __global const storage *query, const ca_view *view, int E, real scale)
{
    PLAIN_FOR (int n = 0; n < VECTORS_OF(E); n++) {
        const int e = COLUMN(n, E);
        realv x;
        if (view->column == 1) {
            x = load_lanes(query + e);
        } else {
            PLAIN_FOR (int k = 0; k < LANES; k++) {
                ((real *)&x)[k] = load(query + (e + k) * view->column);
            }
        }
        const intv own = lane_indices() >= (realv)(real)(n * LANES - e);
        queries[n * RT] = own ? x * scale : (realv)REAL(0.0);
    }
}

/* Defines a function that multiplies each of `present` keys by RT queries, over `vectors` vectors of
   columns. The function adds the products to products[r][k], or stores them there if `first` is true.
   The function reads one key after the other, with few instructions for each. Memory delivers keys
   at full speed only then, not where the products of several keys are interleaved. */
#define DEFINE_ADD_PRODUCTS(name, vectors)                                                         \
    CALLED void name(realv *restrict products, key_rows key, const row_stream *stream,             \
                     int present, const realv *restrict queries, intv own, bool first)             \
    {                                                                                              \
        PLAIN_FOR (int k = 0; k < present; k++) {                                                  \
            realv sums[RT];                                                                        \
            UNROLLED_FOR (int r = 0; r < RT; r++) {                                                \
                sums[r] = first ? (realv)REAL(0.0) : products[r * LANES + k];                      \
            }                                                                                      \
            UNROLLED_FOR (int n = 0; n < (vectors); n++) {                                         \
                realv x = load_row_of_key(key + n * LANES);                                        \
                x = (vectors) == 1 ? as_realv(as_intv(x) & own) : x;                               \
                UNROLLED_FOR (int r = 0; r < RT; r++) {                                            \
                    sums[r] = fma(x, queries[n * RT + r], sums[r]);                                \
                }                                                                                  \
            }                                                                                      \
            UNROLLED_FOR (int r = 0; r < RT; r++) {                                                \
                products[r * LANES + k] = sums[r];                                                 \
            }                                                                                      \
            FETCH_ROW(key, *stream, (vectors) * LANES * (int)sizeof(key_storage))                  \
            key += stream->stride;                                                                 \
        }                                                                                          \
    }

DEFINE_ADD_PRODUCTS(add_products_of_eight, 8)
DEFINE_ADD_PRODUCTS(add_products_of_four, 4)
DEFINE_ADD_PRODUCTS(add_products_of_one, 1)

/* scores[r][k] = the product of row r and key k, for keys first … keys - 1 of a block, filled up to
   whole vectors by 0. `first` is a multiple of LANES. */
CALLED void
score_keys(block_runs *runs, int first, int keys, const realv *queries, realv *scores)
{
    const ca_attention_params *params = runs->call->params;
    const ca_int64 stride = runs->run.key_strides.row;
    const int E = (int)params->E;
    const row_stream whole_stream = find_stream(params, stride, E, sizeof(key_storage));
    const int whole = E / LANES;
    /* What the last vector shares with the vector before is masked by bits: an infinity
       would become a NaN in a product with 0. */
    const intv all = ~(intv)0;
    const intv own = lane_indices() >= (realv)(real)(LANES - E % LANES);
    PLAIN_FOR (int k0 = first; k0 < keys; k0 += LANES) {
        realv products[RT * LANES];
        const int present = min(LANES, keys - k0);
        if (present < LANES) {
            PLAIN_FOR (int n = 0; n < RT * LANES; n++) {
                products[n] = (realv)REAL(0.0);
            }
        }
        int count;
        PLAIN_FOR (int k = 0; k < present; k += count) {
            count = go_to_key(runs, k0 + k, present - k);
            row_stream stream = whole_stream;
            count = look_ahead(&stream, runs, k0 + k, runs->run.key_ahead, count);
            real unpacked[UNPACKED_SIZE];
            key_rows key = find_keys(unpacked, runs, k0 + k, count, &stream);
            realv *of_keys = products + k;
            int n = 0;
            PLAIN_FOR (; n + 8 <= whole; n += 8) {
                add_products_of_eight(of_keys, key + n * LANES, &stream, count, queries + n * RT,
                                      all, n == 0);
            }
            if (n + 4 <= whole) {
                add_products_of_four(of_keys, key + n * LANES, &stream, count, queries + n * RT,
                                     all, n == 0);
                n += 4;
            }
            PLAIN_FOR (; n < VECTORS_OF(E); n++) {
                add_products_of_one(of_keys, key + COLUMN(n, E), &stream, count, queries + n * RT,
                                    n < whole ? all : own, n == 0);
            }
        }
        PLAIN_FOR (int r = 0; r < RT; r++) {
            scores[r * (BN / LANES) + k0 / LANES] = sums_of_lanes(products + r * LANES);
        }
    }
}

/* The numbers of LANES keys, for the user's functions. */
#define KEYS_FROM(j) ((WIDE(int))(int)(j) + WIDE(convert_int)(lane_indices()))

/* Finishes a row's scores of `keys` keys from j0. They are -inf for keys that the row
   does not attend to and behind the last key, and NaN for attended scores of -inf. */
CALLED void
finish_scores(const attention_call *call, const decode_row *row, ca_int64 j0, int keys,
              realv *scores)
{
    const ca_attention_params *params = call->params;
    const int here = (int)clamp(row->last + 1 - j0, (ca_int64)0, (ca_int64)keys);
    realv added[BN / LANES];
    score_bounds bounds = count_from(row->bounds, 0, j0);
    bounds.limit = min(bounds.limit, (ca_int64)keys);
    const bool asks = mask_block_at(call, row->batch, 1, row->mod.q, 1, j0, keys) != CA_BLOCK_FULL;
    if (SCORE_IS_PLAIN(params) && !asks &&
        sees_all(&bounds, 0, 1, 0, (keys + LANES - 1) / LANES * LANES)) {
        return;
    }
    if (HAS_ADDENDS(params)) {
        /* A mask may be short: it does not hold keys behind the band's end. */
        const ca_int64 mask_at =
            USES(params, MASK) ? ca_offset(VIEW(params, MASK), row->batch, row->i, j0) : 0;
        const ca_int64 bias_at =
            USES(params, BIAS) ? ca_offset(VIEW(params, BIAS), row->batch, row->i, j0) : 0;
        load_addends_rows(added, (here + LANES - 1) / LANES, call, &mask_at, &bias_at, 1, here);
    }
    realv key = lane_indices();
    PLAIN_FOR (int k = 0; k < keys; k += LANES) {
        const realv addend = HAS_ADDENDS(params) ? added[k / LANES] : (realv)REAL(0.0);
        realv bounded = bound_addend(&bounds, key, key, addend);
        if (asks) {
            bounded = EXCLUDE(call, &row->mod, KEYS_FROM(j0 + k), bounded);
        }
        realv score = MODIFY_SCORE(call, &row->mod, KEYS_FROM(j0 + k), scores[k / LANES], &bounded);
        score = finish_score(params, score, bounded);
        scores[k / LANES] = distinct_score(score, bounded);
        key += (realv)(real)LANES;
    }
}

/* Defines a function that adds the weighted values of `keys` keys to the sums of
   `columns` vectors of RT rows. A vector begins at column `last` at the latest. */
#define DEFINE_ADD_PASS(name, columns)                                                             \
    CALLED void name(realv *sums, const real *weights, value_rows value, const row_stream *stream, \
                     int keys, ca_int64 last)                                                      \
    {                                                                                              \
        realv pass[RT * (columns)];                                                                \
        UNROLLED_FOR (int n = 0; n < RT * (columns); n++) {                                        \
            pass[n] = sums[n];                                                                     \
        }                                                                                          \
        PLAIN_FOR (int j = 0; j < keys; j++) {                                                     \
            UNROLLED_FOR (int n = 0; n < (columns); n++) {                                         \
                const realv x = load_row_of_value(value + min((ca_int64)(n * LANES), last));       \
                UNROLLED_FOR (int r = 0; r < RT; r++) {                                            \
                    pass[r * (columns) + n] =                                                      \
                        fma((realv)weights[r * BN], x, pass[r * (columns) + n]);                   \
                }                                                                                  \
            }                                                                                      \
            weights++;                                                                             \
            FETCH_ROW(value, *stream, (columns) * LANES * (int)sizeof(value_storage))              \
            value += stream->stride;                                                               \
        }                                                                                          \
        UNROLLED_FOR (int n = 0; n < RT * (columns); n++) {                                        \
            sums[n] = pass[n];                                                                     \
        }                                                                                          \
    }

DEFINE_ADD_PASS(add_pass, PASS)
DEFINE_ADD_PASS(add_short_pass, SHORT_PASS)

/* Returns the index of vector n of row r in the result of RT rows. */
INLINED int
slot_of(int r, int n, int Ev)
{
    const int whole = SLOTS_OF_ROW(Ev) / PASS * PASS;
    return n < whole ? n / PASS * (RT * PASS) + r * PASS + n % PASS
                     : whole * RT + r * SHORT_PASS + n - whole;
}

/* result[r] *= decay[r] */
CALLED void
scale_result(realv *result, const realv *decay, int Ev)
{
    PLAIN_FOR (int r = 0; r < RT; r++) {
        PLAIN_FOR (int n = 0; n < SLOTS_OF_ROW(Ev); n++) {
            result[slot_of(r, n, Ev)] *= decay[r];
        }
    }
}

/* result[r] += sum_j weights[r][j] * value[j], for keys first … end - 1 of a block */
INLINED void
add_values(block_runs *runs, realv *result, const realv *weights, int first, int end)
{
    const ca_attention_params *params = runs->call->params;
    const int Ev = (int)params->Ev;
    const ca_int64 stride = runs->run.value_strides.row;
    const row_stream whole_stream = find_stream(params, stride, Ev, sizeof(value_storage));
    const int slots = SLOTS_OF_ROW(Ev);
    int keys;
    PLAIN_FOR (int k = first; k < end; k += keys) {
        keys = go_to_key(runs, k, HAS_INT4 ? min(LANES, end - k) : end - k);
        row_stream stream = whole_stream;
        keys = look_ahead(&stream, runs, k, runs->run.value_ahead, keys);
        const real *weight = (const real *)weights + k;
        real unpacked[UNPACKED_SIZE];
        value_rows from = find_values(unpacked, runs, k, keys, &stream);
        int n = 0;
        PLAIN_FOR (; n + PASS <= slots; n += PASS) {
            add_pass(result + n * RT, weight, from + n * LANES, &stream, keys,
                     Ev - LANES - n * LANES);
        }
        if (n < slots) {
            add_short_pass(result + n * RT, weight, from + n * LANES, &stream, keys,
                           Ev - LANES - n * LANES);
        }
    }
}

/* --- ends of rows ----------------------------------------------------------------- */

/* Divides `result`, the sum of weights times values, by `sum`, the sum of weights, and
   writes it as row i. A row is empty where masks and bounds exclude all its keys. Only
   excluded keys leave `highest` at -inf and `sum` at 0, because distinct_score has made
   NaN of an attended score of -inf. */
SMALL void
finish_row(const attention_call *call, const ca_int64 *batch, ca_int64 i, const realv *result,
           real highest, real sum)
{
    const ca_attention_params *params = call->params;
    const int Ev = (int)params->Ev;
    const ca_int64 column = params->output.column;
    const bool attends = highest != -INFINITY || sum != REAL(0.0);
    const real factor = factor_of_row(call, batch, base_of(highest), sum, attends);
    __global storage *row = call->output + ca_offset(&params->output, batch, i, 0);
    realv nonzero = (realv)REAL(0.0);
    PLAIN_FOR (int n = 0; n < VECTORS_OF(Ev); n++) {
        const realv x = attends ? result[n] * factor : (realv)REAL(0.0);
        nonzero += x * REAL(0.0);
        if (column == 1) {
            store_lanes(x, row + COLUMN(n, Ev));
            continue;
        }
        PLAIN_FOR (int k = 0; k < LANES; k++) {
            store(((const real *)&x)[k], row + (COLUMN(n, Ev) + k) * column);
        }
    }
    write_lse(call, batch, i, base_of(highest), sum, attends);
    if (any_lane(nonzero != (realv)REAL(0.0))) {
        ask_to_redo(call);
    }
}

#define PARTIAL_SIZE(Ev) ((int)(Ev) + 2) /* Ev sums, the highest score, the sum of weights */

OUTER void
store_partial(__global real *partial, const realv *result, real highest, real sum, int Ev)
{
    PLAIN_FOR (int n = 0; n < VECTORS_OF(Ev); n++) {
        *(__global unaligned_realv *)(partial + COLUMN(n, Ev)) = result[n];
    }
    partial[Ev] = highest;
    partial[Ev + 1] = sum;
}

/* Replaces a row's scores by weights, exp(score - the highest score so far), and updates
   the row's sum. Returns the factor for the row's result so far. */
CALLED realv
weigh_row(const ca_attention_params *params, decode_row *row, realv *scores, int keys)
{
    realv highest = (realv)(-INFINITY);
    realv sum = (realv)REAL(0.0);
    PLAIN_FOR (int k = 0; k < keys; k += LANES) {
        highest = larger(scores[k / LANES], highest);
    }
    const real old = row->highest;
    highest = highest_lane(highest);
    row->highest = max(old, FIRST_LANE(highest));
    const real base = base_of(row->highest);
    PLAIN_FOR (int k = 0; k < keys; k += LANES) {
        const realv weight = weight_of(params, scores[k / LANES] - base);
        scores[k / LANES] = weight;
        sum += weight;
    }
    const realv decay = weight_of(params, (realv)(old - base));
    row->sum = row->sum * decay + sum;
    return decay;
}

#if HAS_MASK_MOD
/* True if the blocks of a mask say that none of RT rows attends to a key from j0 on. */
SMALL bool
skips_block(const attention_call *call, ca_int64 j0, int keys, const decode_row *rows)
{
    bool empty = true;
    PLAIN_FOR (int r = 0; r < RT && empty; r++) {
        empty = mask_block_at(call, rows[r].batch, 1, rows[r].mod.q, 1, j0, keys) == CA_BLOCK_EMPTY;
    }
    return empty;
}
#else
#define skips_block(call, j0, keys, rows) false
#endif

/* The tiles of a work-item, of RT rows each. */
typedef struct {
    int count;
    decode_row *rows;
    realv *queries; /* [count][vectors of E][RT] */
    realv *result;  /* [count][RT][slots of Ev] */
} decode_tiles;

/* Returns how many keys a tile reads before the tile of another head takes its turn: a page of them where each head's
   keys lie together in a page, else LANES. */
INLINED int
keys_of_turn(const attention_call *call)
{
    const ca_attention_params *params = call->params;
    if (params->key_heads == 1) {
        return BN;
    }
    if (IS_RAGGED(params) && params->key.row <= params->E) {
        const int page = (int)sequences_header(call)[CA_HEADER_PAGE_SIZE];
        return min(BN, (page + LANES - 1) / LANES * LANES);
    }
    return LANES;
}

/* All tiles attend to keys j0 … j0 + keys - 1. `run` begins at key j0 of the first key head. Memory is
   read at full speed only in its order. So where heads lie side by side, the tiles take turns after
   a few keys, and where columns need several passes, a pass takes a few values. */
OUTER void
attend_block(const attention_call *call, const decode_tiles *tiles, const key_run *run, ca_int64 j0,
             int keys)
{
    const ca_attention_params *params = call->params;
    const int vectors = VECTORS_OF(params->E);
    const int slots = SLOTS_OF_ROW(params->Ev);
    const int keys_at_once = keys_of_turn(call);
    const int values_at_once =
        slots > PASS || keys_at_once == LANES ? VALUES_AT_ONCE : keys_at_once;
    realv scores[TILES * RT * (BN / LANES)]; /* then weights */
    block_runs runs[TILES];
    int attending = 0; /* tiles that attend to a key of the block */
    int numbers[TILES];
    PLAIN_FOR (int t = 0; t < tiles->count; t++) {
        if (!skips_block(call, j0, keys, tiles->rows + t * RT)) {
            block_runs *of_tile = &runs[attending];
            of_tile->call = call;
            of_tile->batch = tiles->rows[t * RT].batch;
            of_tile->j0 = j0;
            of_tile->first = 0;
            of_tile->run = *run;
            if (params->key_heads > 1) {
                find_key_run(&of_tile->run, call, of_tile->batch, j0);
            }
            numbers[attending++] = t;
        }
    }
    PLAIN_FOR (int k = 0; k < keys; k += keys_at_once) {
        PLAIN_FOR (int n = 0; n < attending; n++) {
            score_keys(&runs[n], k, min(keys, k + keys_at_once),
                       tiles->queries + numbers[n] * RT * vectors, scores + n * RT * (BN / LANES));
        }
    }
    PLAIN_FOR (int n = 0; n < attending; n++) {
        realv decay[RT];
        realv *of_tile = scores + n * RT * (BN / LANES);
        if (!HAS_INT4 && SCALES(params, KEY_SCALE)) {
            scale_block(&runs[n], keys, false, of_tile);
        }
        for (int r = 0; r < RT; r++) {
            realv *of_row = scores + (n * RT + r) * (BN / LANES);
            decode_row *row = tiles->rows + numbers[n] * RT + r;
            finish_scores(call, row, j0, keys, of_row);
            decay[r] = weigh_row(params, row, of_row, keys);
        }
        if (!HAS_INT4 && SCALES(params, VALUE_SCALE)) {
            scale_block(&runs[n], keys, true, of_tile);
        }
        scale_result(tiles->result + numbers[n] * RT * slots, decay, (int)params->Ev);
    }
    PLAIN_FOR (int j = 0; j < keys; j += values_at_once) {
        PLAIN_FOR (int n = 0; n < attending; n++) {
            add_values(&runs[n], tiles->result + numbers[n] * RT * slots,
                       scores + n * RT * (BN / LANES), j, min(keys, j + values_at_once));
        }
    }
}

/* Finds which keys row r of a share may see, and loads the row's query into `queries`. If r is past
   the share's last row, the function takes the last row again. */
SMALL void
start_row(decode_row *row, realv *queries, const attention_call *call, const split_share *share,
          int r)
{
    const ca_attention_params *params = call->params;
    row->i = row_of_share(params, share, r, row->batch);
    const batch_sequence sequence = sequence_of(call, row->batch);
    row->bounds = count_from(bounds_of(&sequence), row->i, 0);
    row->first = max((ca_int64)0, row->i + sequence.lower);
    row->last = min(sequence.limit - 1, row->i + sequence.upper);
    row->highest = -INFINITY;
    row->sum = (realv)REAL(0.0);
#if HAS_MODS
    row->mod = mod_row_at(call, &sequence, row->batch, row->i);
#endif
    load_query(queries, call->query + ca_offset(&params->query, row->batch, row->i, 0),
               &params->query, (int)params->E, score_scale(params));
}

/* Writes row r of a tile of RT rows: its result or, if keys are split, its partial sums. `result` holds
   the sums of the tile's rows. */
SMALL void
end_row(const attention_call *call, const decode_row *row, const realv *result, int r,
        const split_share *share)
{
    const ca_attention_params *params = call->params;
    const int Ev = (int)params->Ev;
    const real sum = sum_of_lanes(row->sum);
    realv of_row[VECTORS_OF(CA_CPU_HEAD_SIZE)];
    PLAIN_FOR (int n = 0; n < VECTORS_OF(Ev); n++) {
        of_row[n] = result[slot_of(r, n, Ev)];
    }
    if (splits_of_share(params, share) > 1) {
        store_partial(partial_row(call, row->batch, row->i, share->split, PARTIAL_SIZE(Ev)), of_row,
                      row->highest, sum, Ev);
    } else {
        finish_row(call, row->batch, row->i, of_row, row->highest, sum);
    }
}

/* Merges the partial sums of one row, and writes the row. `index` counts the rows of all batches. */
OUTER void
merge_row(const attention_call *call, ca_int64 index)
{
    const ca_attention_params *params = call->params;
    const int Ev = (int)params->Ev;
    ca_int64 batch[CA_BATCH_DIMS];
    const ca_int64 i = merged_row(call, index, batch);
    const ca_int64 splits = splits_of(call, batch);

    real highest = -INFINITY;
    PLAIN_FOR (ca_int64 split = 0; split < splits; split++) {
        highest = max(highest, partial_row(call, batch, i, split, PARTIAL_SIZE(Ev))[Ev]);
    }
    const real base = base_of(highest);
    realv result[VECTORS_OF(CA_CPU_HEAD_SIZE)] = {(realv)REAL(0.0)};
    real sum = REAL(0.0);
    PLAIN_FOR (ca_int64 split = 0; split < splits; split++) {
        __global const real *row = partial_row(call, batch, i, split, PARTIAL_SIZE(Ev));
        const realv factor = weight_of(params, (realv)(row[Ev] - base));
        sum += row[Ev + 1] * FIRST_LANE(factor);
        PLAIN_FOR (int n = 0; n < VECTORS_OF(Ev); n++) {
            const realv part = *(__global const unaligned_realv *)(row + COLUMN(n, Ev));
            result[n] = fma(part, factor, result[n]);
        }
    }
    finish_row(call, batch, i, result, highest, sum);
}

/* Attends to the keys of a work-item's share. */
OUTER void
attend_share(const attention_call *call, ca_int64 item)
{
    const ca_attention_params *params = call->params;
    const int heads = (int)params->key_heads;
    split_share mine;
    find_share(&mine, call, item, 0, ROWS);
    const int tiles_of_head = (mine.count + RT - 1) / RT;
    const int rows_of_head = tiles_of_head * RT;
    const int tiles = heads * tiles_of_head;
    const int E_vectors = VECTORS_OF(params->E);
    const int Ev_slots = SLOTS_OF_ROW(params->Ev);
    decode_row rows[ROWS];
    realv queries[ROWS * VECTORS_OF(CA_CPU_HEAD_SIZE)];
    realv result[ROWS * SLOTS_OF_ROW(CA_CPU_HEAD_SIZE)];
    ca_int64 first = params->T;
    ca_int64 last = -1;
    PLAIN_FOR (int r = 0; r < tiles * RT; r++) {
        if (r > 0 && r % rows_of_head == 0) {
            find_share(&mine, call, item, r / rows_of_head, ROWS);
        }
        start_row(&rows[r], queries + r / RT * RT * E_vectors + r % RT, call, &mine,
                  r % rows_of_head);
        first = min(first, rows[r].first);
        last = max(last, rows[r].last);
    }
    PLAIN_FOR (int n = 0; n < tiles * RT * Ev_slots; n++) {
        result[n] = (realv)REAL(0.0);
    }
    const key_range keys = part_of_keys(first, last, mine.split, splits_of_share(params, &mine));
    const decode_tiles all = {tiles, rows, queries, result};
    int count; /* of the keys of a block */
    PLAIN_FOR (ca_int64 j0 = keys.start; j0 < keys.end && !is_stopped(call); j0 += count) {
        key_run run;
        find_key_run(&run, call, mine.batch, j0);
        count = (int)min((ca_int64)params->block_keys, keys.end - j0);
        if (USES(params, PAST_KEY)) { /* past keys and new ones have strides of their own */
            count = (int)min((ca_int64)count, run.count);
        }
        attend_block(call, &all, &run, j0, count);
    }

    PLAIN_FOR (int r = 0; r < tiles * RT; r++) {
        if (r % rows_of_head < mine.count) {
            end_row(call, &rows[r], result + r / RT * RT * Ev_slots, r % RT, &mine);
        }
    }
}

/* The kernel is short, because some compilers take longer for a kernel's own text. */
__kernel __attribute__((reqd_work_group_size(1, 1, 1), vec_type_hint(realv))) void
attention_decode_cpu(ATTENTION_ARGUMENTS)
{
    DEFINE_CALL(call);
    if (params.flags & CA_MERGES) {
        merge_row(&call, group_of(&params));
    } else {
        attend_share(&call, share_of_group(&params));
    }
}
