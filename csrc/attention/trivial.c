/* SPDX-License-Identifier: MIT */
#include "attention/trivial.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "opencl/storage.h"

bool
ca_attention_is_trivial(const ca_attention *attention)
{
    bool writes = false;
    for (int role = CA_ATTENTION_OUTPUT; role < CA_ATTENTION_OPERANDS; role++) {
        writes = writes || attention->operands[role].memory.bytes != 0;
    }
    return !writes || attention->T == 0;
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

/* Fill a result's extent with zeros, or with another value of float32 or float64. */
static ca_status
fill(const ca_attention *attention, ca_attention_role role, double value, ca_error *error)
{
    const ca_operand *operand = &attention->operands[role];
    ca_extent extent = ca_attention_extent(attention, role);
    if (extent.bytes == 0) {
        return CA_OK;
    }
    if (operand->block == NULL) {
        fill_memory(extent.data, extent.bytes, operand->dtype, value);
        return CA_OK;
    }
    void *values = malloc(extent.bytes);
    if (values == NULL) {
        return ca_error_set(error, CA_ERROR_MEMORY, "no memory for %zu bytes", extent.bytes);
    }
    fill_memory(values, extent.bytes, operand->dtype, value);
    size_t offset = (size_t)((char *)extent.data - (char *)operand->block->address);
    ca_status status =
        ca_storage_write(ca_storage_of(operand->block), offset, values, extent.bytes, error);
    free(values);
    return status;
}

ca_status
ca_attention_fill(const ca_attention *attention, ca_error *error)
{
    ca_status status = CA_OK;
    CA_TRY(fill(attention, CA_ATTENTION_OUTPUT, 0, error));
    CA_TRY(fill(attention, CA_ATTENTION_LSE, -INFINITY, error));
done:
    return status;
}
