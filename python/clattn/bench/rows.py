"""The problems that ``python -m clattn bench`` measures, and their data."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]
Shape = tuple[int, int, int, int, int, int]  # B, Hq, Hk, L, S, E

LEAST_LENGTH = 16  # of a row that is scaled down


@dataclass(frozen=True)
class Row:
    """One attention problem by its sizes.

    `window`: a query attends to so many keys before its own and to none after it; a row with
    a window is causal. `limit`: what bounds the time: arithmetic ("fma"), reading keys and
    values, or matrix units ("product"). `on_device`: the arrays lie on the device.
    """

    name: str
    shape: Shape
    dtype: str = "float32"
    mask: Literal["float", "bool"] | None = None
    is_causal: bool = False
    window: int | None = None
    limit: Literal["fma", "read", "product"] = "fma"
    on_device: bool = False

    @property
    def is_grouped(self) -> bool:
        """True if several query heads share a key head."""
        return self.shape[1] != self.shape[2]

    @property
    def is_causal_only(self) -> bool:
        """Causal without a window; else `Problem.additive_mask` excludes the keys."""
        return self.is_causal and self.window is None

    @property
    def work(self) -> int:
        """What the limit counts: bytes or FLOP."""
        return self.bytes_read if self.limit == "read" else self.flop

    @cached_property
    def flop(self) -> int:
        """2 · (E + Ev) for each pair of a query and a key that it attends to."""
        B, Hq, _, L, S, E = self.shape
        pairs = L * S if not self.is_causal else int(self.attended().sum())
        return B * Hq * pairs * 4 * E

    @property
    def bytes_read(self) -> int:
        """Bytes of all keys and values."""
        B, _, Hk, _, S, E = self.shape
        return 2 * B * Hk * S * E * numpy_dtype(self.dtype).itemsize

    def attended(self, rows: NDArray[np.intp] | None = None) -> NDArray[np.bool_]:
        """Return which keys some query rows see by causality and window; by default all rows.

        The shape is (rows, S).
        """
        L, S = self.shape[3:5]
        i = (np.arange(L) if rows is None else rows)[:, None]
        j = np.arange(S)
        seen = np.ones((len(i), S), bool)
        if self.is_causal:
            seen &= j <= i
        if self.window is not None:
            seen &= j >= i - self.window
        return seen


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype of a name; bfloat16 is that of ml_dtypes."""
    kind: DTypeLike = name
    if name == "bfloat16":
        import ml_dtypes

        kind = ml_dtypes.bfloat16
    return np.dtype(kind)


_PREFILL = (1, 8, 8, 2048, 2048, 64)
_DECODE = (1, 32, 32, 1, 4096, 128)
_DECODE_GQA = (1, 32, 8, 1, 4096, 128)

ROWS = (
    Row("plain", _PREFILL),
    Row("E=128", (1, 8, 8, 2048, 2048, 128)),
    Row("float-mask", _PREFILL, mask="float"),
    Row("bool-mask", _PREFILL, mask="bool"),
    Row("batch", (4, 12, 12, 512, 512, 64)),
    Row("cross", (1, 8, 8, 256, 2048, 64)),
    Row("causal", _PREFILL, is_causal=True),
    Row("window", (1, 8, 8, 4096, 4096, 64), is_causal=True, window=256),
    Row("short", (1, 12, 12, 128, 128, 64)),
    Row("short-batch", (8, 12, 12, 64, 64, 64)),
    Row("odd", (3, 5, 5, 77, 77, 80)),
    Row("tiny", (1, 8, 8, 16, 16, 64)),
    Row("decode", _DECODE, limit="read"),
    Row("decode-gqa", _DECODE_GQA, limit="read"),
    Row("decode-batch", (8, 32, 8, 1, 2048, 128), limit="read"),
    Row("decode-4", (1, 32, 8, 4, 4096, 128), limit="read"),
    Row("decode-8", (1, 32, 8, 8, 4096, 128), limit="read"),
    Row("float16", _PREFILL, "float16"),
    Row("float16-decode", _DECODE, "float16", limit="read"),
    Row("float16-gqa", _DECODE_GQA, "float16", limit="read"),
    Row("bfloat16", _PREFILL, "bfloat16"),
    Row("bfloat16-causal", _PREFILL, "bfloat16", is_causal=True),
    Row("bfloat16-decode", _DECODE, "bfloat16", limit="read"),
    Row("bfloat16-gqa", _DECODE_GQA, "bfloat16", limit="read"),
    Row("float64", _PREFILL, "float64"),
)


def _prefill(name: str, shape: Shape, dtype: str = "float16") -> Row:
    # Matrix units multiply half types.
    return Row(name, shape, dtype, limit="fma" if dtype == "float32" else "product", on_device=True)


def _decode(name: str, shape: Shape, dtype: str = "float16") -> Row:
    return Row(name, shape, dtype, limit="read", on_device=True)


def _and_causal(row: Row) -> tuple[Row, Row]:
    return row, replace(row, name=f"{row.name}-causal", is_causal=True)


_LONG = _prefill("f16-E128", (1, 16, 16, 8192, 8192, 128))
_SHORT = _prefill("f16-E128-2k", (4, 16, 16, 2048, 2048, 128))

# The rows of `--gpu`: large problems on arrays of the device. Keys and values of a decode row
# are 256 MiB; those of decode-64M are 64 MiB.
GPU_ROWS = (
    *_and_causal(_LONG),
    *_and_causal(_SHORT),
    *_and_causal(_prefill("f16-E64", (1, 32, 32, 8192, 8192, 64))),
    _prefill("f16-E64-2k", (4, 32, 32, 2048, 2048, 64)),
    *_and_causal(_prefill("bf16-E128", (1, 16, 16, 8192, 8192, 128), "bfloat16")),
    *_and_causal(_prefill("bf16-E64", (1, 32, 32, 8192, 8192, 64), "bfloat16")),
    _prefill("f16-E80-2k", (4, 16, 16, 2048, 2048, 80)),
    _prefill("f16-E256-2k", (4, 8, 8, 2048, 2048, 256)),
    _prefill("f16-gqa", (1, 32, 8, 4096, 4096, 128)),
    replace(_LONG, name="f16-window", is_causal=True, window=1024),
    replace(_SHORT, name="f16-bool-mask", mask="bool"),
    *_and_causal(_prefill("f32-E64", (2, 16, 16, 4096, 4096, 64), "float32")),
    _prefill("f32-E128", (1, 16, 16, 4096, 4096, 128), "float32"),
    _decode("decode-f16", (2, 32, 32, 1, 8192, 128)),
    _decode("decode-f16-gqa", (8, 32, 8, 1, 8192, 128)),
    _decode("decode-f16-gqa-8", (8, 64, 8, 1, 8192, 128)),
    _decode("decode-bf16-gqa", (8, 32, 8, 1, 8192, 128), "bfloat16"),
    _decode("decode-64M", (1, 32, 8, 1, 16384, 128)),
    _decode("decode-f16-gqa-4", (8, 32, 8, 4, 8192, 128)),
    _decode("decode-f32", (2, 32, 32, 1, 4096, 128), "float32"),
    # The same problem again with arrays of the host shows what transfers cost.
    replace(_SHORT, name="f16-E128-2k-host", on_device=False),
)


def scaled(row: Row, divisor: int) -> Row:
    """Return the row with its lengths divided and at most two elements in the batch."""
    B, Hq, Hk, L, S, E = row.shape
    if divisor == 1:
        return row

    def shorter(length: int) -> int:
        return min(length, max(length // divisor, LEAST_LENGTH))

    window = None if row.window is None else shorter(row.window)
    return replace(row, shape=(min(B, 2), Hq, Hk, shorter(L), shorter(S), E), window=window)


@dataclass(frozen=True)
class Problem:
    """A row with its data: query (B, Hq, L, E), key and value (B, Hk, S, E), mask (L, S)."""

    row: Row
    query: Array
    key: Array
    value: Array
    mask: Array | None

    @cached_property
    def additive_mask(self) -> Array | None:
        """The mask for a peer without windows: a window becomes numbers to add; (L, S)."""
        if self.row.window is None:
            return self.mask
        return np.where(self.row.attended(), 0, -np.inf).astype(self.query.dtype)


def draw(row: Row) -> Problem:
    """Return a row with standard normal numbers; a bool mask attends to 70 % of the keys."""
    B, Hq, Hk, L, S, E = row.shape
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32).astype(numpy_dtype(row.dtype))

    query, key, value = normal(B, Hq, L, E), normal(B, Hk, S, E), normal(B, Hk, S, E)
    mask: Array | None = None
    if row.mask is not None:
        mask = normal(L, S) if row.mask == "float" else rng.random((L, S)) < 0.7
    return Problem(row, query, key, value, mask)
