/* SPDX-License-Identifier: MIT */
#include "python/value.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "python/convert.h" /* ca_py_is_other_scalar */
#include "python/error.h"
#include "python/scalars.h" /* ca_py_double */

/* ---- float types ---- */

/* `value` is the double nearest to a whole number. If it differs from the number, it becomes the
   neighbour, below or above the number, whose last bit is 1. Rounding this neighbour to fewer bits
   gives the same as rounding the number. */
static int
round_to_odd(PyObject *whole, double *value)
{
    uint64_t bits;
    memcpy(&bits, value, sizeof(bits));
    PyObject *nearest = PyFloat_FromDouble(*value);
    if (nearest == NULL) {
        return -1;
    }
    int below = PyObject_RichCompareBool(nearest, whole, Py_LT);
    int above = PyObject_RichCompareBool(nearest, whole, Py_GT);
    Py_DECREF(nearest);
    if ((bits & 1) == 0 && below + above > 0) {
        *value = nextafter(*value, below > 0 ? INFINITY : -INFINITY);
    }
    return below < 0 || above < 0 ? -1 : 0;
}

/* Converts a whole number to a double; beyond the range to an infinity. `narrow`: the caller rounds
   the double to fewer bits. */
static int
whole_to_double(PyObject *object, bool narrow, double *value)
{
    PyObject *whole = PyNumber_Index(object);
    if (whole == NULL) {
        return -1;
    }
    int result = -1;
    *value = PyFloat_AsDouble(whole);
    if (*value != -1 || !PyErr_Occurred()) {
        result = narrow ? round_to_odd(whole, value) : 0;
    } else if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        int overflow = 0;
        (void)PyLong_AsLongLongAndOverflow(whole, &overflow);
        *value = overflow > 0 ? INFINITY : -INFINITY;
        result = 0;
    }
    Py_DECREF(whole);
    return result;
}

static int
to_float16(double value, uint64_t *bits)
{
    unsigned char bytes[2];
    if (PyFloat_Pack2(value, (char *)bytes, 1) == 0) {
        *bits = (uint64_t)(bytes[0] | bytes[1] << 8);
        return 0;
    }
    if (!PyErr_ExceptionMatches(PyExc_OverflowError)) {
        return -1;
    }
    PyErr_Clear();
    *bits = value < 0 ? 0xfc00 : 0x7c00;
    return 0;
}

static uint32_t
float_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

/* Rounds to a float first, as round_to_odd does: the last bit is 1 if the float is not exact. */
static uint64_t
bfloat16_bits(double value)
{
    if (isnan(value)) {
        return signbit(value) ? 0xffc0 : 0x7fc0;
    }
    float nearest = (float)value;
    uint32_t bits = float_bits(nearest);
    if ((bits & 1) == 0 && (double)nearest != value) {
        bool below = fabs((double)nearest) < fabs(value);
        bits = below ? bits + 1 : bits - 1;
    }
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static int
float_value(PyObject *object, const char *name, ca_dtype dtype, uint64_t *bits)
{
    double value;
    bool narrow = dtype != CA_FLOAT64;
    int result = PyIndex_Check(object) ? whole_to_double(object, narrow, &value)
                                       : ca_py_double(object, name, &value);
    if (result < 0) {
        return -1;
    }
    switch (dtype) {
    case CA_FLOAT16:
        return to_float16(value, bits);
    case CA_BFLOAT16:
        *bits = bfloat16_bits(value);
        return 0;
    case CA_FLOAT32:
        *bits = float_bits((float)value);
        return 0;
    default:
        memcpy(bits, &value, sizeof(*bits));
        return 0;
    }
}

/* ---- bool and integers ---- */

/* Returns int(object), a new reference. NULL without an exception for NaN and infinities. */
static PyObject *
to_whole(PyObject *object, const char *name)
{
    PyObject *whole = PyIndex_Check(object) ? PyNumber_Index(object) : PyNumber_Long(object);
    if (whole == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
        (void)ca_py_wrong_type(name, "a real number", object);
    } else if (whole == NULL && (PyErr_ExceptionMatches(PyExc_ValueError) ||
                                 PyErr_ExceptionMatches(PyExc_OverflowError))) {
        PyErr_Clear();
    }
    return whole;
}

/* Writes the bits of a number from `lowest` to `highest`. -1: another number, -2: an exception. */
static int
whole_bits(PyObject *whole, int64_t lowest, uint64_t highest, uint64_t *bits)
{
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(whole, &overflow);
    if (number == -1 && overflow == 0 && PyErr_Occurred()) {
        return -2;
    }
    if (overflow > 0) {
        *bits = PyLong_AsUnsignedLongLong(whole);
        if (*bits == UINT64_MAX && PyErr_Occurred()) {
            PyErr_Clear();
            return -1;
        }
        return *bits <= highest ? 0 : -1;
    }
    *bits = (uint64_t)number;
    bool fits = overflow == 0 && number >= lowest && (number < 0 || (uint64_t)number <= highest);
    return fits ? 0 : -1;
}

static int
integer_value(PyObject *object, const char *name, ca_dtype dtype, uint64_t *bits)
{
    unsigned width = 8 * (unsigned)ca_dtype_size(dtype);
    bool is_signed = dtype >= CA_INT8 && dtype <= CA_INT64;
    uint64_t all = UINT64_MAX >> (64 - width);
    uint64_t highest = dtype == CA_BOOL ? 1 : is_signed ? all >> 1 : all;
    int64_t lowest = is_signed ? -(int64_t)highest - 1 : 0;

    PyObject *whole = to_whole(object, name);
    if (whole == NULL && PyErr_Occurred()) {
        return -1;
    }
    int exact = whole != NULL ? PyObject_RichCompareBool(whole, object, Py_EQ) : 0;
    int result = exact < 0 ? -2 : exact == 0 ? -1 : whole_bits(whole, lowest, highest, bits);
    Py_XDECREF(whole);
    if (result == -1) {
        char expected[128];
        (void)snprintf(expected, sizeof(expected),
                       "a whole number from %lld to %llu, which %s holds", (long long)lowest,
                       (unsigned long long)highest, ca_dtype_name(dtype));
        (void)ca_py_refuse(PyExc_ValueError, name, object, expected);
    }
    *bits &= all;
    return result < 0 ? -1 : 0;
}

int
ca_py_value(PyObject *object, const char *name, ca_dtype dtype, uint64_t *bits)
{
    *bits = 0;
    /* An array of one element has __float__ too, but is not a number. */
    if (!PyNumber_Check(object) || PyObject_HasAttrString(object, "__len__") ||
        ca_py_is_other_scalar(object)) {
        return ca_py_wrong_type(name, "a real number", object);
    }
    return ca_dtype_is_float(dtype) ? float_value(object, name, dtype, bits)
                                    : integer_value(object, name, dtype, bits);
}
