"""The parts of a sequence that ranks hold, and attention of one part to others in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from clattn._arguments.dtypes import wide
from clattn.attention import scaled_dot_product_attention
from clattn.merging import merge_into

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

__all__ = ["LAYOUTS", "Pieces", "Schedule", "Share", "part_lengths", "pieces"]

LAYOUTS = ("contiguous", "zigzag")


class Pieces(NamedTuple):
    """Where the pieces of each rank lie in the sequence: two arrays of shape (ranks, pieces).

    One piece in the layout "contiguous", two in "zigzag", in the order in which a rank holds them.
    """

    starts: np.ndarray
    lengths: np.ndarray

    def of(self, rank: int) -> list[tuple[int, int]]:
        """Return (start, length) of each piece of a rank."""
        return [(int(a), int(b)) for a, b in zip(*(part[rank] for part in self), strict=True)]


def part_lengths(total: int, ranks: int, layout: str) -> list[int]:
    """Return how many entries of a sequence `split` gives to each rank."""
    count = ranks if layout == "contiguous" else 2 * ranks
    sizes = total // count + (np.arange(count) < total % count)
    both = sizes if layout == "contiguous" else sizes[:ranks] + sizes[ranks:][::-1]
    return [int(length) for length in both]


def pieces(lengths: Sequence[int], layout: str) -> Pieces:
    """Return the pieces of ranks whose parts have these lengths.

    A zigzag part is cut in the middle, the longer piece first: as `part_lengths` has it.
    """
    parts = np.array(lengths, np.int64)
    sizes = [parts] if layout == "contiguous" else [(parts + 1) // 2, parts // 2]
    ordered = np.concatenate([sizes[0], *(size[::-1] for size in sizes[1:])])
    starts = np.split(np.cumsum(ordered) - ordered, len(sizes))
    starts[1:] = [start[::-1] for start in starts[1:]]
    return Pieces(np.stack(starts, 1), np.stack(sizes, 1))


class Schedule:
    """Which pieces meet: in a step, rank r has the keys of rank r - step."""

    def __init__(
        self,
        rows: Pieces,
        keys: Pieces,
        is_causal: bool | str = False,
        window: tuple[int | None, int | None] | None = None,
    ) -> None:
        self.rows, self.keys = rows, keys
        left, right = window or (None, None)
        if is_causal:
            right = 0 if right is None else min(right, 0)
        self._left, self._right = left, right
        # How far row 0 of the sequence stands from key 0.
        lower_right = isinstance(is_causal, str)
        self.shift = int(keys.lengths.sum() - rows.lengths.sum()) if lower_right else 0
        # Later steps have no keys that any rank sees.
        ranks = len(rows.starts)
        self.steps = next((n for n in range(ranks, 0, -1) if self.seen(n - 1).any()), 0)

    def seen(self, step: int) -> np.ndarray:
        """Return which rows see which keys: bool (ranks, pieces of rows, pieces of keys).

        A pair is False if a piece is empty, or if causality or the window excludes all of it.
        """
        row, length = (part[:, :, None] for part in self.rows)
        key, count = (np.roll(part, step, axis=0)[:, None, :] for part in self.keys)
        seen: np.ndarray = (length > 0) & (count > 0)
        if self._left is not None:
            seen &= key + count > row + self.shift - self._left
        if self._right is not None:
            seen &= key < row + self.shift + length + self._right
        return seen


class Share:
    """The rows of one rank, and their results from the keys seen so far.

    All is computed in float32, float64 in itself: a result is rounded once, at the end.
    """

    def __init__(
        self, query: np.ndarray, rows: Sequence[tuple[int, int]], shift: int, **options: Any
    ) -> None:
        self._dtype = wide(query.dtype)
        self._starts = [start + shift for start, _ in rows]
        self._queries = _cut(query, rows)
        self._results: list[Any] = [None] * len(rows)
        self._options = options

    def attend(
        self,
        key: np.ndarray,
        value: np.ndarray,
        where: Sequence[tuple[int, int]],
        seen: np.ndarray,
    ) -> None:
        """Attend to a part of the keys, where `seen` (pieces of rows, pieces of keys) is True."""
        parts = [part.astype(self._dtype, copy=False) for part in (key, value)]
        cuts = [_cut(part, where) for part in parts]
        for r in np.flatnonzero(seen.any(1)):
            query = self._queries[r].astype(self._dtype, copy=False)
            for k in map(int, np.flatnonzero(seen[r])):
                result = scaled_dot_product_attention(
                    query,
                    cuts[0][k],
                    cuts[1][k],
                    query_offset=self._starts[r] - where[k][0],
                    return_lse=True,
                    **self._options,
                )
                if self._results[r]:
                    merge_into(*self._results[r], *result)
                else:
                    self._results[r] = result

    def write(self, out: np.ndarray, lse: np.ndarray) -> None:
        """Write output (..., L, Ev) and log-sum-exp (..., L) of the pieces that have seen keys."""
        at = 0
        for query, result in zip(self._queries, self._results, strict=True):
            end = at + query.shape[-2]
            if result:
                out[..., at:end, :], lse[..., at:end] = result
            at = end


def _cut(part: np.ndarray, where: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    """Return the pieces of a part (..., L, E)."""
    return np.split(part, np.cumsum([length for _, length in where])[:-1], axis=-2)
