/* SPDX-License-Identifier: MIT
 *
 * The abilities of the processor that runs this process.
 */
#ifndef CLATTN_PROCESSOR_H
#define CLATTN_PROCESSOR_H

#include <stdbool.h>
#include <stdint.h>

/* True if the processor multiplies pairs of bfloat16, 16 at a time (vdpbf16ps on 512-bit
   registers), and the system saves these registers. */
bool ca_processor_has_bfloat16_pairs(void);

/* True if the instruction for pairs multiplies more numbers in a cycle than fma does. Intel's processors
   have the instruction, but multiply half as many numbers with it. */
bool ca_processor_has_fast_pairs(void);

/* True if the processor has AMX with bfloat16, and the system saves its registers. */
bool ca_processor_has_amx(void);

/* Ask the system for the use of AMX in all threads of this process. False if it refuses: an
   instruction of AMX would end the process then. */
bool ca_processor_allow_amx(void);

/* Fills `words` with bits for the processor's family, model and instructions. A word that
   the processor does not tell is 0, as are all words unless it is an x86-64. */
#define CA_PROCESSOR_WORDS 7
void ca_processor_describe(uint32_t words[CA_PROCESSOR_WORDS]);

#endif
