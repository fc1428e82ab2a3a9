"""Partial results of attention, over some of the keys, and their merging in NumPy.

The rules are those of `clattn.merge_attention`: a row without a key in a part takes nothing from
it, and a row without any key is zeros with a log-sum-exp of -inf. A part has two numbers for a row
in the place of its log-sum-exp. Scores of 1e9 are 64 apart in float32, so that the logarithm of a
sum added to them would be lost, and with it how many keys a part has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from clattn import _core

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = [
    "Sums",
    "add_sinks",
    "attend_to_part",
    "finish",
    "merge",
    "merge_into",
    "widened",
    "without_keys",
]


class Sums(NamedTuple):
    """Attention over a part of the keys.

    Attributes
    ----------
    out : array of shape (..., L, Ev)
        The result, as if there were no other keys.
    base : array of shape (..., L)
        A number near the highest score of the part; -inf for a row without a key.
    total : array of shape (..., L)
        ``sum(exp(score - base))`` over the part's keys.
    """

    out: np.ndarray
    base: np.ndarray
    total: np.ndarray


def attend_to_part(attend: Callable[..., Any], *arguments: Any, **options: Any) -> Sums:
    """Return what a function of attention gives with ``return_lse``, as Sums."""
    out, (base, total) = attend(*arguments, return_lse=_core.base_and_sum, **options)
    return Sums(out, base, total)


def without_keys(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Sums:
    """Return the Sums of rows without a key; `shape` is the output's."""
    rows = shape[:-1]
    return Sums(np.zeros(shape, dtype), np.full(rows, -np.inf, dtype), np.zeros(rows, dtype))


def widened(sums: Sums) -> Sums:
    """Return a copy in float64, to merge others into.

    Sums of float32 numbers are nearly exact there, whatever their order: ranks that add up the same
    parts, each in its own order, round to the same float32 numbers.
    """
    return Sums(*(array.astype(np.float64) for array in sums))


def merge_into(sums: Sums, more: Sums) -> None:
    """Add the results over other keys to `sums`, which are float64."""
    out, base, total = sums
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        peak = np.maximum(base, more.base)
        shift = np.where(np.isneginf(peak), 0, peak)
        weight = total * np.exp(base - shift)
        more_weight = more.total * np.exp(more.base - shift)
        both = weight + more_weight
        # Divided by their own sum, the weights add up to 1.
        divisor = np.where(both == 0, 1, both)
        out *= (weight / divisor)[..., None]
        added = more.out * (more_weight / divisor)[..., None]
    # A part whose scores are all -inf has the output NaN, and weighs nothing beside other keys. Its
    # base is -inf, or the lowest float.
    _clear(out, (total == 0) & (both != 0))
    _clear(added, (more.total == 0) & (both != 0))
    out += added
    base[...], total[...] = peak, both


def merge(parts: list[Sums]) -> Sums:
    """Return the Sums of all keys of the parts, float64."""
    sums = widened(parts[0])
    for more in parts[1:]:
        merge_into(sums, more)
    return sums


def add_sinks(sums: Sums, sinks: np.ndarray, dtype: np.dtype[Any]) -> None:
    """Add the logits of sinks (Hq,) to Sums (..., Hq, L) of a call that computes in `dtype`.

    As in the core, a finite number stays finite in `dtype`, and +inf is a NaN. A row without a key
    is zeros all the same.
    """
    most = np.finfo(dtype).max
    logits = sinks.astype(np.float64)
    logits = np.where(np.isfinite(logits), np.clip(logits, -most, most), logits)
    logits = np.where(np.isposinf(logits), np.nan, logits)[:, None]
    empty = np.isneginf(sums.base)
    rows = sums.base.shape
    zeros = np.broadcast_to(np.float64(0), sums.out.shape)
    ones = np.broadcast_to(np.float64(1), rows)
    merge_into(sums, Sums(zeros, np.broadcast_to(logits, rows), ones))
    _clear(sums.out, empty)


def finish(sums: Sums) -> tuple[np.ndarray, np.ndarray]:
    """Return output and log-sum-exp."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return sums.out, sums.base + np.log(sums.total)


def _clear(out: np.ndarray, rows: np.ndarray) -> None:
    if rows.any():
        out[rows] = 0
