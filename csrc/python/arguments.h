/* SPDX-License-Identifier: MIT
 *
 * Arguments by name. A function lists its arguments once, as rows of a macro in its file:
 *
 *     #define TAKEN(ROW, STAR) ROW(QUERY, "query") STAR() ROW(SCALE, "scale=None")
 *
 * Arguments before STAR() may also be given by position. CPython makes a dict for a call whose
 * arguments by position and twice those by name are more than 30, which takes longer than all that
 * is done here. So a function with many arguments takes the first ones by position, too.
 *
 * From the rows come the slots of an array of objects, an enum; the texts, which the module reads
 * once; and the signature, which mypy.stubtest compares with _core.pyi.
 */
#ifndef CLATTN_PYTHON_ARGUMENTS_H
#define CLATTN_PYTHON_ARGUMENTS_H

#include "python/state.h"

#define CA_PY_SLOT(slot, text) slot,
#define CA_PY_SLOT_STAR()
#define CA_PY_TEXT(slot, text)  text,
#define CA_PY_TEXT_STAR()       "*",
#define CA_PY_SHOWN(slot, text) ", " text
#define CA_PY_SHOWN_STAR()      ", *"

/* enum { CA_PY_SLOTS(TAKEN) ARGUMENTS }; */
#define CA_PY_SLOTS(taken) taken(CA_PY_SLOT, CA_PY_SLOT_STAR)
/* const char *const texts[] = CA_PY_TEXTS(TAKEN); */
#define CA_PY_TEXTS(taken) {taken(CA_PY_TEXT, CA_PY_TEXT_STAR) NULL}
/* The docstring in a PyMethodDef that inspect.signature reads. `self` is "$module" or "$self". */
#define CA_PY_SIGNATURE(name, self, taken)                                                         \
    name "(" self ", /" taken(CA_PY_SHOWN, CA_PY_SHOWN_STAR) ")\n--\n\n"

/* Reads the texts of all functions into the module's state. Returns -1 with an exception. */
int ca_py_arguments_init(ca_state *state);

/* Puts the arguments of a call, or their defaults, into the function's slots, borrowed. Returns -1
   with a TypeError if one is unknown, missing or given twice. */
int ca_py_arguments(const ca_state *state, ca_py_function function, PyObject *const *args,
                    Py_ssize_t nargs, PyObject *names, PyObject **slots);

#endif
