"""How far a result may be from the right one: what rounding explains, number by number.

The bench and the tests judge with it. The inputs are the right result, in a wider type than a
kernel's, and the plain computation of the same in the kernel's own type.
"""

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_Array = NDArray[Any]


def epsilon(dtype: DTypeLike) -> float:
    """Return the distance of 1 from the next number, for bfloat16 too."""
    dtype = np.dtype(dtype)
    return 2.0**-7 if dtype.name == "bfloat16" else float(np.finfo(dtype).eps)


def smallest_normal(dtype: DTypeLike) -> float:
    """Return the smallest number that no device flushes to zero."""
    dtype = np.dtype(dtype)
    return 2.0**-126 if dtype.name == "bfloat16" else float(np.finfo(dtype).tiny)


def half_step(numbers: _Array, dtype: DTypeLike) -> _Array:
    """Return the largest error of rounding each number to a dtype: half the distance there."""
    lowest = round(np.log2(smallest_normal(dtype)))
    exponent = np.where(numbers == 0, lowest, np.frexp(np.abs(numbers))[1] - 1)
    step: _Array = np.ldexp(epsilon(dtype) / 2, np.maximum(exponent, lowest))
    return step


def unit_of(relative: _Array | float, square: _Array, result: _Array) -> _Array:
    """Return how far one rounding of each kind moves a result (..., L, Ev), to first order.

    `relative` is the root mean square of the weights' relative errors d (..., L, 1), and `square`
    is weights @ value**2. The error of a mean r of values v with weights w is the sum of
    w d (v - r). By the inequality of Cauchy and Schwarz that is at most the root of the sum of
    w d**2, times that of w v**2, plus as much for r.
    """
    unit: _Array = relative * (np.sqrt(square) + np.abs(result))
    return unit


def score_gradient_errors(
    weights: _Array,
    product: _Array,
    delta: _Array,
    *,
    relative: _Array | float,
    norms: tuple[_Array, _Array],
    mean: _Array,
    epsilon: float,
    stored: float,
) -> tuple[_Array, _Array]:
    """Return how far one rounding of each kind moves weights * (product - delta), to first order.

    That is the gradient of the scores, (..., L, S). First comes the error of each pair by itself,
    then that of delta, (..., L, 1), which moves all keys of a row by their weights.

    `relative` is the error of the weights. `norms` are those of grad_output's rows, (..., L, 1),
    and of value's, which broadcast to the weights. `mean` is the largest number of each row of
    weights @ abs(value). `epsilon` is that of the arithmetic, `stored` that of the output's dtype.
    """
    grad, value = norms
    each = weights * (relative * (np.abs(product) + np.abs(delta)) + epsilon * grad * value)
    return each, stored * grad * mean + epsilon * np.abs(delta)


def explained(right: _Array, plain: _Array, unit: _Array) -> _Array:
    """Return the error of each number that the roundings of the arithmetic explain.

    `unit` says how far one rounding of each kind moves each number. How many units the plain
    computation is off, at most, is counted over all numbers: in a few of them, such as one row, it
    may be exact by luck. A kernel may be off by twice as many, and by one more.

    `plain` is not rounded to the dtype that a result is stored in: `half_step` comes on top.
    """
    with np.errstate(all="ignore"):
        error = np.abs(plain - right)
        is_finite = np.isfinite(right) & np.isfinite(plain)
        units = float(np.max(error / unit, initial=0, where=is_finite & (error > 0)))
        each: _Array = (1 + 2 * units) * unit
    return np.where(is_finite, each, np.inf)
