/* SPDX-License-Identifier: MIT
 *
 * The diagonal-matrix problem that every door fills in. Nothing here knows a specification's name.
 */
#ifndef CLATTN_DIAGONAL_PROBLEM_H
#define CLATTN_DIAGONAL_PROBLEM_H

#include <stdbool.h>
#include <stdint.h>

#include "base/tensor.h"

/* What the output's memory holds before the call. */
typedef enum {
    CA_OUTPUT_GIVEN, /* the caller's elements */
    CA_OUTPUT_NEW,   /* anything */
    CA_OUTPUT_ZERO,  /* zeros */
} ca_output_memory;

/* For each element in column x and row y of every matrix:

       inside       = lower <= x - y < upper
       output[y, x] = value where inside (with `inverted`: where not inside), elsewhere
                      input[y, x], or zero without an input

   input and output have the same shape, of two dimensions or more, and the same dtype.
   The two share no memory, or they are the same view and the call is in place. */
typedef struct {
    ca_tensor input; /* data NULL: none */
    ca_tensor output;
    ca_output_memory memory;
    int64_t lower; /* any numbers; lower >= upper: nothing is inside */
    int64_t upper;
    bool inverted;
    uint64_t value;   /* bits of an element */
    const char *call; /* the function that the user called, for messages */
} ca_diagonal;

#endif
