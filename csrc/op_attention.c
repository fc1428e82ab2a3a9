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
        .softcap = (float)attention->softcap,
    };
}

static void
list_views(ca_attention_params *params, ca_view *views[TENSORS])
{
    views[QUERY] = &params->query;
    views[KEY] = &params->key;
    views[VALUE] = &params->value;
    views[MASK] = &params->mask;
    views[OUTPUT] = &params->output;
    views[LSE] = &params->lse;
}

/* The innermost dimensions go to the kernel. */
static void
set_kernel_dims(const leading_dims *dims, int outer, ca_attention_params *params)
{
    ca_view *views[TENSORS];
    list_views(params, views);
    for (int d = outer; d < dims->count; d++) {
        int place = CA_BATCH_DIMS - dims->count + d;
        params->batch[place] = dims->size[d];
        for (int t = 0; t < TENSORS; t++) {
            views[t]->batch[place] = dims->stride[d][t];
        }
    }
}

/* Offsets of the `index`-th combination of the dimensions the host walks. */
static void
set_outer_offsets(const leading_dims *dims, int outer, int64_t index,
                  ca_attention_params *params)
{
    ca_view *views[TENSORS];
    list_views(params, views);
    for (int d = outer - 1; d >= 0; d--) {
        int64_t position = index % dims->size[d];
        index /= dims->size[d];
        for (int t = 0; t < TENSORS; t++) {
            views[t]->offset += position * dims->stride[d][t];
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
    size_t size = ca_dtype_size(attention->lse.dtype);
    for (size_t i = 0; i < lse.bytes / size; i++) {
        if (attention->lse.dtype == CA_FLOAT64) {
            ((double *)lse.data)[i] = -INFINITY;
        } else {
            ((float *)lse.data)[i] = -INFINITY;
        }
    }
}

ca_status
ca_attention_run(ca_device *device, const ca_attention *attention, ca_error *error)
{
    ca_status status = CA_OK;
    ca_attention_params one;
    ca_attention_params *many = NULL;

    const ca_tensor *tensors[TENSORS];
    list_tensors(attention, tensors);
    ca_extent extents[TENSORS];
    ca_span spans[TENSORS];
    for (int t = 0; t < TENSORS; t++) {
        extents[t] = ca_tensor_extent(tensors[t]);
        bool written = t == OUTPUT || t == LSE;
        spans[t] = (ca_span){.data = extents[t].data,
                             .bytes = extents[t].bytes,
                             .access = written ? CA_ACCESS_WRITE : CA_ACCESS_READ};
    }

    leading_dims dims;
    fold_leading_dims(tensors, &dims);
    int outer = dims.count > CA_BATCH_DIMS ? dims.count - CA_BATCH_DIMS : 0;
    int64_t nparams;
    CA_TRY(ca_shape_count(outer, dims.size, "the leading dimensions", &nparams, error));

    ca_attention_plan plan;
    CA_TRY(ca_attention_make_plan(ca_device_get_info(device), attention, &plan, error));
    ca_kernel *kernel = NULL;
    CA_TRY(ca_kernel_get(device, &plan.spec, &kernel, error));

    one = describe(attention, extents);
    set_kernel_dims(&dims, outer, &one);
    int64_t tiles = (one.L + plan.rows_per_item - 1) / plan.rows_per_item;
    int64_t grid[CA_BATCH_DIMS + 1] = {one.batch[0], one.batch[1], one.batch[2], tiles};
    int64_t items;
    CA_TRY(ca_shape_count(CA_BATCH_DIMS + 1, grid, "query", &items, error));

    if (nparams > 1) {
        many = calloc((size_t)nparams, sizeof(*many));
        if (many == NULL) {
            CA_TRY(ca_error_set(error, CA_ERROR_MEMORY,
                                "no memory for the parameters of %lld launches",
                                (long long)nparams));
        }
        for (int64_t i = 0; i < nparams; i++) {
            many[i] = one;
            set_outer_offsets(&dims, outer, i, &many[i]);
        }
    }
    ca_launch launch = {
        .spans = spans,
        .nspans = TENSORS,
        .params = many != NULL ? many : &one,
        .params_size = sizeof(one),
        .nparams = nparams,
        .global_size = round_up((size_t)items, plan.local_size),
        .local_size = plan.local_size,
    };
    CA_TRY(ca_launch_run(device, kernel, &launch, error));
done:
    free(many);
    return status;
}
