"""How the rows of caches are kept: their elements as they came, or as codes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from clattn import _core
from clattn._arguments.dtypes import FLOATS, float_dtype

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import DTypeLike

    from clattn._arguments.arrays import Array, DeviceLike
    from clattn._core import Tensor

__all__ = ["CODES", "kept_as", "make_core", "scales_of"]

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


def scales_of(
    scale: float | Array, name: str, heads: int, kept: str | np.dtype[Any]
) -> list[float]:
    """Return the scale of all heads, or of each, which float8 has.

    Raises
    ------
    TypeError, ValueError
        No numbers of shape () or (heads,), not finite or above 0, or not 1 where they have no use.
    """
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
    numbers: list[float] = [given.item()] if given.ndim == 0 else given.tolist()
    if not all(0 < number < math.inf for number in numbers):
        raise ValueError(f"{name} is {scale!r:.80}; expected finite numbers above 0")
    if not str(kept).startswith("float8") and any(number != 1 for number in numbers):
        raise ValueError(f"{name} is {scale!r:.80}; expected 1.0: only float8 takes one")
    return numbers


def make_core(
    places: tuple[int, int, int],
    sizes: tuple[int, int],
    kept: str | np.dtype[Any],
    scales: tuple[list[float], list[float]],
    device: DeviceLike | None,
) -> _core.Cache:
    """Return keys and values of pages (num_pages, heads, page_size), not filled.

    Elements, or codes: int8, or uint8 for float8; for int4 (…, ceil(size / 2)), two in a byte, the
    first one in its low half. Scales are float32: of int8 (num_pages, heads, page_size), of int4
    (…, ceil(size / 32)), with offsets like them, of float8 (heads,): those of `scales_of`.
    """
    codes = CODES[kept] if isinstance(kept, str) else 0
    element = np.dtype(("u1" if codes > 1 else "i1") if isinstance(kept, str) else kept)
    columns = [-(-size // 2) if kept == "int4" else size for size in sizes]
    key = _core.empty((*places, columns[0]), element, device)
    value = _core.empty((*places, columns[1]), element, key.device)
    factors: list[Tensor | None] = [None] * 4
    if kept == "int4":
        groups = [(*places, -(-size // _GROUP)) for size in sizes]
        factors = [_core.empty(shape, np.float32, key.device) for shape in groups * 2]
    elif kept == "int8":
        factors[:2] = (_core.empty(places, np.float32, key.device) for _ in sizes)
    elif codes > 0:  # NumPy's broadcasts raise a SystemError where memory runs out
        of_heads = [scale * places[1] if len(scale) == 1 else scale for scale in scales]
        factors[:2] = (_core.tensor(np.array(of, np.float32), key.device) for of in of_heads)
    return _core.Cache(codes, *sizes, key, value, *factors)
