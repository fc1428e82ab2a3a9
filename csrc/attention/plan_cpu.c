/* SPDX-License-Identifier: MIT
 *
 * The variants cpu and pairs, for many rows on CPUs: attention/cpu.cl, with queries in
 * vector lanes.
 */
#include "attention/options.h"
#include "attention/variants.h"

/* With at most this many vectors of rows, a tile has one. */
#define FEW_TILES 8

/* How many rows the tiles have that cover L rows, `rows` each. */
static int64_t
covered(int64_t L, int64_t rows)
{
    return ca_divide_up(L, rows) * rows;
}

/* Returns how many vectors of rows a work-item owns. Two vectors share each load of a
   key, and halve the packing. One vector leaves less of the last tile empty, which
   matters where rows are few; with 16 registers it has too few sums at a time. Four
   vectors share the conversion of half types, and loads of keys from memory. Four do not
   pay if many rows would be padding, if cores would be idle, or with a window, since a
   window excludes more keys of a smaller tile. */
static int64_t
vectors_of_rows(const ca_device_info *info, const ca_attention *attention, bool direct, bool pairs,
                const ca_attention_plan *plan)
{
    int64_t lanes = ca_plan_lanes(info, attention);
    int64_t L = attention->L;
    int64_t two = covered(L, 2 * lanes);
    bool emptier = !pairs && two - covered(L, lanes) > L / 8;
    bool narrow = info->float_width >= 16 && (direct || emptier);
    if (L <= lanes || (L <= FEW_TILES * lanes && narrow)) {
        return 1;
    }
    double items = ca_plan_items(plan) * (double)ca_divide_up(L, 4 * lanes);
    bool four = lanes == 16 && attention->below == CA_BAND_UNBOUNDED &&
                covered(L, 4 * lanes) - two <= L / 16 &&
                (ca_dtype_size(attention->operands[CA_ATTENTION_VALUE].dtype) == 2 ||
                 ca_attention_keys_are_far(attention)) &&
                attention->E <= 128 && attention->Ev <= 128 &&
                items >= (double)(info->compute_units * CA_ITEMS_FOR_EACH_CORE);
    return four ? 4 : 2;
}

/* Returns the number of heads that one work-item computes. Heads that share a mask and a bias load
   both once. The number is 1 if the call has neither, or if more heads would leave cores idle. */
static int64_t
heads_of_item(const ca_device_info *info, const ca_attention *attention, int64_t rows,
              const ca_attention_plan *plan)
{
    bool added = ca_attention_has(attention, CA_ATTENTION_MASK) ||
                 ca_attention_has(attention, CA_ATTENTION_BIAS);
    const ca_operand *operands = attention->operands;
    const int last = CA_BATCH_DIMS - 1;
    if (!added || ca_attention_has(attention, CA_ATTENTION_PRESENT_KEY) ||
        operands[CA_ATTENTION_MASK].batch[last] != 0 ||
        operands[CA_ATTENTION_BIAS].batch[last] != 0 ||
        operands[CA_ATTENTION_KEY_COUNTS].batch[last] != 0) {
        return 1;
    }
    double items = ca_plan_items(plan);
    double fewest = (double)(info->compute_units * CA_ITEMS_FOR_EACH_CORE);
    int64_t columns = attention->E + attention->Ev;
    int64_t head_bytes = columns * rows * ca_plan_real_bytes(attention);
    int64_t heads = ca_smaller(CA_CPU_HEADS, CA_CPU_HEADS_BYTES / head_bytes);
    while (heads > 1 && (attention->batch[last] % heads != 0 || items < fewest * (double)heads)) {
        heads--;
    }
    return heads > 1 ? heads : 1;
}

/* The plan of both variants. The terms of the products are reals, or pairs of bfloat16.
   Pairs can be read in place where a row has an even size. */
static void
plan_tiles(const ca_device_info *info, const ca_attention *attention, bool pairs,
           ca_attention_plan *plan)
{
    const ca_operand *operands = attention->operands;
    const ca_operand *query = &operands[CA_ATTENTION_QUERY];
    const ca_operand *value = &operands[CA_ATTENTION_VALUE];
    ca_dtype real = ca_attention_in_float64(attention) ? CA_FLOAT64 : CA_FLOAT32;
    bool biased = ca_attention_has(attention, CA_ATTENTION_INPUT_BIAS);
    bool are_terms = pairs ? attention->E % 2 == 0 : query->dtype == real;
    bool key_direct = are_terms && !biased && ca_operand_rows_adjoin(&operands[CA_ATTENTION_KEY]) &&
                      ca_operand_rows_adjoin(&operands[CA_ATTENTION_PAST_KEY]);
    bool value_direct = value->dtype == real && !biased && ca_operand_rows_contiguous(value) &&
                        ca_operand_rows_contiguous(&operands[CA_ATTENTION_PAST_VALUE]);

    ca_plan_begin(plan, attention, "attention_cpu", 1);
    int64_t vectors = vectors_of_rows(info, attention, key_direct && value_direct, pairs, plan);
    plan->grid[3] = ca_divide_up(attention->L, vectors * ca_plan_lanes(info, attention));
    int64_t heads = heads_of_item(info, attention, vectors * ca_plan_lanes(info, attention), plan);
    plan->grid[2] /= heads;
    plan->heads = heads;
    ca_plan_define_lanes(&plan->spec, info, attention);
    ca_kernel_define(&plan->spec, "NV", vectors);
    ca_kernel_define(&plan->spec, "BFLOAT16_PAIRS", pairs);
    ca_kernel_define(&plan->spec, "ONE_ADDRESS_SPACE", info->type == CA_DEVICE_CPU);
    /* Usual calls have a program that is half as long, but float64 has one for all. */
    if (ca_attention_options(attention) == 0 && !ca_attention_in_float64(attention)) {
        ca_kernel_define(&plan->spec, "OPTIONS", 0);
    }
}

static void
plan_cpu(const ca_device_info *info, const ca_attention *attention, ca_attention_plan *plan)
{
    plan_tiles(info, attention, false, plan);
}

const ca_variant ca_variant_cpu = {
    .word = "cpu",
    .max_head = CA_CPU_HEAD_SIZE,
    .max_value_head = CA_CPU_HEAD_SIZE,
    .refuses = CA_NO_LATE_SOFTCAP,
    .fast = CA_FAST_ON_CPUS,
    .make_plan = plan_cpu,
};

/* ---- attention/cpu.cl with pairs of bfloat16 ---- */

static bool
pairs_can_run(const ca_device_info *info, const ca_attention *attention)
{
    (void)attention;
    return info->bfloat16_pairs;
}

static void
plan_pairs(const ca_device_info *info, const ca_attention *attention, ca_attention_plan *plan)
{
    plan_tiles(info, attention, true, plan);
}

/* An input bias is refused: its sum with an element would have to be rounded. */
const ca_variant ca_variant_pairs = {
    .word = "pairs",
    .dtypes = CA_BFLOAT16_ONLY,
    .max_head = CA_CPU_HEAD_SIZE,
    .max_value_head = CA_CPU_HEAD_SIZE,
    .refuses = CA_NO_INPUT_BIAS | CA_NO_LATE_SOFTCAP,
    .can_run = pairs_can_run,
    .of_device = "that multiply pairs of bfloat16",
    .fast = CA_FAST_ON_CPUS,
    .make_plan = plan_pairs,
};
