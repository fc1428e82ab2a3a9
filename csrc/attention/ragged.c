/* SPDX-License-Identifier: MIT */
#include "attention/ragged.h"

#include <math.h>
#include <stdlib.h>

#include "attention/alone.h"
#include "attention/launch.h"
#include "attention/plan.h"
#include "attention/trial.h"
#include "attention/variants.h"
#include "kernels/attention/sequences.h"
#include "opencl/prepare.h"
#include "opencl/runtime.h"
#include "opencl/step.h" /* CA_MAX_STEPS */
#include "opencl/storage.h"

/* A split of a sequence's keys has so many bytes, at least. */
#define BYTES_OF_SPLIT (256 << 10)

/* A range of rows, and what it costs: pairs of a row and a key. */
typedef struct {
    int64_t numbers[CA_RANGE_NUMBERS];
    double cost;
} row_range;

/* The sequences that one variant computes. */
typedef struct {
    int64_t sequences;
    int64_t most_rows; /* of a sequence */
    double keys;       /* of all of them */
    ca_attention_plan plan;
    int64_t range; /* the place of its ranges in the list of all ranges */
    int64_t ranges;
    int64_t merge; /* the place of the rows that are merged, ranges of one row */
    int64_t merges;
    double pairs;
} kind;

typedef struct {
    ca_device *device;
    const ca_device_info *info;
    const ca_attention *attention;
    int64_t count; /* sequences, with one for the rows behind the last sequence */
    int *variants; /* of each sequence; -1 without rows */
    int64_t *splits;
    kind kinds[CA_VARIANT_COUNT];
    row_range *ranges;
    int64_t range_count;
    int64_t partial; /* partial rows of a head */
    int64_t *table;
    int64_t table_size;
} ragged;

/* ---- sequences ---- */

static int64_t
rows_of(const ragged *r, int64_t b)
{
    const ca_sequences *sequences = r->attention->sequences;
    int64_t end = b < sequences->count ? sequences->rows[b + 1] : r->attention->L;
    return end - sequences->rows[b];
}

static int64_t
keys_of(const ragged *r, int64_t b)
{
    const ca_sequences *sequences = r->attention->sequences;
    return b < sequences->count ? sequences->lengths[b] : 0;
}

/* The numbers of sequence b, without its splits. */
static void
describe_sequence(const ragged *r, int64_t b, int64_t numbers[CA_SEQUENCE_NUMBERS])
{
    const ca_sequences *sequences = r->attention->sequences;
    const int64_t farthest = r->attention->L + r->attention->T;
    int64_t first = sequences->rows[b];
    int64_t shift = keys_of(r, b) - rows_of(r, b);
    int64_t lower = -farthest;
    int64_t upper = farthest;
    if (sequences->left < farthest) {
        lower = shift - sequences->left - first;
    }
    if (sequences->right < farthest) {
        upper = shift + sequences->right - first;
    }
    if (sequences->causal) {
        upper = ca_smaller(upper, -first);
    }
    numbers[CA_SEQUENCE_ROW] = first;
    numbers[CA_SEQUENCE_ROWS] = rows_of(r, b);
    numbers[CA_SEQUENCE_KEY] = b < sequences->count ? sequences->keys[b] : 0;
    numbers[CA_SEQUENCE_KEYS] = keys_of(r, b);
    numbers[CA_SEQUENCE_LOWER] = lower < -farthest ? -farthest : lower;
    numbers[CA_SEQUENCE_UPPER] = ca_smaller(upper, farthest);
    numbers[CA_SEQUENCE_POSITION] = (sequences->rows_are_last ? shift : 0) - first;
}

/* The operand whose view begins at a header. Without a table it stands for one that comes later. */
static ca_operand
sequences_operand(const ragged *r, int64_t header)
{
    static int64_t later;
    bool there = r->table != NULL;
    return (ca_operand){
        .dtype = CA_INT64,
        .data = there ? r->table : &later,
        .rows = there ? r->table_size : 1,
        .columns = 1,
        .row_stride = 1,
        .memory = {.data = there ? r->table : &later,
                   .bytes = (size_t)(there ? r->table_size : 1) * sizeof(*r->table),
                   .offset = header * CA_HEADER_NUMBERS},
    };
}

/* Make a problem of `count` sequences with L rows and T keys each, for a plan. */
static void
make_model(const ragged *r, int64_t L, int64_t T, int64_t count, ca_attention *model)
{
    const ca_attention *attention = r->attention;
    const ca_sequences *sequences = attention->sequences;
    bool ends = sequences->right != CA_BAND_UNBOUNDED;
    *model = *attention;
    model->L = L;
    model->S = model->T = T > 0 ? T : 1;
    model->batch[0] = count;
    model->operands[CA_ATTENTION_SEQUENCES] = sequences_operand(r, 0);
    /* Each has its own keys, as far apart as rows of whole 16 bytes may be. */
    model->operands[CA_ATTENTION_KEY].batch[0] = CA_WIDE_BYTES;
    model->operands[CA_ATTENTION_VALUE].batch[0] = CA_WIDE_BYTES;
    model->below = sequences->left < attention->L + attention->T
                       ? sequences->left + L /* of any sequence */
                       : CA_BAND_UNBOUNDED;
    model->above = ends                ? ca_smaller(sequences->right, model->T) + model->T - L
                   : sequences->causal ? 0
                                       : CA_BAND_UNBOUNDED;
}

/* ---- plans ---- */

/* Choose a variant for each sequence. */
static ca_status
choose_variants(ragged *r, const ca_forced *forced, ca_error *error)
{
    ca_status status = CA_OK;
    ca_attention model;
    for (int n = 0; n < CA_VARIANT_COUNT; n++) {
        r->kinds[n] = (kind){.sequences = 0};
    }
    for (int64_t b = 0; b < r->count; b++) {
        int64_t rows = rows_of(r, b);
        int64_t keys = keys_of(r, b);
        r->variants[b] = -1;
        r->splits[b] = 1;
        if (rows == 0) {
            continue;
        }
        make_model(r, rows, keys, 1, &model);
        CA_TRY(ca_attention_choose(r->info, forced, &model, &r->variants[b], error));
        kind *of = &r->kinds[r->variants[b]];
        of->sequences++;
        of->most_rows = rows > of->most_rows ? rows : of->most_rows;
        of->keys += (double)keys;
    }
done:
    return status;
}

/* Plan the variants that sequences have. *failed becomes a variant that the device cannot plan or leaves out,
   or stays -1. CA_ERROR_SETTING if this variant is forced. */
static ca_status
plan_variants(ragged *r, const ca_forced *forced, int *failed, ca_error *error)
{
    const ca_plan_limits limits = {r->info->max_work_group, r->info->local_memory};
    for (int n = 0; n < CA_VARIANT_COUNT && *failed < 0; n++) {
        kind *of = &r->kinds[n];
        ca_attention model;
        if (of->sequences == 0) {
            continue;
        }
        make_model(r, of->most_rows, (int64_t)(of->keys / (double)of->sequences), of->sequences,
                   &model);
        of->plan.variant = n;
        bool chosen = forced->kernel != NULL || n == CA_INDEX_reference;
        if (!ca_attention_plan_within(r->info, forced, &model, &limits, &of->plan) ||
            (!chosen && ca_device_leaves_out(r->device, &of->plan.spec))) {
            *failed = n;
        }
    }
    return *failed < 0 || forced->kernel == NULL
               ? CA_OK
               : ca_error_set(error, CA_ERROR_SETTING,
                              "CLATTN_KERNEL is \"%s\", which has no plan for these sequences "
                              "together",
                              forced->kernel);
}

/* ---- ranges ---- */

/* Divide the keys of each sequence so that its splits are about as long as the others' keys. */
static void
choose_splits(ragged *r)
{
    const int64_t key_bytes = ca_attention_key_bytes(r->attention);
    for (int64_t b = 0; b < r->count; b++) {
        const kind *of = r->variants[b] >= 0 ? &r->kinds[r->variants[b]] : NULL;
        if (of == NULL || of->plan.merge_local == 0) {
            continue;
        }
        double mean = of->keys / (double)of->sequences / (double)of->plan.splits;
        double least = (double)BYTES_OF_SPLIT /
                       (double)(key_bytes > 0 ? key_bytes * of->plan.cpu.key_heads : 1);
        double splits = floor((double)keys_of(r, b) / fmax(fmax(mean, least), 1) + 0.5);
        r->splits[b] = splits > 1 ? (int64_t)splits : 1;
    }
}

/* Returns how many keys the rows up to row i of a sequence may see. */
static double
seen_by(const int64_t numbers[CA_SEQUENCE_NUMBERS], int64_t first, int64_t last)
{
    double start = (double)(numbers[CA_SEQUENCE_LOWER] + numbers[CA_SEQUENCE_ROW] + first);
    double end = (double)(numbers[CA_SEQUENCE_UPPER] + numbers[CA_SEQUENCE_ROW] + last + 1);
    return fmax(fmin(end, (double)numbers[CA_SEQUENCE_KEYS]) - fmax(start, 0), 1);
}

/* Write the ranges of sequence b to `to`, unless it is NULL. Returns how many there are. */
static int64_t
divide_sequence(const ragged *r, int64_t b, row_range *to)
{
    const ca_attention_plan *plan = &r->kinds[r->variants[b]].plan;
    int64_t rows = rows_of(r, b) * plan->heads;
    int64_t count = ca_divide_up(rows, plan->rows);
    int64_t numbers[CA_SEQUENCE_NUMBERS];
    if (to == NULL) {
        return count * r->splits[b];
    }
    describe_sequence(r, b, numbers);
    for (int64_t n = 0; n < count; n++) {
        int64_t first = n * plan->rows;
        int64_t size = ca_smaller(plan->rows, rows - first);
        bool all = count == 1;
        double keys = seen_by(numbers, all ? 0 : first / plan->heads,
                              all ? rows_of(r, b) - 1 : (first + size - 1) / plan->heads);
        for (int64_t split = 0; split < r->splits[b]; split++) {
            *to++ =
                (row_range){{b, first, size, split}, keys * (double)size / (double)r->splits[b]};
        }
    }
    return count * r->splits[b];
}

/* Orders ranges by falling cost, and those of one cost by their numbers. */
static int
compare_costs(const void *a, const void *b)
{
    const row_range *left = a;
    const row_range *right = b;
    if (left->cost != right->cost) {
        return left->cost < right->cost ? 1 : -1;
    }
    for (int n = 0; n < CA_RANGE_NUMBERS; n++) {
        if (left->numbers[n] != right->numbers[n]) {
            return left->numbers[n] > right->numbers[n] ? 1 : -1;
        }
    }
    return 0;
}

/* Sort ranges by their costs. Drivers for CPUs give each core a run of work-items that follow each other. So
   there the ranges are dealt out to the cores, back and forth, and those of a core follow each other. */
static ca_status
sort_ranges(const ragged *r, row_range *ranges, int64_t count, ca_error *error)
{
    int64_t cores = r->info->type == CA_DEVICE_CPU ? r->info->compute_units : 1;
    if (count < 2) {
        return CA_OK;
    }
    qsort(ranges, (size_t)count, sizeof(*ranges), compare_costs);
    if (cores == 1 || count <= cores) {
        return CA_OK;
    }
    row_range *sorted = malloc((size_t)count * sizeof(*sorted));
    if (sorted == NULL) {
        return ca_error_set(error, CA_ERROR_MEMORY, "no memory for the ranges of rows");
    }
    int64_t placed = 0;
    for (int64_t core = 0; core < cores; core++) {
        for (int64_t first = 0; first < count; first += 2 * cores) {
            const int64_t there = first + core;
            const int64_t back = first + 2 * cores - 1 - core;
            if (there < count) {
                sorted[placed++] = ranges[there];
            }
            if (back < count) {
                sorted[placed++] = ranges[back];
            }
        }
    }
    for (int64_t n = 0; n < count; n++) {
        ranges[n] = sorted[n];
    }
    free(sorted);
    return CA_OK;
}

/* List the ranges of all variants, and the rows that are merged. */
static ca_status
list_ranges(ragged *r, ca_error *error)
{
    ca_status status = CA_OK;
    int64_t most = 0;
    /* The work-items of the reference find their rows themselves. */
    if (r->kinds[CA_INDEX_reference].sequences > 0) {
        return CA_OK;
    }
    for (int64_t b = 0; b < r->count; b++) {
        if (r->variants[b] >= 0) {
            most += divide_sequence(r, b, NULL) + (r->splits[b] > 1 ? rows_of(r, b) : 0);
        }
    }
    r->ranges = malloc((size_t)(most > 0 ? most : 1) * sizeof(*r->ranges));
    if (r->ranges == NULL) {
        return ca_error_set(error, CA_ERROR_MEMORY, "no memory for the ranges of rows");
    }
    for (int n = 0; n < CA_VARIANT_COUNT; n++) {
        kind *of = &r->kinds[n];
        of->range = r->range_count;
        for (int64_t b = 0; b < r->count && of->sequences > 0; b++) {
            r->range_count +=
                r->variants[b] == n ? divide_sequence(r, b, r->ranges + r->range_count) : 0;
        }
        of->ranges = r->range_count - of->range;
        for (int64_t k = of->range; k < r->range_count; k++) {
            of->pairs += r->ranges[k].cost;
        }
        CA_TRY(sort_ranges(r, r->ranges + of->range, of->ranges, error));
        of->merge = r->range_count;
        for (int64_t b = 0; b < r->count && of->sequences > 0; b++) {
            bool merged = r->variants[b] == n && r->splits[b] > 1;
            for (int64_t i = 0; merged && i < rows_of(r, b); i++) {
                r->ranges[r->range_count++] = (row_range){{b, i, 1, 0}, 0};
                r->partial += r->splits[b];
            }
        }
        of->merges = r->range_count - of->merge;
    }
done:
    return status;
}

/* ---- the operand `sequences` ---- */

/* A header for each variant's step, and one for its merge. */
#define HEADERS ((int64_t)2 * CA_VARIANT_COUNT)

static ca_status
write_table(ragged *r, ca_error *error)
{
    const ca_sequences *given = r->attention->sequences;
    int64_t ranges = HEADERS * CA_HEADER_NUMBERS;
    int64_t sequences = ranges + r->range_count * CA_RANGE_NUMBERS;
    int64_t pages = sequences + r->count * CA_SEQUENCE_NUMBERS;
    int64_t partial = 0;
    r->table_size = pages + given->page_count;
    r->table = malloc((size_t)r->table_size * sizeof(*r->table));
    if (r->table == NULL) {
        return ca_error_set(error, CA_ERROR_MEMORY, "no memory for the numbers of sequences");
    }
    for (int64_t n = 0; n < HEADERS; n++) {
        const kind *of = &r->kinds[n / 2];
        int64_t *header = r->table + n * CA_HEADER_NUMBERS;
        header[CA_HEADER_RANGES] = ranges + (n % 2 == 0 ? of->range : of->merge) * CA_RANGE_NUMBERS;
        header[CA_HEADER_SEQUENCES] = sequences;
        header[CA_HEADER_COUNT] = r->count;
        header[CA_HEADER_PAGES] = pages;
        header[CA_HEADER_PAGE_SIZE] = given->page_size;
        static const int strides[CA_PAGED_OPERANDS] = {
            CA_HEADER_KEY_PAGE,    CA_HEADER_VALUE_PAGE, CA_HEADER_KEY_SCALE,
            CA_HEADER_VALUE_SCALE, CA_HEADER_KEY_OFFSET, CA_HEADER_VALUE_OFFSET};
        for (int k = 0; k < CA_PAGED_OPERANDS; k++) {
            header[strides[k]] = given->paged[k] != NULL ? given->paged[k]->strides[0] : 0;
        }
        header[CA_HEADER_PARTIAL] = r->partial;
    }
    for (int64_t n = 0; n < r->range_count; n++) {
        for (int k = 0; k < CA_RANGE_NUMBERS; k++) {
            r->table[ranges + n * CA_RANGE_NUMBERS + k] = r->ranges[n].numbers[k];
        }
    }
    for (int64_t b = 0; b < r->count; b++) {
        int64_t *numbers = r->table + sequences + b * CA_SEQUENCE_NUMBERS;
        describe_sequence(r, b, numbers);
        numbers[CA_SEQUENCE_SPLITS] = r->splits[b];
        numbers[CA_SEQUENCE_PARTIAL] = partial;
        partial += r->splits[b] > 1 ? rows_of(r, b) * r->splits[b] : 0;
    }
    for (int64_t n = 0; n < given->page_count; n++) {
        r->table[pages + n] = given->pages[n];
    }
    return CA_OK;
}

/* ---- the launch ---- */

/* Set the number of work-items for `ranges` ranges. */
static void
set_grid(const ca_attention *attention, int64_t ranges, size_t local_size, ca_attention_plan *plan)
{
    plan->grid[0] = 1;
    plan->grid[1] = attention->batch[1] * attention->batch[2];
    plan->grid[2] = 1;
    plan->grid[3] = ranges;
    plan->grid[4] = (int64_t)local_size;
}

/* Add the step of the reference, which finds the sequences of all rows itself. */
static int
add_reference(const ragged *r, ca_launched *steps)
{
    const ca_attention *attention = r->attention;
    const ca_attention_plan *plan = &r->kinds[CA_INDEX_reference].plan;
    steps[0] =
        (ca_launched){.attention = *attention, .plan = *plan, .products = CA_REFERENCE_TIMES};
    steps[0].attention.operands[CA_ATTENTION_SEQUENCES] = sequences_operand(r, 0);
    set_grid(attention, attention->L, 1, &steps[0].plan);
    return 1;
}

/* Add the step of a variant, and that of its merge. */
static int
add_steps(const ragged *r, int n, ca_launched *steps, int count)
{
    const kind *of = &r->kinds[n];
    const ca_attention *attention = r->attention;
    ca_launched *step = &steps[count++];
    double columns = (double)(attention->E + attention->Ev) * 2;
    *step = (ca_launched){.attention = *attention, .plan = of->plan};
    step->attention.operands[CA_ATTENTION_SEQUENCES] = sequences_operand(r, (int64_t)2 * n);
    step->plan.cpu.turns = 1;
    set_grid(attention, of->ranges, of->plan.local_size, &step->plan);
    step->plan.grid[1] /= of->plan.heads * of->plan.cpu.key_heads;
    step->work = of->pairs * columns * (double)step->plan.grid[1] * (double)of->plan.cpu.key_heads;
    if (of->merges > 0) {
        ca_launched *merge = &steps[count++];
        *merge = *step;
        merge->attention.operands[CA_ATTENTION_SEQUENCES] =
            sequences_operand(r, (int64_t)2 * n + 1);
        merge->plan.spec = of->plan.merge;
        merge->plan.local_size = of->plan.merge_local;
        merge->plan.any_local_size = false;
        merge->flags = CA_MERGES;
        merge->work = (double)of->merges * (double)attention->Ev;
        set_grid(attention, of->merges, of->plan.merge_local, &merge->plan);
    }
    return count;
}

/* Launch the steps of all variants. */
static ca_status
launch(ragged *r, ca_error *error)
{
    ca_status status = CA_OK;
    const ca_attention *attention = r->attention;
    ca_attention whole = *attention;
    ca_storage *partial = NULL;
    int count = 0;
    int64_t partial_bytes = 0;
    ca_launched *steps = malloc(CA_MAX_STEPS * sizeof(*steps));
    if (steps == NULL) {
        return ca_error_set(error, CA_ERROR_MEMORY, "no memory for the steps of a launch");
    }
    bool by_reference = r->kinds[CA_INDEX_reference].sequences > 0;
    count = by_reference ? add_reference(r, steps) : 0;
    for (int n = 0; n < CA_VARIANT_COUNT && !by_reference; n++) {
        if (r->kinds[n].sequences > 0) {
            partial_bytes = r->kinds[n].merges > 0 ? r->kinds[n].plan.partial_bytes : partial_bytes;
            count = add_steps(r, n, steps, count);
        }
    }
    if (r->partial > 0) {
        int64_t bytes;
        int64_t sizes[] = {attention->batch[1], attention->batch[2], r->partial, partial_bytes};
        CA_TRY(ca_shape_count(4, sizes, "query", &bytes, error));
        CA_TRY(ca_storage_new(r->device, (size_t)bytes, "partial results", &partial, error));
    }
    whole.operands[CA_ATTENTION_SEQUENCES] = sequences_operand(r, 0);
    CA_TRY(ca_attention_launch_ragged(r->device, &whole, steps, count, partial, error));
done:
    ca_storage_release(partial);
    free(steps);
    return status;
}

/* Build the kernel of each variant, and try it. *failed becomes the variant whose kernel fails. */
static ca_status
prepare_variants(ragged *r, const ca_forced *forced, int *failed, ca_error *error)
{
    ca_status status = CA_OK;
    bool tries = forced->kernel == NULL && forced->trials != CA_TRIALS_OFF;
    for (int n = 0; n < CA_VARIANT_COUNT && status == CA_OK; n++) {
        ca_kernel *kernel;
        if (r->kinds[n].sequences == 0) {
            continue;
        }
        *failed = n;
        CA_TRY(ca_kernel_get(r->device, &r->kinds[n].plan.spec, &kernel, error));
        if (tries) {
            const ca_tried tried = ca_alone_variant(n);
            CA_TRY(
                ca_attention_try(r->device, r->attention, &tried, &r->kinds[n].plan.spec, error));
        }
    }
    *failed = -1;
done:
    return status;
}

/* Launch the problem with variants that are not left out. *failed becomes a variant that does not work, or
   stays -1. */
static ca_status
launch_variants(ragged *r, const ca_forced *forced, int *failed, ca_error *error)
{
    ca_status status = CA_OK;
    CA_TRY(choose_variants(r, forced, error));
    CA_TRY(plan_variants(r, forced, failed, error));
    if (*failed >= 0) {
        return CA_OK;
    }
    CA_TRY(prepare_variants(r, forced, failed, error));
    r->range_count = r->partial = 0;
    choose_splits(r);
    CA_TRY(list_ranges(r, error));
    CA_TRY(write_table(r, error));
    CA_TRY(launch(r, error));
done:
    free(r->ranges);
    free(r->table);
    r->ranges = NULL;
    r->table = NULL;
    return status;
}

ca_status
ca_attention_run_ragged(ca_device *device, const ca_forced *forced, const ca_attention *attention,
                        ca_error *error)
{
    ca_status status = CA_OK;
    const ca_sequences *sequences = attention->sequences;
    int64_t behind = attention->L - sequences->rows[sequences->count];
    ca_forced now = *forced;
    int *variants = NULL;
    int64_t *splits = NULL;
    ragged r = {.device = device,
                .info = ca_device_get_info(device),
                .attention = attention,
                .count = sequences->count + (behind > 0)};
    CA_TRY(ca_attention_find_instructions(device, forced, attention, error));
    CA_TRY(ca_device_prepare(device, error));
    now.left_out |= ca_attention_wrong(device, attention);
    variants = malloc((size_t)(r.count + 1) * sizeof(*variants));
    splits = malloc((size_t)(r.count + 1) * sizeof(*splits));
    r.variants = variants;
    r.splits = splits;
    if (variants == NULL || splits == NULL) {
        status = ca_error_set(error, CA_ERROR_MEMORY, "no memory for %lld sequences",
                              (long long)sequences->count);
        goto done;
    }
    for (bool again = true; again;) {
        int failed = -1;
        status = launch_variants(&r, &now, &failed, error);
        /* Where the reference computes a sequence, the launch is its own. Nothing takes its place. */
        bool by_reference = r.kinds[CA_INDEX_reference].sequences > 0;
        bool is_last = failed >= 0 ? failed == CA_INDEX_reference : by_reference;
        bool wrong = status == CA_ERROR_KERNEL && forced->kernel == NULL && !is_last;
        again = wrong || (status == CA_OK && failed >= 0);
        if (wrong && failed >= 0) {
            ca_device_leave_out(device, &r.kinds[failed].plan.spec, error->message);
        }
        if (wrong) {
            ca_error_clear(error);
        }
        now.left_out |= failed >= 0 ? UINT32_C(1) << failed
                        : again     ? ~(UINT32_C(1) << CA_INDEX_reference)
                                    : 0;
    }
done:
    free(variants);
    free(splits);
    return status;
}
