/* SPDX-License-Identifier: MIT
 *
 * What attention_cpu.cl does only where it is asked for: dropping weights, writing the
 * scores. A part of that file, of which it uses the tile, the segments and score_keys.
 */
#ifndef CLATTN_ATTENTION_CPU_EXTRAS_CL
#define CLATTN_ATTENTION_CPU_EXTRAS_CL

#if DROPOUT
DEFINE_PHILOX(philox_lanes, uintv)

/* Weights of a block of keys from j0; their sums have been taken before. */
static inline void
drop_weights(const tile_state *tile, ca_int64 j0, int keys, termv *weights)
{
    const ca_attention_params *params = tile->call->params;
    ca_int64 row = 0;
    for (int n = 0; n < CA_BATCH_DIMS; n++) {
        row = row * params->batch[n] + tile->batch[n];
    }
    row = row * params->L + tile->i0 + params->first_row;
    ulong lanes[BM];
    for (int n = 0; n < BM; n++) {
        lanes[n] = (ulong)(row + n);
    }
    for (ca_int64 quad = j0 >> 2; quad <= (j0 + keys - 1) >> 2; quad++) {
        for (int v = 0; v < NV; v++) {
            const ulongv rows = WIDE(vload)(v, lanes);
            uintv words[4] = {(uintv)(uint)quad, (uintv)(uint)((ulong)quad >> 32),
                              convert_uintv(rows), convert_uintv(rows >> 32)};
            philox_lanes(words, params->seed);
            for (int n = 0; n < 4; n++) {
                const ca_int64 k = quad * 4 + n - j0;
                if (k >= 0 && k < keys) {
                    const intv kept = convert_intv(words[n] > params->last_dropped);
#if BFLOAT16_PAIRS
                    const intv other = k % 2 == 0 ? (intv)~0xffff : (intv)0xffff;
                    weights[k / 2 * NV + v] &= as_uintv(kept | other);
#else
                    weights[k * NV + v] = as_realv(as_intv(weights[k * NV + v]) & kept);
#endif
                }
            }
        }
    }
}
#endif

#if SCORES >= 0
/* scores[lane][j0 + j] = block[j][lane] */
static inline void
store_scores(const tile_state *tile, ca_int64 j0, int keys, const realv *block)
{
    const attention_call *call = tile->call;
    const ca_view *view = &call->params->scores;
    store_columns(block, keys,
                  call->scores + ca_offset(view, tile->batch, tile->i0, j0), view,
                  tile->rows);
}

static inline void
fill_scores(realv *scores, real value)
{
    for (int n = 0; n < MR * NV; n++) {
        scores[n] = (realv)value;
    }
}
#endif

#if KEEPS_SCORES
/* The chunks of a block after the `attended` keys: excluded in the last stage, scored
   like others in those before the mask. */
static inline void
keep_unattended(const tile_state *tile, const key_segment *segment,
                const termv *queries, ca_int64 j0, int attended, int keys, realv *kept)
{
    for (int k0 = (attended + MR - 1) / MR * MR; k0 < keys; k0 += MR) {
#if SCORES == 2
        fill_scores(kept + k0 * NV, -INFINITY);
#else
        realv scores[MR * NV];
        score_keys(tile, segment, queries, scores, j0 + k0, false, kept + k0 * NV,
                   scores);
#endif
    }
}
#endif

#if SCORES == 3
/* All weights of the tile. Scores are computed again, by the same text, since weights
   need the sums first; `block` has room for BN keys. */
static inline void
write_weights(const tile_state *tile, const termv *queries,
              const softmax_state *softmax, realv *block)
{
    for (int s = 0; s < SEGMENTS; s++) {
        const key_segment segment = segment_at(tile->call, tile->batch, s);
        for (ca_int64 j0 = segment.start; j0 < segment.end; j0 += BN) {
            const int keys = (int)min((ca_int64)BN, segment.end - j0);
#if HAS_ADDENDS
            const int attended =
                (int)clamp(tile->last + 1 - j0, (ca_int64)0, (ca_int64)keys);
            load_added(block, tile->call, tile->batch, tile->i0, j0, tile->rows,
                       attended);
#endif
            for (int k0 = 0; k0 < keys; k0 += MR) {
                const ca_int64 j = j0 + k0;
                realv chunk[MR * NV];
                if (j > tile->last || j + MR <= tile->first) {
                    fill_scores(chunk, -INFINITY);
                } else {
                    score_keys(tile, &segment, queries, block + k0 * NV, j, true, 0,
                               chunk);
                }
                for (int n = 0; n < MR * NV; n++) {
                    const int v = n % NV;
                    block[k0 * NV + n] =
                        exp2_lanes(TO_LOG2(chunk[n] - softmax->base[v])) /
                        softmax->sum[v];
                }
            }
            store_scores(tile, j0, keys, block);
        }
    }
}
#endif

#endif
