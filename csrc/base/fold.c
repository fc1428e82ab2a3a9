/* SPDX-License-Identifier: MIT */
#include "base/fold.h"

#include <string.h>

/* The tensors that are not absent. */
typedef struct {
    int numbers[CA_FOLD_TENSORS];
    int count;
} present_tensors;

static present_tensors
find_present(const ca_tensor *tensors, int ntensors)
{
    present_tensors present;
    present.count = 0;
    for (int t = 0; t < ntensors; t++) {
        if (tensors[t].data != NULL) {
            present.numbers[present.count++] = t;
        }
    }
    return present;
}

static bool
can_fold(const int64_t *outer, const int64_t *inner, int64_t size, const present_tensors *present)
{
    for (int n = 0; n < present->count; n++) {
        const int t = present->numbers[n];
        if (outer[t] != inner[t] * size) {
            return false;
        }
    }
    return true;
}

void
ca_fold_leading(const ca_tensor *tensors, int ntensors, int nleading, const int64_t *shape,
                ca_leading_dims *dims)
{
    const present_tensors present = find_present(tensors, ntensors);
    dims->count = 0;
    for (int d = 0; d < nleading; d++) {
        int64_t size = shape[d];
        if (size == 1) {
            continue;
        }
        int64_t *stride = dims->stride[dims->count]; /* those of absent tensors are 0 */
        memset(stride, 0, sizeof(dims->stride[0]));
        for (int n = 0; n < present.count; n++) {
            const int t = present.numbers[n];
            stride[t] = tensors[t].strides[d];
        }
        int last = dims->count - 1;
        if (last >= 0 && can_fold(dims->stride[last], stride, size, &present)) {
            dims->size[last] *= size;
            memcpy(dims->stride[last], stride, sizeof(dims->stride[0]));
        } else {
            dims->size[dims->count++] = size;
        }
    }
}

void
ca_fold_remove(ca_leading_dims *dims, int d)
{
    dims->count--;
    for (int next = d; next < dims->count; next++) {
        dims->size[next] = dims->size[next + 1];
        memcpy(dims->stride[next], dims->stride[next + 1], sizeof(dims->stride[next]));
    }
}

void
ca_fold_sizes(const ca_leading_dims *dims, ca_int64 batch[CA_BATCH_DIMS])
{
    for (int d = 0; d < dims->count; d++) {
        batch[CA_BATCH_DIMS - dims->count + d] = dims->size[d];
    }
}

void
ca_fold_strides(const ca_leading_dims *dims, int t, ca_int64 batch[CA_BATCH_DIMS])
{
    for (int d = 0; d < dims->count; d++) {
        batch[CA_BATCH_DIMS - dims->count + d] = dims->stride[d][t];
    }
}

int
ca_smallest_dimension(const int64_t *shape, int ndim)
{
    int best = -1;
    for (int d = 0; d < ndim; d++) {
        if (shape[d] > 1 && (best < 0 || shape[d] < shape[best])) {
            best = d;
        }
    }
    return best;
}
