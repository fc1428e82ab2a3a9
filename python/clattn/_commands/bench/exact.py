"""The right result in float64, and the allowed error."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clattn._commands.bench.rows import Array, Problem
from clattn._commands.rounding import epsilon, explained, half_step, unit_of
from clattn._commands.softmax import weigh

SAMPLE = 64  # query rows that are compared
SAMPLE_LONG = 8  # of float64 results: NumPy has no fast product of long doubles
SAMPLE_LARGE = 16  # of rows for GPUs, whose problems are large

# A peer may round to a half type on the way, where clattn does not.
PEER_FACTOR = 10


@dataclass(frozen=True)
class Exact:
    """Some query rows of a problem, computed in a wider type."""

    rows: NDArray[np.intp]
    result: Array  # (B, Hq, len(rows), E)
    each: Array | float = np.inf  # the largest error of each number that rounding explains
    # (B, 1, len(rows), 1): False in rows of padding, to which implementations give different
    # numbers. These rows are not compared.
    attends: NDArray[np.bool_] | bool = True

    @property
    def allowed(self) -> float:
        """The largest error that rounding explains anywhere."""
        return float(np.where(self.attends, self.each, 0).max())

    def error(self, result: Array) -> float:
        """Return the largest error of a whole result in these rows; infinity for NaN."""
        return float(self._errors(result).max())

    def is_right(self, result: Array, factor: float = 1) -> bool:
        """Return whether rounding explains each number's error, or a multiple of it does."""
        return bool((self._errors(result) <= factor * self.each).all())

    def _errors(self, result: Array) -> Array:
        if result.shape[:2] + result.shape[3:] != self.result.shape[:2] + self.result.shape[3:]:
            return np.full((), np.inf)
        difference = np.abs(result[:, :, self.rows].astype(self.result.dtype) - self.result)
        return np.nan_to_num(np.where(self.attends, difference, 0), nan=np.inf)


def exact_rows(problem: Problem) -> Exact:
    """Compute rows spread over the problem, the first and the last among them.

    What the plain computation in float32 (in float64 for float64) loses says what rounding
    explains. On matrix units kernels also round the weights to half types.
    """
    dtype, L = problem.query.dtype, problem.query.shape[2]
    is_double = dtype == np.float64
    sample = SAMPLE_LONG if is_double else SAMPLE_LARGE if problem.row.on_device else SAMPLE
    rows = np.linspace(0, L - 1, min(sample, L)).astype(np.intp)
    wide: np.dtype[Any] = np.dtype(np.longdouble if is_double else np.float64)
    narrow: np.dtype[Any] = np.dtype(np.float64 if is_double else np.float32)
    seen = [problem.row.attended(rows, b).any(axis=-1) for b in range(problem.row.shape[0])]
    result, square, score = _attend(problem, rows, wide)
    plain = _attend(problem, rows, narrow)[0]

    unit = unit_of(epsilon(narrow) * (1 + score / 2), square, result)
    each = half_step(result, dtype) + explained(result, plain, unit)
    if dtype.itemsize == 2:
        each += epsilon(dtype) / 2 * np.sqrt(square)
    return Exact(rows, result, each, np.stack(seen)[:, None, :, None])


def _seen(problem: Problem, rows: NDArray[np.intp], batch: int) -> NDArray[np.bool_]:
    """Return which keys some query rows of a batch attend to: (len(rows), S)."""
    mask, row = problem.mask, problem.row
    if row.mask == "lowest":
        return np.ones((len(rows), row.shape[4]), bool)
    seen = row.attended(rows, batch)
    return seen & mask[rows] if mask is not None and row.mask == "bool" else seen


def score_rows(
    problem: Problem,
    rows: NDArray[np.intp],
    batch: int,
    heads: slice | NDArray[np.intp],
    dtype: np.dtype[Any],
    keys: slice = slice(None),
) -> tuple[Array, float]:
    """Return scores of some query rows, key heads and keys, (heads, Hq / Hk, len(rows), S).

    A key that a row does not attend to has -inf. The largest product of query and key follows.
    """
    _, Hq, Hk, L, _, E = problem.row.shape
    groups = (Hk, Hq // Hk)
    query = problem.query[batch].reshape(*groups, L, E)[heads][:, :, rows].astype(dtype)
    key = problem.key[batch][heads][:, keys].astype(dtype)[:, None]
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(dtype.type(E))
    largest = float(np.abs(scores).max())
    if problem.mask is not None and problem.mask.dtype != bool:
        mask = problem.mask[batch, 0] if problem.mask.ndim == 4 else problem.mask
        scores += mask[rows][:, keys].astype(dtype)
    bias = problem.row.bias(rows)
    if bias is not None:
        scores += bias.astype(dtype).reshape(*groups, *bias.shape[1:])[heads][..., keys]
    return np.where(_seen(problem, rows, batch)[:, keys], scores, -np.inf), largest


def _attend(
    problem: Problem, rows: NDArray[np.intp], dtype: np.dtype[Any]
) -> tuple[Array, Array, float]:
    """Return result rows, computed in `dtype` from the definition.

    The same with the squares of values follows, and the largest score.
    """
    B, Hq, _, _, _, E = problem.row.shape
    result, square = (np.empty((B, Hq, len(rows), E), dtype) for _ in range(2))
    largest = 0.0
    for b in range(B):  # wider copies of the keys of a whole batch may be gigabytes
        for places, keys in problem.row.parts(rows):
            scores, most = score_rows(problem, rows[places], b, slice(None), dtype, keys)
            largest = max(largest, most)
            value = problem.value[b][:, keys].astype(dtype)[:, None]
            both = weigh(scores, np.concatenate((value, value * value), axis=-1))
            for whole, part in zip((result, square), np.split(both, 2, axis=-1), strict=True):
                whole[b][:, places] = part.reshape(Hq, len(places), E)
    return result, square, largest
