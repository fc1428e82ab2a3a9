/* SPDX-License-Identifier: MIT */
#include "attention/variants.h"

#include <stddef.h>
#include <string.h>

#include "attention/options.h"
#include "base/strbuf.h"

#define ROW(word) &ca_variant_##word,
static const ca_variant *const variants[] = {CA_VARIANTS(ROW)};
#undef ROW

/* Most work-groups for each compute unit in a launch that computes rows again. */
#define REDOING_GROUPS 16

/* Rows of a work-item, at most, where some row is known to be computed again: a launch of all
   rows can be divided. */
#define REDOING_ROWS 8

/* What follows a variant's word where CLATTN_KERNEL asks for the emulation of matrix units. */
#define EMULATED "_emulated"

/* ---- what a variant takes ---- */

static bool
takes_dtypes(const ca_variant *variant, const ca_attention *attention)
{
    ca_dtype dtype = attention->operands[CA_ATTENTION_QUERY].dtype;
    bool equal = attention->operands[CA_ATTENTION_VALUE].dtype == dtype &&
                 !ca_attention_in_float64(attention);
    return variant->dtypes == CA_FLOATS ||
           (equal &&
            (dtype == CA_BFLOAT16 || (variant->dtypes == CA_ONE_HALF_TYPE && dtype == CA_FLOAT16)));
}

static bool
takes_heads(const ca_variant *variant, const ca_attention *attention)
{
    return variant->max_head == 0 ||
           (attention->E >= 1 && attention->E <= variant->max_head && attention->Ev >= 1 &&
            attention->Ev <= variant->max_value_head);
}

static bool
fits_device(const ca_variant *variant, const ca_device_info *info, const ca_attention *attention)
{
    bool emulated = variant->multiplies_matrices && !ca_plan_has_matrix_units(info, attention);
    return info->max_work_group >= variant->group &&
           info->local_memory >= variant->local_memory + (emulated ? CA_EMULATION_BYTES : 0);
}

/* On a CPU such a variant runs only if it is forced, which shows that its numbers are right. */
static bool
is_for_gpus(const ca_variant *variant)
{
    return variant->fast == CA_FAST_ON_GPUS || variant->fast == CA_FAST_WITH_MATRIX_UNITS;
}

/* Returns the row of the variant whose kernel of scores runs behind a row's variant. */
static int
scorer_of(int row)
{
    return variants[row]->scores != NULL ? row
           : is_for_gpus(variants[row])  ? CA_INDEX_tiled
                                         : CA_INDEX_cpu;
}

/* True if the variant takes the problem, without the scores that a kernel behind writes. */
static bool
attends(const ca_variant *variant, const ca_device_info *info, const ca_attention *attention)
{
    return takes_dtypes(variant, attention) && takes_heads(variant, attention) &&
           (ca_attention_options(attention) & ~variant->takes) == 0 &&
           fits_device(variant, info, attention) &&
           (variant->can_run == NULL || variant->can_run(info, attention));
}

/* True if a row's variant takes the problem. It writes scores itself, or a kernel behind does. */
static bool
takes(int row, const ca_device_info *info, const ca_attention *attention)
{
    bool scores = attention->scored != NULL && (variants[row]->takes & CA_USES(SCORES)) == 0;
    return attends(variants[row], info, attention) &&
           (!scores || scorer_of(row) == row || attends(variants[scorer_of(row)], info, attention));
}

static bool
is_fast_on(const ca_variant *variant, const ca_device_info *info, const ca_attention *attention)
{
    bool lanes = info->items_are_lanes;
    return variant->fast == CA_FAST_ANYWHERE || (variant->fast == CA_FAST_ON_CPUS && !lanes) ||
           (variant->fast == CA_FAST_ON_GPUS && lanes) ||
           (variant->fast == CA_FAST_WITH_MATRIX_UNITS &&
            ca_plan_has_matrix_units(info, attention));
}

static bool
is_fast(const ca_variant *variant, const ca_device_info *info, const ca_attention *attention)
{
    return is_fast_on(variant, info, attention) &&
           (variant->fast_rows == 0 || attention->L <= variant->fast_rows) &&
           (variant->fewest_rows == 0 ||
            ca_attention_heads_together(attention) * attention->L >= variant->fewest_rows) &&
           (variant->is_fast == NULL || variant->is_fast(info, attention));
}

/* ---- the same in words ---- */

static void
append_refused(ca_strbuf *text, int64_t takes)
{
    static const struct {
        int64_t options;
        const char *name;
    } refused[] = {
        {CA_PAST_OPTIONS, "past keys"},
        {CA_RAGGED_OPTIONS, "sequences of different lengths"},
        {CA_SCALE_OPTIONS, "scales of keys and values"},
        {CA_USES(DROPOUT), "dropout"},
        {CA_USES(LATE_SOFTCAP), "softcap after the mask"},
    };
    const char *last = NULL;
    const char *before = ", and no ";
    for (size_t n = 0; n < sizeof(refused) / sizeof(refused[0]); n++) {
        if ((refused[n].options & takes) != 0) {
            continue;
        }
        if (last != NULL) {
            ca_strbuf_append(text, "%s%s", before, last);
            before = ", ";
        }
        last = refused[n].name;
    }
    if (last != NULL) {
        ca_strbuf_append(text, "%s%s", strcmp(before, ", ") == 0 ? " or " : before, last);
    }
}

static ca_status
refuse(const ca_variant *variant, ca_error *error)
{
    static const char *const dtypes[] = {
        [CA_FLOATS] = "",
        [CA_ONE_HALF_TYPE] = "query and value of one half type, ",
        [CA_BFLOAT16_ONLY] = "bfloat16, ",
    };
    ca_strbuf text = {0};
    ca_strbuf_append(&text, "%shead sizes of 1 to %lld", dtypes[variant->dtypes],
                     (long long)variant->max_head);
    if (variant->max_value_head != variant->max_head) {
        ca_strbuf_append(&text, " and of value of 1 to %lld", (long long)variant->max_value_head);
    }
    if (variant->of_problem != NULL) {
        ca_strbuf_append(&text, ", %s", variant->of_problem);
    }
    append_refused(&text, variant->takes);
    if (variant->of_device != NULL) {
        ca_strbuf_append(&text, ", on devices %s", variant->of_device);
    } else if (variant->local_memory > 0) {
        int64_t bytes =
            variant->local_memory + (variant->multiplies_matrices ? CA_EMULATION_BYTES : 0);
        ca_strbuf_append(&text,
                         ", on devices with groups of %lld work-items and %lld KiB of "
                         "local memory",
                         (long long)variant->group, (long long)bytes >> 10);
    }
    ca_status status =
        ca_error_set(error, CA_ERROR_SETTING, "CLATTN_KERNEL is \"%s\", whose kernel takes %s",
                     variant->word, !text.failed ? text.data : "something else");
    ca_strbuf_free(&text);
    return status;
}

const ca_variant *
ca_variant_at(int row)
{
    return variants[row];
}

bool
ca_variant_is_fast_on(const ca_device_info *info, int row, ca_dtype dtype)
{
    ca_attention attention = {.E = 1};
    attention.operands[CA_ATTENTION_QUERY].dtype = dtype;
    return is_fast_on(variants[row], info, &attention);
}

/* The index of the variant whose word has `length` characters; the user gave `words`. */
static ca_status
find(const char *words, const char *word, size_t length, size_t *found, ca_error *error)
{
    ca_strbuf known = {0};
    for (size_t n = 0; n < CA_VARIANT_COUNT; n++) {
        if (strlen(variants[n]->word) == length && memcmp(word, variants[n]->word, length) == 0) {
            *found = n;
            ca_strbuf_free(&known);
            return CA_OK;
        }
        ca_strbuf_append(&known, "%s\"%s\"",
                         n == 0                     ? ""
                         : n + 1 < CA_VARIANT_COUNT ? ", "
                                                    : " or ",
                         variants[n]->word);
    }
    ca_status status = ca_error_set(error, CA_ERROR_SETTING,
                                    "CLATTN_KERNEL is \"%.100s\"; expected %s, or to leave some "
                                    "out a \"-\" before each, as in \"-mma,-tiled\"",
                                    words, !known.failed ? known.data : "a variant");
    ca_strbuf_free(&known);
    return status;
}

ca_status
ca_variant_force(const char *words, ca_forced *forced, ca_error *error)
{
    ca_status status = CA_OK;
    size_t n;
    if (words[0] != '-') {
        size_t length = strlen(words);
        size_t suffix = strlen(EMULATED);
        size_t rest = length > suffix ? length - suffix : 0;
        if (rest > 0 && strcmp(words + rest, EMULATED) == 0 &&
            find(words, words, rest, &n, error) == CA_OK && variants[n]->multiplies_matrices) {
            forced->emulates = true;
        } else {
            CA_TRY(find(words, words, length, &n, error));
        }
        forced->kernel = variants[n]->word;
        return CA_OK;
    }
    for (const char *word = words; word[0] != '\0';) {
        size_t length = strcspn(word, ",");
        if (word[0] == '-') {
            CA_TRY(find(words, word + 1, length - 1, &n, error));
        } else {
            CA_TRY(find(words, words, strlen(words), &n, error)); /* refuses all of them */
        }
        if (n == CA_INDEX_reference) {
            CA_TRY(ca_error_set(error, CA_ERROR_SETTING,
                                "CLATTN_KERNEL is \"%.100s\"; \"%s\" takes what the others refuse "
                                "and cannot be left out",
                                words, variants[n]->word));
        }
        forced->left_out |= UINT32_C(1) << n;
        word += length + (word[length] == ',');
    }
done:
    return status;
}

/* ---- the choice ---- */

static ca_status
choose(const ca_device_info *info, const ca_forced *forced, const ca_attention *attention,
       size_t *chosen, ca_error *error)
{
    size_t n = 0;
    ca_status status = ca_plan_check_float64(info, attention, error);
    if (status != CA_OK) {
        return status;
    }
    /* The last row, the reference, is always fast and takes everything. */
    while (forced->kernel != NULL
               ? strcmp(forced->kernel, variants[n]->word) != 0
               : (forced->left_out >> n & 1) != 0 || !is_fast(variants[n], info, attention) ||
                     !takes((int)n, info, attention)) {
        n++;
    }
    *chosen = n;
    if (!takes((int)n, info, attention)) {
        return refuse(variants[n], error);
    }
    if (variants[n]->multiplies_matrices && info->type != CA_DEVICE_CPU && !forced->emulates &&
        !ca_plan_has_matrix_units(info, attention)) {
        return ca_error_set(error, CA_ERROR_SETTING,
                            "CLATTN_KERNEL is \"%s\", but %s has no matrix units for this dtype; "
                            "\"%s" EMULATED "\" emulates them, slowly",
                            variants[n]->word, info->name, variants[n]->word);
    }
    return CA_OK;
}

/* Makes the plan of a row of the table for a device that looks like this. */
static void
make_plan(const ca_device_info *seen, const ca_attention *attention, int row,
          ca_attention_plan *plan)
{
    bool scores = row == CA_INDEX_reference && attention->scored != NULL;
    variants[row]->make_plan(seen, scores ? attention->scored : attention, plan);
    plan->variant = row;
    if (seen->optimises_slowly && seen->type == CA_DEVICE_CPU && is_for_gpus(variants[row])) {
        plan->spec.unoptimised = true;
        plan->merge.unoptimised = true;
    }
}

void
ca_variant_limit(ca_device_info *info, const ca_plan_limits *limits)
{
    info->max_work_group = ca_smaller(info->max_work_group, limits->group);
    if (limits->local_memory < info->local_memory) {
        info->local_memory = limits->local_memory;
        info->ample_local_memory = info->group_matrices = false;
    }
}

ca_status
ca_attention_make_plan(const ca_device_info *info, const ca_forced *forced,
                       const ca_attention *attention, ca_attention_plan *plan, ca_error *error)
{
    ca_status status = CA_OK;
    size_t row = 0;
    const ca_device_info *seen = info;
    ca_device_info limited;
    ca_attention_role roles[CA_OPTIONAL_ROLES];
    int optional =
        ca_attention_optional(attention->scored != NULL ? attention->scored : attention, roles);
    if (optional > CA_OPTIONAL_VIEWS) {
        CA_TRY(ca_error_set(error, CA_ERROR_DEVICE,
                            "internal error: %s has %d optional arrays; kernels take at most %d",
                            attention->call, optional, CA_OPTIONAL_VIEWS));
    }
    if (ca_forced_limits(forced)) {
        ca_forced_limit(forced, info, &limited);
        seen = &limited;
    }
    CA_TRY(choose(seen, forced, attention, &row, error));
    make_plan(seen, attention, (int)row, plan);
done:
    return status;
}

ca_status
ca_attention_choose(const ca_device_info *info, const ca_forced *forced,
                    const ca_attention *attention, int *row, ca_error *error)
{
    size_t found = 0;
    ca_device_info limited;
    ca_forced_limit(forced, info, &limited);
    ca_status status = choose(&limited, forced, attention, &found, error);
    *row = (int)found;
    return status;
}

bool
ca_attention_plan_within(const ca_device_info *info, const ca_forced *forced,
                         const ca_attention *attention, const ca_plan_limits *limits,
                         ca_attention_plan *plan)
{
    ca_device_info limited;
    ca_forced_limit(forced, info, &limited);
    ca_variant_limit(&limited, limits);
    if (!takes(plan->variant, &limited, attention)) {
        return false;
    }
    make_plan(&limited, attention, plan->variant, plan);
    return true;
}

bool
ca_attention_plan_scores(const ca_device_info *info, const ca_attention *attention,
                         const ca_plan_limits *limits, int variant, ca_attention_plan *plan)
{
    ca_device_info limited = *info;
    ca_variant_limit(&limited, limits);
    int row = scorer_of(variant);
    if (!attends(variants[row], &limited, attention)) {
        return false;
    }
    make_plan(&limited, attention->scored, row, plan);
    plan->spec.name = variants[row]->scores;
    plan->cpu.values_in_place = true; /* nobody reads them */
    plan->cpu.fetches = 0;
    return true;
}

void
ca_attention_plan_redo(const ca_device_info *info, const ca_attention *attention, bool marked,
                       ca_attention_plan *plan)
{
    ca_variant_reference.make_plan(info, attention, plan);
    /* Few rows have to be computed again. Each work-item looks at several rows, because a
       work-item that finds nothing to do costs time too. */
    const int64_t *grid = plan->grid;
    int64_t rows = grid[0] * grid[1] * grid[2] * grid[3];
    int64_t items = info->compute_units * REDOING_GROUPS * (int64_t)plan->local_size;
    plan->tiles = ca_divide_up(rows, items);
    plan->tiles = ca_smaller(plan->tiles, marked ? REDOING_ROWS : INT32_MAX);
    plan->grid[0] = ca_divide_up(rows, plan->tiles);
    plan->grid[1] = plan->grid[2] = plan->grid[3] = 1;
}
