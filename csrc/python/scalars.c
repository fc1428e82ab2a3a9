/* SPDX-License-Identifier: MIT */
#include "python/scalars.h"

#include <stdio.h>
#include <string.h>

#include "python/convert.h" /* ca_py_is_other_scalar */
#include "python/error.h"
#include "python/imports.h"

int
ca_py_wrong_type(const char *name, const char *expected, PyObject *object)
{
    return ca_py_raise(PyExc_TypeError, "%s must be %s, got %.200s", name, expected,
                       Py_TYPE(object)->tp_name);
}

PyObject *
ca_py_tuple(int64_t count, const int64_t *numbers, int64_t unit)
{
    PyObject *tuple = PyTuple_New((Py_ssize_t)count);
    for (int64_t i = 0; tuple != NULL && i < count; i++) {
        PyObject *number = PyLong_FromLongLong(numbers[i] * unit);
        if (number == NULL) {
            Py_CLEAR(tuple);
        } else {
            PyTuple_SET_ITEM(tuple, (Py_ssize_t)i, number);
        }
    }
    return tuple;
}

int
ca_py_double(PyObject *object, const char *name, double *value)
{
    if (PyFloat_CheckExact(object)) {
        *value = PyFloat_AS_DOUBLE(object);
        return 0;
    }
    /* An array of one element has __float__ too, but is not a number. */
    if (!PyNumber_Check(object) || PyObject_HasAttrString(object, "__len__")) {
        return ca_py_wrong_type(name, "a number", object);
    }
    if (ca_py_is_other_scalar(object)) {
        return ca_py_wrong_type(name, "a real number", object);
    }
    *value = PyFloat_AsDouble(object);
    if (*value != -1 || !PyErr_Occurred()) {
        return 0;
    }
    if (PyErr_ExceptionMatches(PyExc_TypeError)) {
        return ca_py_wrong_type(name, "a real number", object);
    }
    if (PyErr_ExceptionMatches(PyExc_OverflowError) || PyErr_ExceptionMatches(PyExc_ValueError)) {
        return ca_py_refuse(PyExc_ValueError, name, object, "a number that a double holds");
    }
    return -1;
}

int
ca_py_scale(PyObject *object, bool *given, double *scale)
{
    *given = object != Py_None;
    return *given ? ca_py_double(object, "scale", scale) : 0;
}

/* NumPy's bool has no C symbol outside NumPy's API. Its name tells the type. */
bool
ca_py_is_numpy_bool(PyObject *object)
{
    return strcmp(Py_TYPE(object)->tp_name, "numpy.bool") == 0;
}

int
ca_py_flag(PyObject *object, const char *name, bool *value)
{
    if (PyBool_Check(object)) {
        *value = object == Py_True;
        return 0;
    }
    if (!ca_py_is_numpy_bool(object)) {
        return ca_py_wrong_type(name, "True or False", object);
    }
    int truth = PyObject_IsTrue(object);
    *value = truth == 1;
    return truth < 0 ? -1 : 0;
}

int
ca_py_causal(PyObject *object, ca_causal *causal)
{
    if (PyUnicode_Check(object)) {
        *causal = CA_CAUSAL_LOWER_RIGHT;
        return PyUnicode_CompareWithASCIIString(object, "lower_right") == 0
                   ? 0
                   : ca_py_raise(PyExc_ValueError,
                                 "is_causal is %R; expected True, False or \"lower_right\"",
                                 object);
    }
    if (!PyBool_Check(object) && !ca_py_is_numpy_bool(object)) {
        return ca_py_wrong_type("is_causal", "True, False or \"lower_right\"", object);
    }
    bool value = false;
    int result = ca_py_flag(object, "is_causal", &value);
    *causal = value ? CA_CAUSAL_UPPER_LEFT : CA_CAUSAL_NONE;
    return result;
}

/* An array has __index__, too, which may raise. NumPy's bool has none. */
PyObject *
ca_py_whole(PyObject *object, const char *name, const char *expected)
{
    bool counts = PyIndex_Check(object) && !PyBool_Check(object);
    PyObject *whole = counts ? PyNumber_Index(object) : NULL;
    if (whole == NULL && (!PyErr_Occurred() || PyErr_ExceptionMatches(PyExc_TypeError))) {
        (void)ca_py_wrong_type(name, expected, object);
    }
    return whole;
}

/* Returns a whole number as a new reference. *nearest is the nearest number of 64
   bits, and *overflow says on which side of 64 bits the number is. */
static PyObject *
read_int(PyObject *object, const char *name, int64_t *nearest, int *overflow)
{
    PyObject *whole = ca_py_whole(object, name, "a whole number");
    if (whole != NULL) {
        long long number = PyLong_AsLongLongAndOverflow(whole, overflow);
        *nearest = *overflow > 0 ? INT64_MAX : *overflow < 0 ? INT64_MIN : number;
    }
    return whole;
}

int
ca_py_int(PyObject *object, const char *name, int64_t lowest, int64_t highest, int64_t *value)
{
    int overflow;
    PyObject *whole = read_int(object, name, value, &overflow);
    if (whole == NULL) {
        return -1;
    }
    Py_DECREF(whole);
    if (overflow == 0 && *value >= lowest && *value <= highest) {
        return 0;
    }
    char expected[64];
    (void)snprintf(expected, sizeof(expected), "%lld %s %lld", (long long)lowest,
                   highest == lowest + 1 ? "or" : "to", (long long)highest);
    return ca_py_refuse(PyExc_ValueError, name, object, expected);
}

int
ca_py_any_int(PyObject *object, const char *name, int64_t *value)
{
    int overflow;
    PyObject *whole = read_int(object, name, value, &overflow);
    Py_XDECREF(whole);
    return whole != NULL ? 0 : -1;
}

/* Reads one bound of the window. A bound larger than any tensor is no bound. */
static int
window_bound(PyObject *object, int64_t *bound)
{
    if (object == Py_None) {
        *bound = CA_BAND_UNBOUNDED;
        return 0;
    }
    PyObject *whole = ca_py_whole(object, "window", "a pair of whole numbers or None");
    if (whole == NULL) {
        return -1;
    }
    int overflow;
    long long value = PyLong_AsLongLongAndOverflow(whole, &overflow);
    Py_DECREF(whole);
    if (overflow < 0 || (overflow == 0 && value < 0)) {
        PyObject *text = ca_py_repr(object);
        if (text != NULL) {
            PyErr_Format(PyExc_ValueError, "window has the bound %U; expected 0 or more, or None",
                         text);
            Py_DECREF(text);
        }
        return -1;
    }
    *bound = overflow > 0 || value > INT64_MAX / 2 ? CA_BAND_UNBOUNDED : value;
    return 0;
}

int
ca_py_window(PyObject *object, int64_t *left, int64_t *right)
{
    *left = CA_BAND_UNBOUNDED;
    *right = CA_BAND_UNBOUNDED;
    if (object == Py_None) {
        return 0;
    }
    if (!PyTuple_Check(object) && !PyList_Check(object)) {
        return ca_py_wrong_type("window", "a pair (left, right) or None", object);
    }
    /* A copy: __index__ may run code that changes the caller's list. */
    PyObject *pair = PySequence_Tuple(object);
    if (pair == NULL) {
        return -1;
    }
    int result = -1;
    if (PyTuple_GET_SIZE(pair) != 2) {
        PyErr_Format(PyExc_ValueError, "window has %zd elements; expected a pair (left, right)",
                     PyTuple_GET_SIZE(pair));
    } else if (window_bound(PyTuple_GET_ITEM(pair, 0), left) == 0) {
        result = window_bound(PyTuple_GET_ITEM(pair, 1), right);
    }
    Py_DECREF(pair);
    return result;
}

int
ca_py_band(PyObject *begin, PyObject *end, int64_t *lower, int64_t *upper, bool *inverted)
{
    int64_t from;
    int64_t to;
    int overflow;
    PyObject *from_whole = read_int(begin, "begin", &from, &overflow);
    PyObject *to_whole = from_whole != NULL ? read_int(end, "end", &to, &overflow) : NULL;
    int result = -1;
    if (to_whole != NULL) {
        /* For numbers beyond 64 bits, only the objects tell which is larger. */
        result = PyObject_RichCompareBool(from_whole, to_whole, Py_GT);
        *inverted = result == 1;
        *lower = *inverted ? to : from;
        *upper = *inverted ? from : to;
    }
    Py_XDECREF(from_whole);
    Py_XDECREF(to_whole);
    return result < 0 ? -1 : 0;
}

int
ca_py_shape(PyObject *object, const char *name, int *ndim, int64_t shape[CA_MAX_DIMS])
{
    if (!PyTuple_Check(object) && !PyList_Check(object)) {
        return ca_py_wrong_type(name, "a tuple or list of whole numbers", object);
    }
    PyObject *sizes = PySequence_Tuple(object);
    if (sizes == NULL) {
        return -1;
    }
    int result = 0;
    Py_ssize_t count = PyTuple_GET_SIZE(sizes);
    if (count > CA_MAX_DIMS - 1) {
        PyErr_Format(PyExc_ValueError, "%s has %zd dimensions; expected %d at most", name, count,
                     CA_MAX_DIMS - 1);
        result = -1;
    }
    for (Py_ssize_t d = 0; result == 0 && d < count; d++) {
        result = ca_py_int(PyTuple_GET_ITEM(sizes, d), name, 0, INT64_MAX, &shape[d]);
    }
    Py_DECREF(sizes);
    *ndim = (int)count;
    return result;
}

int
ca_py_word(PyObject *object, const char *name, const char *const *words, int count, int *index)
{
    if (!PyUnicode_Check(object)) {
        return ca_py_wrong_type(name, "a str", object);
    }
    for (int n = 0; n < count; n++) {
        if (PyUnicode_CompareWithASCIIString(object, words[n]) == 0) {
            *index = n;
            return 0;
        }
    }
    char expected[256];
    size_t length = 0;
    for (int n = 0; n < count && length < sizeof(expected); n++) {
        length += (size_t)snprintf(expected + length, sizeof(expected) - length, "%s\"%s\"",
                                   n == 0 ? "" : ", ", words[n]);
    }
    return ca_py_raise(PyExc_ValueError, "%s is %R; expected one of %s", name, object, expected);
}

static int
random_seed(uint64_t *seed)
{
    PyObject *bytes = ca_py_call_from("os", "urandom", "(i)", (int)sizeof(*seed));
    const char *data = bytes != NULL ? PyBytes_AsString(bytes) : NULL;
    if (data != NULL) {
        memcpy(seed, data, sizeof(*seed));
    }
    Py_XDECREF(bytes);
    return data != NULL ? 0 : -1;
}

int
ca_py_seed(PyObject *object, bool needed, uint64_t *seed)
{
    *seed = 0;
    if (object == Py_None) {
        return needed ? random_seed(seed) : 0;
    }
    PyObject *whole = ca_py_whole(object, "seed", "a whole number or None");
    if (whole == NULL) {
        return -1;
    }
    *seed = PyLong_AsUnsignedLongLong(whole);
    Py_DECREF(whole);
    if (PyErr_Occurred()) {
        return ca_py_refuse(PyExc_ValueError, "seed", object, "0 to 2**64 - 1");
    }
    return 0;
}
