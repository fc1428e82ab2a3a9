/* SPDX-License-Identifier: MIT
 *
 * The variant tiled, for many rows on GPUs without matrix units: attention/tiled.cl, with
 * tiles in local memory.
 */
#include "attention/variants.h"

#define MAX_HEAD 512

/* The kernel counts rows and keys in an int. */
#define MAX_LENGTH (INT64_C(1) << 28)

/* With more, some GPUs have room for only one work-group at a time; on others a static
   array may not be larger. */
#define MAX_LOCAL_MEMORY (48 << 10)

/* A work-item keeps at most this many elements of the result in registers, and reals of 32 bits where
   it has few registers. */
#define MAX_RESULT 64
#define FEW_RESULT 24

/* The first tilings need so many registers. */
#define MANY_REGISTERS 256

/* Local memory holds at most so many elements of a query or key at a time, and the values of at most
   so many keys, unless a knob says otherwise. */
#define MAX_PASS 64
#define MAX_KEYS 32

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

/* Best first: a larger tile needs fewer loads for each fma. The first six are for work-items with many
   registers, the others for those with few, whose work-groups have more of them. */
static const tiling tilings[] = {
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

/* Returns the columns of a work-item, rounded up so that they are loaded by twos or
   fours. */
static int64_t
columns_of_item(int64_t Ev, int64_t TX)
{
    int64_t columns = ca_divide_up(Ev, TX);
    return round_up(columns, columns > 12 ? 4 : columns > 2 ? 2 : 1);
}

/* Returns bytes. As in attention/tiled/tiles.clh, each row of a tile is padded by one
   vector. */
static int64_t
local_memory(const tiling *t, int64_t real)
{
    int64_t rows = t->TY * t->MI;
    int64_t keys = t->TX * t->NJ;
    int64_t queries_size = rows * (t->EC + 4);
    int64_t keys_size = keys * ((t->EC > rows ? t->EC : rows) + 4); /* of weights too */
    int64_t values_size = t->KC * round_up(t->TX * t->NC, 4);
    return (queries_size + keys_size + values_size) * real + rows * 4 + 64;
}

/* Choose the most values, then the fewest passes over a head, that fit. Passes that leave much of the
   last one empty do not count. */
static bool
fit_passes(tiling *t, int64_t E, int64_t real, int64_t available, const ca_knobs *knobs)
{
    int64_t whole = round_up(E, 8);
    int64_t most = ca_knob_value(knobs, PASS, MAX_PASS);
    for (t->KC = ca_knob_value(knobs, KEYS, MAX_KEYS); t->KC >= 4; t->KC /= 2) {
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

/* Fill in the rest of a tiling, with at most `result` elements of the result in a work-item. False
   where it does not fit. */
static bool
complete_tiling(tiling *t, const ca_device_info *info, const ca_attention *attention,
                int64_t result, int64_t available, const ca_knobs *knobs)
{
    t->NC = columns_of_item(attention->Ev, t->TX);
    return t->MI * t->NC <= result && t->TX * t->TY <= info->max_work_group &&
           fit_passes(t, attention->E, ca_plan_real_bytes(attention),
                      ca_smaller(available, MAX_LOCAL_MEMORY), knobs);
}

/* False where no tiling fits the device. Where work-items have few registers, two work-groups share a
   unit's local memory, if the last tiling is not needed. */
static bool
choose_tiling(const ca_device_info *info, const ca_attention *attention, tiling *chosen)
{
    bool few = info->registers < MANY_REGISTERS;
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
        tiling t = tilings[n];
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
    tiling t;
    return attention->L <= MAX_LENGTH && attention->T <= MAX_LENGTH &&
           choose_tiling(info, attention, &t);
}

static void
plan_tiled(const ca_device_info *info, const ca_attention *attention, ca_attention_plan *plan)
{
    tiling t;
    (void)choose_tiling(info, attention, &t);
    int64_t threads = t.TX * t.TY;
    ca_plan_begin(plan, attention, "attention_tiled", (size_t)threads);
    plan->grid[3] = ca_divide_up(attention->L, t.TY * t.MI);
    plan->grid[4] = threads;
    ca_kernel_spec *spec = &plan->spec;
    ca_plan_define_sizes(plan, attention);
    ca_kernel_define(spec, "TX", t.TX);
    ca_kernel_define(spec, "TY", t.TY);
    ca_kernel_define(spec, "MI", t.MI);
    ca_kernel_define(spec, "NJ", t.NJ);
    ca_kernel_define(spec, "NC", t.NC);
    ca_kernel_define(spec, "EC", t.EC);
    ca_kernel_define(spec, "KC", t.KC);
    /* NVIDIA's compilers read params where they are used, from constant memory. */
    ca_kernel_define(spec, "ENDS_IN_LOCAL", !info->warp_shuffles);
    ca_kernel_define(spec, "SUB_GROUP", info->smallest_sub_group);
}

const ca_variant ca_variant_tiled = {
    .word = "tiled",
    .scores = "attention_tiled_scores",
    .max_head = MAX_HEAD,
    .max_value_head = MAX_HEAD,
    .takes = CA_COMMON_OPTIONS | CA_PAST_OPTIONS | CA_USES(DROPOUT),
    .can_run = tiled_can_run,
    .of_device = "with work-groups of 64 and local memory for its tiles (16 KiB in "
                 "float32)",
    .fast = CA_FAST_ON_GPUS,
    .make_plan = plan_tiled,
    .knobs = knobs_of_tiled,
};
