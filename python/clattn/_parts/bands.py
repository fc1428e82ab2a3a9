"""Which keys a row attends to by its position: causality and windows."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from typing import Any

    from clattn._arguments.options import Window

__all__ = ["Band", "band_of", "band_of_packed"]

# Longer than any sequence; sums of it and of positions fit 64 bits.
_FAR = 1 << 61


class Band(NamedTuple):
    """Row i attends to the keys ``i + shift - left`` to ``i + shift + right``; None: no bound."""

    left: int | None
    right: int | None
    shift: int

    def meets(self, row: Any, rows: Any, key: Any, keys: Any) -> np.ndarray:
        """Return whether some row of a piece attends to some key of another one.

        Pieces have their first place and their length: ints, or int64 arrays that broadcast.
        """
        meets: np.ndarray = np.asarray((rows > 0) & (keys > 0))
        if self.left is not None:
            meets = meets & (key + keys > row + self.shift - self.left)
        if self.right is not None:
            meets = meets & (key < row + rows + self.shift + self.right)
        return meets


def band_of(is_causal: bool | str, window: Window, rows: int, keys: int) -> Band:
    """Return the band of a call whose arguments are checked, on `rows` rows and `keys` keys."""
    left, right = (None if bound is None else _int(bound) for bound in window or (None, None))
    return Band(left, 0 if is_causal else right, keys - rows if isinstance(is_causal, str) else 0)


def band_of_packed(is_causal: bool | str, window: Window, rows: int, keys: int) -> Band:
    """Return the band of a packed sequence, whose window is aligned at its end.

    No bound is below 0, so a call of the sequence alone takes them as its window, and the shift as
    its `query_offset`.
    """
    left, right = (None if bound is None else _int(bound) for bound in window or (None, None))
    shift = keys - rows
    if isinstance(is_causal, str):
        right = 0
    highest = None if right is None else shift + right  # row i attends to j <= i + highest
    if is_causal is True:
        highest = 0 if highest is None else min(0, highest)
    if highest is None:
        return Band(left, None, shift)
    if left is None:
        return Band(None, 0, highest)
    lowest = shift - left
    return Band(highest - lowest, 0, highest) if lowest <= highest else Band(None, 0, -rows)


def _int(bound: Any) -> int:
    """Return an int of Python, with which sums do not wrap as those of NumPy's types do."""
    return min(operator.index(bound), _FAR)
