/* SPDX-License-Identifier: MIT
 *
 * A call of one of the functions that fill diagonals.
 */
#ifndef CLATTN_PY_DIAGONAL_H
#define CLATTN_PY_DIAGONAL_H

#include "diagonal/problem.h"
#include "doors/diagonal.h"
#include "python/array.h"
#include "python/call.h"

typedef struct {
    ca_py_call call;
    ca_diagonal_source source;
    PyObject *input; /* borrowed; NULL: there is none */
    PyObject *dtype; /* NumPy's, NULL: not given */
    PyObject *out;   /* borrowed, or None */
    ca_py_out opened;
    ca_py_sharing sharing; /* of out with the input */
    PyObject *device;      /* borrowed, or None */
    ca_diagonal problem;
} ca_py_diagonal;

/* The checked call's result, NULL with an exception. */
PyObject *ca_py_diagonal_run(ca_py_diagonal *call);

#endif
