/* SPDX-License-Identifier: MIT
 *
 * A lock that is held while a thread works without the GIL. Handlers of signals run in a thread that
 * waits for the lock, and may run in the one that holds it.
 */
#ifndef CLATTN_PYTHON_LOCK_H
#define CLATTN_PYTHON_LOCK_H

#include <Python.h>

typedef struct {
    PyThread_type_lock handle; /* NULL: the lock was not made */
    unsigned long holder;      /* a thread, under the GIL; 0: none */
} ca_py_lock;

/* All functions are called with the GIL. */

/* Makes the lock. In a forked child, where a holder does not exist, makes it anew: a thread of the
   child that has taken the old one then releases nothing. Returns -1 with an exception. */
int ca_py_lock_init(ca_py_lock *lock);

void ca_py_lock_destroy(ca_py_lock *lock);

/* Waits for the lock, without the GIL, for a change by `name`. Returns -1 with an exception: that of a
   handler, or RuntimeError if this thread holds the lock, which a handler alone can meet. */
int ca_py_lock_take(ca_py_lock *lock, const char *name);

void ca_py_lock_release(ca_py_lock *lock);

#endif
