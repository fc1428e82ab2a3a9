/* SPDX-License-Identifier: MIT
 *
 * What a mask that the user writes does to each block of rows and keys, CA_BLOCK_EMPTY,
 * CA_BLOCK_PARTIAL or CA_BLOCK_FULL. The mask itself is never in memory.
 *
 *     global size  batches * blocks of rows * blocks of keys, or more
 *     work-item    one block: CA_NUMBER_OF_BLOCK_ROWS rows, CA_NUMBER_OF_BLOCK_KEYS keys
 *     output       [batch][blocks of rows][blocks of keys], bytes
 *
 * The mask has params.L rows and params.T keys, and the last two leading dimensions are its
 * batches and heads.
 *
 *     -DLANES  on CPUs: rows in a vector, see support/lanes.clh
 *     and the macros of support/common.clh, with HAS_MASK_MOD
 */
#ifdef LANES
#define SCORE_LANES LANES_ARE_ROWS
#define ROWS        LANES
#define NUMBERS     WIDE(convert_int)(lane_indices())
#define ANY(x)      any_lane(x)
#else
#define ROWS    1
#define NUMBERS 0
#define ANY(x)  ((x) != 0)
#endif
#define KEYS 4                         /* that a turn of the loop asks for */
#include "kernels/attention/score.clh" /* mod_mask, mod_row */

/* Sets what the mask needs of ROWS rows from `first` on; after row `last` it repeats. */
INLINED void
start_rows(mod_row *rows, const attention_call *call, const ca_int64 *batch, int first, int last)
{
    rows->b = (int)batch[CA_BATCH_DIMS - 2];
    rows->h = (OP(int, R))(int)batch[CA_BATCH_DIMS - 1];
    rows->q = min((OP(int, R))first + NUMBERS, (OP(int, R))last);
    start_mod_row(rows, call);
}

/* Looks at mask block `item`. */
SMALL void
look_at_block(const attention_call *call, ca_int64 item)
{
    const ca_attention_params *params = call->params;
    const int block_rows = (int)call->numbers[CA_NUMBER_OF_BLOCK_ROWS];
    const int block_keys = (int)call->numbers[CA_NUMBER_OF_BLOCK_KEYS];
    const ca_int64 across = (params->T + block_keys - 1) / block_keys;
    const ca_int64 down = (params->L + block_rows - 1) / block_rows;
    const ca_int64 row_of_blocks = ca_divide(item, across);
    const ca_int64 linear = ca_divide(row_of_blocks, down);
    if (linear >= params->batch[0] * params->batch[1] * params->batch[2]) {
        return;
    }
    ca_int64 batch[CA_BATCH_DIMS];
    ca_unravel(linear, params->batch, batch);
    const int row = (int)(row_of_blocks - linear * down) * block_rows;
    const int first_key = (int)(item - row_of_blocks * across) * block_keys;
    const int last_row = min(row + block_rows, (int)params->L);
    const int last_key = min(first_key + block_keys, (int)params->T);

    bool attends = false;
    bool excludes = false;
    for (int i = row; i < last_row && !(attends && excludes); i += ROWS) {
        mod_row rows;
        OP(bool, S) some = (OP(bool, S))0;
        OP(bool, S) all = ~some;
        start_rows(&rows, call, batch, i, last_row - 1);
        PLAIN_FOR (int j = first_key; j < last_key; j += KEYS) {
            UNROLLED_FOR (int n = 0; n < KEYS; n++) { /* the last key repeats */
                const OP(bool, S) allowed = mod_mask(call, &rows, min(j + n, last_key - 1));
                some |= allowed;
                all &= allowed;
            }
        }
        attends = attends || ANY(some);
        excludes = excludes || ANY(~all);
    }
    ((__global uchar *)call->output)[item] = !attends   ? CA_BLOCK_EMPTY
                                             : excludes ? CA_BLOCK_PARTIAL
                                                        : CA_BLOCK_FULL;
}

__kernel __attribute__((vec_type_hint(float4))) void
attention_blocks(ATTENTION_ARGUMENTS)
{
    DEFINE_CALL(call);
    look_at_block(&call, item_of(&params));
}
