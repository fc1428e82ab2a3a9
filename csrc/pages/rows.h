/* SPDX-License-Identifier: MIT
 *
 * Rows of keys or values in the pages of a cache. A row has a vector for each head: a key or a value. Pages are
 * tensors (num_pages, heads, page_size, …), C-contiguous. Place p is row p % page_size of page p / page_size.
 */
#ifndef CLATTN_PAGES_ROWS_H
#define CLATTN_PAGES_ROWS_H

#include "base/status.h"
#include "base/tensor.h"
#include "kernels/pages/params.h" /* CA_CODES_NONE, … */
#include "opencl/info.h"

/* How the rows of a cache's keys, or of its values, are kept. */
typedef struct {
    int codes;    /* CA_CODES_… */
    int64_t size; /* elements of a vector */
    ca_tensor
        pages; /* elements, or codes. Those of 8 bits have `size` columns, those of int4 half */
    /* float32: pages of int8 and, with a dimension of groups, of int4; (heads,) of float8; else absent */
    ca_tensor scales;
    ca_tensor offsets; /* of int4, as its scales; else absent */
} ca_kept;

/* True if the tensors have these shapes and dtypes. */
bool ca_kept_is_whole(const ca_kept *kept);

/* Write the tensors that have memory for each row. Returns how many there are. */
#define CA_KEPT_TENSORS 3
int ca_kept_tensors(const ca_kept *kept, ca_tensor tensors[CA_KEPT_TENSORS]);

typedef struct {
    ca_tensor from; /* (entries, heads, rows, size), of a float dtype, any strides */
    const ca_kept *to;
    const int64_t *places; /* (entries, rows); below 0: the row is not written */
    const char *call;
} ca_rows;

/* Write the rows. Their places differ, and `from` shares no memory with the pages. If the pages hold elements, not
   codes, `from` has their dtype. The function waits only where ca_launch_run waits. `call` is the function that the
   user called, for messages. */
ca_status ca_rows_write(ca_device *device, const ca_rows *rows, ca_error *error);

/* Copy `count` rows between pages: the row at place moves[count + n] of `from` to place moves[n] of `to`. The two
   have the same heads, columns and dtype. They may be the same pages, if no row is both read and written. The
   function waits as ca_rows_write does, and `call` is as there. */
ca_status ca_rows_copy(ca_device *device, const ca_tensor *from, const ca_tensor *to,
                       const int64_t *moves, int64_t count, const char *call, ca_error *error);

#endif
