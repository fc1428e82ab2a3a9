/* SPDX-License-Identifier: MIT
 *
 * The variants for CPUs: attention_cpu.cl, many rows, queries in vector lanes, and
 * attention_decode.cl, few rows, keys in vector lanes.
 */
#include <math.h>

#include "op_attention_params.h" /* ca_attention_keys */
#include "op_attention_variants.h"

/* Larger heads would outgrow the private memory that CPU drivers give a work-item. */
#define MAX_HEAD_SIZE 512

/* Work-items for each core, so that all end at about the same time. */
#define ITEMS_FOR_EACH_CORE 4

static int64_t
head_size(const ca_attention *attention)
{
    return ca_tensor_size(&attention->tensors[CA_ATTENTION_QUERY], 1);
}

static int64_t
value_head_size(const ca_attention *attention)
{
    return ca_tensor_size(&attention->tensors[CA_ATTENTION_VALUE], 1);
}

static int64_t
query_rows(const ca_attention *attention)
{
    return ca_tensor_size(&attention->tensors[CA_ATTENTION_QUERY], 2);
}

/* Lanes that fill a vector register. */
static int64_t
lanes_of(const ca_device_info *info, const ca_attention *attention)
{
    int64_t lanes = info->float_width >= 16 ? 16 : info->float_width >= 8 ? 8 : 4;
    return ca_attention_in_float64(attention) && lanes > 4 ? lanes / 2 : lanes;
}

static int64_t
divide_up(int64_t count, int64_t step)
{
    return (count + step - 1) / step;
}

static int64_t
smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Work-items so far, as a number that does not overflow. */
static double
items_of(const ca_attention_plan *plan)
{
    double items = 1;
    for (int n = 0; n < CA_ATTENTION_GRID_DIMS; n++) {
        items *= (double)plan->grid[n];
    }
    return items;
}

/* Up to so many vectors of rows a tile has one of them. */
#define FEW_TILES 8

/* Bytes of queries and results of the heads of a work-item: more would leave the
   cache, and outgrow the private memory too. */
#define BYTES_OF_HEADS (128 << 10)

/* An absent tensor has none, a past of no keys neither: its strides mean nothing. */
static bool
has_rows(const ca_tensor *tensor)
{
    return tensor->data != NULL && ca_tensor_size(tensor, 2) > 0;
}

/* Do the elements of a row lie side by side? A row of one element does. */
static bool
rows_are_contiguous(const ca_tensor *tensor)
{
    return !has_rows(tensor) || ca_tensor_size(tensor, 1) == 1 ||
           ca_tensor_stride(tensor, 1) == 1;
}

/* And each row behind the one before? A single row, of a new key, has none before. */
static bool
rows_adjoin(const ca_tensor *tensor)
{
    return rows_are_contiguous(tensor) &&
           (!has_rows(tensor) || ca_tensor_size(tensor, 2) == 1 ||
            tensor->strides[tensor->ndim - 2] == ca_tensor_size(tensor, 1));
}

/* The macros of both kernels. */
static void
define_sizes(ca_kernel_spec *spec, const ca_device_info *info,
             const ca_attention *attention)
{
    ca_attention_define_common(spec, attention);
    ca_attention_define(spec, "HEAD_E", head_size(attention));
    ca_attention_define(spec, "HEAD_EV", value_head_size(attention));
    ca_attention_define(spec, "SOFTCAP", ca_attention_softcap(attention) > 0);
    ca_attention_define(spec, "LANES", lanes_of(info, attention));
}

/* ---- attention_cpu.cl ---- */

static bool
cpu_can_run(const ca_device_info *info, const ca_attention *attention)
{
    (void)info;
    int64_t E = head_size(attention);
    int64_t Ev = value_head_size(attention);
    return E >= 1 && E <= MAX_HEAD_SIZE && Ev >= 1 && Ev <= MAX_HEAD_SIZE &&
           !ca_attention_caps_last(attention);
}

static bool
cpu_is_fast(const ca_device_info *info, const ca_attention *attention)
{
    (void)attention;
    return info->type == CA_DEVICE_CPU;
}

/* Rows of the tiles of so many vectors that cover L rows. */
static int64_t
covered(int64_t L, int64_t rows)
{
    return divide_up(L, rows) * rows;
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
    int64_t lanes = lanes_of(info, attention);
    int64_t L = query_rows(attention);
    int64_t two = covered(L, 2 * lanes);
    bool emptier = !pairs && two - covered(L, lanes) > L / 8;
    bool narrow = info->float_width >= 16 && (direct || emptier);
    if (L <= lanes || (L <= FEW_TILES * lanes && narrow)) {
        return 1;
    }
    double items = items_of(plan) * (double)divide_up(L, 4 * lanes);
    bool four = lanes == 16 && attention->below == CA_BAND_UNBOUNDED &&
                covered(L, 4 * lanes) - two <= L / 16 &&
                (ca_dtype_size(attention->tensors[CA_ATTENTION_VALUE].dtype) == 2 ||
                 ca_attention_keys_are_far(attention)) &&
                head_size(attention) <= 128 && value_head_size(attention) <= 128 &&
                items >= (double)(info->compute_units * ITEMS_FOR_EACH_CORE);
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
    double items = items_of(plan);
    double fewest = (double)(info->compute_units * ITEMS_FOR_EACH_CORE);
    int64_t real = ca_attention_in_float64(attention) ? 8 : 4;
    int64_t columns = head_size(attention) + value_head_size(attention);
    int64_t heads = BYTES_OF_HEADS / (columns * rows * real);
    while (heads > 1 &&
           (dims->size[last] % heads != 0 || items < fewest * (double)heads)) {
        heads--;
    }
    return heads > 1 ? heads : 1;
}

/* The two variants of attention_cpu.cl: terms of its products are reals, or pairs of
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
    bool are_terms = pairs ? head_size(attention) % 2 == 0 : query->dtype == real;
    bool key_direct = are_terms && !biased && rows_adjoin(&tensors[CA_ATTENTION_KEY]) &&
                      rows_adjoin(&tensors[CA_ATTENTION_PAST_KEY]);
    bool value_direct = value->dtype == real && !biased && rows_are_contiguous(value) &&
                        rows_are_contiguous(&tensors[CA_ATTENTION_PAST_VALUE]);

    *plan = (ca_attention_plan){.spec = {.name = "attention_cpu"}, .local_size = 1};
    ca_attention_cover(plan, dims);
    int64_t vectors =
        vectors_of_rows(info, attention, key_direct && value_direct, pairs, plan);
    plan->grid[3] =
        divide_up(query_rows(attention), vectors * lanes_of(info, attention));
    int64_t heads =
        heads_of_item(info, attention, dims, vectors * lanes_of(info, attention), plan);
    plan->grid[2] /= heads;
    ca_kernel_spec *spec = &plan->spec;
    define_sizes(spec, info, attention);
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
    cpu_can_run, cpu_is_fast, plan_cpu};

/* ---- attention_cpu.cl with pairs of bfloat16 ---- */

/* An input bias would have to be rounded with what it is added to. */
static bool
pairs_can_run(const ca_device_info *info, const ca_attention *attention)
{
    return attention->tensors[CA_ATTENTION_QUERY].dtype == CA_BFLOAT16 &&
           attention->tensors[CA_ATTENTION_VALUE].dtype == CA_BFLOAT16 &&
           info->bfloat16_pairs && cpu_can_run(info, attention) &&
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

/* ---- attention_decode.cl ---- */

/* More rows of a head fill enough lanes of attention_cpu's vectors. */
#define FEW_ROWS 8

/* Rows that share a load, and how many times as many a work-item has at most. */
#define SHARED_ROWS 4
#define SHARES      8

/* No work-item reads so little that handing it out costs as much. */
#define BYTES_OF_AN_ITEM (256 << 10)

/* Is a row of at least one vector, side by side? */
static bool
holds_vectors(const ca_tensor *tensor, int64_t lanes)
{
    return !has_rows(tensor) ||
           (ca_tensor_size(tensor, 1) >= lanes && ca_tensor_stride(tensor, 1) == 1);
}

static bool
decode_can_run(const ca_device_info *info, const ca_attention *attention)
{
    const ca_tensor *tensors = attention->tensors;
    int64_t lanes = lanes_of(info, attention);
    return cpu_can_run(info, attention) && head_size(attention) >= lanes &&
           value_head_size(attention) >= lanes &&
           holds_vectors(&tensors[CA_ATTENTION_KEY], lanes) &&
           holds_vectors(&tensors[CA_ATTENTION_VALUE], lanes) &&
           holds_vectors(&tensors[CA_ATTENTION_PAST_KEY], lanes) &&
           holds_vectors(&tensors[CA_ATTENTION_PAST_VALUE], lanes) &&
           !ca_attention_has(attention, CA_ATTENTION_INPUT_BIAS) &&
           !ca_attention_has(attention, CA_ATTENTION_SCORES) &&
           !ca_attention_drops(attention);
}

static bool
decode_is_fast(const ca_device_info *info, const ca_attention *attention)
{
    return info->type == CA_DEVICE_CPU && query_rows(attention) <= FEW_ROWS;
}

/* Query heads with the same keys, which become rows of one work-item: the last leading
   dimension, where nothing of the keys moves along it. */
static int64_t
heads_together(const ca_leading_dims *dims)
{
    static const ca_attention_tensor shared[] = {
        CA_ATTENTION_KEY,          CA_ATTENTION_VALUE,      CA_ATTENTION_PAST_KEY,
        CA_ATTENTION_PAST_VALUE,   CA_ATTENTION_KEY_COUNTS, CA_ATTENTION_PRESENT_KEY,
        CA_ATTENTION_PRESENT_VALUE};
    if (dims->count == 0) {
        return 1;
    }
    int last = dims->count - 1;
    for (size_t n = 0; n < sizeof(shared) / sizeof(shared[0]); n++) {
        if (dims->stride[last][shared[n]] != 0) {
            return 1;
        }
    }
    return dims->size[last];
}

/* Keys that a row may see at most. */
static int64_t
visible_keys(const ca_attention *attention)
{
    int64_t T = ca_attention_keys(attention);
    if (attention->below >= T || attention->above >= T) {
        return T;
    }
    int64_t band = attention->below + attention->above + query_rows(attention);
    return band < 0 ? 0 : smaller(band, T);
}

static void
plan_decode(const ca_device_info *info, const ca_attention *attention,
            const ca_leading_dims *dims, ca_attention_plan *plan)
{
    const ca_tensor *tensors = attention->tensors;
    *plan = (ca_attention_plan){.spec = {.name = "attention_decode"}, .local_size = 1};
    ca_attention_cover(plan, dims);
    plan->heads = heads_together(dims);
    int64_t rows = plan->heads * query_rows(attention);
    int64_t together = divide_up(rows, divide_up(rows, SHARED_ROWS));
    plan->grid[2] /= plan->heads;
    plan->grid[3] = divide_up(rows, together * SHARES);

    double items = items_of(plan);
    double wanted = (double)(info->compute_units * ITEMS_FOR_EACH_CORE);
    int64_t worthwhile = visible_keys(attention) /
                         divide_up(BYTES_OF_AN_ITEM, ca_attention_key_bytes(attention));
    if (items < wanted && worthwhile > 1) {
        plan->splits = smaller((int64_t)ceil(wanted / items), worthwhile);
        plan->grid[4] = plan->splits;
    }

    ca_kernel_spec *spec = &plan->spec;
    define_sizes(spec, info, attention);
    plan->merge = *spec;
    plan->merge.name = "attention_merge";
    size_t real = ca_attention_in_float64(attention) ? sizeof(double) : sizeof(float);
    plan->partial_bytes = (value_head_size(attention) + 2) * (int64_t)real;
    bool adjoin = rows_adjoin(&tensors[CA_ATTENTION_KEY]) &&
                  rows_adjoin(&tensors[CA_ATTENTION_PAST_KEY]);
    ca_attention_define(spec, "KEYS_ADJOIN", adjoin);
    ca_attention_define(spec, "RT", together);
}

const ca_attention_variant ca_attention_decoding = {
    CA_VARIANT_DECODE,
    "keys and values with contiguous rows of at least one vector and at most 512 "
    "elements only, and no input bias, dropout, scores or softcap after the mask",
    decode_can_run, decode_is_fast, plan_decode};
