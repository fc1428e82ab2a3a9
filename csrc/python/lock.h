/* SPDX-License-Identifier: MIT
 *
 * The lock of a cache. Threads read and change the cache without the GIL; the lock decides who waits for whom.
 *
 * Changes wait for each other, from their check to their end. Readers take no lock: they are noted until they
 * have read. A change waits for those readers that may see what it writes:
 *
 *     a change that    waits for
 *     grows            readers that began before a change last forgot positions: it writes behind all positions that
 *                      are left, and only these readers can read there
 *     shares, forgets  nobody: it writes nothing
 *     overwrites       all readers. New ones wait for the change
 *
 * A handler of a signal runs in a thread that may be waiting, reading or changing at that moment. A change in a handler
 * raises a RuntimeError if it would wait for its own thread: directly, or because another thread's change waits for
 * what this thread reads. The handler may read then, since the other change has not begun to write.
 */
#ifndef CLATTN_PYTHON_LOCK_H
#define CLATTN_PYTHON_LOCK_H

#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

#include "base/platform.h"

typedef enum {
    CA_PY_GROWS,
    CA_PY_SHARES,
    CA_PY_FORGETS,
    CA_PY_OVERWRITES,
} ca_py_change;

typedef struct {
    unsigned long thread;
    uint64_t time; /* what `forgotten` was when it began */
} ca_py_reader;

typedef struct {
    PyThread_type_lock changing; /* NULL: the lock was not made */
    PyThread_type_lock gone;     /* held; a reader that a change waits for releases it */
    ca_mutex guard;              /* of all that follows, for an instant */
    unsigned long changer;       /* a thread; 0: none */
    ca_py_change change;
    bool waits;         /* a change waits for readers */
    uint64_t forgotten; /* how often positions were forgotten */
    ca_py_reader *readers;
    int count;
    int room;
} ca_py_lock;

/* All functions are called with the GIL. `name` is the method, for messages. */

/* Makes the lock. In a forked child, where other threads do not exist, makes it anew: a thread of the child that
   has taken the old one then releases nothing. Returns -1 with an exception. */
int ca_py_lock_init(ca_py_lock *lock);

void ca_py_lock_destroy(ca_py_lock *lock);

/* Begins a change, once it need not wait any more. Waits without the GIL. Returns -1 with an exception: that of a
   handler, or the RuntimeError. */
int ca_py_lock_change(ca_py_lock *lock, ca_py_change change, const char *name);

/* Ends the change of this thread, whose results others see already. */
void ca_py_lock_changed(ca_py_lock *lock);

/* Begins to read: *time is for ca_py_lock_has_read. What the cache holds is looked at afterwards. Returns -1 with
   an exception. */
int ca_py_lock_read(ca_py_lock *lock, const char *name, uint64_t *time);
void ca_py_lock_has_read(ca_py_lock *lock, uint64_t time);

#endif
