/* SPDX-License-Identifier: MIT
 *
 * Rows that are written to pages. A row has a vector for each head: a key or a value. Pages are tensors
 * (num_pages, heads, page_size, …), C-contiguous. Place p is row p % page_size of page p / page_size.
 */
#ifndef CLATTN_PAGES_ROWS_H
#define CLATTN_PAGES_ROWS_H

#include "base/status.h"
#include "base/tensor.h"
#include "kernels/pages/params.h" /* CA_CODES_NONE, … */
#include "opencl/info.h"

typedef struct {
    ca_tensor from; /* (rows or more, heads, size), of a float dtype, any strides */
    ca_tensor
        to;    /* pages, on the device. Codes of 8 bits have `size` columns, those of int4 half */
    int codes; /* CA_CODES_NONE: `to` has the dtype of `from` */
    ca_tensor
        scales; /* float32: pages of int8 and, with a dimension of groups, of int4; (heads,) of
                          float8, which are read; else absent */
    ca_tensor offsets; /* of int4, as its scales; else absent */
    const int64_t *places;
    int64_t count; /* of places, which are the rows that are written */
    const char *call;
} ca_rows;

/* Write the rows for the function `call`. No two places are equal, and `from` shares no memory with
   pages. Waits only where ca_launch_run would. */
ca_status ca_rows_write(ca_device *device, const ca_rows *rows, ca_error *error);

/* Copy rows of pages for the function `call`: the row at place moves[count + n] to moves[n]. Nothing is
   copied from a row to which something is copied. Waits as ca_rows_write. */
ca_status ca_rows_copy(ca_device *device, const ca_tensor *pages, const int64_t *moves,
                       int64_t count, const char *call, ca_error *error);

#endif
