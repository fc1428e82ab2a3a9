"""Builds the programs of later calls ahead of time."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from clattn import _core
from clattn._arguments.dtypes import float_dtype
from clattn._arguments.integers import size
from clattn._caches.rows import CODES
from clattn._host.progress import open_bar, show_nothing
from clattn.attention import scaled_dot_product_attention
from clattn.cache import KVCache
from clattn.paged import PagedKVCache
from clattn.tensors import tensor
from clattn.varlen import varlen_attn

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from numpy.typing import DTypeLike

    from clattn._arguments.arrays import DeviceLike
    from clattn._core import Device, Tensor

__all__ = ["warm_up"]

KINDS = ("prefill", "decode", "masked", "cache", "paged")
_OF_CACHES = {"cache", "paged"}

# If the keys and values of a head have more bytes, a call of few rows is planned in another way:
# csrc/attention/plan_cpu.c, NEAR_BYTES.
_FAR = 4 << 20

_PAGE_SIZE = 16


def warm_up(
    dtypes: Sequence[DTypeLike] = ("float32",),
    kinds: Sequence[str] = ("prefill", "decode"),
    device: DeviceLike | None = None,
    *,
    head_sizes: Sequence[int] = (64, 128),
    codes: Sequence[str] = (),
    progress: bool = False,
) -> float:
    """Build what later calls need, so that no call waits for a compiler.

    A first call with a new dtype or another kind of rows builds a program, which takes half a
    second; on GPUs also one with new head sizes or features. `warm_up` makes small calls of these
    combinations. Their programs are then in this process, and on disk for later processes on the
    same machine. A container keeps them if its build runs ``python -m clattn warm-up`` on the
    processor that it will run on.

    Parameters
    ----------
    dtypes : sequence of dtypes
        Of query, key and value: float16, bfloat16, float32 or float64.
    kinds : sequence of str
        What calls will look like.

        - "prefill": many rows, such as a whole prompt; causal or not, with a window or without.
        - "decode": one row, such as a new token, for one query head for each key head and for
          groups of up to eight.
        - "masked": both of these with `attn_mask`, which is bool or of the call's dtype and is
          shared by all heads.
        - "cache": steps of a `KVCache`.
        - "paged": steps of a `PagedKVCache`, and `varlen_attn`.
    device : Device, str or int, optional
        See `clattn.devices`. Default: `clattn.get_default_device`.
    head_sizes : sequence of int
        The sizes E of a row of query, key and value. On GPUs each needs programs of its own.
    codes : sequence of str
        How caches keep keys and values, besides `dtypes`: "int8", "float8_e4m3fn", "float8_e5m2" or
        "int4". For the kinds "cache" and "paged", of which `kinds` has to have one.
    progress : bool
        Show the progress on the standard error stream: a bar on a terminal where the package
        rich is installed, else a line for each dtype, head size and kind.

    Returns
    -------
    seconds : float
        How long it took. Where all programs are on disk, it is a fraction of a second.

    Raises
    ------
    TypeError
        An argument of the wrong kind, or a dtype that attention does not take.
    ValueError
        An unknown kind or code, a head size below 1, or no device matches.
    ModuleNotFoundError
        bfloat16 is asked for by name, and ml_dtypes is not installed.
    MemoryError
        Host or device memory does not suffice.
    DeviceError
        There is no usable OpenCL device, it cannot compute in float64, or a program does not
        build.

    Notes
    -----
    Other programs are built by their first call: values of another dtype than the query's, and
    diagonal matrices; on GPUs also dropout, heads whose values have another size, masks of another
    dtype, and the operators of ONNX, OpenVINO and DirectML.

    Examples
    --------
    >>> seconds = warm_up(["float32"], ["decode"], head_sizes=[64])
    """
    start = time.perf_counter()
    wanted = _words(kinds, "kinds", KINDS)
    combinations = list(product(_dtypes(dtypes), _head_sizes(head_sizes), wanted))
    known = _words(codes, "codes", tuple(CODES))
    if known and not _OF_CACHES.intersection(wanted):
        raise ValueError(
            f'codes has {known[0]!r}, but kinds has no cache; expected "cache" or "paged" among '
            f"kinds, which alone keep codes"
        )
    if not isinstance(progress, bool):
        raise TypeError(f"progress must be a bool, got {type(progress).__name__}")
    chosen = _core.find_device(device)
    steps = [
        step
        for dtype, head_size, kind in combinations
        for step in _steps(dtype, head_size, kind, known, chosen)
    ]
    lines = partial(_print_line, steps)
    bar = open_bar(len(steps), sys.stderr, lines) if progress else nullcontext(show_nothing)
    with bar as show:
        for done, step in enumerate(steps):
            show(done, step.label)
            step.run(chosen)
    return time.perf_counter() - start


class _Step(NamedTuple):
    """One call, or the steps of a cache. One key head is enough: the work is in query heads.

    Calls are on Tensors, because a call that is left pending needs one program more: the one that
    computes rows of NaN again.
    """

    dtype: np.dtype[Any]
    head_size: int
    kind: str
    heads: int
    rows: int
    keys: int
    mask: DTypeLike | None = None
    code: str | None = None

    def run(self, device: Device) -> None:
        runs = {"cache": self._run_cache, "paged": self._run_pages}
        runs.get(self.kind, self._run_call)(device).numpy()  # waits

    def _zeros(self, *shape: int) -> np.ndarray:
        return np.zeros((*shape, self.head_size), self.dtype)

    def _run_call(self, device: Device) -> Tensor:
        query = tensor(self._zeros(1, self.heads, self.rows), device)
        key = tensor(self._zeros(1, 1, self.keys), device)
        mask = None if self.mask is None else np.ones((self.rows, self.keys), self.mask)
        return scaled_dot_product_attention(query, key, key, mask, enable_gqa=True)

    def _run_cache(self, device: Device) -> Tensor:
        """Append and attend, and change the order of sequences."""
        kept = self.code or self.dtype
        cache = KVCache(1, 1, self.keys, self.head_size, dtype=kept, device=device)
        for rows in self.keys - 1, 1:
            cache.append(self._zeros(1, 1, rows), self._zeros(1, 1, rows))
        if self.is_first:
            beams = KVCache(2, 1, 1, self.head_size, dtype=kept, device=device)
            beams.append(self._zeros(2, 1, 1), self._zeros(2, 1, 1))
            beams.reorder([1, 0])
        return cache.attend(tensor(self._zeros(1, self.heads, self.rows), device))

    def _run_pages(self, device: Device) -> Any:
        """Append and attend, and append to forks, one of which copies a page that is half full.

        Packed rows are attended to without a cache, too.
        """
        pages = -(-self.keys // _PAGE_SIZE) + 2
        kept = self.code or self.dtype
        cache = PagedKVCache(pages, _PAGE_SIZE, 1, self.head_size, dtype=kept, device=device)
        (sequence,) = cache.open()
        for rows in self.keys - 1, 1:
            cache.append(sequence, self._zeros(rows, 1), self._zeros(rows, 1))
        branch = sequence
        for _ in range(2 if self.is_first else 0):
            branch = cache.fork(branch)
            cache.append(branch, self._zeros(1, 1), self._zeros(1, 1))
        query = tensor(self._zeros(self.rows, self.heads), device)
        if self.code is None:
            key = tensor(self._zeros(self.keys, 1), device)
            ends = (0, self.rows), (0, self.keys)
            varlen_attn(query, key, key, *ends, enable_gqa=True).numpy()  # waits
        return cache.attend(query, sequence)

    @property
    def is_first(self) -> bool:
        """Whether it is the one step of a cache that also copies rows."""
        return self.heads == self.rows == 1

    @property
    def label(self) -> str:
        code = "" if self.code is None else f" of {self.code}"
        return f"{self.dtype.name}, head size {self.head_size}, {self.kind}{code}"


def _steps(
    dtype: np.dtype[Any], head_size: int, kind: str, codes: Sequence[str], device: Device
) -> list[_Step]:
    """Return calls that together need every program of the kind."""
    every_core = 4 * device.compute_units  # heads that give each core several work-items
    far = _FAR // (2 * head_size * dtype.itemsize) + 1
    prefill = [(1, 16, 64), (1, 32, 64), (1, 256, 64), (1, 256, 256), (every_core, 256, 64)]
    decode = [(group, 1, far) for group in (1, 2, 3, 4, 8)]
    steps = [*decode, *((heads, rows, 256) for heads, rows, _ in prefill)]
    shapes = {
        "prefill": prefill,
        "decode": decode,
        "masked": [*prefill, *decode],
        "cache": steps,
        "paged": steps,
    }
    masks = (np.dtype(bool), dtype) if kind == "masked" else (None,)
    kept = (None, *codes) if shapes[kind] is steps else (None,)
    return [
        _Step(dtype, head_size, kind, *shape, mask, code)
        for code in kept
        for shape in shapes[kind]
        for mask in masks
    ]


def _print_line(steps: Sequence[_Step], done: int, label: str) -> None:
    """Print a line before the first step of each label."""
    if done == 0 or label != steps[done - 1].label:
        print(f"{done:>4} of {len(steps)}  {label}", file=sys.stderr, flush=True)


def _listed(given: Any, name: str, example: str) -> list[Any]:
    """Return the elements of a sequence. A string is refused, though it can be iterated."""
    if isinstance(given, str | bytes) or not hasattr(type(given), "__iter__"):
        kind = repr(given) if isinstance(given, str) else type(given).__name__
        raise TypeError(f"{name} must be a sequence such as {example}, got {kind}")
    return list(given)


def _dtypes(given: Any) -> list[np.dtype[Any]]:
    found = []
    for dtype in _listed(given, "dtypes", "['float32']"):
        try:
            found.append(np.dtype(float_dtype(dtype)))
        except TypeError as error:
            raise TypeError(f"dtypes: {error}") from None
    return list(dict.fromkeys(found))


def _words(given: Any, name: str, words: Sequence[str]) -> list[str]:
    found = _listed(given, name, f"['{words[1]}']")
    for word in found:
        if not isinstance(word, str):
            raise TypeError(f"{name} must be made of str, got {type(word).__name__}")
        if word not in words:
            known = ", ".join(f'"{other}"' for other in words[:-1])
            raise ValueError(f'{name} has {word!r}; expected {known} or "{words[-1]}"')
    return list(dict.fromkeys(found))


def _head_sizes(given: Any) -> list[int]:
    sizes = _listed(given, "head_sizes", "[64, 128]")
    return list(dict.fromkeys(size(number, "an element of head_sizes", 1) for number in sizes))
