/* SPDX-License-Identifier: MIT */
#include "attention/fill.h"

#include <stdlib.h>
#include <string.h>

#include "opencl/storage.h"

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

ca_status
ca_fill_extent(const ca_extent *extent, ca_block *block, ca_dtype dtype, double value,
               ca_error *error)
{
    if (extent->bytes == 0) {
        return CA_OK;
    }
    if (block == NULL) {
        fill_memory(extent->data, extent->bytes, dtype, value);
        return CA_OK;
    }
    void *values = malloc(extent->bytes);
    if (values == NULL) {
        return ca_error_set(error, CA_ERROR_MEMORY, "no memory for %zu bytes", extent->bytes);
    }
    fill_memory(values, extent->bytes, dtype, value);
    size_t offset = (size_t)((char *)extent->data - (char *)block->address);
    ca_status status = ca_storage_write(ca_storage_of(block), offset, values, extent->bytes, error);
    free(values);
    return status;
}
