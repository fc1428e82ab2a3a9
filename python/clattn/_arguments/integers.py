"""Integers that a caller hands over: a sequence, or an array of any library."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

# An array may have so many numbers at most, because the functions below copy the array. A view may
# repeat one number so often that memory could not hold the copy.
MOST = 2**28


def _has_buffer(numbers: Any) -> bool:
    try:
        memoryview(numbers).release()
    except TypeError:
        return False
    return True


def _too_large(numbers: Any, name: str) -> ValueError:
    return ValueError(f"{name} is {numbers!r:.80}; expected numbers of 63 bits")


def integers(numbers: Any, name: str, expected: str = "a sequence of integers") -> np.ndarray:
    """Return a new int64 array of one dimension."""
    kind = type(numbers)
    if hasattr(kind, "__array__"):
        array = np.asarray(numbers)
    elif hasattr(kind, "__dlpack__"):
        array = np.from_dlpack(numbers)
    elif isinstance(numbers, Sequence) and not isinstance(numbers, str | bytes):
        array = np.empty(len(numbers), object)
        array[:] = numbers
    elif not isinstance(numbers, str | bytes) and _has_buffer(numbers):
        array = np.asarray(memoryview(numbers))
    else:
        raise TypeError(f"{name} must be {expected}, got {kind.__name__}")
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}; expected one dimension")
    if array.dtype.kind not in "iuO":
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    if array.size > MOST:
        raise ValueError(f"{name} has {array.size} numbers; expected at most {MOST}")
    if array.dtype.kind in "iu":
        copy = array.astype(np.int64)
        if array.dtype.kind == "u" and (copy < 0).any():
            raise _too_large(numbers, name)
        return copy
    try:
        return np.array([operator.index(number) for number in array], np.int64)
    except TypeError:
        raise TypeError(f"{name} must be integers, got {numbers!r:.80}") from None
    except OverflowError:
        raise _too_large(numbers, name) from None


def offsets(query_offset: Any) -> int | np.ndarray:
    """Return an int, or int64 numbers of one dimension."""
    kind = type(query_offset)
    several = query_offset if issubclass(kind, list | tuple) else [query_offset]
    expected = "an int or a sequence of integers"
    if any(isinstance(offset, bool | np.bool) for offset in several):
        raise TypeError(f"query_offset must be {expected}, got bool")
    if not hasattr(kind, "__index__") or np.ndim(query_offset) != 0:
        return integers(query_offset, "query_offset", expected)
    try:
        return operator.index(query_offset)
    except TypeError:
        raise TypeError(f"query_offset must be {expected}, got {kind.__name__}") from None
