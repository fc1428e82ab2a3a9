"""The parts of a sequence that ranks hold, and attention of one part to others in turn."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from clattn._arguments.dtypes import wide
from clattn._arguments.operands import FACTORS
from clattn._parts.bands import band_of
from clattn._parts.sums import Sums, attend_to_part, finish, merge_into, widened
from clattn.attention import scaled_dot_product_attention

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from clattn._arguments.operands import Operands
    from clattn._arguments.options import Window

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

    A zigzag sequence is the first halves of ranks 0 ... n - 1, then the second halves of ranks
    n - 1 ... 0. A part of odd length has the longer half first, as in `part_lengths`. Three ranks
    with the lengths 5, 4 and 4:

        place  0 1 2  3 4  5 6  7 8  9 10  11 12
        rank   0 0 0  1 1  2 2  2 2  1  1   0  0
    """
    parts = np.array(lengths, np.int64)
    if layout == "contiguous":
        return Pieces(_starts(parts)[:, None], parts[:, None])
    first, second = (parts + 1) // 2, parts // 2
    starts = _starts(np.concatenate([first, second[::-1]]))
    ranks = len(parts)
    return Pieces(np.stack([starts[:ranks], starts[ranks:][::-1]], 1), np.stack([first, second], 1))


def _starts(lengths: np.ndarray) -> np.ndarray:
    """Return where each of some adjoining pieces begins."""
    starts: np.ndarray = np.cumsum(lengths) - lengths
    return starts


class Schedule:
    """Which pieces meet: in a step, rank r has the keys of rank r - step."""

    def __init__(
        self,
        rows: Pieces,
        keys: Pieces,
        is_causal: bool | str = False,
        window: Window = None,
    ) -> None:
        self.rows, self.keys = rows, keys
        totals = (int(whole.lengths.sum()) for whole in (rows, keys))
        self.band = band_of(is_causal, window, *totals)
        # Later steps have no keys that any rank sees.
        ranks = len(rows.starts)
        self.steps = next((n for n in range(ranks, 0, -1) if self.seen(n - 1).any()), 0)

    def seen(self, step: int) -> np.ndarray:
        """Return which rows see which keys: bool (ranks, pieces of rows, pieces of keys).

        A pair is False if a piece is empty, or if causality or the window excludes all of it.
        """
        row, rows = (part[:, :, None] for part in self.rows)
        key, keys = (np.roll(part, step, axis=0)[:, None, :] for part in self.keys)
        return self.band.meets(row, rows, key, keys)


class Share:
    """The rows of one rank, and their results from the keys seen so far.

    Attention is computed in float32, float64 in itself, and the results are summed in float64: they
    are rounded to query's dtype once, at the end.
    """

    def __init__(
        self, own: Operands, rows: Sequence[tuple[int, int]], shift: int, **options: Any
    ) -> None:
        self._dtype = wide(own.query.dtype)
        self._starts = [start + shift for start, _ in rows]
        self._rows = [own.cut("L", part) for part in _parts(rows)]
        self._results: list[Sums | None] = [None] * len(rows)
        self._options = options

    def attend(
        self, keys: Mapping[str, np.ndarray], where: Sequence[tuple[int, int]], seen: np.ndarray
    ) -> None:
        """Attend to a part of the keys, where `seen` (pieces of rows, pieces of keys) is True.

        `keys` are the operands that have keys, and no rows.
        """
        keys = {name: self._widen(a) if name in FACTORS else a for name, a in keys.items()}
        for r in np.flatnonzero(seen.any(1)):
            rows = replace(self._rows[r].map(self._widen, "query"), **keys)
            parts = list(_parts(where))
            for k in map(int, np.flatnonzero(seen[r])):
                more = attend_to_part(
                    scaled_dot_product_attention,
                    **rows.cut("S", parts[k]).given(),
                    query_offset=self._starts[r] - where[k][0],
                    **self._options,
                )
                sums = self._results[r]
                if sums is None:
                    self._results[r] = widened(more)
                else:
                    merge_into(sums, more)

    def _widen(self, array: np.ndarray) -> np.ndarray:
        return array.astype(self._dtype, copy=False)

    def write(self, out: np.ndarray, lse: np.ndarray) -> None:
        """Write output (..., L, Ev) and log-sum-exp (..., L) of the pieces that have seen keys."""
        at = 0
        for rows, sums in zip(self._rows, self._results, strict=True):
            end = at + rows.query.shape[-2]
            if sums is not None:
                out[..., at:end, :], lse[..., at:end] = finish(sums)
            at = end


def _parts(where: Sequence[tuple[int, int]]) -> Iterator[slice]:
    """Return where the pieces of a part lie in it."""
    end = 0
    for _, length in where:
        end += length
        yield slice(end - length, end)
