/* SPDX-License-Identifier: MIT */
#include "python/imports.h"

#include <stdarg.h>

PyObject *
ca_py_import_from(const char *module, const char *name)
{
    PyObject *imported = PyImport_ImportModule(module);
    PyObject *attribute = imported != NULL ? PyObject_GetAttrString(imported, name) : NULL;
    Py_XDECREF(imported);
    return attribute;
}

PyObject *
ca_py_call_from(const char *module, const char *name, const char *format, ...)
{
    PyObject *result = NULL;
    PyObject *function = ca_py_import_from(module, name);
    va_list values;
    va_start(values, format);
    PyObject *arguments = function != NULL ? Py_VaBuildValue(format, values) : NULL;
    va_end(values);
    if (arguments != NULL) {
        result = PyObject_CallObject(function, arguments);
    }
    Py_XDECREF(arguments);
    Py_XDECREF(function);
    return result;
}
