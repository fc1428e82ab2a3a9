/* SPDX-License-Identifier: MIT */
#include "attention/trial.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attention/variants.h" /* ca_variant_at */
#include "opencl/apart.h"
#include "opencl/prepare.h"
#include "opencl/program.h"
#include "opencl/runtime.h"
#include "opencl/verdict.h"

/* The small problem: heads that share their keys, and a causal band, so that no length is whole
   tiles. Each variant takes few rows. Kernels of gradients go over rows and keys in tiles and blocks. */
typedef struct {
    int64_t heads;
    int64_t rows;
    int64_t keys;
} lengths;

static const lengths of_results = {4, 5, 70};
static const lengths of_gradients = {2, 70, 200};

/* Results may differ by this many steps of the dtype at 1, which no result exceeds, and gradients by as many
   steps at the largest of them. Kernels round weights to half types, and sum in other orders. */
#define STEPS_OF_HALF_TYPES 4
#define STEPS_OF_FLOATS     256

_Static_assert(CA_VARIANT_COUNT <= CA_TRIED_KERNELS &&
                   CA_FLOAT64 - CA_FLOAT16 < 64 / CA_TRIED_KERNELS,
               "a device has a bit for each kernel and dtype");

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

/* ---- the small problem ---- */

typedef struct {
    ca_attention problem; /* contiguous operands */
    /* The operands as the host reads them. Results are those that are right. */
    double *numbers[CA_ATTENTION_OPERANDS];
    const ca_tried *tried;
    ca_kernel_spec spec;
    bool *is_wrong; /* becomes true where results differ */
} trial;

/* Returns how many elements an operand has in memory. */
static size_t
count_elements(const ca_attention *small, ca_attention_role role)
{
    const ca_operand *operand = &small->operands[role];
    int64_t heads = operand->batch[CA_BATCH_DIMS - 1] != 0 ? small->batch[CA_BATCH_DIMS - 1] : 1;
    return (size_t)(heads * operand->rows * operand->columns);
}

/* Make an operand of so many rows and columns, for each head or for all heads. A seed fills it with
   numbers. */
static ca_status
add_operand(trial *t, ca_attention_role role, ca_dtype dtype, int64_t rows, int64_t columns,
            bool for_each_head, uint64_t seed, ca_error *error)
{
    ca_operand *operand = &t->problem.operands[role];
    *operand = (ca_operand){.dtype = dtype,
                            .rows = rows,
                            .columns = columns,
                            .row_stride = columns,
                            .column_stride = 1};
    operand->batch[CA_BATCH_DIMS - 1] = for_each_head ? rows * columns : 0;
    const size_t count = count_elements(&t->problem, role);
    operand->data = calloc(count, ca_dtype_size(dtype));
    t->numbers[role] = calloc(count, sizeof(double));
    if (operand->data == NULL || t->numbers[role] == NULL) {
        return ca_error_set(error, CA_ERROR_MEMORY, "no memory to try a kernel");
    }
    if (seed != 0) {
        fill_array(operand->data, dtype, count, seed);
    }
    for (size_t n = 0; n < count; n++) {
        t->numbers[role][n] = number_at(operand->data, dtype, n);
    }
    operand->memory = ca_attention_extent(&t->problem, role);
    return CA_OK;
}

/* Make the small problem with the head sizes and dtypes of `attention`, and find the program that is
   tried. Keys and values are numbers where those of `attention` are codes: a verdict is one of the kernel and
   of the dtype of queries. */
static ca_status
start_trial(trial *t, ca_device *device, const ca_attention *attention, ca_error *error)
{
    ca_status status = CA_OK;
    ca_tensor absent[CA_ATTENTION_OPERANDS];
    ca_attention *small = &t->problem;
    ca_dtype dtype = attention->operands[CA_ATTENTION_QUERY].dtype;
    ca_dtype value_dtype =
        ca_attention_has_codes(attention) ? dtype : attention->operands[CA_ATTENTION_VALUE].dtype;
    const lengths size = t->tried->is_backward ? of_gradients : of_results;
    const int64_t L = size.rows;
    const int64_t S = size.keys;
    const int64_t E = attention->E;
    const int64_t Ev = attention->Ev;
    *small = (ca_attention){.batch = {1, 1, size.heads}, .L = L, .S = S, .T = S, .E = E, .Ev = Ev};
    ca_attention_init(small, absent);
    small->above = S - L;
    small->scale = E > 0 ? 4 / sqrt((double)E) : 1; /* without columns all scores are 0 */
    small->in_float64 = attention->in_float64;
    small->call = "the trial of a kernel";
    for (int role = 0; role < CA_ATTENTION_OPERANDS; role++) {
        small->operands[role].dtype = CA_FLOAT32;
    }
    CA_TRY(add_operand(t, CA_ATTENTION_QUERY, dtype, L, E, true, 1, error));
    CA_TRY(add_operand(t, CA_ATTENTION_KEY, dtype, S, E, false, 2, error));
    CA_TRY(add_operand(t, CA_ATTENTION_VALUE, value_dtype, S, Ev, false, 3, error));
    if (!t->tried->is_backward) {
        CA_TRY(add_operand(t, CA_ATTENTION_OUTPUT, dtype, L, Ev, true, 0, error));
    } else { /* gradients have the same formula for any output */
        ca_dtype real = ca_attention_in_float64(small) ? CA_FLOAT64 : CA_FLOAT32;
        CA_TRY(add_operand(t, CA_ATTENTION_OUTPUT, dtype, L, Ev, true, 4, error));
        CA_TRY(add_operand(t, CA_ATTENTION_GRAD_OUTPUT, dtype, L, Ev, true, 5, error));
        CA_TRY(add_operand(t, CA_ATTENTION_FORWARD_LSE, real, L, 1, true, 0, error));
        CA_TRY(add_operand(t, CA_ATTENTION_GRAD_QUERY, dtype, L, E, true, 0, error));
        CA_TRY(add_operand(t, CA_ATTENTION_GRAD_KEY, dtype, S, E, false, 0, error));
        CA_TRY(add_operand(t, CA_ATTENTION_GRAD_VALUE, value_dtype, S, Ev, false, 0, error));
    }
    CA_TRY(t->tried->plan(device, small, t->tried->kernel, &t->spec, error));
done:
    return status;
}

static void
end_trial(trial *t)
{
    for (int role = 0; role < CA_ATTENTION_OPERANDS; role++) {
        free(t->problem.operands[role].data);
        free(t->numbers[role]);
    }
}

/* ---- what the host computes ---- */

static double
dot(const double *a, const double *b, int64_t size)
{
    double sum = 0;
    for (int64_t n = 0; n < size; n++) {
        sum += a[n] * b[n];
    }
    return sum;
}

/* to[n] += factor * from[n] */
static void
add_row(double *to, double factor, const double *from, int64_t size)
{
    for (int64_t n = 0; n < size; n++) {
        to[n] += factor * from[n];
    }
}

/* Writes the log-sum-exp of a row. */
static void
store_lse(const trial *t, int64_t n, double lse)
{
    const ca_operand *operand = &t->problem.operands[CA_ATTENTION_FORWARD_LSE];
    if (operand->dtype == CA_FLOAT64) {
        ((double *)operand->data)[n] = lse;
    } else {
        ((float *)operand->data)[n] = (float)lse;
    }
}

/* Adds what row n of all heads' rows gives to gradients. */
static void
differentiate_row(const trial *t, int64_t n, int64_t attended, const double *weights)
{
    const int64_t E = t->problem.E;
    const int64_t Ev = t->problem.Ev;
    const double *grad_output = t->numbers[CA_ATTENTION_GRAD_OUTPUT] + n * Ev;
    const double delta = dot(grad_output, t->numbers[CA_ATTENTION_OUTPUT] + n * Ev, Ev);
    for (int64_t j = 0; j < attended; j++) {
        double grad_weight = dot(grad_output, t->numbers[CA_ATTENTION_VALUE] + j * Ev, Ev);
        double grad_product = t->problem.scale * weights[j] * (grad_weight - delta);
        add_row(t->numbers[CA_ATTENTION_GRAD_QUERY] + n * E, grad_product,
                t->numbers[CA_ATTENTION_KEY] + j * E, E);
        add_row(t->numbers[CA_ATTENTION_GRAD_KEY] + j * E, grad_product,
                t->numbers[CA_ATTENTION_QUERY] + n * E, E);
        add_row(t->numbers[CA_ATTENTION_GRAD_VALUE] + j * Ev, weights[j], grad_output, Ev);
    }
}

/* Computes the results that row n of all heads' rows has, or gives to. `weights` has room for all keys. */
static void
compute_row(const trial *t, int64_t n, double *weights)
{
    const ca_attention *small = &t->problem;
    const int64_t E = small->E;
    const int64_t Ev = small->Ev;
    const int64_t attended = small->above + n % small->L + 1;
    double highest = -INFINITY;
    double sum = 0;
    for (int64_t j = 0; j < attended; j++) {
        weights[j] = small->scale * dot(t->numbers[CA_ATTENTION_QUERY] + n * E,
                                        t->numbers[CA_ATTENTION_KEY] + j * E, E);
        highest = fmax(highest, weights[j]);
    }
    for (int64_t j = 0; j < attended; j++) {
        weights[j] = exp(weights[j] - highest);
        sum += weights[j];
    }
    for (int64_t j = 0; j < attended; j++) {
        weights[j] /= sum;
    }
    if (t->tried->is_backward) {
        store_lse(t, n, highest + log(sum));
        differentiate_row(t, n, attended, weights);
        return;
    }
    for (int64_t j = 0; j < attended; j++) {
        add_row(t->numbers[CA_ATTENTION_OUTPUT] + n * Ev, weights[j],
                t->numbers[CA_ATTENTION_VALUE] + j * Ev, Ev);
    }
}

static ca_status
compute_results(const trial *t, ca_error *error)
{
    const ca_attention *small = &t->problem;
    double *weights = malloc((size_t)small->S * sizeof *weights);
    if (weights == NULL) {
        return ca_error_set(error, CA_ERROR_MEMORY, "no memory to try a kernel");
    }
    for (int64_t n = 0; n < small->batch[CA_BATCH_DIMS - 1] * small->L; n++) {
        compute_row(t, n, weights);
    }
    free(weights);
    return CA_OK;
}

/* ---- the comparison ---- */

/* CA_ERROR_KERNEL if a result differs from the right one. */
static ca_status
compare_result(const trial *t, ca_attention_role role, ca_error *error)
{
    const ca_operand *operand = &t->problem.operands[role];
    const size_t count = count_elements(&t->problem, role);
    double most = 0; /* NaN where a result is not finite */
    double largest = 0;
    for (size_t n = 0; n < count; n++) {
        double right = t->numbers[role][n];
        double apart = fabs(number_at(operand->data, operand->dtype, n) - right);
        most = apart <= most ? most : apart;
        largest = fmax(largest, fabs(right));
    }
    int steps = ca_dtype_size(operand->dtype) == 2 ? STEPS_OF_HALF_TYPES : STEPS_OF_FLOATS;
    double step = ldexp(t->tried->is_backward ? largest : 1, -format_of(operand->dtype).mantissa);
    if (most <= steps * step) {
        return CA_OK;
    }
    *t->is_wrong = true;
    return ca_error_set(error, CA_ERROR_KERNEL,
                        "kernel '%s' gives wrong results: they differ by %g from the right ones",
                        t->spec.name, most);
}

/* Compute the small problem by the kernel and by the host, and compare. */
static ca_status
compare(ca_device *device, const ca_kernel_spec *spec, const void *context, ca_error *error)
{
    ca_status status = CA_OK;
    const trial *t = context;
    (void)spec;
    CA_TRY(compute_results(t, error));
    CA_TRY(t->tried->run(device, &t->problem, t->tried->kernel, error));
    if (!t->tried->is_backward) {
        CA_TRY(compare_result(t, CA_ATTENTION_OUTPUT, error));
        return CA_OK;
    }
    for (ca_attention_role role = CA_ATTENTION_GRAD_QUERY; role <= CA_ATTENTION_GRAD_VALUE;
         role++) {
        CA_TRY(compare_result(t, role, error));
    }
done:
    return status;
}

/* Returns the number of a dtype's first bit. */
static int
first_bit(const ca_attention *attention)
{
    int dtype = (int)attention->operands[CA_ATTENTION_QUERY].dtype - CA_FLOAT16;
    return dtype * CA_TRIED_KERNELS;
}

static uint32_t
wrong_kernels(const ca_device *device, const ca_attention *attention)
{
    return (uint32_t)(ca_device_wrong(device) >> first_bit(attention)) &
           ((UINT32_C(1) << CA_TRIED_KERNELS) - 1);
}

uint32_t
ca_attention_wrong(const ca_device *device, const ca_attention *attention)
{
    return wrong_kernels(device, attention) & ~(UINT32_C(1) << CA_INDEX_reference);
}

/* Try the kernel in another process, if the driver is not known, and then here, unless an earlier
   process has done so. */
static ca_status
find_verdict(ca_device *device, const trial *t, ca_error *error)
{
    ca_status status = CA_OK;
    char request[128];
    const ca_attention *small = &t->problem;
    (void)snprintf(request, sizeof request, "%s %s %s %s %lld %lld",
                   t->tried->is_backward ? "gradients" : "attention",
                   ca_variant_at(t->tried->variant)->word,
                   ca_dtype_name(small->operands[CA_ATTENTION_QUERY].dtype),
                   ca_dtype_name(small->operands[CA_ATTENTION_VALUE].dtype), (long long)small->E,
                   (long long)small->Ev);
    CA_TRY(ca_apart_try(device, &t->spec, request, error));
    CA_TRY(ca_verdict_find(device, &t->spec, "", false, compare, t, error));
done:
    return status;
}

/* True if the kernel has not been tried on a device whose drivers are tried. There is none in the
   reference's place: where that is wrong, each call tries it, and fails. */
static bool
needs_trial(ca_device *device, const ca_attention *attention, const ca_tried *tried,
            const ca_kernel_spec *spec, int bit)
{
    const ca_device_info *info = ca_device_get_info(device);
    if (!info->is_known) {
        return !ca_kernel_is_built(device, spec) ||
               (wrong_kernels(device, attention) >> tried->number & 1) != 0;
    }
    return info->type != CA_DEVICE_CPU && tried->variant != CA_INDEX_reference &&
           !ca_device_was_tried(device, bit);
}

ca_status
ca_attention_try(ca_device *device, const ca_attention *attention, const ca_tried *tried,
                 const ca_kernel_spec *spec, ca_error *error)
{
    ca_status status = CA_OK;
    int bit = first_bit(attention) + tried->number;
    if (!needs_trial(device, attention, tried, spec, bit)) {
        return CA_OK;
    }
    bool is_wrong = false;
    trial t = {.tried = tried, .is_wrong = &is_wrong};
    CA_TRY(start_trial(&t, device, attention, error));
    CA_TRY(find_verdict(device, &t, error));
done:
    end_trial(&t);
    if (is_wrong ||
        (status != CA_ERROR_KERNEL && status != CA_ERROR_MEMORY && status != CA_ERROR_STOPPED)) {
        ca_device_set_tried(device, bit, !is_wrong);
    }
    /* Other failures say nothing about the kernel. */
    if (status != CA_ERROR_KERNEL && status != CA_ERROR_STOPPED) {
        ca_error_clear(error);
        status = CA_OK;
    }
    return status;
}

ca_status
ca_attention_try_kernel(ca_device *device, const ca_tried *tried, ca_dtype dtype,
                        ca_dtype value_dtype, int64_t E, int64_t Ev, bool anew, ca_error *error)
{
    ca_status status = CA_OK;
    bool is_wrong = false;
    trial t = {.tried = tried, .is_wrong = &is_wrong};
    ca_attention like = {.E = E, .Ev = Ev, .in_float64 = dtype == CA_FLOAT64};
    like.operands[CA_ATTENTION_QUERY].dtype = dtype;
    like.operands[CA_ATTENTION_VALUE].dtype = value_dtype;
    CA_TRY(ca_device_prepare(device, error));
    CA_TRY(start_trial(&t, device, &like, error));
    if (anew) {
        CA_TRY(compare(device, &t.spec, &t, error));
        ca_verdict_keep_pass(device, &t.spec);
    } else {
        CA_TRY(find_verdict(device, &t, error));
    }
done:
    end_trial(&t);
    return status;
}
