/* SPDX-License-Identifier: MIT */
#include "python/lock.h"

#include "python/error.h"

/* A waiting thread looks for signals this often: a signal may come just before the thread waits. */
#define WAITING_MICROSECONDS 50000

int
ca_py_lock_init(ca_py_lock *lock)
{
    PyThread_type_lock changing = PyThread_allocate_lock();
    PyThread_type_lock gone = PyThread_allocate_lock();
    if (changing == NULL || gone == NULL) {
        if (changing != NULL) {
            PyThread_free_lock(changing);
        }
        PyErr_NoMemory();
        return -1;
    }
    (void)PyThread_acquire_lock(gone, NOWAIT_LOCK);
    *lock = (ca_py_lock){.changing = changing, .gone = gone};
    ca_mutex_init(&lock->guard);
    return 0;
}

void
ca_py_lock_destroy(ca_py_lock *lock)
{
    if (lock->changing != NULL) {
        PyThread_free_lock(lock->changing);
        (void)PyThread_acquire_lock(lock->gone, NOWAIT_LOCK);
        PyThread_release_lock(lock->gone); /* a lock that is held may not be freed */
        PyThread_free_lock(lock->gone);
        ca_mutex_destroy(&lock->guard);
    }
    PyMem_RawFree(lock->readers);
}

/* Waits a while for a lock of the system, without the GIL. Returns 1 if it is taken, 0 if not yet, -1 with the
   exception of a handler. */
static int
wait_for(PyThread_type_lock handle)
{
    PyLockStatus taken;
    Py_BEGIN_ALLOW_THREADS
        taken = PyThread_acquire_lock_timed(handle, WAITING_MICROSECONDS, 1);
    Py_END_ALLOW_THREADS
    return taken == PY_LOCK_ACQUIRED ? 1 : PyErr_CheckSignals();
}

static int
refuse(const char *name, const char *what, const char *does)
{
    return ca_py_raise(PyExc_RuntimeError,
                       "%s: the handler of a signal cannot %s what its thread is %s", name, what,
                       does);
}

/* Returns how many readers a change waits for: those of one thread, or of all for thread 0. Under the guard. */
static int
count_readers(const ca_py_lock *lock, ca_py_change change, unsigned long thread)
{
    int found = 0;
    for (int n = 0; n < lock->count; n++) {
        const ca_py_reader *reader = &lock->readers[n];
        const bool awaited =
            change == CA_PY_OVERWRITES || (change == CA_PY_GROWS && reader->time < lock->forgotten);
        found += awaited && (thread == 0 || reader->thread == thread);
    }
    return found;
}

/* Waits until no other change is under way. Refuses to wait for a change that itself waits for this thread. */
static int
take(ca_py_lock *lock, const char *name, const char *what)
{
    const unsigned long thread = PyThread_get_thread_ident();
    int taken = PyThread_acquire_lock(lock->changing, NOWAIT_LOCK);
    while (taken == 0) {
        ca_mutex_lock(&lock->guard);
        const bool changes = lock->changer == thread;
        const bool reads = lock->waits && count_readers(lock, lock->change, thread) > 0;
        ca_mutex_unlock(&lock->guard);
        if (changes || reads) {
            return refuse(name, what, changes ? "changing" : "reading");
        }
        taken = wait_for(lock->changing);
    }
    return taken < 0 ? -1 : 0;
}

/* Looks for readers that the change of this thread has to wait for, and notes the change. Returns how many there
   are; *own becomes true if one of them is of this thread. */
static int
find_readers(ca_py_lock *lock, ca_py_change change, bool *own)
{
    const unsigned long thread = PyThread_get_thread_ident();
    ca_mutex_lock(&lock->guard);
    lock->changer = thread;
    lock->change = change;
    const int found = count_readers(lock, change, 0);
    *own = count_readers(lock, change, thread) > 0;
    lock->waits = found > 0 && !*own;
    if (lock->waits) { /* `gone` may be free, by a reader that came too late */
        (void)PyThread_acquire_lock(lock->gone, NOWAIT_LOCK);
    }
    ca_mutex_unlock(&lock->guard);
    return found;
}

int
ca_py_lock_change(ca_py_lock *lock, ca_py_change change, const char *name)
{
    bool own = false;
    int waited = 0;
    if (take(lock, name, "change") < 0) {
        return -1;
    }
    while (waited >= 0 && find_readers(lock, change, &own) > 0) {
        waited = own ? refuse(name, "change", "reading") : wait_for(lock->gone);
    }
    if (waited >= 0) {
        return 0;
    }
    ca_mutex_lock(&lock->guard);
    lock->changer = 0;
    lock->waits = false;
    ca_mutex_unlock(&lock->guard);
    PyThread_release_lock(lock->changing);
    return -1;
}

void
ca_py_lock_changed(ca_py_lock *lock)
{
    ca_mutex_lock(&lock->guard);
    const bool own = lock->changer == PyThread_get_thread_ident();
    if (own) {
        lock->forgotten += lock->change == CA_PY_FORGETS;
        lock->changer = 0;
    }
    ca_mutex_unlock(&lock->guard);
    if (own) {
        PyThread_release_lock(lock->changing);
    }
}

/* Notes a reader. Returns 1; 0 if a change overwrites what it would see; -1 with a MemoryError. A thread that reads
   already may read once more, in a handler of a signal: a change that waits for its first reading has not begun. */
static int
note(ca_py_lock *lock, uint64_t *time)
{
    int noted = 0;
    const unsigned long thread = PyThread_get_thread_ident();
    ca_mutex_lock(&lock->guard);
    if (lock->changer == 0 || lock->change != CA_PY_OVERWRITES ||
        count_readers(lock, lock->change, thread) > 0) {
        const int room = lock->count < lock->room ? lock->room : 2 * lock->room + 2;
        ca_py_reader *readers = lock->readers;
        if (room > lock->room) {
            readers = PyMem_RawRealloc(readers, (size_t)room * sizeof(*readers));
        }
        noted = readers != NULL ? 1 : -1;
        if (noted > 0) {
            lock->readers = readers;
            lock->room = room;
            *time = lock->forgotten;
            readers[lock->count++] = (ca_py_reader){thread, lock->forgotten};
        }
    }
    ca_mutex_unlock(&lock->guard);
    if (noted < 0) {
        PyErr_NoMemory();
    }
    return noted;
}

int
ca_py_lock_read(ca_py_lock *lock, const char *name, uint64_t *time)
{
    int noted;
    while ((noted = note(lock, time)) == 0) {
        if (take(lock, name, "read") < 0) {
            return -1;
        }
        PyThread_release_lock(lock->changing);
    }
    return noted < 0 ? -1 : 0;
}

void
ca_py_lock_has_read(ca_py_lock *lock, uint64_t time)
{
    const unsigned long thread = PyThread_get_thread_ident();
    ca_mutex_lock(&lock->guard);
    int n = 0;
    while (n < lock->count &&
           (lock->readers[n].thread != thread || lock->readers[n].time != time)) {
        n++;
    }
    if (n < lock->count) { /* else the process was forked meanwhile */
        lock->readers[n] = lock->readers[--lock->count];
    }
    if (lock->waits) {
        lock->waits = false;
        PyThread_release_lock(lock->gone);
    }
    ca_mutex_unlock(&lock->guard);
}
