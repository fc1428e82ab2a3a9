/* SPDX-License-Identifier: MIT
 *
 * A knob is a number of a plan. A rule chooses it, or the tuner, where it has measured a better
 * number on this device. Only variants for GPUs have knobs. The tuner chooses numbers for each class
 * of problems: a dtype, a range of head sizes and a range of rows.
 */
#ifndef CLATTN_ATTENTION_KNOBS_H
#define CLATTN_ATTENTION_KNOBS_H

#include <stdint.h>

#include "attention/problem.h"
#include "opencl/info.h" /* ca_device_info */

#define CA_MAX_KNOBS   8 /* of a variant */
#define CA_KNOB_VALUES 9

/* A plan is right with any legal value, and may pass over a value that does not suit a problem. */
typedef struct {
    const char *name;               /* NULL: the end of a list */
    int64_t values[CA_KNOB_VALUES]; /* the legal ones; then zeros */
} ca_knob;

/* The classes: all combinations of these. A problem belongs to the smallest head size that is not
   smaller than its own E and Ev, and to a range of rows of all heads that share their keys. */
#define CA_CLASS_DTYPES 4
#define CA_CLASS_HEADS  5
#define CA_CLASS_ROWS   3
#define CA_CLASSES      (CA_CLASS_DTYPES * CA_CLASS_HEADS * CA_CLASS_ROWS)

#define CA_CLASS_NAME_SIZE 32

/* Write the name of a class, such as "float16-64-many". */
void ca_class_name(int number, char name[CA_CLASS_NAME_SIZE]);

/* The tuner's numbers for one problem and one variant. Byte n of the word is 1 + the index of the
   value of knob n, or 0 for the plan's rule. */
typedef struct {
    const ca_knob *list;
    uint64_t word;
} ca_knobs;

/* The word of a class and a variant, an index of the table of variants. */
static inline int
ca_knobs_place(int class_number, int variant)
{
    return variant * CA_CLASSES + class_number;
}

/* `list` is that of the variant. A device without tuning, and a problem without a class, have no
   numbers. */
ca_knobs ca_knobs_of(const ca_device_info *info, const ca_attention *attention, int variant,
                     const ca_knob *list);

/* Returns the tuner's value of knob n, or the rule's where there is none. */
static inline int64_t
ca_knob_value(const ca_knobs *knobs, int n, int64_t rule)
{
    unsigned index = (unsigned)(knobs->word >> (8 * n)) & 0xff;
    return index != 0 ? knobs->list[n].values[index - 1] : rule;
}

#endif
