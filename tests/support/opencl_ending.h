/* SPDX-License-Identifier: MIT */
/* How a kernel of LIMITS_ENDS ends the process: see opencl_limits.c. */
#ifndef CLATTN_OPENCL_ENDING_H
#define CLATTN_OPENCL_ENDING_H

#include <signal.h>
#include <unistd.h>

#define HANGS 99

/* Ends the process by a signal, or hangs; 0: does neither. */
static void
end_process(int how)
{
    if (how == HANGS) {
        pause();
    } else if (how != 0) {
        signal(how, SIG_DFL); /* drivers have handlers */
        raise(how);
    }
}

#endif
