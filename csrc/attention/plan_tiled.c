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

/* A work-item keeps at most this many elements of the result in registers. */
#define MAX_RESULT 64

/* Local memory holds at most so many elements of a query or key at a time, and the values of at most
   so many keys, unless a knob says otherwise. */
#define MAX_CHUNK 64
#define MAX_KEYS  32

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

/* Best first: a larger tile needs fewer loads for each fma. */
static const tiling tilings[] = {
    {8, 16, 4, 8, 0, 0, 0}, {16, 8, 4, 4, 0, 0, 0}, {32, 8, 4, 2, 0, 0, 0},
    {8, 8, 4, 4, 0, 0, 0},  {8, 8, 2, 4, 0, 0, 0},  {8, 8, 1, 4, 0, 0, 0},
};

enum { TILING, CHUNK, KEYS };

/* The number of a row of `tilings`, from 1 on; one that does not fit is passed over. EC and KC are
   the most that the kernel's macros may be; where local memory is short, these are less. */
static const ca_knob knobs_of_tiled[] = {
    [TILING] = {"TILING", {1, 2, 3, 4, 5, 6}},
    [CHUNK] = {"EC", {16, 32, 64, 128}},
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

/* Choose the most values, then the largest chunk of a head, that fit. A chunk that leaves
   much of the last chunk empty does not count. */
static bool
fit_chunks(tiling *t, int64_t E, int64_t real, int64_t available, const ca_knobs *knobs)
{
    int64_t whole = round_up(E, 8);
    int64_t most = ca_knob_value(knobs, CHUNK, MAX_CHUNK);
    for (t->KC = ca_knob_value(knobs, KEYS, MAX_KEYS); t->KC >= 4; t->KC /= 2) {
        for (int64_t chunks = ca_divide_up(whole, most);; chunks++) {
            t->EC = round_up(ca_divide_up(E, chunks), 8);
            bool wastes = 8 * (t->EC * chunks - whole) >= whole;
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

/* False where no tiling fits the device. */
static bool
choose_tiling(const ca_device_info *info, const ca_attention *attention, tiling *chosen)
{
    int64_t E = attention->E;
    int64_t Ev = attention->Ev;
    int64_t L = attention->L;
    int64_t real = ca_plan_real_bytes(attention);
    int64_t available = ca_smaller(info->local_memory, MAX_LOCAL_MEMORY);
    ca_knobs knobs = ca_knobs_of(info, attention, CA_INDEX_tiled, knobs_of_tiled);
    size_t tuned = (size_t)ca_knob_value(&knobs, TILING, 0);
    bool found = false;
    for (size_t n = tuned != 0 ? 0 : 1; n <= sizeof(tilings) / sizeof(tilings[0]); n++) {
        tiling t = tilings[n == 0 ? tuned - 1 : n - 1];
        int64_t rows = t.TY * t.MI;
        t.NC = columns_of_item(Ev, t.TX);
        if (t.MI * t.NC <= MAX_RESULT && t.TX * t.TY <= info->max_work_group &&
            fit_chunks(&t, E, real, available, &knobs)) {
            *chosen = t;
            found = true;
            if (n == 0 || rows / 2 < L) {
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
    ca_plan_define_sizes(spec, attention);
    ca_kernel_define(spec, "TX", t.TX);
    ca_kernel_define(spec, "TY", t.TY);
    ca_kernel_define(spec, "MI", t.MI);
    ca_kernel_define(spec, "NJ", t.NJ);
    ca_kernel_define(spec, "NC", t.NC);
    ca_kernel_define(spec, "EC", t.EC);
    ca_kernel_define(spec, "KC", t.KC);
}

const ca_variant ca_variant_tiled = {
    .word = "tiled",
    .max_head = MAX_HEAD,
    .max_value_head = MAX_HEAD,
    .can_run = tiled_can_run,
    .of_device = "with work-groups of 64 and local memory for its tiles (16 KiB in "
                 "float32)",
    .fast = CA_FAST_ON_GPUS,
    .make_plan = plan_tiled,
    .knobs = knobs_of_tiled,
};
