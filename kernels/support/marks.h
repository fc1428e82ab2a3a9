/* SPDX-License-Identifier: MIT
 *
 * The memory of marks, one text for host C and OpenCL C: CA_MARKS words that kernels write, by which
 * calls ask for rows to be computed again, then as many that the host writes, by which calls stop.
 */
#pragma once

/* More than calls run at a time. */
#define CA_MARKS 1024
