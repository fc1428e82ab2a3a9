/* SPDX-License-Identifier: MIT */
#include "attention/knobs.h"

#include <stdio.h>

#include "opencl/tuning.h"

static const ca_dtype dtypes[CA_CLASS_DTYPES] = {CA_FLOAT16, CA_BFLOAT16, CA_FLOAT32, CA_FLOAT64};
static const int heads[CA_CLASS_HEADS] = {64, 80, 96, 128, 256};
static const char *const rows[CA_CLASS_ROWS] = {"many", "few", "decode"};

enum { MANY, FEW, DECODE };

/* A problem with fewer rows is one of decoding, one with at most FEW_ROWS one of few rows. */
#define DECODING_ROWS 16
#define FEW_ROWS      128

void
ca_class_name(int number, char name[CA_CLASS_NAME_SIZE])
{
    int head = number / CA_CLASS_ROWS;
    (void)snprintf(name, CA_CLASS_NAME_SIZE, "%s-%d-%s",
                   ca_dtype_name(dtypes[head / CA_CLASS_HEADS]), heads[head % CA_CLASS_HEADS],
                   rows[number % CA_CLASS_ROWS]);
}

/* Returns the number of the problem's class, or -1. */
static int
class_of(const ca_attention *attention)
{
    ca_dtype dtype = attention->operands[CA_ATTENTION_QUERY].dtype;
    bool wider = ca_attention_in_float64(attention) && dtype != CA_FLOAT64;
    int64_t size = attention->E > attention->Ev ? attention->E : attention->Ev;
    int64_t together = ca_attention_heads_together(attention) * attention->L;
    int range = together < DECODING_ROWS ? DECODE : together <= FEW_ROWS ? FEW : MANY;
    int d = 0;
    int head = 0;
    while (d < CA_CLASS_DTYPES && dtypes[d] != dtype) {
        d++;
    }
    while (head < CA_CLASS_HEADS && heads[head] < size) {
        head++;
    }
    if (d == CA_CLASS_DTYPES || head == CA_CLASS_HEADS || wider ||
        attention->operands[CA_ATTENTION_VALUE].dtype != dtype) {
        return -1;
    }
    return (d * CA_CLASS_HEADS + head) * CA_CLASS_ROWS + range;
}

ca_knobs
ca_knobs_of(const ca_device_info *info, const ca_attention *attention, int variant,
            const ca_knob *list)
{
    ca_knobs knobs = {.list = list};
    const ca_tuning *tuning = info->tuning;
    bool tuned = tuning != NULL && atomic_load_explicit(&tuning->in_use, memory_order_relaxed);
    int number = tuned ? class_of(attention) : -1;
    if (number >= 0) {
        knobs.word = atomic_load_explicit(&tuning->words[ca_knobs_place(number, variant)],
                                          memory_order_relaxed);
    }
    return knobs;
}
