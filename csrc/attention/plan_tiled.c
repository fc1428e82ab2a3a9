/* SPDX-License-Identifier: MIT
 *
 * The variant tiled, for many rows on GPUs without matrix units: attention/tiled.cl, with
 * tiles in local memory.
 */
#include "attention/plan_tiled.h"

#include "attention/variants.h"

/* A work-item keeps at most this many elements of the result in registers, and reals of 32 bits where
   it has few registers. */
#define MAX_RESULT 64
#define FEW_RESULT 24

/* Best first: a larger tile needs fewer loads for each fma. The first six are for work-items with many
   registers, the others for those with few, whose work-groups have more of them. */
static const ca_tiling tilings[] = {
    {8, 16, 4, 8, 0, 0, 0}, {16, 8, 4, 4, 0, 0, 0}, {32, 8, 4, 2, 0, 0, 0},  {8, 8, 4, 4, 0, 0, 0},
    {8, 8, 2, 4, 0, 0, 0},  {8, 8, 1, 4, 0, 0, 0},  {16, 16, 2, 4, 0, 0, 0}, {32, 8, 2, 2, 0, 0, 0},
    {32, 8, 1, 4, 0, 0, 0}, {8, 8, 2, 4, 0, 0, 0},  {8, 8, 1, 4, 0, 0, 0},
};

enum { WIDE_TILINGS = 6, TILINGS = sizeof(tilings) / sizeof(tilings[0]) };

enum { TILING, PASS, KEYS };

/* The number of a row of `tilings`, from 1 on; one that does not fit is passed over. EC and KC are
   the most that the kernel's macros may be; where local memory is short, these are less. */
static const ca_knob knobs_of_tiled[] = {
    [TILING] = {"TILING", {1, 2, 3, 4, 5, 6, 7, 8, 9}},
    [PASS] = {"EC", {16, 32, 64, 128}},
    [KEYS] = {"KC", {8, 16, 32}},
    {NULL, {0}},
};

static int64_t
round_up(int64_t count, int64_t step)
{
    return ca_divide_up(count, step) * step;
}

int64_t
ca_tiling_columns(const ca_tiling *t, int64_t columns)
{
    columns = ca_divide_up(columns, t->TX);
    return round_up(columns, columns > 12 ? 4 : columns > 2 ? 2 : 1);
}

/* Returns bytes. As in attention/tiled/tiles.clh, each row of a tile is padded by one
   vector. */
static int64_t
local_memory(const ca_tiling *t, int64_t real)
{
    int64_t rows = t->TY * t->MI;
    int64_t keys = t->TX * t->NJ;
    int64_t queries_size = rows * (t->EC + 4);
    int64_t keys_size = keys * ((t->EC > rows ? t->EC : rows) + 4); /* of weights too */
    int64_t values_size = t->KC * round_up(t->TX * t->NC, 4);
    return (queries_size + keys_size + values_size) * real + rows * 4 + 64;
}

bool
ca_tiling_fit(ca_tiling *t, int64_t E, int64_t real, int64_t available)
{
    int64_t whole = round_up(E, 8);
    int64_t most = t->EC;
    for (; t->KC >= 4; t->KC /= 2) {
        for (int64_t passes = ca_divide_up(whole, most);; passes++) {
            t->EC = round_up(ca_divide_up(E, passes), 8);
            bool wastes = 8 * (t->EC * passes - whole) >= whole;
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

void
ca_tiling_define(const ca_tiling *t, const ca_device_info *info, ca_kernel_spec *spec)
{
    ca_kernel_define(spec, "TX", t->TX);
    ca_kernel_define(spec, "TY", t->TY);
    ca_kernel_define(spec, "MI", t->MI);
    ca_kernel_define(spec, "NJ", t->NJ);
    ca_kernel_define(spec, "NC", t->NC);
    ca_kernel_define(spec, "EC", t->EC);
    ca_kernel_define(spec, "KC", t->KC);
    ca_kernel_define(spec, "SUB_GROUP", info->smallest_sub_group);
}

/* Fill in the rest of a tiling, with at most `result` elements of the result in a work-item. False
   where it does not fit. */
static bool
complete_tiling(ca_tiling *t, const ca_device_info *info, const ca_attention *attention,
                int64_t result, int64_t available, const ca_knobs *knobs)
{
    t->NC = ca_tiling_columns(t, attention->Ev);
    t->EC = ca_knob_value(knobs, PASS, CA_TILING_PASS);
    t->KC = ca_knob_value(knobs, KEYS, CA_TILING_KEYS);
    return t->MI * t->NC <= result && t->TX * t->TY <= info->max_work_group &&
           ca_tiling_fit(t, attention->E, ca_plan_real_bytes(attention),
                         ca_smaller(available, CA_TILING_MEMORY));
}

/* False where no tiling fits the device. Where work-items have few registers, two work-groups share a
   unit's local memory, if the last tiling is not needed. */
static bool
choose_tiling(const ca_device_info *info, const ca_attention *attention, ca_tiling *chosen)
{
    bool few = info->registers < CA_TILING_REGISTERS;
    int64_t few_result = FEW_RESULT * 4 / ca_plan_real_bytes(attention);
    int64_t local = info->local_memory;
    ca_knobs knobs = ca_knobs_of(info, attention, CA_INDEX_tiled, knobs_of_tiled);
    int64_t tuned = ca_knob_value(&knobs, TILING, 0);
    if (tuned != 0) {
        *chosen = tilings[tuned - 1];
        if (complete_tiling(chosen, info, attention, MAX_RESULT, local, &knobs)) {
            return true;
        }
    }
    bool found = false;
    int last = few ? TILINGS - 1 : WIDE_TILINGS - 1;
    for (int n = few ? WIDE_TILINGS : 0; n <= last; n++) {
        ca_tiling t = tilings[n];
        bool lean = few && n < last;
        if (complete_tiling(&t, info, attention, lean ? few_result : MAX_RESULT,
                            lean ? local / 2 : local, &knobs)) {
            *chosen = t;
            found = true;
            if (t.TY * t.MI / 2 < attention->L) {
                break; /* else half the tile would be empty */
            }
        }
    }
    return found;
}

static bool
tiled_can_run(const ca_device_info *info, const ca_attention *attention)
{
    ca_tiling t;
    return attention->L <= CA_TILING_LENGTH && attention->T <= CA_TILING_LENGTH &&
           choose_tiling(info, attention, &t);
}

static void
plan_tiled(const ca_device_info *info, const ca_attention *attention, ca_attention_plan *plan)
{
    ca_tiling t;
    (void)choose_tiling(info, attention, &t);
    int64_t threads = t.TX * t.TY;
    ca_plan_begin(plan, attention, "attention_tiled", (size_t)threads);
    plan->rows = t.TY * t.MI;
    plan->grid[3] = ca_divide_up(attention->L, plan->rows);
    plan->grid[4] = threads;
    ca_plan_define_sizes(plan, attention);
    ca_tiling_define(&t, info, &plan->spec);
    /* NVIDIA's compilers read params where they are used, from constant memory. */
    ca_kernel_define(&plan->spec, "ENDS_IN_LOCAL", !info->warp_shuffles);
}

const ca_variant ca_variant_tiled = {
    .word = "tiled",
    .scores = "attention_tiled_scores",
    .max_head = CA_TILING_HEAD,
    .max_value_head = CA_TILING_HEAD,
    .takes = CA_COMMON_OPTIONS | CA_PAST_OPTIONS | CA_RAGGED_OPTIONS | CA_SCALE_OPTIONS |
             CA_INT4_OPTIONS | CA_USES(DROPOUT),
    .can_run = tiled_can_run,
    .of_device = "with work-groups of 64 and local memory for its tiles (16 KiB in "
                 "float32)",
    .fast = CA_FAST_ON_GPUS,
    .make_plan = plan_tiled,
    .knobs = knobs_of_tiled,
};
