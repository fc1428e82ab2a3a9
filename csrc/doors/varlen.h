/* SPDX-License-Identifier: MIT
 *
 * torch.nn.attention.varlen.varlen_attn and what clattn adds to it: the offsets and lengths of packed sequences,
 * and keys in pages.
 */
#ifndef CLATTN_DOORS_VARLEN_H
#define CLATTN_DOORS_VARLEN_H

#include <stdbool.h>
#include <stdint.h>

#include "attention/problem.h"
#include "base/status.h"
#include "base/tensor.h"
#include "doors/torch.h"

/* What a call has beside the arguments of ca_torch_sdpa. Numbers are int64, contiguous and on the host. */
typedef struct {
    ca_tensor cu_seq_q;    /* (n + 1) */
    ca_tensor cu_seq_k;    /* (n + 1); data NULL: absent, as the next two may be */
    ca_tensor seqused_k;   /* (n) */
    ca_tensor block_table; /* (n, most) */
    ca_tensor key_scale;   /* float32 (), (Hk), or of the shape of key without its last dimension */
    ca_tensor value_scale;
    ca_tensor
        key_offset; /* of int4, as its scales: (…, groups). Pages have (…, ceil(E / 2)) bytes */
    ca_tensor value_offset;
    int64_t value_size; /* Ev of int4 */
    bool heads_first;   /* pages are (num_pages, Hk, page_size, E); else their heads come third */
    bool rows_are_last; /* mods count the rows of a sequence as its last positions; else from 0 */
} ca_varlen;

/* The sequences of a checked call, with the memory that they point to. */
typedef struct {
    ca_sequences sequences;
    int64_t *memory;
    ca_tensor pages[CA_PAGED_OPERANDS];
} ca_varlen_sequences;

/* Check what the call says of sequences, and find them. query (total_q, Hq, E), key and value are the call's; if
   they are pages, they become views of the first page, (page_size, Hk, E). The caller frees found->memory in
   any case, which is NULL at first. `call` points to `found` afterwards. */
ca_status ca_varlen_find(const ca_varlen *varlen, ca_torch_sdpa *call, ca_varlen_sequences *found,
                         ca_error *error);

#endif
