/* SPDX-License-Identifier: MIT */
#include "python/error.h"

#include <stdarg.h>

#include "python/imports.h"

int
ca_py_error_init(PyObject *module)
{
    ca_state *state = ca_state_get(module);
    state->device_error = PyErr_NewExceptionWithDoc(
        "clattn.DeviceError",
        "What OpenCL reports beyond wrong arguments and lack of memory: no loader, no\n"
        "usable device, a kernel that does not build. The message carries OpenCL's\n"
        "name for the error, the device, and the compiler's log where there is one.",
        PyExc_RuntimeError, NULL);
    if (PyModule_AddObjectRef(module, "DeviceError", state->device_error) < 0) {
        return -1;
    }
    state->setting_error = PyErr_NewExceptionWithDoc(
        "clattn._core.SettingError",
        "A ValueError about an environment variable of clattn: its words, or a call that\n"
        "it does not allow. The arguments of the call may be right.",
        PyExc_ValueError, NULL);
    return PyModule_AddObjectRef(module, "SettingError", state->setting_error);
}

static PyObject *
exception_type(const ca_state *state, ca_status status)
{
    switch (status) {
    case CA_ERROR_TYPE:
        return PyExc_TypeError;
    case CA_ERROR_VALUE:
        return PyExc_ValueError;
    case CA_ERROR_SETTING:
        return state->setting_error;
    case CA_ERROR_MEMORY:
        return PyExc_MemoryError;
    case CA_ERROR_KERNEL:
    case CA_ERROR_DEVICE:
        return state->device_error;
    case CA_ERROR_STOPPED:
    case CA_OK:
        break;
    }
    return PyExc_SystemError;
}

int
ca_py_error_check(const ca_state *state, ca_status status, ca_error *error)
{
    if (status == CA_OK) {
        return 0;
    }
    PyObject *type = exception_type(state, status);
    if (status == CA_ERROR_STOPPED) {
        return -1;
    }
    if (error->log != NULL) {
        PyErr_Format(type, "%s\n%s", error->message, error->log);
    } else {
        PyErr_Format(type, "%s", error->message); /* the format takes any bytes */
    }
    ca_error_clear(error);
    return -1;
}

/* The main thread runs Python's handlers of signals here. Another thread only learns whether the
   interpreter ends, and does not take the GIL: an interpreter that ends stops each thread that asks
   for the GIL, in the middle of the thread's work. */
static bool
is_interrupted(void *caller)
{
    ca_py_work *work = caller;
    if (PyThread_get_thread_ident() != atomic_load(&work->workers->main)) {
        return atomic_load(&work->workers->stop);
    }
    PyEval_RestoreThread(work->thread);
    bool raised = PyErr_CheckSignals() < 0;
    work->thread = PyEval_SaveThread();
    return raised;
}

/* Runs clattn._host.apart, which does what the request says in another process. CA_ERROR_DEVICE if
   no process can be started. */
static ca_status
try_apart(void *caller, const char *request, ca_error *error)
{
    ca_py_work *work = caller;
    ca_status status = CA_ERROR_STOPPED;
    if (atomic_load(&work->workers->stop)) { /* as in is_interrupted */
        return status;
    }
    PyEval_RestoreThread(work->thread);
    PyObject *reason = ca_py_call_from("clattn._host.apart", "run", "(s)", request);
    const char *text = reason != NULL && PyUnicode_Check(reason) ? PyUnicode_AsUTF8(reason) : NULL;
    if (text != NULL) {
        status =
            ca_error_set(error, text[0] == '\0' ? CA_ERROR_DEVICE : CA_ERROR_KERNEL, "%s", text);
    } else if (reason == Py_None) {
        status = CA_OK;
    }
    Py_XDECREF(reason);
    work->thread = PyEval_SaveThread();
    return status;
}

void
ca_py_work_begin(ca_py_work *work, const ca_state *state, ca_error *error)
{
    work->workers = state->workers;
    work->error = error;
    error->stops = is_interrupted;
    error->apart = state->forced.trials == CA_TRIALS_APART ? try_apart : NULL;
    error->caller = work;
    atomic_fetch_add(&state->workers->count, 1);
    work->thread = PyEval_SaveThread();
}

void
ca_py_work_end(ca_py_work *work)
{
    work->error->stops = NULL;
    work->error->apart = NULL;
    work->error->caller = NULL;
    atomic_fetch_sub(&work->workers->count, 1);
    PyEval_RestoreThread(work->thread);
}

int
ca_py_raise(PyObject *type, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    (void)PyErr_FormatV(type, format, values);
    va_end(values);
    return -1;
}

#define REPR_LENGTH 80

PyObject *
ca_py_repr(PyObject *object)
{
    PyObject *text = PyObject_Repr(object);
    if (text == NULL && PyErr_ExceptionMatches(PyExc_ValueError)) {
        PyErr_Clear();
        return PyUnicode_FromString("a number too long to print");
    }
    if (text == NULL || PyUnicode_GET_LENGTH(text) <= REPR_LENGTH) {
        return text;
    }
    PyObject *start = PyUnicode_Substring(text, 0, REPR_LENGTH);
    Py_DECREF(text);
    text = start != NULL ? PyUnicode_FromFormat("%U...", start) : NULL;
    Py_XDECREF(start);
    return text;
}

int
ca_py_refuse(PyObject *type, const char *name, PyObject *object, const char *expected)
{
    PyObject *text = ca_py_repr(object);
    if (text != NULL) {
        PyErr_Format(type, "%s is %U; expected %s", name, text, expected);
        Py_DECREF(text);
    }
    return -1;
}
