"""Rows of keys or values in pages on a device: their elements as they came, or as codes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from clattn import _core
from clattn._arguments.arrays import host_array
from clattn._arguments.dtypes import FLOAT_WORDS, FLOATS, float_dtype

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import DTypeLike

    from clattn._arguments.arrays import Array, DeviceLike
    from clattn._core import Tensor

__all__ = ["CODES", "Rows", "kept_as"]

# The words of CA_CODES_ in kernels/pages/params.h.
CODES = {"int8": 1, "float8_e4m3fn": 2, "float8_e5m2": 3, "int4": 4}

# CA_INT4_GROUP: elements that share a scale and an offset.
_GROUP = 32


def kept_as(dtype: DTypeLike) -> str | np.dtype[Any]:
    """Return how a cache keeps its rows: a float dtype, or a word of `CODES`.

    Raises
    ------
    TypeError
        Another dtype.
    ModuleNotFoundError
        The dtype is the word "bfloat16", and ml_dtypes is not installed.
    """
    if isinstance(dtype, str) and dtype in CODES:
        return dtype
    try:
        name = "None" if dtype is None else np.dtype(dtype).name
    except (TypeError, SyntaxError):
        name = ""
    if name in CODES:
        return name
    try:
        return np.dtype(float_dtype(dtype))
    except TypeError as error:
        words = ", ".join(CODES)
        raise TypeError(f"{str(error).replace(' or ', ', ')}, {words}") from None


class Rows:
    """The rows of the keys, or of the values, of a cache.

    Attributes
    ----------
    pages : Tensor of shape (num_pages, heads, page_size, size)
        Elements, or codes: int8, or uint8 for float8; for int4 of shape (…, ceil(size / 2)), two in
        a byte, the first one in its low half.
    scales : Tensor or None
        float32: of int8 (num_pages, heads, page_size), of int4 (…, ceil(size / 32)), of float8
        (heads,).
    offsets : Tensor or None
        Of int4, as its scales.
    """

    def __init__(
        self,
        name: str,
        places: tuple[int, int, int],
        size: int,
        kept: str | np.dtype[Any],
        scale: Any,
        device: DeviceLike | None,
    ) -> None:
        self.name = name
        self.size = size
        self.heads = places[1]
        self.kept = kept
        self.scales: Tensor | None = None
        self.offsets: Tensor | None = None
        given = _given_scales(scale, f"{name}_scale", self.heads)
        if any(number != 1 for number in given.tolist()) and not str(kept).startswith("float8"):
            raise ValueError(f"{name}_scale is {scale!r:.80}; expected 1.0: only float8 takes one")
        if kept == "int4":
            self.pages = _core.empty((*places, -(-size // 2)), np.uint8, device)
            groups = (*places, -(-size // _GROUP))
            self.scales = _core.empty(groups, np.float32, self.pages.device)
            self.offsets = _core.empty(groups, np.float32, self.pages.device)
        elif kept == "int8":
            self.pages = _core.empty((*places, size), np.int8, device)
            self.scales = _core.empty(places, np.float32, self.pages.device)
        elif isinstance(kept, str):
            self.pages = _core.empty((*places, size), np.uint8, device)
            self.scales = _core.tensor(given, self.pages.device)
        else:
            self.pages = _core.empty((*places, size), kept, device)

    def read(self, array: Array) -> np.ndarray | Tensor:
        """Return rows that a caller gives, of shape (n, heads, size).

        Raises
        ------
        TypeError, ValueError
            Another dtype or shape.
        """
        found = array if isinstance(array, _core.Tensor) else host_array(array, self.name)
        name = found.dtype.name
        if isinstance(self.kept, str):
            if name not in FLOATS:
                raise TypeError(f"{self.name} has dtype {name}; expected {FLOAT_WORDS}")
        elif found.dtype != self.kept:
            raise TypeError(
                f"{self.name} has dtype {name}; expected {self.kept}, that of the cache"
            )
        if found.ndim != 3 or found.shape[1:] != (self.heads, self.size):
            raise ValueError(
                f"{self.name} has shape {found.shape}; expected (n, {self.heads}, {self.size})"
            )
        if isinstance(found, _core.Tensor) and found.device != self.pages.device:
            raise ValueError(
                f"{self.name} is on {found.device.name}; expected the cache's device, "
                f"{self.pages.device.name}"
            )
        return found

    def write(self, array: np.ndarray | Tensor, places: np.ndarray) -> None:
        """Write the first rows to their places."""
        codes = CODES[self.kept] if isinstance(self.kept, str) else 0
        _core.write_rows(array, self.name, places, codes, self.pages, self.scales, self.offsets)

    def copy(self, moves: np.ndarray) -> None:
        """Copy rows: the first half of the places are targets, the second half sources."""
        _core.copy_rows(self.pages, moves)
        if self.kept in ("int8", "int4") and self.scales is not None:
            _core.copy_rows(self.scales, moves)
        if self.offsets is not None:
            _core.copy_rows(self.offsets, moves)


def _given_scales(scale: Any, name: str, heads: int) -> np.ndarray:
    """Return float32 scales of shape (heads,), of a number or of one for each head."""
    try:
        found = np.asarray(scale)
    except ValueError:  # of sequences of unequal length
        found = np.asarray(None)
    if found.dtype.kind not in "iu" and found.dtype.name not in FLOATS:
        raise TypeError(
            f"{name} must be a number or numbers of shape ({heads},), got {type(scale).__name__}"
        )
    with np.errstate(over="ignore"):
        given = found.astype(np.float32)
    if given.shape not in ((), (heads,)):
        raise ValueError(f"{name} has shape {given.shape}; expected () or ({heads},)")
    # NumPy's reductions and broadcasts raise a SystemError where memory runs out.
    numbers = [given.item()] * heads if given.ndim == 0 else given.tolist()
    if not all(0 < number < math.inf for number in numbers):
        raise ValueError(f"{name} is {scale!r:.80}; expected finite numbers above 0")
    return np.array(numbers, np.float32)
