"""What a result should be, in float64, and how far off it may be."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clattn.bench.rows import Array, Problem

SAMPLE = 64  # query rows that are compared
SAMPLE_LONG = 8  # the same of float64, for which NumPy has no fast product
SAMPLE_LARGE = 16  # of rows for GPUs, whose problems are large

# A peer may round to a half type on the way, where clattn does not.
PEER_FACTOR = 10


@dataclass(frozen=True)
class Exact:
    """Some query rows of a problem, one step wider than they are computed."""

    rows: NDArray[np.intp]
    result: Array  # (B, Hq, len(rows), E)
    allowed: float  # the largest error that rounding explains

    def error(self, result: Array) -> float:
        """Return the largest error of a whole result in these rows; infinity for NaN."""
        if result.shape[:2] + result.shape[3:] != self.result.shape[:2] + self.result.shape[3:]:
            return float("inf")
        difference = np.abs(result[:, :, self.rows].astype(self.result.dtype) - self.result)
        return float(np.nan_to_num(difference, nan=np.inf).max())


def exact_rows(problem: Problem) -> Exact:
    """Compute rows spread over the problem, the first and the last included.

    Allowed is twice the error of the plain computation in float32 (float64 for float64),
    rounded to the dtype, and a floor for what no computation avoids: half a step of the
    result, and of the largest value what exp, sum and division cost.
    """
    L = problem.query.shape[2]
    is_double = problem.query.dtype == np.float64
    sample = SAMPLE_LONG if is_double else SAMPLE_LARGE if problem.row.on_device else SAMPLE
    rows = np.linspace(0, L - 1, min(sample, L)).astype(np.intp)
    wide: np.dtype[Any] = np.dtype(np.longdouble if is_double else np.float64)
    narrow: np.dtype[Any] = np.dtype(np.float64 if is_double else np.float32)
    result, score = _attend(problem, rows, wide)
    plain = _attend(problem, rows, narrow)[0].astype(problem.query.dtype)

    error = float(np.abs(plain.astype(wide) - result).max())
    step = _step(problem.query.dtype) * float(np.abs(result).max())
    value = float(np.abs(problem.value.astype(narrow)).max())
    floor = value * _step(narrow) * (1 + score / 2)
    return Exact(rows, result, max(2 * error, step / 2) + floor)


def _attend(problem: Problem, rows: NDArray[np.intp], dtype: np.dtype[Any]) -> tuple[Array, float]:
    """Return result rows, computed in `dtype` from the definition, and the largest score.

    One element of the batch after the other: wider copies of all keys may be gigabytes.
    """
    parts = [_attend_one(problem, b, rows, dtype) for b in range(problem.row.shape[0])]
    return np.stack([result for result, _ in parts]), max(score for _, score in parts)


def _attend_one(
    problem: Problem, b: int, rows: NDArray[np.intp], dtype: np.dtype[Any]
) -> tuple[Array, float]:
    _, Hq, Hk, _, _, E = problem.row.shape
    key, value = (a[b].astype(dtype)[:, None] for a in (problem.key, problem.value))
    query = problem.query[b][:, rows].astype(dtype).reshape(Hk, Hq // Hk, len(rows), E)
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(dtype.type(E))
    largest = float(np.abs(scores).max())
    seen = problem.row.attended(rows)
    if problem.mask is not None and problem.mask.dtype == bool:
        seen = seen & problem.mask[rows]
    elif problem.mask is not None:
        scores += problem.mask[rows].astype(dtype)
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    result = weights @ value / weights.sum(axis=-1, keepdims=True)
    return result.reshape(Hq, len(rows), E), largest


def _step(dtype: np.dtype[Any]) -> float:
    """Return the relative distance of neighbours, for bfloat16 too."""
    return 2.0**-7 if dtype.name == "bfloat16" else float(np.finfo(dtype).eps)
