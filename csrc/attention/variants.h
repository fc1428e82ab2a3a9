/* SPDX-License-Identifier: MIT
 *
 * The variants: ways to run attention problems, each a kernel and a plan for it. A new
 * variant is a kernel kernels/attention/<word>.cl, a file plan_<word>.c that defines
 * ca_variant_<word>, and a row of CA_VARIANTS. docs/add_a_kernel.md adds one.
 */
#ifndef CLATTN_ATTENTION_VARIANTS_H
#define CLATTN_ATTENTION_VARIANTS_H

#include <stdbool.h>
#include <stdint.h>

#include "attention/knobs.h"
#include "attention/options.h" /* CA_COMMON_OPTIONS */
#include "attention/plan.h"
#include "attention/problem.h"
#include "base/status.h"
#include "opencl/forced.h" /* ca_forced */
#include "opencl/info.h"   /* ca_device_info */

typedef enum {
    CA_FLOATS,        /* any floats */
    CA_ONE_HALF_TYPE, /* query and value of float16, or both of bfloat16 */
    CA_BFLOAT16_ONLY,
} ca_variant_dtypes;

typedef enum {
    CA_FAST_ANYWHERE,
    CA_FAST_ON_CPUS,
    CA_FAST_ON_GPUS, /* where the work-items of a group are lanes */
    CA_FAST_WITH_MATRIX_UNITS,
} ca_variant_devices;

typedef struct {
    const char *word; /* of CLATTN_KERNEL, of the kernel and of the plan */
    const char *
        scores; /* the kernel that writes scores behind this one, by the same plan; NULL: another's */

    /* What the variant takes. Refusals are put in words from the same fields. */
    ca_variant_dtypes dtypes;
    int64_t max_head; /* E and Ev are 1 to these; 0: any, 0 included */
    int64_t max_value_head;
    int64_t takes;            /* options */
    int64_t group;            /* work-items that a group of the device has to hold */
    int64_t local_memory;     /* bytes */
    bool multiplies_matrices; /* by matrix units, or by their emulation */
    /* True where a further condition holds. Its words: of the problem, of the device. */
    bool (*can_run)(const ca_device_info *info, const ca_attention *attention);
    const char *of_problem;
    const char *of_device;

    /* The problems for which the planner chooses this variant, unless an earlier row takes them. */
    ca_variant_devices fast;
    int64_t fast_rows;   /* at most so many rows of a head; 0: any number */
    int64_t fewest_rows; /* of all heads that share their keys */
    bool (*is_fast)(const ca_device_info *info, const ca_attention *attention);

    void (*make_plan)(const ca_device_info *info, const ca_attention *attention,
                      ca_attention_plan *plan);
    const ca_knob *knobs; /* what the tuner may choose in the plan; NULL: nothing */
} ca_variant;

/* Local memory that the emulation of matrix units adds to a kernel's own. */
#define CA_EMULATION_BYTES (4 << 10)

/* Kernels for matrix units count rows and keys in 32 bits. */
#define CA_MATRIX_MAX_ROWS ((int64_t)1 << 28)

/* The planner tries the variants in this order. */
#define CA_VARIANTS(row)                                                                           \
    row(decode_mma) row(decode_gpu) row(mma) row(tiled) row(decode_cpu) row(amx) row(pairs)        \
        row(cpu) row(reference)

#define CA_DECLARE_VARIANT(word) extern const ca_variant ca_variant_##word;
CA_VARIANTS(CA_DECLARE_VARIANT)
#undef CA_DECLARE_VARIANT

/* The index of each variant in the table. */
#define CA_INDEX(word) CA_INDEX_##word,
enum { CA_VARIANTS(CA_INDEX) CA_VARIANT_COUNT };
#undef CA_INDEX

/* Read CLATTN_KERNEL into `forced`: the word of a variant, which all calls use, or several words
   with commas, each after a "-", which no call uses. CA_ERROR_SETTING where no variant has a word,
   or where the reference is left out. */
ca_status ca_variant_force(const char *words, ca_forced *forced, ca_error *error);

/* The variant in a row of the table, below CA_VARIANT_COUNT. */
const ca_variant *ca_variant_at(int row);

/* True if the device is of the kind on which the variant is fast, with queries of that dtype. */
bool ca_variant_is_fast_on(const ca_device_info *info, int row, ca_dtype dtype);

/* The plan of the variant that is forced, else of the first that is fast and takes the
   problem. CA_ERROR_SETTING where the variant that is forced does not take the problem.
   CA_ERROR_DEVICE where the device lacks the dtype, or where the problem has more than
   CA_OPTIONAL_VIEWS optional arrays, which no door makes. */
ca_status ca_attention_make_plan(const ca_device_info *info, const ca_forced *forced,
                                 const ca_attention *attention, ca_attention_plan *plan,
                                 ca_error *error);

/* Choose that variant, without a plan: *row becomes its row in the table. */
ca_status ca_attention_choose(const ca_device_info *info, const ca_forced *forced,
                              const ca_attention *attention, int *row, ca_error *error);

/* Limit what a device looks like. */
void ca_variant_limit(ca_device_info *info, const ca_plan_limits *limits);

/* Plan the problem again by the variant plan->variant, within limits of its kernels. False if the
   variant has no plan within them. */
bool ca_attention_plan_within(const ca_device_info *info, const ca_forced *forced,
                              const ca_attention *attention, const ca_plan_limits *limits,
                              ca_attention_plan *plan);

/* Plan the kernel that writes the scores of attention->scored behind a variant, within limits. False if no
   plan is within them. */
bool ca_attention_plan_scores(const ca_device_info *info, const ca_attention *attention,
                              const ca_plan_limits *limits, int variant, ca_attention_plan *plan);

/* The plan of a launch that computes rows again: the reference's, with fewer work-items. `marked`:
   there are such rows. */
void ca_attention_plan_redo(const ca_device_info *info, const ca_attention *attention, bool marked,
                            ca_attention_plan *plan);

#endif
