/* SPDX-License-Identifier: MIT
 *
 * torch.nn.functional.scaled_dot_product_attention and what clattn adds to it: its
 * rules, and its arguments as an attention problem.
 */
#ifndef CLATTN_DOORS_TORCH_H
#define CLATTN_DOORS_TORCH_H

#include <stdbool.h>
#include <stdint.h>

#include "attention/problem.h" /* ca_attention, CA_BAND_UNBOUNDED */
#include "base/status.h"
#include "base/tensor.h"

typedef enum {
    CA_CAUSAL_NONE,
    CA_CAUSAL_UPPER_LEFT,  /* j <= i */
    CA_CAUSAL_LOWER_RIGHT, /* j <= i + S - L */
} ca_causal;

/* What is known of a mask for each block of its rows and keys. */
typedef struct {
    ca_tensor entries; /* (B or 1, Hq or 1, blocks of rows, blocks of keys) uint8: CA_BLOCK_… */
    int64_t rows;      /* of the mask */
    int64_t keys;
    int64_t block_rows; /* of a block */
    int64_t block_keys;
    bool uses[2]; /* does the mask_mod use b, h? */
} ca_blocks;

typedef struct {
    ca_tensor query;     /* (…, Hq, L, E) */
    ca_tensor key;       /* (…, Hk, S, E) */
    ca_tensor value;     /* (…, Hk, S, Ev) */
    ca_tensor attn_mask; /* broadcasts to (…, Hq, L, S); data NULL: none */
    bool has_mask;       /* an empty mask has no data but is checked all the same */
    ca_tensor sinks;     /* (Hq,), of the type of the arithmetic, never +inf; data NULL: none */
    ca_tensor offsets;   /* int64 (B,), B the first dimension of query; data NULL: none */
    int64_t position;    /* without offsets: row i stands at i + position */
    ca_causal causal;
    bool enable_gqa;
    bool has_scale; /* else 1/sqrt(E) */
    double scale;
    double softcap;       /* 0: none */
    int64_t window_left;  /* CA_BAND_UNBOUNDED: no bound */
    int64_t window_right; /* likewise */
    double dropout;       /* 0 … 1 */
    uint64_t seed;
    bool returns_weights;
    ca_mods *mods;                 /* NULL: none; the door sets the numbers of the call */
    ca_blocks blocks;              /* of a mask that mods have; entries absent: none */
    const ca_sequences *sequences; /* of packed rows and keys; NULL: none */
    /* Beside codes, or with sequences; data NULL: none. float32 (…, Hk, S, 1), or of int4 (…, Hk, S, groups), as
       key_offset and value_offset, which only int4 has. */
    ca_tensor key_scale;
    ca_tensor value_scale;
    ca_tensor key_offset;
    ca_tensor value_offset;
    int64_t code; /* CA_KERNEL_FLOAT8_… or _INT4: what key and value are, of dtype uint8; or 0 */
} ca_torch_sdpa;

/* Start a call without arrays, options and results beside the output. */
void ca_torch_sdpa_init(ca_torch_sdpa *call);

/* Check every rule; the result's shape (…, Hq, L, Ev) is written to `shape`.
   CA_ERROR_TYPE or CA_ERROR_VALUE naming the argument. */
ca_status ca_torch_sdpa_check(const ca_torch_sdpa *call, int *ndim, int64_t shape[CA_MAX_DIMS],
                              ca_error *error);

/* Write sinks, of any float dtype, to `converted`, which has their shape and the type of the
   arithmetic. Both are on the host. A finite number stays finite. +inf becomes a NaN, which a
   score of +inf gives too. */
void ca_torch_convert_sinks(const ca_tensor *sinks, ca_tensor *converted);

/* Set the options and views of the checked call, which are to be folded. `output` has the result's
   shape, `lse` (…, Hq, L, 1), or (…, Hq, L, 2) for base and sum (data NULL: not wanted), `weights`
   (…, Hq, L, S) likewise. */
void ca_torch_sdpa_views(const ca_torch_sdpa *call, const ca_tensor *output, const ca_tensor *lse,
                         const ca_tensor *weights, ca_attention *attention,
                         ca_tensor views[CA_ATTENTION_OPERANDS]);

#endif
