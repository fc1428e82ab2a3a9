/* SPDX-License-Identifier: MIT
 *
 * What python/clattn/flex hands over: functions of scores and masks as OpenCL C, and their data.
 */
#ifndef CLATTN_PYTHON_MODS_H
#define CLATTN_PYTHON_MODS_H

#include "attention/mods.h"
#include "python/call.h"

/* Reads `object`, a tuple (text, has_score, has_mask, numbers, tables), whose arrays the call
   keeps. If `object` is None, *mods does not change. `in_float64`: real numbers become doubles, else
   floats. mods->numbers starts as NULL, and ca_py_mods_free follows in any case. Returns -1 with an
   exception. */
int ca_py_mods_parse(ca_py_call *call, PyObject *object, bool in_float64, ca_mods *mods);
void ca_py_mods_free(ca_mods *mods);

#endif
