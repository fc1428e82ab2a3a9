"""Arrays as codes of a byte and scales, on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from clattn._arguments.arrays import host_array
from clattn._arguments.dtypes import FLOAT_WORDS, FLOATS, float_dtype, ml_dtype
from clattn._arguments.integers import integer, size

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import DTypeLike

    from clattn._arguments.arrays import Array

__all__ = ["dequantize", "quantize"]

# The largest number that a code stands for, without its scale.
_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}

# A smaller scale is none, as in kernels/pages/quantize.cl.
_SMALLEST_SCALE = np.float32(2.0**-120)


def quantize(
    array: Array, dtype: DTypeLike, axis: int = -1, group: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return an array as codes of 8 bits and the scales of its vectors.

    A number is about ``code * scale``. The codes of "int8" are those that a cache of this dtype
    keeps.

    Parameters
    ----------
    array : array
        Of a float dtype: a NumPy array, a Tensor, or an array of another library on the host.
        float64 numbers are rounded to float32 first.
    dtype : dtype or str
        "int8", "float8_e4m3fn" or "float8_e5m2".
    axis : int
        Along which the vectors lie.
    group : int, optional
        So many neighbours of a vector share a scale; the last group may be smaller. Default: all.

    Returns
    -------
    values : array
        The codes, of the shape of `array`: int8, or a dtype of ml_dtypes.
    scales : array
        float32. The largest number of a vector, or of a group, gets the largest code: 127, 448 or
        57344. Numbers that are all zero have the scale 1. The shape is that of `array` without
        `axis`; with `group`, `axis` has as many entries as there are groups.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong kind or range; the message names it.
    ModuleNotFoundError
        `dtype` is a float8, and ml_dtypes is not installed.

    Notes
    -----
    Codes are rounded to nearest, ties to even. With "int8" a vector with NaN or infinity has the
    codes 0 and the scale NaN. With float8 NaN stays NaN and is left out of the scale, and so is
    infinity, which "float8_e4m3fn" lacks: it becomes NaN there.

    Examples
    --------
    >>> values, scales = quantize(np.array([[0.5, -2.0], [0.0, 0.0]], np.float32), "int8")
    >>> values
    array([[  32, -127],
           [   0,    0]], dtype=int8)
    >>> dequantize(values, scales).round(2)
    array([[ 0.5, -2. ],
           [ 0. ,  0. ]], dtype=float32)
    """
    word = _word(dtype)
    kept = np.dtype(np.int8) if word == "int8" else ml_dtype(word)
    found = _floats(host_array(array, "array"), "array")
    place = _axis(axis, found.ndim)
    vectors = np.moveaxis(found, place, -1)
    length = vectors.shape[-1]
    count = min(max(length, 1), 2**63 if group is None else size(group, "group", 1))
    groups = 1 if group is None else -(-length // count)
    padding = [(0, 0)] * (found.ndim - 1) + [(0, groups * count - length)]
    parts = np.pad(vectors, padding).reshape(*vectors.shape[:-1], groups, count)
    with np.errstate(all="ignore"):
        considered = parts if word == "int8" else np.where(np.isfinite(parts), parts, 0)
        scales = np.abs(considered).max(-1, initial=0) / np.float32(_LARGEST[word])
        is_finite = np.isfinite(scales)
        scales = np.where(scales < _SMALLEST_SCALE, np.float32(1), scales)
        codes = _codes(parts, scales[..., None], kept)
    codes[~is_finite] = 0
    values = codes.reshape(*vectors.shape[:-1], groups * count)[..., :length]
    scales = np.where(is_finite, scales, np.float32(np.nan))
    scales = scales[..., 0] if group is None else np.moveaxis(scales, -1, place)
    return np.ascontiguousarray(np.moveaxis(values, -1, place)), np.ascontiguousarray(scales)


def dequantize(
    values: Array,
    scales: Array,
    dtype: DTypeLike = np.float32,
    *,
    axis: int = -1,
    group: int | None = None,
) -> np.ndarray:
    """Return the numbers that codes stand for.

    Parameters
    ----------
    values : array
        Codes, as `quantize` returns them.
    scales : array
        Of the shape of `values` without `axis`; or with as many entries at `axis` as there are
        groups; or one number.
    dtype : dtype
        Of the result: float16, bfloat16, float32 or float64.
    axis, group : int
        As for `quantize`. Default of `group`: groups of equal size.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong kind, range or shape; the message names it.
    """
    target = np.dtype(float_dtype(dtype))
    codes = host_array(values, "values")
    if codes.dtype.name not in _LARGEST:
        raise TypeError(f"values has dtype {codes.dtype}; expected {', '.join(_LARGEST)}")
    factors = _floats(host_array(scales, "scales"), "scales")
    if factors.ndim > 0:
        factors = _spread(factors, codes.shape, _axis(axis, codes.ndim), group)
    with np.errstate(over="ignore", invalid="ignore"):
        found: np.ndarray = (codes.astype(np.float32) * factors).astype(target)
    return found


def _spread(scales: np.ndarray, shape: tuple[int, ...], axis: int, group: int | None) -> np.ndarray:
    """Return scales that broadcast to codes of that shape."""
    length = shape[axis]
    rest = (*shape[:axis], *shape[axis + 1 :])
    if group is None and scales.shape == rest:
        return np.expand_dims(scales, axis)
    groups = scales.shape[axis] if scales.ndim == len(shape) else 0
    if groups == 0 or (*scales.shape[:axis], *scales.shape[axis + 1 :]) != rest:
        raise ValueError(
            f"scales has shape {scales.shape} for values of shape {shape}; expected {rest}, or "
            f"groups at axis {axis}"
        )
    if group is None and length % groups:
        raise ValueError(f"group is None; expected the size of the {groups} groups of {length}")
    count = length // groups if group is None else size(group, "group", 1)
    if -(-length // max(count, 1)) != groups:
        raise ValueError(f"group is {group}; expected one that makes {groups} groups of {length}")
    return scales.take(np.arange(length) // count, axis)


def _word(dtype: Any) -> str:
    """Return the name of a dtype of codes."""
    try:
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    if dtype is None or name not in _LARGEST:
        words = ", ".join(f'"{word}"' for word in _LARGEST)
        raise TypeError(f"dtype is {'None' if dtype is None else name}; expected {words}")
    return name


def _codes(parts: np.ndarray, scales: np.ndarray, kept: np.dtype[Any]) -> np.ndarray:
    """Return codes of numbers. NumPy's float8 does not saturate."""
    largest = np.float32(_LARGEST[kept.name])
    scaled = parts / scales
    if kept != np.int8:
        scaled = np.where(np.isfinite(parts), scaled.clip(-largest, largest), parts)
    codes: np.ndarray = (np.rint(scaled) if kept == np.int8 else scaled).astype(kept)
    return codes


def _floats(array: np.ndarray, name: str) -> np.ndarray:
    """Return float32 numbers. Those of float64 saturate; what is below float32's range is 0."""
    if array.dtype.name not in FLOATS:
        raise TypeError(f"{name} has dtype {array.dtype}; expected {FLOAT_WORDS}")
    if array.dtype != np.float64:
        return array.astype(np.float32)
    limits = np.finfo(np.float32)
    with np.errstate(all="ignore"):
        narrow = np.where(np.isfinite(array), array.clip(limits.min, limits.max), array)
        narrow = narrow.astype(np.float32)
    return np.where(np.abs(narrow) < limits.tiny, np.float32(0), narrow)


def _axis(axis: Any, ndim: int) -> int:
    """Return an axis of an array, counted from 0."""
    found = integer(axis, "axis")
    if not -ndim <= found < ndim:
        raise ValueError(f"axis is {found}; expected {-ndim} to {ndim - 1}, for {ndim} dimensions")
    return found % ndim
