/* SPDX-License-Identifier: MIT
 *
 * A variant that computes a problem by itself, for its trial.
 */
#ifndef CLATTN_ATTENTION_ALONE_H
#define CLATTN_ATTENTION_ALONE_H

#include "attention/trial.h" /* ca_tried */

/* Returns the variant in a row of the table as a kernel to try. */
ca_tried ca_alone_variant(int variant);

#endif
