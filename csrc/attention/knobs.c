/* SPDX-License-Identifier: MIT */
#include "attention/knobs.h"

#include "opencl/tuning.h"

const ca_dtype ca_class_dtypes[CA_CLASS_DTYPES] = {CA_FLOAT32, CA_FLOAT16, CA_BFLOAT16, CA_FLOAT64};
const int64_t ca_class_heads[CA_CLASS_HEADS] = {64, 80, 96, 128, 256};
const char *const ca_class_rows[CA_CLASS_ROWS] = {"many", "few", "decode", "threshold"};

/* A problem with fewer rows is one of decoding, one with at most FEW_ROWS one of few rows. */
#define DECODING_ROWS 16
#define FEW_ROWS      128

enum { MANY, FEW, DECODE, THRESHOLD };

/* Returns the range that the problem's rows are in. */
static int
rows_of(const ca_attention *attention)
{
    int64_t rows = ca_attention_heads_together(attention) * attention->L;
    return rows < DECODING_ROWS ? DECODE : rows <= FEW_ROWS ? FEW : MANY;
}

/* Returns the number of the class of the problem's dtype and head size, or -1. */
static int
class_of(const ca_attention *attention, int rows)
{
    ca_dtype dtype = attention->operands[CA_ATTENTION_QUERY].dtype;
    bool wider = ca_attention_in_float64(attention) && dtype != CA_FLOAT64;
    int64_t size = attention->E > attention->Ev ? attention->E : attention->Ev;
    int d = 0;
    int head = 0;
    while (d < CA_CLASS_DTYPES && ca_class_dtypes[d] != dtype) {
        d++;
    }
    while (head < CA_CLASS_HEADS && ca_class_heads[head] < size) {
        head++;
    }
    if (d == CA_CLASS_DTYPES || head == CA_CLASS_HEADS || wider ||
        attention->operands[CA_ATTENTION_VALUE].dtype != dtype) {
        return -1;
    }
    return ca_class_number(d, head, rows);
}

static bool
is_tuned(const ca_device_info *info)
{
    return info->tuning != NULL &&
           atomic_load_explicit(&info->tuning->in_use, memory_order_relaxed);
}

static ca_knobs
knobs_of_class(const ca_device_info *info, const ca_attention *attention, int rows, int variant,
               const ca_knob *list)
{
    ca_knobs knobs = {.list = list};
    int number = class_of(attention, rows);
    if (number >= 0) {
        knobs.word = atomic_load_explicit(&info->tuning->words[ca_knobs_place(number, variant)],
                                          memory_order_relaxed);
    }
    return knobs;
}

ca_knobs
ca_knobs_of(const ca_device_info *info, const ca_attention *attention, int variant,
            const ca_knob *list)
{
    return is_tuned(info) ? knobs_of_class(info, attention, rows_of(attention), variant, list)
                          : (ca_knobs){.list = list};
}

ca_knobs
ca_knobs_of_threshold(const ca_device_info *info, const ca_attention *attention, int variant,
                      const ca_knob *list)
{
    return is_tuned(info) ? knobs_of_class(info, attention, THRESHOLD, variant, list)
                          : (ca_knobs){.list = list};
}
