"""Sequences of different lengths, pages and codes, for ``bench --rows serve``.

clattn's call stands beside its own other ways to the same result. Keys and values lie on the
device, as those of a cache do.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

import clattn
from clattn import Device
from clattn._commands.bench.peers import Call, repeated
from clattn._commands.bench.rows import LEAST_LENGTH, Array, Problem, Row, numpy_dtype

Lengths = tuple[tuple[int, int], ...]  # rows and keys of each sequence

CODES_PAGE = 64  # positions of a page of codes


@dataclass(frozen=True)
class ServeRow(Row):
    """Sequences in one call; the rows of each are its last positions.

    `shape` counts the rows and keys of all sequences. `page_size`: keys of sequences of
    equal lengths lie in pages of so many positions. `code`: keys and values are int8 or float8.
    With `on_device` the query lies on the device too, and packed keys stand beside nothing.
    """

    lengths: Lengths = ()
    page_size: int = 0
    code: str = ""

    @cached_property
    def ends(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where the rows and the keys of each sequence begin, and where the last ones end."""
        rows, keys = np.cumsum([(0, 0), *self.lengths], axis=0, dtype=np.int64).T
        return rows, keys

    @cached_property
    def pairs(self) -> int:
        """Pairs of a query and a key that it attends to, of all heads."""
        seen = sum(L * S - L * (L - 1) // 2 for L, S in self.lengths)
        return self.shape[1] * seen

    @property
    def bytes_read(self) -> int:
        """Bytes of all keys and values, and of their scales."""
        _, _, Hk, _, S, E = self.shape
        size = E if self.code else E * numpy_dtype(self.dtype).itemsize
        return 2 * S * Hk * (size + (4 if self.code == "int8" else 0))

    def attended(self, rows: NDArray[np.intp] | None = None, batch: int = 0) -> NDArray[np.bool_]:
        """Return which keys some query rows see, of all sequences: (rows, S)."""
        of_rows, of_keys = self.ends
        i = np.arange(self.shape[3]) if rows is None else rows
        j = np.arange(self.shape[4])
        sequence = np.searchsorted(of_rows, i, side="right") - 1
        last = of_keys[sequence + 1] - (of_rows[sequence + 1] - i)
        return (j >= of_keys[sequence][:, None]) & (j <= last[:, None])

    def parts(self, rows: NDArray[np.intp]) -> Iterator[tuple[NDArray[np.intp], slice]]:
        """Yield the places of each sequence's rows, and its keys."""
        of_rows, of_keys = self.ends
        sequence = np.searchsorted(of_rows, rows, side="right") - 1
        for n in np.unique(sequence):
            yield np.flatnonzero(sequence == n), slice(*of_keys[n : n + 2].tolist())

    def kept(self, array: Array) -> Array:
        """Return the numbers that codes of keys or values stand for."""
        if self.code == "int8":
            return clattn.dequantize(*clattn.quantize(array, self.code))
        return array.astype(float_dtype_of(self.code)).astype(np.float32) if self.code else array

    def scaled(self, divisor: int) -> "ServeRow":
        """Return the first and the last sequence, shorter."""
        if divisor == 1:
            return self
        shorter = [
            (1 if L == 1 else max(L // divisor, 2), max(S // divisor, LEAST_LENGTH))
            for L, S in (self.lengths[0], self.lengths[-1])
        ]
        return _of_lengths(self, tuple((min(L, S), S) for L, S in shorter))


def float_dtype_of(code: str) -> np.dtype[Any]:
    """Return the float8 dtype of ml_dtypes that a word names."""
    import ml_dtypes

    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, code))
    return found


def _of_lengths(row: ServeRow, lengths: Lengths) -> ServeRow:
    _, Hq, Hk, _, _, E = row.shape
    rows, keys = (sum(one) for one in zip(*lengths, strict=True))
    return replace(row, shape=(1, Hq, Hk, rows, keys, E), lengths=lengths)


def _serve(name: str, lengths: Lengths, heads: tuple[int, int, int], **options: Any) -> ServeRow:
    Hq, Hk, E = heads
    row = ServeRow(f"serve-{name}", (1, Hq, Hk, 0, 0, E), layout="projections", **options)
    return _of_lengths(row, lengths)


# 64 sequences of 16 to 4,096 keys, each so many times as long as the one before.
_KEYS = tuple(round(16 * 256 ** (n / 63)) for n in range(64))
_DECODING = tuple((1, S) for S in _KEYS)
_MIXED = tuple((min(S, 128) if n % 8 == 7 else 1, S) for n, S in enumerate(_KEYS))
_EQUAL = ((1, 4096),) * 8
_HEADS, _GROUPS = (8, 8, 64), (8, 2, 64)


def _codes(code: str) -> tuple[ServeRow, ...]:
    """Return rows whose keys and values are 64 MiB: more than caches of processors hold."""
    problems = (
        ("E64", 65536, (8, 8, 64)), ("E128", 32768, (8, 8, 128)), ("groups", 32768, (32, 8, 128)),
    )  # fmt: skip
    word = code.partition("_")[0]
    return tuple(
        _serve(f"{word}-{name}", ((1, keys // 8),) * 8, heads, dtype="float16", limit="read",
               page_size=CODES_PAGE, code=code)
        for name, keys, heads in problems
    )  # fmt: skip


def gpu_row(name: str, lengths: Lengths, heads: tuple[int, int, int], **options: Any) -> ServeRow:
    """Return a row of float16 whose arrays lie on the device."""
    row = _serve("", lengths, heads, **{"dtype": "float16", "on_device": True, **options})
    return replace(row, name=name)


SERVE_ROWS = (
    _serve("prompts", tuple((S, S) for S in _KEYS), _HEADS),
    _serve("decode", _DECODING, _HEADS, limit="read"),
    _serve("decode-groups", _DECODING, _GROUPS, limit="read"),
    _serve("mixed", _MIXED, _HEADS, limit="read"),
    *(_serve(f"pages-{size}", _EQUAL, _HEADS, limit="read", page_size=size)
      for size in (16, 64, 256)),
    *_codes("int8"),
    *_codes("float8_e4m3fn"),
)  # fmt: skip


def serve_calls(problem: Problem, device: Device) -> tuple[Call, dict[str, Call]]:
    """Return clattn's call of all sequences, and its other ways to the same result."""
    row = problem.row
    assert isinstance(row, ServeRow)
    query, key, value = (
        np.ascontiguousarray(a[0].swapaxes(0, 1))
        for a in (problem.query, problem.key, problem.value)
    )
    attend = _Attend(row, clattn.tensor(query, device) if row.on_device else query, device)
    others: dict[str, Callable[[], Any]] = {}
    if not row.page_size:
        run = attend.packed(key, value)
        if not row.on_device:
            others = {"each": attend.each(key, value), "padded": attend.padded(key, value)}
    elif not row.code:
        run = attend.pages(key, value, row.dtype)
        others = {"contiguous": attend.contiguous(key, value)}
    else:
        run = attend.pages(key, value, row.code)
        others = {"float16": attend.pages(key.astype("f2"), value.astype("f2"), "float16")}

    def prepared(run: Callable[[], Any]) -> Call:
        def run_some(count: int) -> None:
            for _ in range(count):
                run()
            clattn.synchronize(device)

        def result() -> Array:
            return np.asarray(run()).swapaxes(0, 1)[None]

        return repeated(run_some, result) if row.on_device else Call(run, result)

    return prepared(run), {name: prepared(other) for name, other in others.items()}


@dataclass(frozen=True)
class _Attend:
    """Calls of a row, over packed keys and values: (S, Hk, E)."""

    row: ServeRow
    query: Any  # (L, Hq, E), an array of the host or of the device
    device: Device

    def _place(self, array: Array) -> clattn.Tensor:
        return clattn.tensor(array, self.device)

    @property
    def _options(self) -> dict[str, Any]:
        return {"is_causal": "lower_right", "enable_gqa": True, "device": self.device}

    def packed(self, key: Array, value: Array) -> Callable[[], Any]:
        """Return one call over packed keys."""
        arrays = self.query, self._place(key), self._place(value), *self.row.ends
        return lambda: clattn.varlen_attn(*arrays, **self._options)

    def each(self, key: Array, value: Array) -> Callable[[], Any]:
        """Return a call for each sequence."""
        calls = []
        for rows, keys in self._slices():
            arrays = (
                self.query[None, rows],
                self._place(key[None, keys]),
                self._place(value[None, keys]),
            )
            calls.append(self._dense(arrays, "BLHE"))
        return lambda: [call() for call in calls]

    def padded(self, key: Array, value: Array) -> Callable[[], Any]:
        """Return one call over sequences that are padded at their start to the longest one."""
        places = self._slices()
        most = [max(one) for one in zip(*self.row.lengths, strict=True)]
        shapes = zip((self.query, key, value), (most[0], most[1], most[1]), strict=True)
        query, *arrays = (np.zeros((len(places), n, *a.shape[1:]), a.dtype) for a, n in shapes)
        mask = np.zeros((len(places), 1, 1, most[1]), bool)
        for b, (rows, keys) in enumerate(places):
            query[b, most[0] - (rows.stop - rows.start) :] = self.query[rows]
            first = most[1] - (keys.stop - keys.start)
            mask[b, ..., first:] = True
            for padded, array in zip(arrays, (key, value), strict=True):
                padded[b, first:] = array[keys]
        call = self._dense((query, *map(self._place, arrays)), "BLHE")
        return functools.partial(call, attn_mask=self._place(mask))

    def contiguous(self, key: Array, value: Array) -> Callable[[], Any]:
        """Return one call over a cache of equal lengths, with heads before rows as in pages."""
        B = len(self.row.lengths)
        query, key, value = (
            np.ascontiguousarray(a.reshape(B, -1, *a.shape[1:]).swapaxes(1, 2))
            for a in (np.asarray(self.query), key, value)
        )
        placed = self._place(query) if self.row.on_device else query
        return self._dense((placed, self._place(key), self._place(value)), "BHLE")

    def pages(self, key: Array, value: Array, dtype: str) -> Callable[[], Any]:
        """Return one call over a cache of pages; those of sequences of equal lengths alternate."""
        _, _, Hk, _, total, E = self.row.shape
        count, size = len(self.row.lengths), self.row.page_size
        length = total // count
        cache = clattn.PagedKVCache(
            count * -(-length // size), size, Hk, E, dtype=dtype, device=self.device
        )
        sequences = cache.open(count)
        places = np.arange(total).reshape(count, length)
        for first in range(0, length, size):
            new = places[:, first : first + size].ravel()
            cache.append(sequences, key[new], value[new])
        return functools.partial(cache.attend, self.query, sequences)

    def _dense(self, arrays: tuple[Any, ...], layout: str) -> Callable[..., Any]:
        return functools.partial(
            clattn.scaled_dot_product_attention, *arrays, layout=layout, **self._options
        )

    def _slices(self) -> list[tuple[slice, slice]]:
        of_rows, of_keys = (ends.tolist() for ends in self.row.ends)
        return [
            (slice(*of_rows[n : n + 2]), slice(*of_keys[n : n + 2]))
            for n in range(len(self.row.lengths))
        ]
