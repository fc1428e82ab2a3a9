/* SPDX-License-Identifier: MIT
 *
 * The variant for devices with matrix units, attention/mma.cl: tiles of half types.
 */
#include "attention/params.h" /* ca_attention_keys */
#include "attention/variants.h"

/* Work-items of a group, in warps of 32: WARPS of the kernel. */
#define THREADS 128

/* Rows of a matrix tile, of which each warp has one or two. */
#define TILE_ROWS (THREADS / 32 * 16)

/* Local memory that every device with matrix units gives a group. */
#define LOCAL_BYTES (48 << 10)

/* What the emulation needs besides. */
#define SCRATCH_BYTES (4 << 10)

#define MAX_HEAD 256

/* Rows and keys are counted in 32 bits, and so are offsets within a tile, where rows
   are copied by 16 bytes. */
#define MAX_ROWS   ((int64_t)1 << 28)
#define MAX_STRIDE ((int64_t)1 << 22)

bool
ca_attention_has_matrix_units(const ca_device_info *info)
{
    return info->matrix_units;
}

bool
ca_attention_holds_matrices(const ca_device_info *info, int64_t group, int64_t bytes)
{
    int64_t scratch = ca_attention_has_matrix_units(info) ? 0 : SCRATCH_BYTES;
    return info->max_work_group >= group && info->local_memory >= bytes + scratch;
}

bool
ca_attention_suits_matrix_units(const ca_attention *attention)
{
    ca_dtype dtype = attention->tensors[CA_ATTENTION_QUERY].dtype;
    return (dtype == CA_FLOAT16 || dtype == CA_BFLOAT16) &&
           attention->tensors[CA_ATTENTION_VALUE].dtype == dtype &&
           !ca_attention_in_float64(attention) &&
           ca_attention_keys(attention) <= MAX_ROWS &&
           !ca_attention_has(attention, CA_ATTENTION_PAST_KEY) &&
           !ca_attention_has(attention, CA_ATTENTION_PRESENT_KEY) &&
           !ca_attention_has(attention, CA_ATTENTION_INPUT_BIAS) &&
           !ca_attention_has(attention, CA_ATTENTION_SCORES) &&
           !ca_attention_drops(attention) && !ca_attention_caps_last(attention);
}

static bool
mma_can_run(const ca_device_info *info, const ca_attention *attention)
{
    int64_t E = ca_attention_head_size(attention);
    int64_t Ev = ca_attention_value_head_size(attention);
    return ca_attention_suits_matrix_units(attention) && E >= 1 && E <= MAX_HEAD &&
           Ev >= 1 && Ev <= MAX_HEAD && ca_attention_rows(attention) <= MAX_ROWS &&
           ca_attention_holds_matrices(info, THREADS, LOCAL_BYTES);
}

/* The emulation is for tests. */
static bool
mma_is_fast(const ca_device_info *info, const ca_attention *attention,
            const ca_leading_dims *dims)
{
    (void)dims;
    (void)attention;
    return ca_attention_has_matrix_units(info);
}

static bool
is_aligned(const void *address)
{
    return (uintptr_t)address % CA_WIDE_BYTES == 0;
}

/* Are rows whole 16 bytes, at multiples of 16 bytes in memory? A buffer begins at the
   extent's first byte. */
static bool
rows_are_aligned(const ca_attention *attention, ca_attention_tensor t)
{
    const ca_tensor *tensor = &attention->tensors[t];
    int64_t row = ca_tensor_stride(tensor, 2);
    return ca_attention_is_wide(tensor) && row <= MAX_STRIDE && row >= -MAX_STRIDE &&
           is_aligned(ca_tensor_memory(tensor).data);
}

static bool
overlaps_another(const ca_attention *attention, int t)
{
    ca_extent own = ca_tensor_memory(&attention->tensors[t]);
    for (int other = 0; other < CA_ATTENTION_OUTPUT; other++) {
        ca_extent extent = ca_tensor_memory(&attention->tensors[other]);
        if (other != t && ca_extents_overlap(&own, &extent)) {
            return true;
        }
    }
    return false;
}

/* Inputs that overlap share a buffer, which begins at the first byte of one of them.
   Where a mask that lies alone begins matters to nobody. */
static bool
inputs_are_aligned(const ca_attention *attention)
{
    for (int t = 0; t < CA_ATTENTION_OUTPUT; t++) {
        if (!is_aligned(ca_tensor_memory(&attention->tensors[t]).data) &&
            overlaps_another(attention, t)) {
            return false;
        }
    }
    return rows_are_aligned(attention, CA_ATTENTION_QUERY) &&
           rows_are_aligned(attention, CA_ATTENTION_KEY) &&
           rows_are_aligned(attention, CA_ATTENTION_VALUE);
}

/* One of few sizes, so that few programs are built. */
static int64_t
padded(int64_t head)
{
    static const int64_t sizes[] = {64, 80, 96, 128, 192};
    for (size_t n = 0; n < sizeof(sizes) / sizeof(sizes[0]); n++) {
        if (head <= sizes[n]) {
            return sizes[n];
        }
    }
    return MAX_HEAD;
}

/* Tiles of rows of a warp: two halve what is read of keys and values, if there are
   registers for them, rows to fill them and enough groups left for all units. */
static int64_t
row_tiles(const ca_device_info *info, const ca_attention *attention, int64_t head,
          double heads)
{
    bool plain = !ca_attention_has(attention, CA_ATTENTION_MASK) &&
                 !ca_attention_has(attention, CA_ATTENTION_BIAS) &&
                 !ca_attention_has(attention, CA_ATTENTION_LSE) &&
                 ca_attention_softcap(attention) == 0;
    bool ample = !ca_attention_has_matrix_units(info) || info->ample_registers;
    bool fits = head <= 80 || (plain && (head <= 96 || (head <= 128 && ample)));
    int64_t L = ca_attention_rows(attention);
    double groups = heads * (double)ca_divide_up(L, 2 * TILE_ROWS);
    return fits && L > TILE_ROWS && groups >= (double)info->compute_units ? 2 : 1;
}

static void
plan_mma(const ca_device_info *info, const ca_attention *attention,
         const ca_leading_dims *dims, ca_attention_plan *plan)
{
    int64_t E = padded(ca_attention_head_size(attention));
    int64_t Ev = padded(ca_attention_value_head_size(attention));
    *plan =
        (ca_attention_plan){.spec = {.name = "attention_mma"}, .local_size = THREADS};
    ca_attention_cover(plan, dims);

    int64_t tiles =
        row_tiles(info, attention, E > Ev ? E : Ev, ca_attention_items(plan));
    plan->grid[3] = ca_divide_up(ca_attention_rows(attention), tiles * TILE_ROWS);
    plan->grid[4] = THREADS;

    const int64_t stages = 3;
    int64_t keys = 64;
    while (keys > 16 && stages * keys * (E + Ev) * 2 > LOCAL_BYTES) {
        keys /= 2;
    }
    ca_kernel_spec *spec = &plan->spec;
    ca_attention_define_common(spec, attention);
    ca_attention_define(spec, "HEAD_E", E);
    ca_attention_define(spec, "HEAD_EV", Ev);
    ca_attention_define(spec, "SOFTCAP", ca_attention_softcap(attention) > 0);
    ca_attention_define(spec, "LSE", ca_attention_has(attention, CA_ATTENTION_LSE));
    ca_attention_define(spec, "ALIGNED", inputs_are_aligned(attention));
    ca_attention_define(spec, "OUTPUT_ALIGNED",
                        rows_are_aligned(attention, CA_ATTENTION_OUTPUT));
    ca_attention_define(spec, "WARP", ca_attention_has_matrix_units(info));
    ca_attention_define(spec, "MT", tiles);
    ca_attention_define(spec, "BN", keys);
}

const ca_attention_variant ca_attention_on_matrix_units = {
    CA_VARIANT_MMA,
    "query and value of one half type, head sizes of 1 to 256, and no past keys, input "
    "bias, dropout, scores or softcap after the mask, on devices with 52 KiB of local "
    "memory",
    mma_can_run, mma_is_fast, plan_mma};
