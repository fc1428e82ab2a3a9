/* SPDX-License-Identifier: MIT */
#include "base/fold.h"

#include <string.h>

static bool
can_fold(const ca_leading_dims *dims, int outer, int64_t size, const int64_t *stride, int ntensors)
{
    for (int t = 0; t < ntensors; t++) {
        if (dims->stride[outer][t] != stride[t] * size) {
            return false;
        }
    }
    return true;
}

void
ca_fold_leading(const ca_tensor *tensors, int ntensors, int nleading, const int64_t *shape,
                ca_leading_dims *dims)
{
    dims->count = 0;
    for (int d = 0; d < nleading; d++) {
        int64_t size = shape[d];
        if (size == 1) {
            continue;
        }
        int64_t stride[CA_FOLD_TENSORS] = {0};
        for (int t = 0; t < ntensors; t++) {
            stride[t] = tensors[t].data != NULL ? tensors[t].strides[d] : 0;
        }
        int last = dims->count - 1;
        if (last >= 0 && can_fold(dims, last, size, stride, ntensors)) {
            dims->size[last] *= size;
        } else {
            last = dims->count++;
            dims->size[last] = size;
        }
        memcpy(dims->stride[last], stride, sizeof(stride));
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
