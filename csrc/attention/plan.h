/* SPDX-License-Identifier: MIT
 *
 * The plan of one launch of an attention problem: the host chooses a kernel, its macros and
 * its number of work-items.
 */
#ifndef CLATTN_ATTENTION_PLAN_H
#define CLATTN_ATTENTION_PLAN_H

#include <stdint.h>

#include "attention/problem.h"
#include "base/status.h"
#include "opencl/program.h" /* ca_kernel_spec */

#define CA_ATTENTION_GRID_DIMS 5

/* What only kernels for CPUs read. */
typedef struct {
    int64_t key_heads;  /* of a work-item */
    int64_t block_keys; /* of a block, at most */
    int64_t turns;      /* cores that take turns at neighbouring heads, or 1 */
    bool keys_in_place; /* attention_cpu reads them where they lie */
    bool values_in_place;
    bool keys_are_far; /* they come from memory */
    uint32_t fetches;  /* what to prefetch of them: CA_FETCHES_ROWS, CA_FETCHES_STARTS or 0 */
} ca_cpu_plan;

typedef struct {
    int variant;                          /* its row in the table of variants */
    int64_t grid[CA_ATTENTION_GRID_DIMS]; /* work-items: the product */
    size_t local_size;                    /* work-items of a group */
    bool any_local_size;                  /* the kernel works in smaller groups, too */
    int64_t heads;                        /* query heads of one work-item, which share keys */
    int64_t tiles;                        /* of a work-item; see the params */
    int64_t rows; /* of the heads that share keys, of a work-item or work-group, at most */
    ca_cpu_plan cpu;
    uint32_t gradient; /* of a step of the backward pass, see the params; else 0 */
    int arrays;        /* optional operands that the program takes */
    bool redoes;       /* the kernel may ask for rows to be computed again */
    /* With more than one split of the keys, each split leaves partial_bytes for each row.
       The second kernel, `merge`, makes results of these partial rows: a group of
       merge_local work-items for each row. */
    int64_t splits;
    int64_t partial_bytes;
    size_t merge_local;
    /* Last, because no plan has most of their macros, which ca_plan_begin leaves undefined. */
    ca_kernel_spec spec;
    ca_kernel_spec merge;
} ca_attention_plan;

/* Start a plan: the kernel's name, and one work-item for each entry of the leading
   dimensions. A work-item has one head and all keys. */
void ca_plan_begin(ca_attention_plan *plan, const ca_attention *attention, const char *name,
                   size_t local_size);

/* CA_ERROR_DEVICE if the problem computes in float64 and the device cannot. */
ca_status ca_plan_check_float64(const ca_device_info *info, const ca_attention *attention,
                                ca_error *error);

/* Returns the product of `grid`, as a double, which does not overflow. */
double ca_plan_items(const ca_attention_plan *plan);

/* Define DTYPE, VALUE_DTYPE and REAL64. */
void ca_plan_define_common(ca_kernel_spec *spec, const ca_attention *attention);

/* Let the call's options be macros of one of the plan's programs: OPTIONS, ARRAYS and MASK_DTYPE. Other
   programs read options as data, and take CA_OPTIONAL_VIEWS optional operands. */
void ca_plan_define_options(ca_attention_plan *plan, ca_kernel_spec *spec,
                            const ca_attention *attention);

/* For kernels that read a call's options as data: define the macros of ca_plan_define_common, and where
   work-items of a CPU are lanes those of ca_plan_define_options. Mesa's compiler for CPUs cannot read
   params at a place that is data. */
void ca_plan_define_data(ca_attention_plan *plan, const ca_device_info *info,
                         const ca_attention *attention);

/* For kernels on CPUs: define the macros of ca_plan_define_common, LANES and ON_CPU, and set
   `unoptimised`. */
void ca_plan_define_lanes(ca_attention_plan *plan, const ca_device_info *info,
                          const ca_attention *attention);

/* For kernels on GPUs: define the macros of ca_plan_define_common and ca_plan_define_options, HEAD_E and
   HEAD_EV. */
void ca_plan_define_sizes(ca_attention_plan *plan, const ca_attention *attention);

/* True if the device has matrix units for the query's dtype. */
bool ca_plan_has_matrix_units(const ca_device_info *info, const ca_attention *attention);

/* For kernels that multiply matrices: define WARP, how warps do so. `grouped`: in groups of four. */
void ca_plan_define_warp(ca_kernel_spec *spec, const ca_device_info *info,
                         const ca_attention *attention, bool grouped);

/* Work-items for each core of a CPU, so that all cores end at about the same time. */
#define CA_ITEMS_FOR_EACH_CORE 4

/* True if a core's first cache has 48 KiB or more. A core of Zen 5 has 48 KiB. Cores of Zen 4 and
   Cascade Lake have 32 KiB. */
bool ca_first_cache_is_large(const ca_device_info *info);

/* True if a core's second cache has 2 MiB or more, as that of Emerald Rapids. Such a core prefetches a row by
   itself once the row's start is on its way. Cores of Zen 5, Zen 4 and Cascade Lake have 1 MiB, and are
   faster if kernels prefetch whole rows. */
bool ca_second_cache_is_large(const ca_device_info *info);

/* Returns how many reals fill a vector register of a CPU. A real has the type in which the kernel
   computes, float or double. */
int64_t ca_plan_lanes(const ca_device_info *info, const ca_attention *attention);

/* Returns the bytes of such a real. */
int64_t ca_plan_real_bytes(const ca_attention *attention);

static inline int64_t
ca_divide_up(int64_t count, int64_t step)
{
    return (count + step - 1) / step;
}

static inline int64_t
ca_smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

#endif
