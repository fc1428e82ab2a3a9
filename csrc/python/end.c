/* SPDX-License-Identifier: MIT */
#include "python/end.h"

#include "opencl/storage.h" /* ca_device_synchronize */
#include "python/error.h"
#include "python/methods.h"

#define NAME         "clattn._core._end"
#define MOST_SECONDS 60.0 /* a driver that never returns does not keep the process for ever */
#define WAITING_MILLISECONDS 1

/* True once no thread is in a call. Long calls stop meanwhile. */
static bool
wait_for_workers(ca_py_workers *workers)
{
    const double end = ca_seconds() + MOST_SECONDS;
    atomic_store(&workers->stop, true);
    while (atomic_load(&workers->count) > 0) {
        if (ca_seconds() > end) {
            return false;
        }
        ca_sleep(WAITING_MILLISECONDS);
    }
    return true;
}

/* The interpreter clears the module's names: no other thread gets the GIL any more. The frame of a
   call keeps the module, so the module is not freed if a daemon thread is in a call. A forked child
   has none of its parent's threads. */
static void
end(PyObject *capsule)
{
    ca_state *state = PyCapsule_GetPointer(capsule, NAME);
    ca_runtime *runtime = atomic_load(&state->runtime);
    state->end = NULL;
    if (atomic_load(&state->process_id) != ca_process_id() || !wait_for_workers(state->workers)) {
        return;
    }
    for (int i = 0; runtime != NULL && ca_runtime_device(runtime, i) != NULL; i++) {
        CA_NEW_ERROR(unasked);
        (void)ca_device_synchronize(ca_runtime_device(runtime, i), &unasked);
        ca_error_clear(&unasked);
    }
}

/* Returns the thread that runs the handlers of signals, or 0 with an exception. */
static unsigned long
find_main_thread(void)
{
    PyObject *threading = PyImport_ImportModule("threading");
    PyObject *thread =
        threading != NULL ? PyObject_CallMethod(threading, "main_thread", NULL) : NULL;
    PyObject *number = thread != NULL ? PyObject_GetAttrString(thread, "ident") : NULL;
    unsigned long found = number != NULL ? PyLong_AsUnsignedLong(number) : 0;
    Py_XDECREF(number);
    Py_XDECREF(thread);
    Py_XDECREF(threading);
    return PyErr_Occurred() == NULL ? found : 0;
}

int
ca_py_end_init(PyObject *module)
{
    ca_state *state = ca_state_get(module);
    unsigned long main_thread = find_main_thread();
    state->workers = main_thread != 0 ? PyMem_RawCalloc(1, sizeof *state->workers) : NULL;
    if (state->workers == NULL) {
        if (main_thread != 0) {
            PyErr_NoMemory();
        }
        return -1;
    }
    atomic_init(&state->workers->main, main_thread);
    atomic_init(&state->workers->count, 0);
    atomic_init(&state->workers->stop, false);
    state->end = PyCapsule_New(state, NAME, end);
    int added = state->end != NULL ? PyModule_AddObjectRef(module, "_end", state->end) : -1;
    Py_XDECREF(state->end);
    return added;
}

void
ca_py_end_free(ca_state *state)
{
    if (state->end != NULL) {
        (void)PyCapsule_SetDestructor(state->end, NULL);
    }
    PyMem_RawFree(state->workers);
}

/* after_fork(): in the child, whose only thread is the one that forked. Exit handlers of drivers
   may wait for threads of the parent, so none of those runs that are registered by now. */
static PyObject *
after_fork(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    ca_state *state = ca_state_get(module);
    atomic_store(&state->workers->main, PyThread_get_thread_ident());
    if (atomic_load(&state->runtime) != NULL || atomic_load(&state->opening) != 0) {
        ca_skip_exit_handlers();
    }
    Py_RETURN_NONE;
}

PyMethodDef ca_py_end_methods[] = {
    {"after_fork", after_fork, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
