/* SPDX-License-Identifier: MIT */
#include "opencl/ptx.h"

#include <string.h>

#define TARGET ".target sm_90"
#define MARK   "//@90a " /* GROUP_PTX of kernels/support/warp_group.clh */

void
ca_ptx_retarget(const char *ptx, size_t size, ca_strbuf *retargeted)
{
    const char *end = ptx + size;
    for (const char *at = ptx; at < end;) {
        const char *stop = memchr(at, '\n', (size_t)(end - at));
        stop = stop != NULL ? stop + 1 : end;
        size_t length = (size_t)(stop - at);
        size_t blank = 0;
        while (blank < length && (at[blank] == ' ' || at[blank] == '\t')) {
            blank++;
        }
        size_t left = length - blank;
        if (left >= strlen(MARK) && memcmp(at + blank, MARK, strlen(MARK)) == 0) {
            at += blank + strlen(MARK);
        } else if (left >= strlen(TARGET) && memcmp(at + blank, TARGET, strlen(TARGET)) == 0) {
            ca_strbuf_append(retargeted, TARGET "a");
            at += blank + strlen(TARGET);
        }
        ca_strbuf_append(retargeted, "%.*s", (int)(stop - at), at);
        at = stop;
    }
}
