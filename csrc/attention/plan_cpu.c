/* SPDX-License-Identifier: MIT
 *
 * The variants for many rows on CPUs, both of attention/cpu.cl: queries in vector lanes.
 */
#include "attention/params.h" /* ca_attention_keys_are_far */
#include "attention/variants.h"

/* Up to so many vectors of rows a tile has one of them. */
#define FEW_TILES 8

/* Bytes of queries and results of the heads of a work-item: more would leave the
   cache, and outgrow the private memory too. */
#define BYTES_OF_HEADS (128 << 10)

bool
ca_attention_cpu_can_run(const ca_device_info *info, const ca_attention *attention)
{
    (void)info;
    int64_t E = ca_attention_head_size(attention);
    int64_t Ev = ca_attention_value_head_size(attention);
    return E >= 1 && E <= CA_CPU_MAX_HEAD && Ev >= 1 && Ev <= CA_CPU_MAX_HEAD &&
           !ca_attention_caps_last(attention);
}

static bool
cpu_is_fast(const ca_device_info *info, const ca_attention *attention,
            const ca_leading_dims *dims)
{
    (void)dims;
    (void)attention;
    return info->type == CA_DEVICE_CPU;
}

/* Rows of the tiles of so many vectors that cover L rows. */
static int64_t
covered(int64_t L, int64_t rows)
{
    return ca_divide_up(L, rows) * rows;
}

/* Vectors of rows that a work-item owns. Two share a load of a key, and half as often
   what has to be packed; one leaves less of the last tile empty, which matters to few
   rows, but with 16 registers it has too few sums at a time. Four share the conversion
   of half types and keys that come from memory; but not where many rows would be
   padding or cores idle, nor with a window, which excludes more keys of a smaller tile.
 */
static int64_t
vectors_of_rows(const ca_device_info *info, const ca_attention *attention, bool direct,
                bool pairs, const ca_attention_plan *plan)
{
    int64_t lanes = ca_attention_lanes(info, attention);
    int64_t L = ca_attention_rows(attention);
    int64_t two = covered(L, 2 * lanes);
    bool emptier = !pairs && two - covered(L, lanes) > L / 8;
    bool narrow = info->float_width >= 16 && (direct || emptier);
    if (L <= lanes || (L <= FEW_TILES * lanes && narrow)) {
        return 1;
    }
    double items = ca_attention_items(plan) * (double)ca_divide_up(L, 4 * lanes);
    bool four = lanes == 16 && attention->below == CA_BAND_UNBOUNDED &&
                covered(L, 4 * lanes) - two <= L / 16 &&
                (ca_dtype_size(attention->tensors[CA_ATTENTION_VALUE].dtype) == 2 ||
                 ca_attention_keys_are_far(attention)) &&
                ca_attention_head_size(attention) <= 128 &&
                ca_attention_value_head_size(attention) <= 128 &&
                items >= (double)(info->compute_units * CA_ITEMS_FOR_EACH_CORE);
    return four ? 4 : 2;
}

/* Heads of a work-item: where they share mask and bias, these are loaded once for all.
   Not where nothing of the kind is loaded, or where cores would be idle. */
static int64_t
heads_of_item(const ca_device_info *info, const ca_attention *attention,
              const ca_leading_dims *dims, int64_t rows, const ca_attention_plan *plan)
{
    bool added = ca_attention_has(attention, CA_ATTENTION_MASK) ||
                 ca_attention_has(attention, CA_ATTENTION_BIAS);
    int last = dims->count - 1;
    if (!added || last < 0 || ca_attention_has(attention, CA_ATTENTION_PRESENT_KEY) ||
        dims->stride[last][CA_ATTENTION_MASK] != 0 ||
        dims->stride[last][CA_ATTENTION_BIAS] != 0 ||
        dims->stride[last][CA_ATTENTION_KEY_COUNTS] != 0) {
        return 1;
    }
    double items = ca_attention_items(plan);
    double fewest = (double)(info->compute_units * CA_ITEMS_FOR_EACH_CORE);
    int64_t real = ca_attention_in_float64(attention) ? 8 : 4;
    int64_t columns =
        ca_attention_head_size(attention) + ca_attention_value_head_size(attention);
    int64_t heads = BYTES_OF_HEADS / (columns * rows * real);
    while (heads > 1 &&
           (dims->size[last] % heads != 0 || items < fewest * (double)heads)) {
        heads--;
    }
    return heads > 1 ? heads : 1;
}

/* The two variants of attention/cpu.cl: terms of its products are reals, or pairs of
   bfloat16, which are whole where a row has an even size. */
static void
plan_tiles(const ca_device_info *info, const ca_attention *attention,
           const ca_leading_dims *dims, bool pairs, ca_attention_plan *plan)
{
    const ca_tensor *tensors = attention->tensors;
    const ca_tensor *query = &tensors[CA_ATTENTION_QUERY];
    const ca_tensor *value = &tensors[CA_ATTENTION_VALUE];
    ca_dtype real = ca_attention_in_float64(attention) ? CA_FLOAT64 : CA_FLOAT32;
    bool biased = ca_attention_has(attention, CA_ATTENTION_INPUT_BIAS);
    bool are_terms =
        pairs ? ca_attention_head_size(attention) % 2 == 0 : query->dtype == real;
    bool key_direct = are_terms && !biased &&
                      ca_attention_rows_adjoin(&tensors[CA_ATTENTION_KEY]) &&
                      ca_attention_rows_adjoin(&tensors[CA_ATTENTION_PAST_KEY]);
    bool value_direct = value->dtype == real && !biased &&
                        ca_attention_rows_contiguous(value) &&
                        ca_attention_rows_contiguous(&tensors[CA_ATTENTION_PAST_VALUE]);

    *plan = (ca_attention_plan){.spec = {.name = "attention_cpu"}, .local_size = 1};
    ca_attention_cover(plan, dims);
    int64_t vectors =
        vectors_of_rows(info, attention, key_direct && value_direct, pairs, plan);
    plan->grid[3] = ca_divide_up(ca_attention_rows(attention),
                                 vectors * ca_attention_lanes(info, attention));
    int64_t heads = heads_of_item(info, attention, dims,
                                  vectors * ca_attention_lanes(info, attention), plan);
    plan->grid[2] /= heads;
    ca_kernel_spec *spec = &plan->spec;
    ca_attention_define_sizes(spec, attention);
    ca_attention_define(spec, "LANES", ca_attention_lanes(info, attention));
    if (heads > 1) {
        ca_attention_define(spec, "HEADS", heads);
    }
    ca_attention_define(spec, "KEY_DIRECT", key_direct);
    ca_attention_define(spec, "VALUE_DIRECT", value_direct);
    ca_attention_define(spec, "NV", vectors);
    if (pairs) {
        ca_attention_define(spec, "BFLOAT16_PAIRS", 1);
    }
}

static void
plan_cpu(const ca_device_info *info, const ca_attention *attention,
         const ca_leading_dims *dims, ca_attention_plan *plan)
{
    plan_tiles(info, attention, dims, false, plan);
}

const ca_attention_variant ca_attention_on_cpu = {
    CA_VARIANT_CPU, "head sizes of 1 to 512 only, and no softcap after the mask",
    ca_attention_cpu_can_run, cpu_is_fast, plan_cpu};

/* ---- attention/cpu.cl with pairs of bfloat16 ---- */

/* An input bias would have to be rounded with what it is added to. */
static bool
pairs_can_run(const ca_device_info *info, const ca_attention *attention)
{
    return attention->tensors[CA_ATTENTION_QUERY].dtype == CA_BFLOAT16 &&
           attention->tensors[CA_ATTENTION_VALUE].dtype == CA_BFLOAT16 &&
           info->bfloat16_pairs && ca_attention_cpu_can_run(info, attention) &&
           !ca_attention_in_float64(attention) &&
           !ca_attention_has(attention, CA_ATTENTION_INPUT_BIAS);
}

static void
plan_pairs(const ca_device_info *info, const ca_attention *attention,
           const ca_leading_dims *dims, ca_attention_plan *plan)
{
    plan_tiles(info, attention, dims, true, plan);
}

const ca_attention_variant ca_attention_on_pairs = {
    CA_VARIANT_PAIRS,
    "bfloat16 without input bias only, with head sizes of 1 to 512 and no softcap "
    "after the mask, on devices that multiply pairs of bfloat16",
    pairs_can_run, cpu_is_fast, plan_pairs};
