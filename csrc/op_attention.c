/* SPDX-License-Identifier: MIT
 *
 * Launch attention: fold the leading dimensions, describe the problem to the kernel
 * that the plan chose.
 */
#include "op_attention.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attention_params.h"
#include "cl_launch.h"
#include "cl_program.h"
#include "op_attention_plan.h"

_Static_assert(sizeof(ca_attention_params) == CA_ATTENTION_PARAMS_SIZE,
               "host and device must agree on the parameters' layout");
_Static_assert(CA_BOOL == CA_KERNEL_BOOL && CA_FLOAT16 == CA_KERNEL_FLOAT16 &&
                   CA_BFLOAT16 == CA_KERNEL_BFLOAT16 &&
                   CA_FLOAT32 == CA_KERNEL_FLOAT32 && CA_FLOAT64 == CA_KERNEL_FLOAT64,
               "dtypes are passed to kernels by value");

enum { QUERY, KEY, VALUE, MASK, OUTPUT, LSE, TENSORS };

/* The leading dimensions after folding, and each tensor's strides along them. */
typedef struct {
    int count;
    int64_t size[CA_MAX_DIMS];
    int64_t stride[CA_MAX_DIMS][TENSORS];
} leading_dims;

static void
list_tensors(const ca_attention *attention, const ca_tensor *tensors[TENSORS])
{
    tensors[QUERY] = &attention->query;
    tensors[KEY] = &attention->key;
    tensors[VALUE] = &attention->value;
    tensors[MASK] = &attention->mask;
    tensors[OUTPUT] = &attention->output;
    tensors[LSE] = &attention->lse;
}

/* Can dimension `outer` and the next one be walked as a single one in every tensor? */
static bool
can_fold(const leading_dims *dims, int outer, int64_t size,
         const int64_t stride[TENSORS])
{
    for (int t = 0; t < TENSORS; t++) {
        if (dims->stride[outer][t] != stride[t] * size) {
            return false;
        }
    }
    return true;
}

static void
fold_leading_dims(const ca_tensor *const tensors[TENSORS], leading_dims *dims)
{
    int n = tensors[QUERY]->ndim - 2;
    dims->count = 0;
    for (int d = 0; d < n; d++) {
        int64_t size = tensors[OUTPUT]->shape[d];
        if (size == 1) {
            continue;
        }
        int64_t stride[TENSORS];
        for (int t = 0; t < TENSORS; t++) {
            stride[t] = tensors[t]->data != NULL ? tensors[t]->strides[d] : 0;
        }
        int last = dims->count - 1;
        if (last >= 0 && can_fold(dims, last, size, stride)) {
            dims->size[last] *= size;
        } else {
            last = dims->count++;
            dims->size[last] = size;
        }
        memcpy(dims->stride[last], stride, sizeof(stride));
    }
}

/* Row and column strides; batch strides come from the folded dimensions. */
static ca_view
matrix_view(const ca_tensor *tensor, int64_t offset)
{
    ca_view view = {.offset = offset};
    if (tensor->data != NULL) {
        view.row = tensor->strides[tensor->ndim - 2];
        view.column = tensor->strides[tensor->ndim - 1];
    }
    return view;
}

static int64_t
clamp_bound(int64_t bound, int64_t limit)
{
    return bound > limit ? limit : bound < -limit ? -limit : bound;
}

static int64_t
double_bits(double value)
{
    int64_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static ca_attention_params
describe(const ca_attention *attention, const ca_extent extents[TENSORS])
{
    int64_t L = attention->query.shape[attention->query.ndim - 2];
    int64_t S = attention->key.shape[attention->key.ndim - 2];
    ca_view lse = {.offset = extents[LSE].offset};
    if (attention->lse.data != NULL) {
        lse.row = attention->lse.strides[attention->lse.ndim - 1];
    }
    return (ca_attention_params){
        .batch = {1, 1, 1},
        .L = L,
        .S = S,
        .E = attention->query.shape[attention->query.ndim - 1],
        .Ev = attention->value.shape[attention->value.ndim - 1],
        .lower = -clamp_bound(attention->below, L + S),
        .upper = clamp_bound(attention->above, L + S),
        .query = matrix_view(&attention->query, extents[QUERY].offset),
        .key = matrix_view(&attention->key, extents[KEY].offset),
        .value = matrix_view(&attention->value, extents[VALUE].offset),
        .mask = matrix_view(&attention->mask, extents[MASK].offset),
        .output = matrix_view(&attention->output, extents[OUTPUT].offset),
        .lse = lse,
        .has_lse = attention->lse.data != NULL,
        .scale_bits = double_bits(attention->scale),
        .softcap_bits = double_bits(attention->softcap),
        .scale = (float)attention->scale,
        .softcap = (float)ca_attention_softcap(attention),
    };
}

static void
set_leading_dims(const leading_dims *dims, ca_attention_params *params)
{
    ca_view *views[TENSORS] = {
        [QUERY] = &params->query, [KEY] = &params->key,       [VALUE] = &params->value,
        [MASK] = &params->mask,   [OUTPUT] = &params->output, [LSE] = &params->lse,
    };
    for (int d = 0; d < dims->count; d++) {
        int place = CA_BATCH_DIMS - dims->count + d;
        params->batch[place] = dims->size[d];
        for (int t = 0; t < TENSORS; t++) {
            views[t]->batch[place] = dims->stride[d][t];
        }
    }
}

static size_t
round_up(size_t count, size_t step)
{
    return (count + step - 1) / step * step;
}

bool
ca_attention_is_trivial(const ca_attention *attention)
{
    return (ca_tensor_extent(&attention->output).bytes == 0 &&
            ca_tensor_extent(&attention->lse).bytes == 0) ||
           attention->key.shape[attention->key.ndim - 2] == 0;
}

void
ca_attention_fill(const ca_attention *attention)
{
    ca_extent output = ca_tensor_extent(&attention->output);
    if (output.bytes != 0) {
        memset(output.data, 0, output.bytes);
    }
    ca_extent lse = ca_tensor_extent(&attention->lse);
    size_t count = lse.bytes / ca_dtype_size(attention->lse.dtype);
    for (size_t i = 0; i < count; i++) {
        if (attention->lse.dtype == CA_FLOAT64) {
            ((double *)lse.data)[i] = -INFINITY;
        } else {
            ((float *)lse.data)[i] = -INFINITY;
        }
    }
}

/* ---- one launch ---- */

/* A result that fills its extent is written as a whole. */
static ca_access
access_of(int tensor, const ca_tensor *result, const ca_extent *extent)
{
    if (tensor != OUTPUT && tensor != LSE) {
        return CA_ACCESS_READ;
    }
    size_t bytes = ca_dtype_size(result->dtype);
    for (int d = 0; d < result->ndim; d++) {
        bytes *= (size_t)result->shape[d];
    }
    return bytes == extent->bytes ? CA_ACCESS_WRITE : CA_ACCESS_UPDATE;
}

static ca_status
launch_whole(ca_device *device, const ca_attention *attention,
             const ca_tensor *const tensors[TENSORS], const ca_extent extents[TENSORS],
             const leading_dims *dims, ca_error *error)
{
    ca_status status = CA_OK;
    ca_attention_plan plan;
    CA_TRY(ca_attention_make_plan(ca_device_get_info(device), attention, &plan, error));
    ca_kernel *kernel = NULL;
    CA_TRY(ca_kernel_get(device, &plan.spec, &kernel, error));

    ca_span spans[TENSORS];
    for (int t = 0; t < TENSORS; t++) {
        spans[t] = (ca_span){.data = extents[t].data,
                             .bytes = extents[t].bytes,
                             .access = access_of(t, tensors[t], &extents[t])};
    }
    ca_attention_params params = describe(attention, extents);
    set_leading_dims(dims, &params);
    int64_t tiles = (params.L + plan.rows_per_item - 1) / plan.rows_per_item;
    int64_t grid[] = {params.batch[0], params.batch[1], params.batch[2], tiles};
    int64_t items;
    CA_TRY(ca_shape_count(4, grid, "query", &items, error));
    ca_launch launch = {
        .spans = spans,
        .nspans = TENSORS,
        .params = &params,
        .params_size = sizeof(params),
        .global_size = round_up((size_t)items, plan.local_size),
        .local_size = plan.local_size,
    };
    CA_TRY(ca_launch_run(device, kernel, &launch, error));
done:
    return status;
}

/* ---- halves, where one launch cannot hold it all ---- */

/* Entries first … first + count - 1 of dimension `from_end` of a tensor that has it. */
static void
take_part(ca_tensor *tensor, int from_end, int64_t first, int64_t count)
{
    int d = tensor->ndim - from_end;
    if (tensor->data != NULL && tensor->shape[d] > 1) {
        ptrdiff_t size = (ptrdiff_t)ca_dtype_size(tensor->dtype);
        tensor->data = (char *)tensor->data + first * tensor->strides[d] * size;
        tensor->shape[d] = count;
    }
}

/* Part of leading dimension `d`, or of the rows where d is the number of leading
   dimensions: the band moves along with them. */
static ca_attention
part_of(const ca_attention *attention, int d, int64_t first, int64_t count)
{
    ca_attention part = *attention;
    int leading = attention->query.ndim - 2;
    int from_end = leading + 2 - d;
    take_part(&part.query, from_end, first, count);
    take_part(&part.mask, from_end, first, count);
    take_part(&part.output, from_end, first, count);
    take_part(&part.lse, from_end - 1, first, count);
    if (d < leading) {
        take_part(&part.key, from_end, first, count);
        take_part(&part.value, from_end, first, count);
        return part;
    }
    if (part.below != CA_BAND_UNBOUNDED) {
        part.below -= first;
    }
    if (part.above != CA_BAND_UNBOUNDED) {
        part.above += first;
    }
    return part;
}

/* Does some tensor reach over more memory than the device takes as one buffer? */
static bool
exceeds_device(const ca_device_info *info, const ca_extent extents[TENSORS])
{
    for (int t = 0; t < TENSORS; t++) {
        if (info->memory != CA_MEMORY_SVM &&
            extents[t].bytes > (uint64_t)info->max_allocation) {
            return true;
        }
    }
    return false;
}

ca_status
ca_attention_run(ca_device *device, const ca_attention *attention, ca_error *error)
{
    const ca_tensor *tensors[TENSORS];
    list_tensors(attention, tensors);
    ca_extent extents[TENSORS];
    for (int t = 0; t < TENSORS; t++) {
        extents[t] = ca_tensor_extent(tensors[t]);
    }
    leading_dims dims;
    fold_leading_dims(tensors, &dims);

    /* The outermost dimension that can be halved; the rows are the last resort. */
    int leading = attention->output.ndim - 2;
    int d = 0;
    while (d < leading && attention->output.shape[d] == 1) {
        d++;
    }
    int64_t size = attention->output.shape[d];
    bool whole = dims.count <= CA_BATCH_DIMS &&
                 !exceeds_device(ca_device_get_info(device), extents);
    if (whole || size <= 1) {
        return launch_whole(device, attention, tensors, extents, &dims, error);
    }
    ca_attention half = part_of(attention, d, 0, size / 2);
    ca_status status = ca_attention_run(device, &half, error);
    if (status == CA_OK) {
        half = part_of(attention, d, size / 2, size - size / 2);
        status = ca_attention_run(device, &half, error);
    }
    return status;
}
