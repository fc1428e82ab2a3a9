/* SPDX-License-Identifier: MIT
 *
 * ONNX TensorScatter, opset 24: its rules, and the copies that make its result.
 */
#ifndef CLATTN_DOORS_ONNX_SCATTER_H
#define CLATTN_DOORS_ONNX_SCATTER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "base/tensor.h"

typedef struct {
    ca_tensor past;    /* (B, …, capacity, …) */
    ca_tensor update;  /* (B, …, n, …) */
    ca_tensor indices; /* (B), in the host's memory; absent: zeros */
    int64_t axis;      /* of capacity and n */
    bool circular;
    int64_t *places; /* B positions, below the capacity, of the first rows; NULL without indices */
} ca_onnx_scatter;

/* Checks every rule but what the indices are. The axis then counts from the first dimension. */
ca_status ca_onnx_scatter_check(ca_onnx_scatter *call, ca_error *error);

/* Reads the indices of a checked call, once, and checks them. */
ca_status ca_onnx_scatter_place(const ca_onnx_scatter *call, ca_error *error);

/* The copies that are left. It starts as zeros. */
typedef struct {
    bool begun;
    int64_t batch;
    int64_t row; /* of the update */
} ca_onnx_copies;

/* Gives the next copy, which follows those before it. False if there is none. */
bool ca_onnx_scatter_next(const ca_onnx_scatter *call, const ca_tensor *output,
                          ca_onnx_copies *copies, ca_tensor *from, ca_tensor *to);

#endif
