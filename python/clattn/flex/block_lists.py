"""The blocks of a mask as torch keeps them: how many there are in a row, and which."""

from __future__ import annotations

from typing import Any

import numpy as np

from clattn._arguments.arrays import host_array

__all__ = ["flags_of", "lists_of"]


def lists_of(flags: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return how many flags of each row are set, and the columns, those that are set first.

    Both are int32, as torch's. Columns keep their order.
    """
    counts = flags.sum(-1, dtype=np.int32)
    return counts, np.argsort(~flags, -1, kind="stable").astype(np.int32)


def flags_of(counts: Any, columns: Any, name: str) -> np.ndarray:
    """Return the flags of lists, of shape (B, H, blocks of rows, blocks of keys).

    Parameters
    ----------
    counts : array of integers of shape (B, H, blocks of rows)
        The number of columns that count in each row. Leading dimensions may be missing.
    columns : array of integers of shape (B, H, blocks of rows, blocks of keys)
        Columns, of which the first ones count.
    name : str
        Of the columns, for messages.
    """
    number, places = (host_array(array, name) for array in (counts, columns))
    if not 2 <= places.ndim <= 4 or number.shape != places.shape[:-1]:
        raise ValueError(
            f"{name} has shape {places.shape}, with counts of shape {number.shape}; expected "
            "(B, H, blocks of rows, blocks of keys), and counts without the last dimension"
        )
    if number.dtype.kind not in "iu" or places.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {places.dtype}; expected integers")
    number = number.reshape((1,) * (4 - places.ndim) + number.shape)
    places = places.reshape((1,) * (4 - places.ndim) + places.shape)
    width = places.shape[-1]
    counted = np.arange(width) < number[..., None]
    if ((places < 0) | (places >= width))[counted].any() or (number > width).any():
        raise ValueError(f"{name} has a block outside of 0 to {width - 1}")
    flags = np.zeros(places.shape, bool)
    *lead, _ = np.nonzero(counted)
    flags[(*lead, places[counted])] = True
    return flags
