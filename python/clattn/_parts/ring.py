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
from clattn.gradients import scaled_dot_product_attention_backward

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from typing import Any, Literal

    from clattn._arguments.operands import Operands
    from clattn._arguments.options import Window
    from clattn.gradients import AttentionGradients

    Layout = Literal["contiguous", "zigzag"]

__all__ = [
    "LAYOUTS",
    "Forward",
    "GradientShare",
    "Pieces",
    "Schedule",
    "Share",
    "check_layout",
    "part_lengths",
    "pieces",
]

LAYOUTS = ("contiguous", "zigzag")


def check_layout(layout: Any) -> None:
    """Raise ValueError for what is no layout."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; expected 'contiguous' or 'zigzag'")


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


class _Rows:
    """The rows of one rank, which meet the keys of one rank after the other.

    Attention is computed in float32, float64 in itself, whatever the dtype of the query.
    """

    def __init__(
        self, own: Operands, rows: Sequence[tuple[int, int]], shift: int, **options: Any
    ) -> None:
        self.dtype = wide(own.query.dtype)
        self.pieces = [*_parts(rows)]
        self._starts = [start + shift for start, _ in rows]
        self._rows = [own.cut("L", part) for part in self.pieces]
        self._options = options

    def meet(
        self, keys: Mapping[str, np.ndarray], where: Sequence[tuple[int, int]], seen: np.ndarray
    ) -> Iterator[tuple[int, slice, dict[str, Any]]]:
        """Yield the pieces of rows and of keys for which `seen` (rows, keys) is True.

        `keys` are the operands that have keys, and no rows. A pair is the number of its piece of
        rows, where its keys lie in the part, and the arguments of a call of attention.
        """
        keys = {name: self.widen(a) if name in FACTORS else a for name, a in keys.items()}
        for r in map(int, np.flatnonzero(seen.any(1))):
            rows = replace(self._rows[r].map(self.widen, "query"), **keys)
            parts = list(_parts(where))
            for k in map(int, np.flatnonzero(seen[r])):
                arrays = rows.cut("S", parts[k]).given()
                offset = self._starts[r] - where[k][0]
                yield r, parts[k], {**arrays, "query_offset": offset, **self._options}

    def widen(self, array: np.ndarray) -> np.ndarray:
        return array.astype(self.dtype, copy=False)


class Share(_Rows):
    """The rows of one rank, and their results from the keys seen so far.

    Results are summed in float64: they are rounded to query's dtype once, at the end.
    """

    def __init__(
        self, own: Operands, rows: Sequence[tuple[int, int]], shift: int, **options: Any
    ) -> None:
        super().__init__(own, rows, shift, **options)
        self._results: list[Sums | None] = [None] * len(rows)

    def attend(
        self, keys: Mapping[str, np.ndarray], where: Sequence[tuple[int, int]], seen: np.ndarray
    ) -> None:
        """Attend to a part of the keys, where `seen` (pieces of rows, pieces of keys) is True.

        `keys` are the operands that have keys, and no rows.
        """
        for r, _, call in self.meet(keys, where, seen):
            more = attend_to_part(scaled_dot_product_attention, **call)
            sums = self._results[r]
            if sums is None:
                self._results[r] = widened(more)
            else:
                merge_into(sums, more)

    def results(self) -> Iterator[tuple[slice, Sums]]:
        """Yield where the pieces lie that have seen keys, and their results."""
        for piece, sums in zip(self.pieces, self._results, strict=True):
            if sums is not None:
                yield piece, sums

    def write(self, out: np.ndarray, lse: np.ndarray) -> None:
        """Write output (..., L, Ev) and log-sum-exp (..., L) of the pieces that have seen keys."""
        for piece, sums in self.results():
            out[..., piece, :], lse[..., piece] = finish(sums)


class Forward(NamedTuple):
    """What a forward pass gave for the rows of one rank, and the gradients of it.

    Attributes
    ----------
    grad_output, output : arrays of shape (..., L, Ev)
        Of query's dtype.
    base, total : arrays of shape (..., L)
        ``exp(score - base) / total`` is a weight among the keys of all ranks.
    grad_lse : array of shape (..., L) or None
        None: zeros.
    """

    grad_output: np.ndarray
    output: np.ndarray
    base: np.ndarray
    total: np.ndarray
    grad_lse: np.ndarray | None

    def cut(self, piece: slice) -> Forward:
        """Return a piece of the rows."""
        matrices = (array[..., piece, :] for array in self[:2])
        vectors = (None if array is None else array[..., piece] for array in self[2:])
        return Forward(*matrices, *vectors)


class GradientShare(_Rows):
    """The rows of one rank, and the gradients that come of them and of the keys seen so far.

    A row's weights among the keys of a block are those of a call with this block alone, times a
    number w of the row: the share of the block's keys in the sum of all. With the weights P of such
    a call, the gradient G of the output O, and g of the log-sum-exp, the gradients of the whole are

        dV = P^T (w G),   dS = P ((w G) V^T - (w G) . O + w g)

    which is what the block's own backward pass computes of w G, O and w g. The rule holds for any
    O: the backward pass takes no more from it than this product.
    """

    def __init__(
        self,
        own: Operands,
        rows: Sequence[tuple[int, int]],
        shift: int,
        *,
        forward: Forward,
        needs: Collection[str],
        **options: Any,
    ) -> None:
        super().__init__(own, rows, shift, **options)
        self._forward = [forward.cut(piece) for piece in self.pieces]
        self._needs = needs
        self.query = np.zeros(own.query.shape, self.dtype)

    def differentiate(
        self,
        keys: Mapping[str, np.ndarray],
        where: Sequence[tuple[int, int]],
        seen: np.ndarray,
        gradients: Mapping[str, np.ndarray],
    ) -> None:
        """Add the gradients of a part of the keys to arrays of these names, where `seen` is True.

        The gradient of the query is added to `query`.
        """
        for r, part, call in self.meet(keys, where, seen):
            found = self._of_block(self._forward[r], call)
            with np.errstate(all="ignore"):
                if found.query is not None:
                    self.query[..., self.pieces[r], :] += found.query
                for name, sums in gradients.items():
                    sums[..., part, :] += getattr(found, name)

    def _of_block(self, rows: Forward, call: dict[str, Any]) -> AttentionGradients:
        # What softmax is made of: one column of the values is enough.
        column = call["value"][..., :1]
        block = attend_to_part(scaled_dot_product_attention, **call | {"value": column})
        with np.errstate(all="ignore"):
            share = block.total * np.exp(block.base - rows.base.astype(np.float64)) / rows.total
            share = share.astype(self.dtype)
            # Keys whose scores are all -inf weigh nothing beside others, and NaN if they are alone.
            nothing = (block.total == 0) & (rows.total != 0)
            if nothing.any():
                call = call | {"attn_mask": ~nothing[..., None]}
            grad_output = share[..., None] * self.widen(rows.grad_output)
            grad_lse = None if rows.grad_lse is None else share * rows.grad_lse
        return scaled_dot_product_attention_backward(
            grad_output,
            output=self.widen(rows.output),
            lse=finish(block)[1],
            grad_lse=grad_lse,
            needs=self._needs,
            **call,
        )


def _parts(where: Sequence[tuple[int, int]]) -> Iterator[slice]:
    """Return where the pieces of a part lie in it."""
    end = 0
    for _, length in where:
        end += length
        yield slice(end - length, end)
