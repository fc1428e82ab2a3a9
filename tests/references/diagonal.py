# SPDX-License-Identifier: MIT
"""The oracle: diagonal matrices, written from the pseudo-code of their specification.

`brute` goes element by element in Python integers, which cannot overflow. `diagonal` is the same
line of pseudo-code on whole arrays, for large ones; test_diagonal.py holds the two together.
`stored` rounds a value exactly, in fractions. Nothing is computed here, so nothing may be off:
support/diagonal_calls.py calls clattn and compares bit by bit. The oracle refuses nothing: see
test_diagonal_errors.py for that. At the end: ways in which an array may lie in memory.
"""

from fractions import Fraction

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import as_strided
from support.checks import native
from support.layouts import (
    byte_swapped,
    columns_first,
    fortran,
    misaligned,
    negative_everywhere,
    negative_rows,
    one_element_in,
    record_field,
    sliced,
)

bfloat16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = (*(np.dtype(t) for t in ("f8", "f4", "f2")), bfloat16)
INTEGERS = tuple(np.dtype(t) for t in ("i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1"))
DTYPES = (*FLOATS, *INTEGERS, np.dtype(bool))
ELEVEN = tuple(t for t in DTYPES if t not in (bfloat16, bool))  # what DirectML has
WIDTHS = tuple(np.dtype(t) for t in ("f8", "f4", "f2", "u1"))  # one of each element width
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


def fills(t, begin, end):
    """The pseudo-code, word by word; t may be an array, begin and end are Python integers."""
    return (end >= begin) ^ (t >= begin) ^ (t < end)


def rounded(value, dtype):
    """A finite value in a float dtype: to nearest, ties to even, in one step from the exact one.

    Infinite beyond the largest, as IEEE 754 has it.
    """
    limits = ml_dtypes.finfo(dtype)
    exact = Fraction(value if isinstance(value, int) else float(value))
    below = exact.numerator.bit_length() - exact.denominator.bit_length() - 1
    exponent = max(int(limits.minexp), below)
    while Fraction(2) ** (exponent + 1) <= abs(exact):
        exponent += 1
    unit = Fraction(2) ** (exponent - limits.nmant)
    near = round(exact / unit) * unit  # of a Fraction: exact, ties to even
    if abs(near) >= Fraction(2) ** int(limits.maxexp):
        return np.array(np.inf if near > 0 else -np.inf).astype(dtype)
    negative = exact < 0 or (not exact and np.signbit(float(value)))
    return np.array(-float(abs(near)) if negative else float(near)).astype(dtype)


def stored(value, dtype):
    """What fills the band: a scalar array of `dtype`."""
    if isinstance(value, np.generic):
        value = float(value) if value.dtype == bfloat16 else value.item()
    if dtype.kind in "iub":
        return np.array(int(value), dtype)
    if isinstance(value, float) and not np.isfinite(value):
        return np.array(value).astype(dtype)
    return rounded(value, dtype)


def start(source, dtype):
    """What lies outside the band, a new array: the input, or zeros of the given shape."""
    if isinstance(source, np.ndarray):
        return native(source)
    return np.zeros(source, np.float32 if dtype is None else dtype)


def brute(source, value, begin, end, dtype=None):
    """The right answer, one element at a time. `source` is an array or a shape."""
    right = start(source, dtype)
    fill = stored(value, right.dtype)
    for place in np.ndindex(right.shape):
        *_, y, x = place
        if fills(x - y, begin, end):
            right[place] = fill
    return right


def band(shape, begin, end):
    """Which elements of the last two dimensions are filled: bool, (rows, columns)."""
    rows, columns = shape[-2:]
    t = np.arange(columns, dtype=np.int64)[None, :] - np.arange(rows, dtype=np.int64)[:, None]
    return fills(t, begin, end)  # NumPy compares with integers beyond 64 bits rightly


def diagonal(source, value, begin, end, dtype=None):
    """The right answer, by whole arrays."""
    right = start(source, dtype)
    if right.size:  # an empty array may have any number of rows or columns
        np.copyto(right, stored(value, right.dtype), where=band(right.shape, begin, end))
    return right


def bits(array):
    """The elements as unsigned integers; a copy only where they do not lie one after the other."""
    raw = f"u{array.itemsize}"
    return (array if array.flags.c_contiguous and array.dtype.isnative else native(array)).view(raw)


def numbers(shape, dtype, seed=0):
    """Random bits: in float dtypes every kind of NaN, infinities and subnormals among them."""
    rng = np.random.default_rng([seed, *shape])
    if np.dtype(dtype) == bool:
        return rng.integers(0, 2, shape).astype(bool)
    count = int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize
    return np.frombuffer(rng.bytes(count), dtype).reshape(shape).copy()


def assert_same(got, right, what="result"):
    """`got` is a NumPy array with the dtype, the shape and the bits of `right`."""
    assert type(got) is np.ndarray, f"{what}: {type(got)}"
    assert got.dtype == right.dtype, f"{what}: {got.dtype}, expected {right.dtype}"
    assert got.shape == right.shape, f"{what}: {got.shape}, expected {right.shape}"
    if not np.array_equal(bits(got), bits(right)):
        wrong = np.argwhere(bits(got) != bits(right))
        place = tuple(map(int, wrong[0]))
        raise AssertionError(
            f"{what}: {len(wrong)} of {right.size} elements are wrong, the first at "
            f"{place}: {got[place]!r}, expected {right[place]!r}"
        )


# Ways to lie in memory, beside those of every operator.


def negative_columns(a):
    return a[..., ::-1].copy()[..., ::-1]


def batches_last(a):
    """The first dimension lies innermost."""
    return np.moveaxis(np.moveaxis(a, 0, -1).copy(), -1, 0)


def cut(a):
    """Columns dense, rows further apart, starting at an odd element."""
    big = numbers([n + 3 for n in a.shape], a.dtype, 99)
    view = big[tuple(slice(1, 1 + n) for n in a.shape)]
    view[...] = a
    return view


def overlapping_rows(a):
    """Other values than those of `a`: each row starts one element after the one before."""
    rows, columns = a.shape[-2:]
    flat = numbers((rows + columns,), a.dtype, 96)
    return as_strided(flat, (rows, columns), flat.strides * 2, writeable=False)


LAYOUTS = (negative_rows, negative_columns, negative_everywhere, columns_first, fortran,
           batches_last, sliced, cut, one_element_in)  # fmt: skip
ODD = (misaligned, record_field, byte_swapped)
