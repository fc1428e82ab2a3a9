/* SPDX-License-Identifier: MIT
 *
 * Attention problems that need no kernel.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attention/params.h" /* ca_attention_keys */
#include "attention/problem.h"
#include "opencl/storage.h"

bool
ca_attention_is_trivial(const ca_attention *attention)
{
    const ca_tensor *tensors = attention->tensors;
    bool writes = false;
    for (int t = CA_ATTENTION_OUTPUT; t < CA_ATTENTION_TENSORS; t++) {
        writes = writes || ca_tensor_extent(&tensors[t]).bytes != 0;
    }
    return !writes || ca_attention_keys(attention) == 0;
}

static void
fill_memory(void *data, size_t bytes, ca_dtype dtype, double value)
{
    if (value == 0) {
        memset(data, 0, bytes);
    } else if (dtype == CA_FLOAT64) {
        for (size_t i = 0; i < bytes / sizeof(double); i++) {
            ((double *)data)[i] = value;
        }
    } else {
        for (size_t i = 0; i < bytes / sizeof(float); i++) {
            ((float *)data)[i] = (float)value;
        }
    }
}

/* All of a result's extent: zeros, or another value of float32 or float64. */
static ca_status
fill(const ca_tensor *tensor, double value, ca_error *error)
{
    ca_extent extent = ca_tensor_extent(tensor);
    if (extent.bytes == 0) {
        return CA_OK;
    }
    if (tensor->block == NULL) {
        fill_memory(extent.data, extent.bytes, tensor->dtype, value);
        return CA_OK;
    }
    void *values = malloc(extent.bytes);
    if (values == NULL) {
        return ca_error_set(error, CA_ERROR_MEMORY, "no memory for %zu bytes",
                            extent.bytes);
    }
    fill_memory(values, extent.bytes, tensor->dtype, value);
    size_t offset = (size_t)((char *)extent.data - (char *)tensor->block->address);
    ca_status status = ca_storage_write(ca_storage_of(tensor->block), offset, values,
                                        extent.bytes, error);
    free(values);
    return status;
}

ca_status
ca_attention_fill(const ca_attention *attention, ca_error *error)
{
    ca_status status = CA_OK;
    CA_TRY(fill(&attention->tensors[CA_ATTENTION_OUTPUT], 0, error));
    CA_TRY(fill(&attention->tensors[CA_ATTENTION_LSE], -INFINITY, error));
done:
    return status;
}
