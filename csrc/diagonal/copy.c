/* SPDX-License-Identifier: MIT */
#include "diagonal/copy.h"

#include <string.h>

#include "diagonal/plan.h" /* ca_diagonal_has_rows */
#include "diagonal/run.h"
#include "opencl/runtime.h"
#include "opencl/storage.h"

/* The host has copied this much before a kernel would have started. */
#define SMALL_BYTES (64 << 10)

/* Copies row by row, from dimension `d` on. */
static void
copy_rows(const ca_tensor *from, const ca_tensor *to, int d, const char *source, char *target)
{
    size_t size = ca_dtype_size(to->dtype);
    if (d >= to->ndim - 1) {
        memcpy(target, source, (size_t)ca_tensor_size(to, 1) * size);
        return;
    }
    for (int64_t i = 0; i < to->shape[d]; i++) {
        copy_rows(from, to, d + 1, source + i * from->strides[d] * (int64_t)size,
                  target + i * to->strides[d] * (int64_t)size);
    }
}

/* Returns a view of two dimensions or more. With `apart` each element is a matrix of its
   own: kernels can write only rows or columns whose elements lie side by side. */
static ca_tensor
as_matrices(const ca_tensor *tensor, bool apart)
{
    ca_tensor view;
    ca_tensor_start_view(tensor, &view);
    for (int missing = 2 - tensor->ndim - apart; missing > 0; missing--) {
        ca_tensor_add_dim(&view, 1, 0);
    }
    for (int d = 0; d < tensor->ndim; d++) {
        ca_tensor_add_dim(&view, tensor->shape[d], tensor->strides[d]);
    }
    if (apart) {
        ca_tensor_add_dim(&view, 1, 0);
    }
    return view;
}

ca_status
ca_copy_run(ca_device *device, const ca_tensor *from, const ca_tensor *to, const char *call,
            ca_error *error)
{
    int64_t bytes = ca_tensor_count(to) * (int64_t)ca_dtype_size(to->dtype);
    if (bytes == 0) {
        return CA_OK;
    }
    if (bytes <= SMALL_BYTES && ca_storage_is_at_hand(from) && ca_storage_is_at_hand(to) &&
        ca_diagonal_has_rows(from) && ca_diagonal_has_rows(to)) {
        copy_rows(from, to, 0, from->data, to->data);
        return CA_OK;
    }
    ca_tensor matrices = as_matrices(to, false);
    bool apart = !ca_diagonal_has_lines(&matrices);
    /* The band is empty, so everything is copied. */
    const ca_diagonal diagonal = {.input = as_matrices(from, apart),
                                  .output = as_matrices(to, apart),
                                  .memory = CA_OUTPUT_GIVEN,
                                  .call = call};
    static const ca_forced nothing = {.kernel = NULL};
    return ca_diagonal_run(device, &nothing, &diagonal, error);
}
