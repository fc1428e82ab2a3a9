/* SPDX-License-Identifier: MIT
 *
 * What the environment forces, mostly for tests: one variant, tighter limits than the device has,
 * where trials run.
 */
#ifndef CLATTN_OPENCL_FORCED_H
#define CLATTN_OPENCL_FORCED_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "opencl/info.h" /* ca_device_info */

/* CLATTN_TRIALS: where variants, and drivers that are not known, are tried before their first use. */
typedef enum {
    CA_TRIALS_APART, /* drivers that are not known in another process, variants here */
    CA_TRIALS_HERE,  /* in this process */
    CA_TRIALS_OFF,   /* nowhere */
} ca_trials;

/* All zero: nothing is forced. */
typedef struct {
    const char *kernel;   /* CLATTN_KERNEL, a variant's word; NULL: the fastest */
    bool emulates;        /* the variant emulates matrix units, also on a device that has them */
    uint32_t left_out;    /* a bit for each row of the table of variants that calls may not use */
    int64_t local_memory; /* CLATTN_LOCAL_MEMORY, bytes at most; 0: all there are */
    ca_trials trials;
} ca_forced;

/* Read CLATTN_TRIALS; NULL or "": apart. CA_ERROR_SETTING for other words. */
ca_status ca_forced_parse_trials(const char *words, ca_forced *forced, ca_error *error);

/* Read CLATTN_LOCAL_MEMORY; NULL or "": not limited. CA_ERROR_SETTING for other words. */
ca_status ca_forced_parse_local_memory(const char *words, ca_forced *forced, ca_error *error);

/* True if the device is limited. */
bool ca_forced_limits(const ca_forced *forced);

/* Copy `info` with the limits applied. */
void ca_forced_limit(const ca_forced *forced, const ca_device_info *info, ca_device_info *limited);

#endif
