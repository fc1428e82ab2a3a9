/* SPDX-License-Identifier: MIT
 *
 * The variant for GPUs without matrix units, attention/tiled.cl: tiles in local memory.
 */
#include "attention/params.h" /* ca_attention_keys */
#include "attention/variants.h"

#define MAX_HEAD 512

/* Rows and keys: the kernel counts them in an int. */
#define MAX_LENGTH (INT64_C(1) << 28)

/* More leaves some GPUs room for one work-group at a time, and a static array may not
   be larger on others. */
#define MAX_LOCAL_MEMORY (48 << 10)

/* Columns of the result times rows that a work-item has in registers. */
#define MAX_RESULT 64

/* Elements of queries and keys that are in local memory at a time. */
#define MAX_CHUNK 64

/* How a work-group is arranged; see the kernel. */
typedef struct {
    int64_t TX;
    int64_t TY;
    int64_t MI;
    int64_t NJ;
    int64_t NC; /* columns of the result of a work-item */
    int64_t EC;
    int64_t KC;
} tiling;

/* The larger the tile, the fewer loads for each fma; best first. */
static const tiling tilings[] = {
    {8, 16, 4, 8, 0, 0, 0}, {16, 8, 4, 4, 0, 0, 0}, {32, 8, 4, 2, 0, 0, 0},
    {8, 8, 4, 4, 0, 0, 0},  {8, 8, 2, 4, 0, 0, 0},  {8, 8, 1, 4, 0, 0, 0},
};

static int64_t
round_up(int64_t count, int64_t step)
{
    return ca_divide_up(count, step) * step;
}

/* Columns that are loaded by twos and fours where there are some. */
static int64_t
columns_of_item(int64_t Ev, int64_t TX)
{
    int64_t columns = ca_divide_up(Ev, TX);
    return round_up(columns, columns > 12 ? 4 : columns > 2 ? 2 : 1);
}

/* As attention/tiled/loads.clh has it: a row of a tile is followed by one vector more. */
static int64_t
local_memory(const tiling *t, int64_t real)
{
    int64_t rows = t->TY * t->MI;
    int64_t keys = t->TX * t->NJ;
    int64_t queries_size = rows * (t->EC + 4);
    int64_t keys_size = keys * (t->EC + 4);
    int64_t after_size = keys * (rows + 4) + t->KC * round_up(t->TX * t->NC, 4);
    int64_t shared = keys_size > after_size ? keys_size : after_size;
    return (queries_size + shared) * real + rows * 4 + 64;
}

/* The most values, and then the largest part of a head, that fit. Parts of a head that
   leave much of the last one empty do not count. */
static bool
fit_chunks(tiling *t, int64_t E, int64_t real, int64_t available)
{
    int64_t whole = round_up(E, 8);
    for (t->KC = 32; t->KC >= 4; t->KC /= 2) {
        for (int64_t parts = ca_divide_up(whole, MAX_CHUNK);; parts++) {
            t->EC = round_up(ca_divide_up(E, parts), 8);
            bool wastes = 8 * (t->EC * parts - whole) >= whole;
            if (!wastes && local_memory(t, real) <= available) {
                return true;
            }
            if (t->EC == 8) {
                break;
            }
        }
    }
    return false;
}

/* The largest sub-groups that a kernel may require, up to those that hold the
   work-items of several rows. */
static int64_t
sub_group_of(const ca_device_info *info)
{
    int64_t size = 32;
    while (size >= 8 && (info->sub_groups & size) == 0) {
        size /= 2;
    }
    return size >= 8 ? size : 0;
}

/* False where no tiling fits the device. */
static bool
choose_tiling(const ca_device_info *info, const ca_attention *attention, tiling *chosen)
{
    int64_t E = ca_attention_head_size(attention);
    int64_t Ev = ca_attention_value_head_size(attention);
    int64_t L = ca_attention_rows(attention);
    int64_t real = ca_attention_in_float64(attention) ? 8 : 4;
    int64_t sub_group = sub_group_of(info);
    int64_t available = ca_smaller(info->local_memory, MAX_LOCAL_MEMORY);
    bool found = false;
    for (size_t n = 0; n < sizeof(tilings) / sizeof(tilings[0]); n++) {
        tiling t = tilings[n];
        int64_t rows = t.TY * t.MI;
        t.NC = columns_of_item(Ev, t.TX);
        if (t.MI * t.NC <= MAX_RESULT && t.TX * t.TY <= info->max_work_group &&
            (sub_group == 0 || t.TX <= sub_group) &&
            fit_chunks(&t, E, real, available)) {
            *chosen = t;
            found = true;
            if (rows / 2 < L) {
                break; /* else half the tile would be empty */
            }
        }
    }
    return found;
}

static bool
tiled_can_run(const ca_device_info *info, const ca_attention *attention)
{
    int64_t E = ca_attention_head_size(attention);
    int64_t Ev = ca_attention_value_head_size(attention);
    tiling t;
    return E >= 1 && E <= MAX_HEAD && Ev >= 1 && Ev <= MAX_HEAD &&
           ca_attention_rows(attention) <= MAX_LENGTH &&
           ca_attention_keys(attention) <= MAX_LENGTH &&
           choose_tiling(info, attention, &t);
}

static bool
tiled_is_fast(const ca_device_info *info, const ca_attention *attention,
              const ca_leading_dims *dims)
{
    (void)dims;
    (void)attention;
    return info->type != CA_DEVICE_CPU;
}

static void
plan_tiled(const ca_device_info *info, const ca_attention *attention,
           const ca_leading_dims *dims, ca_attention_plan *plan)
{
    tiling t;
    (void)choose_tiling(info, attention, &t);
    int64_t threads = t.TX * t.TY;
    int64_t sub_group = sub_group_of(info);
    *plan = (ca_attention_plan){
        .spec = {.name = "attention_tiled", .in_c30 = sub_group != 0},
        .local_size = (size_t)threads};
    ca_attention_cover(plan, dims);
    plan->grid[3] = ca_divide_up(ca_attention_rows(attention), t.TY * t.MI);
    plan->grid[4] = threads;
    ca_kernel_spec *spec = &plan->spec;
    ca_attention_define_sizes(spec, attention);
    ca_attention_define(spec, "SUB_GROUP", sub_group);
    ca_attention_define(spec, "TX", t.TX);
    ca_attention_define(spec, "TY", t.TY);
    ca_attention_define(spec, "MI", t.MI);
    ca_attention_define(spec, "NJ", t.NJ);
    ca_attention_define(spec, "NC", t.NC);
    ca_attention_define(spec, "EC", t.EC);
    ca_attention_define(spec, "KC", t.KC);
}

const ca_attention_variant ca_attention_tiled = {
    CA_VARIANT_TILED,
    "head sizes of 1 to 512 only, and devices with work-groups of 64 and local memory "
    "for its tiles (16 KiB in float32)",
    tiled_can_run, tiled_is_fast, plan_tiled};
