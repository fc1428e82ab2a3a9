/* SPDX-License-Identifier: MIT */
#include "attention/trial.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attention/launch.h"
#include "attention/variants.h"
#include "opencl/apart.h"
#include "opencl/prepare.h"
#include "opencl/program.h"
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

/* Bits of a device for each dtype of queries: one for each variant. */
#define VARIANT_BITS 16

_Static_assert(CA_VARIANT_COUNT <= VARIANT_BITS && CA_FLOAT64 - CA_FLOAT16 < 64 / VARIANT_BITS,
               "every variant has a bit for each dtype");

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

/* Writes the numbers of an array. Returns what follows them. */
static double *
read_numbers(const void *array, ca_dtype dtype, size_t count, double *numbers)
{
    for (size_t i = 0; i < count; i++) {
        numbers[i] = number_at(array, dtype, i);
    }
    return numbers + count;
}

/* ---- the small problem ---- */

enum { QUERY, KEY, VALUE, FOUND, ARRAYS };

typedef struct {
    ca_attention problem;
    ca_attention_plan plan; /* the variant's */
    ca_dtype dtype;         /* of queries and results */
    void *arrays[ARRAYS];
    bool *is_wrong; /* becomes true where results differ */
} trial;

/* Make an operand of so many rows and columns, for each head or for all heads, in array n. Inputs have
   numbers. */
static ca_status
add_operand(trial *t, ca_attention_role role, ca_dtype dtype, int n, int64_t rows, int64_t columns,
            bool for_each_head, ca_error *error)
{
    ca_operand *operand = &t->problem.operands[role];
    size_t count = (size_t)((for_each_head ? HEADS : 1) * rows * columns);
    t->arrays[n] = calloc(count, ca_dtype_size(dtype));
    if (t->arrays[n] == NULL) {
        return ca_error_set(error, CA_ERROR_MEMORY, "no memory to try a kernel");
    }
    if (!ca_attention_is_result(role)) {
        fill_array(t->arrays[n], dtype, count, (uint64_t)n + 1);
    }
    *operand = (ca_operand){.dtype = dtype,
                            .data = t->arrays[n],
                            .rows = rows,
                            .columns = columns,
                            .row_stride = columns,
                            .column_stride = 1};
    operand->batch[CA_BATCH_DIMS - 1] = for_each_head ? rows * columns : 0;
    operand->memory = ca_attention_extent(&t->problem, role);
    return CA_OK;
}

/* Make the small problem with the head sizes and dtypes of `attention`, and the variant's plan. */
static ca_status
start_trial(trial *t, const ca_device_info *info, const ca_attention *attention, const char *word,
            ca_error *error)
{
    ca_status status = CA_OK;
    ca_tensor absent[CA_ATTENTION_OPERANDS];
    ca_attention *small = &t->problem;
    const ca_forced forced = {.kernel = word};
    ca_dtype value_dtype = attention->operands[CA_ATTENTION_VALUE].dtype;
    int64_t E = attention->E;
    int64_t Ev = attention->Ev;
    *small =
        (ca_attention){.batch = {1, 1, HEADS}, .L = ROWS, .S = KEYS, .T = KEYS, .E = E, .Ev = Ev};
    ca_attention_init(small, absent);
    small->above = KEYS - ROWS;
    small->scale = 4 / sqrt((double)E);
    small->in_float64 = attention->in_float64;
    small->call = "the trial of a kernel";
    for (int role = 0; role < CA_ATTENTION_OPERANDS; role++) {
        small->operands[role].dtype = CA_FLOAT32;
    }
    t->dtype = attention->operands[CA_ATTENTION_QUERY].dtype;
    CA_TRY(add_operand(t, CA_ATTENTION_QUERY, t->dtype, QUERY, ROWS, E, true, error));
    CA_TRY(add_operand(t, CA_ATTENTION_KEY, t->dtype, KEY, KEYS, E, false, error));
    CA_TRY(add_operand(t, CA_ATTENTION_VALUE, value_dtype, VALUE, KEYS, Ev, false, error));
    CA_TRY(add_operand(t, CA_ATTENTION_OUTPUT, t->dtype, FOUND, ROWS, Ev, true, error));
    CA_TRY(ca_attention_make_plan(info, &forced, small, &t->plan, error));
done:
    return status;
}

/* Returns by how much the results found for a row differ at most from the right ones: from the sum of its
   keys' values, by the softmax of their scores. NaN where a result is not finite. */
static double
difference_of_row(const trial *t, int row, const double *query, const double *keys,
                  const double *values, const double *found)
{
    const size_t E = (size_t)t->problem.E;
    const size_t Ev = (size_t)t->problem.Ev;
    const int attended = KEYS - ROWS + row + 1;
    double weights[KEYS];
    double highest = -INFINITY;
    double sum = 0;
    double most = 0;
    for (int j = 0; j < attended; j++) {
        weights[j] = 0;
        for (size_t e = 0; e < E; e++) {
            weights[j] += t->problem.scale * query[e] * keys[(size_t)j * E + e];
        }
        highest = fmax(highest, weights[j]);
    }
    for (int j = 0; j < attended; j++) {
        weights[j] = exp(weights[j] - highest);
        sum += weights[j];
    }
    for (size_t c = 0; c < Ev; c++) {
        double right = 0;
        for (int j = 0; j < attended; j++) {
            right += weights[j] / sum * values[(size_t)j * Ev + c];
        }
        double apart = fabs(found[c] - right);
        most = apart <= most ? most : apart;
    }
    return most;
}

/* The same, of all rows of all heads. */
static ca_status
difference_of(const trial *t, double *most, ca_error *error)
{
    const size_t rows = HEADS * ROWS;
    const size_t E = (size_t)t->problem.E;
    const size_t Ev = (size_t)t->problem.Ev;
    double *query = calloc((rows + KEYS) * (E + Ev), sizeof *query);
    if (query == NULL) {
        return ca_error_set(error, CA_ERROR_MEMORY, "no memory to try a kernel");
    }
    ca_dtype value_dtype = t->problem.operands[CA_ATTENTION_VALUE].dtype;
    double *keys = read_numbers(t->arrays[QUERY], t->dtype, rows * E, query);
    double *values = read_numbers(t->arrays[KEY], t->dtype, KEYS * E, keys);
    double *found = read_numbers(t->arrays[VALUE], value_dtype, KEYS * Ev, values);
    (void)read_numbers(t->arrays[FOUND], t->dtype, rows * Ev, found);
    *most = 0;
    for (size_t n = 0; n < rows; n++) {
        double apart =
            difference_of_row(t, (int)(n % ROWS), query + n * E, keys, values, found + n * Ev);
        *most = apart <= *most ? *most : apart;
    }
    free(query);
    return CA_OK;
}

/* Compute the small problem by the variant's plan, and compare with what the host computes. */
static ca_status
compare(ca_device *device, const ca_kernel_spec *spec, const void *context, ca_error *error)
{
    ca_status status = CA_OK;
    const trial *t = context;
    const ca_forced none = {.kernel = NULL};
    double apart = 0;
    CA_TRY(ca_attention_launch_within(device, &none, &t->problem, &t->plan, error));
    CA_TRY(difference_of(t, &apart, error));
    int steps = ca_dtype_size(t->dtype) == 2 ? STEPS_OF_HALF_TYPES : STEPS_OF_FLOATS;
    *t->is_wrong = !(apart <= ldexp(steps, -format_of(t->dtype).mantissa));
    if (*t->is_wrong) {
        CA_TRY(ca_error_set(error, CA_ERROR_KERNEL,
                            "kernel '%s' gives wrong results: they differ by %g from the right "
                            "ones",
                            spec->name, apart));
    }
done:
    return status;
}

static int
first_bit(const ca_attention *attention)
{
    int dtype = (int)attention->operands[CA_ATTENTION_QUERY].dtype - CA_FLOAT16;
    return dtype * VARIANT_BITS;
}

uint32_t
ca_attention_wrong(const ca_device *device, const ca_attention *attention)
{
    return (uint32_t)(ca_device_wrong(device) >> first_bit(attention)) &
           ((UINT32_C(1) << VARIANT_BITS) - 1);
}

/* Asks another process for the trial of a variant, if the driver is not known. */
static ca_status
try_apart(ca_device *device, const trial *t, const char *word, ca_error *error)
{
    char request[128];
    const ca_attention *small = &t->problem;
    (void)snprintf(request, sizeof request, "attention %s %s %s %lld %lld", word,
                   ca_dtype_name(t->dtype),
                   ca_dtype_name(small->operands[CA_ATTENTION_VALUE].dtype), (long long)small->E,
                   (long long)small->Ev);
    return ca_apart_try(device, &t->plan.spec, request, error);
}

static void
end_trial(trial *t)
{
    for (int n = 0; n < ARRAYS; n++) {
        free(t->arrays[n]);
    }
}

/* True if the variant of the plan has not been tried on a device whose drivers are tried. */
static bool
needs_trial(ca_device *device, const ca_attention_plan *plan, int bit)
{
    const ca_device_info *info = ca_device_get_info(device);
    if (!info->is_known) {
        return !ca_kernel_is_built(device, &plan->spec);
    }
    return info->type != CA_DEVICE_CPU && plan->variant != CA_INDEX_reference &&
           !ca_device_was_tried(device, bit);
}

ca_status
ca_attention_try(ca_device *device, const ca_attention *attention, const ca_attention_plan *plan,
                 ca_error *error)
{
    ca_status status = CA_OK;
    int bit = first_bit(attention) + plan->variant;
    if (!needs_trial(device, plan, bit)) {
        return CA_OK;
    }
    bool is_wrong = false;
    trial t = {.is_wrong = &is_wrong};
    const char *word = ca_variant_at(plan->variant)->word;
    CA_TRY(start_trial(&t, ca_device_get_info(device), attention, word, error));
    CA_TRY(try_apart(device, &t, word, error));
    CA_TRY(ca_verdict_find(device, &t.plan.spec, "", false, compare, &t, error));
done:
    end_trial(&t);
    if (is_wrong ||
        (status != CA_ERROR_KERNEL && status != CA_ERROR_MEMORY && status != CA_ERROR_STOPPED)) {
        ca_device_set_tried(device, bit, !is_wrong);
    }
    /* Other failures say nothing about the variant. */
    if (status != CA_ERROR_KERNEL && status != CA_ERROR_STOPPED) {
        ca_error_clear(error);
        status = CA_OK;
    }
    return status;
}

ca_status
ca_attention_try_variant(ca_device *device, int variant, ca_dtype dtype, ca_dtype value_dtype,
                         int64_t E, int64_t Ev, bool anew, ca_error *error)
{
    ca_status status = CA_OK;
    bool is_wrong = false;
    trial t = {.is_wrong = &is_wrong};
    ca_attention like = {.E = E, .Ev = Ev, .in_float64 = dtype == CA_FLOAT64};
    like.operands[CA_ATTENTION_QUERY].dtype = dtype;
    like.operands[CA_ATTENTION_VALUE].dtype = value_dtype;
    const char *word = ca_variant_at(variant)->word;
    CA_TRY(ca_device_prepare(device, error));
    CA_TRY(start_trial(&t, ca_device_get_info(device), &like, word, error));
    if (anew) {
        CA_TRY(compare(device, &t.plan.spec, &t, error));
        ca_verdict_keep_pass(device, &t.plan.spec);
    } else {
        CA_TRY(try_apart(device, &t, word, error));
        CA_TRY(ca_verdict_find(device, &t.plan.spec, "", false, compare, &t, error));
    }
done:
    end_trial(&t);
    return status;
}
