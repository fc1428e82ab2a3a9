/* SPDX-License-Identifier: MIT
 *
 * What clattn._host.drivers asks about the libraries of this process, to find the loaders in it.
 */
#include "base/libraries.h"
#include "python/methods.h"
#include "python/state.h"

/* Loaders, of Khronos and others, give their functions versions. Drivers that have functions of the
   same names do not. */
#define NAME    "clGetPlatformIDs"
#define VERSION "OPENCL_1.0"

static PyObject *
path_or_none(const char *path)
{
    return path != NULL ? PyBytes_FromString(path) : Py_NewRef(Py_None);
}

/* Appends a path to the list *context, which becomes NULL, with an exception, on failure. */
static void
append(void *context, const char *path)
{
    PyObject **list = context;
    PyObject *bytes = *list != NULL ? PyBytes_FromString(path) : NULL;
    if (bytes == NULL || PyList_Append(*list, bytes) < 0) {
        Py_CLEAR(*list);
    }
    Py_XDECREF(bytes);
}

/* libraries() -> list[bytes]: paths, in the order in which the libraries were opened */
static PyObject *
libraries(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    PyObject *list = PyList_New(0);
    ca_libraries_list(append, &list);
    return list;
}

/* loader_of(path, /) -> bytes | None: the loader that a library of this process calls, which may be
   the library itself */
static PyObject *
loader_of(PyObject *Py_UNUSED(module), PyObject *path)
{
    const char *bytes = PyBytes_AsString(path);
    return bytes != NULL ? path_or_none(ca_library_defining(bytes, NAME, VERSION)) : NULL;
}

/* loader() -> bytes | None: the path of the loader that clattn calls. None before clattn has opened one,
   and on systems that do not report paths. */
static PyObject *
loader(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    const ca_runtime *runtime = atomic_load(&ca_state_get(module)->runtime);
    const void *function =
        runtime != NULL ? ca_library_symbol(ca_runtime_loader(runtime), NAME) : NULL;
    return path_or_none(function != NULL ? ca_library_at(function) : NULL);
}

PyMethodDef ca_py_loaders_methods[] = {
    {"libraries", libraries, METH_NOARGS, NULL},
    {"loader_of", loader_of, METH_O, NULL},
    {"loader", loader, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
