/* SPDX-License-Identifier: MIT
 *
 * Trials of drivers: those that run in another process, by clattn/_apart.py, and its own.
 */
#ifndef CLATTN_PYTHON_TRIALS_H
#define CLATTN_PYTHON_TRIALS_H

#include "base/status.h"

/* A ca_error's `apart`, whose caller is a ca_py_work. CA_ERROR_DEVICE if no process can be started. */
ca_status ca_py_try_apart(void *caller, const char *request, ca_error *error);

#endif
