/* SPDX-License-Identifier: MIT
 *
 * Marks: words in a device's memory. A kernel sets its call's mark to ask for a second kernel.
 * Each call that uses a word writes a larger value than the call before, so no word is ever
 * cleared.
 */
#ifndef CLATTN_OPENCL_MARKS_H
#define CLATTN_OPENCL_MARKS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "opencl/info.h"
#include "opencl/span.h"

/* A kernel sets the mark by marks[slot] = value. The mark is set if marks[slot] >= value: later
   calls that use the slot write larger values. */
typedef struct {
    uint32_t slot;
    uint32_t value;
} ca_mark;

/* Take a mark for one call, on a prepared device. *marks is the memory of all marks. */
ca_status ca_mark_take(ca_device *device, ca_mark *mark, ca_span *marks, ca_error *error);

/* Sets *set to true if a kernel has set the mark. The call's kernels have to be complete. If a
   later call has the same slot and has set its own mark, *set is true as well. */
ca_status ca_mark_is_set(ca_device *device, const ca_mark *mark, bool *set, ca_error *error);

/* Tell the call's kernels to end, where the host reaches the marks while kernels run. The results are
   undefined then. Other calls that use the slot go on, earlier and later ones. Two such calls that
   are to end at once share the word: the first one may run to its end. */
void ca_mark_stop(ca_device *device, const ca_mark *mark);

#endif
