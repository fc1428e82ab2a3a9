/* SPDX-License-Identifier: MIT */
#include "python/lock.h"

#include "python/error.h"

/* A waiting thread looks for signals this often: a signal may come just before the thread waits. */
#define WAITING_MICROSECONDS 50000

int
ca_py_lock_init(ca_py_lock *lock)
{
    PyThread_type_lock handle = PyThread_allocate_lock();
    if (handle == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    *lock = (ca_py_lock){.handle = handle};
    return 0;
}

void
ca_py_lock_destroy(ca_py_lock *lock)
{
    if (lock->handle != NULL) {
        PyThread_free_lock(lock->handle);
    }
}

int
ca_py_lock_take(ca_py_lock *lock, const char *name)
{
    const unsigned long thread = PyThread_get_thread_ident();
    PyLockStatus taken = PyThread_acquire_lock_timed(lock->handle, 0, 0);
    while (taken != PY_LOCK_ACQUIRED) {
        if (lock->holder == thread) {
            return ca_py_raise(PyExc_RuntimeError,
                               "%s: the handler of a signal cannot change what its thread is "
                               "changing",
                               name);
        }
        Py_BEGIN_ALLOW_THREADS
            taken = PyThread_acquire_lock_timed(lock->handle, WAITING_MICROSECONDS, 1);
        Py_END_ALLOW_THREADS
        if (taken != PY_LOCK_ACQUIRED && PyErr_CheckSignals() < 0) {
            return -1;
        }
    }
    lock->holder = thread;
    return 0;
}

void
ca_py_lock_release(ca_py_lock *lock)
{
    if (lock->holder == PyThread_get_thread_ident()) {
        lock->holder = 0;
        PyThread_release_lock(lock->handle);
    }
}
