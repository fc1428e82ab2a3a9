/* SPDX-License-Identifier: MIT
 *
 * The operands of an attention problem: one table, which host C and OpenCL C include. From it come the
 * roles of a problem and their names, the arguments of kernels, the bits of options, and what folding
 * and launches have to hold. A new operand is a row here, a view that a door sets, and a kernel that
 * reads it. docs/add_an_option.md adds one.
 *
 *     X(role, member, element, dimensions, traits, name)
 *
 *     role        CA_ATTENTION_<role> on the host; USES and VIEW (support/common.clh) in kernels
 *     member      of attention_call in kernels: __global element *member
 *     dimensions  that follow the leading ones: 2 are rows and columns, 1 is rows
 *     traits      bits of CA_IS_…, or 0
 *     name        for messages
 */
#pragma once

#define CA_IS_RESULT  1 /* kernels write it */
#define CA_IS_BY_ROWS 2 /* its rows are rows of the query */
#define CA_IS_WHOLE   4 /* each part of a divided problem reads all of it */

/* Operands that every kernel takes. */
#define CA_OWN_OPERANDS(X)                                                                         \
    X(QUERY, query, const storage, 2, CA_IS_BY_ROWS, "query")             /* (L, E) */             \
    X(KEY, key, const key_storage, 2, 0, "key")                           /* (S, E) */             \
    X(VALUE, value, const value_storage, 2, 0, "value")                   /* (S, Ev) */            \
    X(KEY_COUNTS, key_counts, const long, 0, 0, "key counts")             /* 0 … T */              \
    X(OUTPUT, output, storage, 2, CA_IS_RESULT | CA_IS_BY_ROWS, "output") /* (L, Ev) */            \
    X(LSE, lse, real, 2, CA_IS_RESULT | CA_IS_BY_ROWS, "lse") /* (L, 1), or (L, 2): base and sum */

/* Operands that few calls have. A call has at most CA_OPTIONAL_VIEWS of these and of the next ones.
   Row or column strides of mask and bias are 0 where they broadcast, and M <= T. Heads that share
   present keys and values, with stride 0, divide the copying. */
#define CA_OPTIONAL_OPERANDS(X)                                                                    \
    X(PAST_KEY, past_key, const key_storage, 2, 0, "past_key")         /* (P, E) */                \
    X(PAST_VALUE, past_value, const value_storage, 2, 0, "past_value") /* (P, Ev) */               \
    X(INPUT_BIAS, input_bias, const storage, 1, 0, "input bias") /* (E + E + Ev), contiguous */    \
    X(MASK, mask, const void, 2, CA_IS_BY_ROWS, "mask")          /* (L, M), of any dtype */        \
    X(BIAS, bias, const storage, 2, CA_IS_BY_ROWS, "bias")       /* (L, T) */                      \
    X(PRESENT_KEY, present_key, storage, 2, CA_IS_RESULT, "present_key")             /* (T, E) */  \
    X(PRESENT_VALUE, present_value, value_storage, 2, CA_IS_RESULT, "present_value") /* (T, Ev) */ \
    X(SCORES, scores, storage, 2, CA_IS_RESULT | CA_IS_BY_ROWS, "scores")            /* (L, T) */  \
    X(SINKS, sinks, const real, 0, 0, "sinks")       /* natural units, in host memory, not +inf */ \
    X(OFFSETS, offsets, const long, 0, 0, "offsets") /* positions of row 0 */                      \
    X(SEQUENCES, sequences, const long, 1, CA_IS_WHOLE, "sequences") /* attention/sequences.h */   \
    X(KEY_SCALE, key_scale, const float, 2, 0, "key_scale")          /* (S, 1), or (S, groups) */  \
    X(VALUE_SCALE, value_scale, const float, 2, 0, "value_scale")    /* likewise */                \
    X(KEY_OFFSET, key_offset, const float, 2, 0, "key_offset")       /* (S, groups), of int4 */    \
    X(VALUE_OFFSET, value_offset, const float, 2, 0, "value_offset") /* likewise */

/* Operands of mods, which only programs with mods take. Tables have up to 5 dimensions and any
   dtype: batch, row and column are their strides. */
#define CA_MOD_OPERANDS(X)                                                                         \
    X(BLOCKS, mask_blocks, const uchar, 2, 0, "mask blocks") /* (blocks of rows, of keys) */       \
    X(NUMBERS, numbers, const long, 1, CA_IS_WHOLE, "numbers of mods")                             \
    X(TABLE0, table0, const void, 2, CA_IS_WHOLE, "table 0")                                       \
    X(TABLE1, table1, const void, 2, CA_IS_WHOLE, "table 1")                                       \
    X(TABLE2, table2, const void, 2, CA_IS_WHOLE, "table 2")                                       \
    X(TABLE3, table3, const void, 2, CA_IS_WHOLE, "table 3")

/* Operands of the backward pass, which only its kernels take. A gradient has stride 0 along a dimension that
   is summed over. */
#define CA_BACKWARD_OPERANDS(X)                                                                    \
    X(FORWARD, forward, const storage, 2, CA_IS_BY_ROWS, "output")              /* (L, Ev) */      \
    X(FORWARD_LSE, forward_lse, const real, 2, CA_IS_BY_ROWS, "lse")            /* (L, 1) */       \
    X(GRAD_OUTPUT, grad_output, const storage, 2, CA_IS_BY_ROWS, "grad_output") /* (L, Ev) */      \
    X(GRAD_LSE, grad_lse, const real, 2, CA_IS_BY_ROWS, "grad_lse")             /* (L, 1) */       \
    X(GRAD_QUERY, grad_query, storage, 2, CA_IS_RESULT, "gradient of query")    /* (L, E) */       \
    X(GRAD_KEY, grad_key, storage, 2, CA_IS_RESULT, "gradient of key")          /* (S, E) */       \
    X(GRAD_VALUE, grad_value, storage, 2, CA_IS_RESULT, "gradient of value")    /* (S, Ev) */

/* Gradients that a step of attention/backward.cl has as its OUTPUT: no kernel takes them as arguments. */
#define CA_GRADIENT_OPERANDS(X)                                                                    \
    X(GRAD_MASK, grad_mask, void, 2, CA_IS_RESULT, "gradient of attn_mask") /* (L, S) */           \
    X(GRAD_SINKS, grad_sinks, void, 0, CA_IS_RESULT, "gradient of sinks")

/* Optional operands of a call, at most: the arguments of a kernel fit the 1,024 bytes that every device
   takes. */
#define CA_OPTIONAL_VIEWS 8

/* What a call asks for, as bits of a number: first the optional operands that it has. Kernels for CPUs
   read params.options. Kernels for GPUs have the number as the macro OPTIONS, so that options that are
   not used take no registers. */
#define CA_OPTION_OF(role, member, element, dimensions, traits, name) CA_OPTION_##role,
enum {
    CA_OPTIONAL_OPERANDS(CA_OPTION_OF) CA_MOD_OPERANDS(CA_OPTION_OF)
        CA_BACKWARD_OPERANDS(CA_OPTION_OF) CA_OPTIONAL_ROLES,
    CA_OPTION_ADDED_MASK = 48, /* the mask's values are added; else they are conditions */
    CA_OPTION_FILTER,          /* a false condition adds `filter`, a finite number */
    CA_OPTION_SOFTCAP,
    CA_OPTION_LATE_SOFTCAP, /* the softcap comes after mask and bias */
    CA_OPTION_DROPOUT,
    CA_OPTION_STAGE, /* and the bit behind it: which scores are written, a ca_scores_stage */
};
#undef CA_OPTION_OF

#define CA_USES(option) ((ca_int64)1 << CA_OPTION_##option)
