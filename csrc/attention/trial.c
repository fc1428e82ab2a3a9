/* SPDX-License-Identifier: MIT */
#include "attention/trial.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attention/launch.h"
#include "attention/variants.h"
#include "opencl/runtime.h"
#include "opencl/verdict.h"

/* The small problem: heads that share their keys, and a causal band, so that no length is whole
   tiles and each variant takes the problem. */
#define HEADS 4
#define ROWS  5
#define KEYS  70

/* Results may differ by this many steps of the dtype at 1, which no result exceeds. Variants round
   weights to half types, and sum in other orders. */
#define STEPS_OF_HALF_TYPES 4
#define STEPS_OF_FLOATS     256

#define FLOAT_DTYPES (CA_FLOAT64 - CA_FLOAT16 + 1)

/* How a dtype holds numbers. */
typedef struct {
    int mantissa; /* bits */
    int exponent;
} format;

static format
format_of(ca_dtype dtype)
{
    switch (dtype) {
    case CA_FLOAT16:
        return (format){10, 5};
    case CA_BFLOAT16:
        return (format){7, 8};
    case CA_FLOAT64:
        return (format){52, 11};
    default:
        return (format){23, 8};
    }
}

/* Fill an array with numbers of both signs, of sizes from 1/8 to 1. */
static void
fill_array(void *array, ca_dtype dtype, size_t count, uint64_t seed)
{
    const format f = format_of(dtype);
    const size_t size = ca_dtype_size(dtype);
    const uint64_t bias = (UINT64_C(1) << (f.exponent - 1)) - 1;
    uint64_t random = seed;
    for (size_t i = 0; i < count; i++) {
        random = random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        uint64_t stirred = random ^ random >> 29;
        uint64_t exponent = bias - 1 - (stirred >> 60) % 3;
        uint64_t mantissa = stirred >> 4 & ((UINT64_C(1) << f.mantissa) - 1);
        uint64_t sign = stirred >> 59 & 1;
        uint64_t bits = sign << (f.mantissa + f.exponent) | exponent << f.mantissa | mantissa;
        memcpy((char *)array + i * size, &bits, size); /* little-endian, as all devices are */
    }
}

static double
number_at(const void *array, ca_dtype dtype, size_t i)
{
    const format f = format_of(dtype);
    const size_t size = ca_dtype_size(dtype);
    uint64_t bits = 0;
    memcpy(&bits, (const char *)array + i * size, size);
    uint64_t mantissa = bits & ((UINT64_C(1) << f.mantissa) - 1);
    int exponent = (int)(bits >> f.mantissa & ((UINT64_C(1) << f.exponent) - 1));
    int bias = (1 << (f.exponent - 1)) - 1;
    if (exponent == 2 * bias + 1) {
        return NAN;
    }
    double magnitude = exponent == 0 ? ldexp((double)mantissa, 1 - bias - f.mantissa)
                                     : ldexp((double)(mantissa | UINT64_C(1) << f.mantissa),
                                             exponent - bias - f.mantissa);
    return (bits >> (f.mantissa + f.exponent) & 1) != 0 ? -magnitude : magnitude;
}

/* The largest difference of two arrays; NaN where a number is not finite. */
static double
difference_of(const void *a, const void *b, ca_dtype dtype, size_t count)
{
    double most = 0;
    for (size_t i = 0; i < count; i++) {
        double apart = fabs(number_at(a, dtype, i) - number_at(b, dtype, i));
        most = apart <= most ? most : apart;
    }
    return most;
}

/* ---- the small problem ---- */

static void
set_operand(ca_attention *small, ca_attention_role role, ca_dtype dtype, void *data, int64_t rows,
            int64_t columns, bool for_each_head)
{
    ca_operand *operand = &small->operands[role];
    *operand = (ca_operand){.dtype = dtype,
                            .data = data,
                            .rows = rows,
                            .columns = columns,
                            .row_stride = columns,
                            .column_stride = 1};
    operand->batch[CA_BATCH_DIMS - 1] = for_each_head ? rows * columns : 0;
    operand->memory = ca_attention_extent(small, role);
}

/* Compute the small problem into `output` by the variant, or by the reference. */
static ca_status
compute(ca_device *device, const char *word, ca_attention *small, void *output, ca_error *error)
{
    ca_status status = CA_OK;
    ca_attention_plan plan;
    const ca_forced forced = {.kernel = word};
    const ca_operand *query = &small->operands[CA_ATTENTION_QUERY];
    set_operand(small, CA_ATTENTION_OUTPUT, query->dtype, output, ROWS, small->Ev, true);
    CA_TRY(ca_attention_make_plan(ca_device_get_info(device), &forced, small, &plan, error));
    CA_TRY(ca_attention_launch(device, small, &plan, error));
done:
    return status;
}

typedef struct {
    const ca_attention *attention; /* the user's */
    const char *word;              /* of the variant */
} trial;

static ca_attention
small_problem(const ca_attention *attention)
{
    ca_tensor absent[CA_ATTENTION_OPERANDS];
    ca_attention small = {.batch = {1, 1, HEADS},
                          .L = ROWS,
                          .S = KEYS,
                          .T = KEYS,
                          .E = attention->E,
                          .Ev = attention->Ev};
    ca_attention_init(&small, absent);
    small.above = KEYS - ROWS;
    small.scale = 4 / sqrt((double)attention->E);
    small.in_float64 = attention->in_float64;
    small.call = "the trial of a kernel";
    for (int role = 0; role < CA_ATTENTION_OPERANDS; role++) {
        small.operands[role].dtype = CA_FLOAT32;
    }
    return small;
}

static ca_status
compare(ca_device *device, const ca_kernel_spec *spec, const void *context, ca_error *error)
{
    ca_status status = CA_OK;
    const trial *t = context;
    ca_dtype dtype = t->attention->operands[CA_ATTENTION_QUERY].dtype;
    ca_dtype value_dtype = t->attention->operands[CA_ATTENTION_VALUE].dtype;
    ca_attention small = small_problem(t->attention);
    size_t queries = (size_t)(HEADS * ROWS * small.E);
    size_t keys = (size_t)(KEYS * small.E);
    size_t values = (size_t)(KEYS * small.Ev);
    size_t results = (size_t)(HEADS * ROWS * small.Ev);
    void *query = calloc(queries, ca_dtype_size(dtype));
    void *key = calloc(keys, ca_dtype_size(dtype));
    void *value = calloc(values, ca_dtype_size(value_dtype));
    void *found = calloc(results, ca_dtype_size(dtype));
    void *right = calloc(results, ca_dtype_size(dtype));
    if (query == NULL || key == NULL || value == NULL || found == NULL || right == NULL) {
        CA_TRY(ca_error_set(error, CA_ERROR_MEMORY, "no memory to try a kernel"));
    }
    fill_array(query, dtype, queries, 1);
    fill_array(key, dtype, keys, 2);
    fill_array(value, value_dtype, values, 3);
    set_operand(&small, CA_ATTENTION_QUERY, dtype, query, ROWS, small.E, true);
    set_operand(&small, CA_ATTENTION_KEY, dtype, key, KEYS, small.E, false);
    set_operand(&small, CA_ATTENTION_VALUE, value_dtype, value, KEYS, small.Ev, false);
    status = compute(device, ca_variant_reference.word, &small, right, error);
    if (status == CA_ERROR_KERNEL) { /* which says nothing about the variant */
        status = CA_ERROR_DEVICE;
    }
    CA_TRY(status);
    CA_TRY(compute(device, t->word, &small, found, error));
    int steps = ca_dtype_size(dtype) == 2 ? STEPS_OF_HALF_TYPES : STEPS_OF_FLOATS;
    double apart = difference_of(found, right, dtype, results);
    if (!(apart <= ldexp(steps, -format_of(dtype).mantissa))) {
        CA_TRY(ca_error_set(error, CA_ERROR_KERNEL,
                            "kernel '%s' gives wrong results: they differ by %g from those of "
                            "the reference",
                            spec->name, apart));
    }
done:
    free(query);
    free(key);
    free(value);
    free(found);
    free(right);
    return status;
}

ca_status
ca_attention_try(ca_device *device, const ca_attention *attention, const ca_attention_plan *plan,
                 ca_error *error)
{
    const ca_device_info *info = ca_device_get_info(device);
    int dtype = (int)attention->operands[CA_ATTENTION_QUERY].dtype - CA_FLOAT16;
    int bit = plan->variant * FLOAT_DTYPES + dtype;
    if (info->type == CA_DEVICE_CPU || plan->variant == CA_INDEX_reference ||
        ca_device_was_tried(device, bit)) {
        return CA_OK;
    }
    const trial context = {attention, ca_variant_at(plan->variant)->word};
    ca_status status = ca_verdict_find(device, &plan->spec, false, compare, &context, error);
    if (status == CA_ERROR_KERNEL) {
        return status;
    }
    ca_error_clear(error);
    if (status != CA_ERROR_MEMORY) { /* a later call may have the memory */
        ca_device_set_tried(device, bit);
    }
    return CA_OK;
}
