"""Lists of arrays, one for each sequence, are packed into one array."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from clattn import _core
from clattn._parts.copies import copy_into

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Lists", "pack_lists"]


class Lists(NamedTuple):
    """The packed arguments of `varlen_attn`, and whether the query was a list."""

    query: Any
    key: Any
    value: Any
    cu_seq_q: Any
    cu_seq_k: Any
    are_split: bool

    def results(self, given: Any, return_lse: bool) -> Any:
        """Return an output, or (output, lse), split into lists if the query was a list."""
        if not self.are_split:
            return given
        output, lse = given if return_lse else (given, None)
        parts = list(itertools.starmap(slice, itertools.pairwise(self.cu_seq_q)))
        # There is no lambda or comprehension here: where memory runs out, CPython 3.11 leaks the
        # arguments that inner functions read.
        rows = list(map(output.__getitem__, parts))
        if lse is None:
            return rows
        return rows, list(map(lse.__getitem__, zip(itertools.repeat(slice(None)), parts)))


def pack_lists(query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, out: Any) -> Lists:
    """Pack what is a list or a tuple of arrays (rows, heads, size); the rest stays as it is.

    Raises
    ------
    TypeError
        An element is no array, or of another library than the first one.
    ValueError
        Shapes or lengths do not fit, or an argument is given that lists have no use for.
    """
    given: dict[str, Any] = {"query": query, "key": key, "value": value}
    lists = {name: one for name, one in given.items() if isinstance(one, list | tuple)}
    if not lists:
        return Lists(query, key, value, cu_seq_q, cu_seq_k, are_split=False)
    for name, one in lists.items():
        _check(one, name)
    offsets = {"cu_seq_q": cu_seq_q, "cu_seq_k": cu_seq_k}
    for name, of in ("query", "cu_seq_q"), ("key", "cu_seq_k"):
        if name in lists:
            if offsets[of] is not None:
                raise ValueError(f"{of} is given beside a list of arrays, {name}; expected None")
            offsets[of] = _ends(lists[name])
    if "query" in lists and out is not None:
        raise ValueError("out is given beside a list of arrays, query; expected None")
    _check_keys(lists)
    for name, one in lists.items():
        given[name] = _join(one, name)
    return Lists(**given, **offsets, are_split="query" in lists)


def _check(arrays: Sequence[Any], name: str) -> None:
    """Check that the arrays of a list have one library, dtype, number of heads and head size."""
    if not arrays:
        raise ValueError(f"{name} is an empty list; expected an array for each sequence")
    first = arrays[0]
    for n, one in enumerate(arrays):
        if not hasattr(one, "shape") or not hasattr(one, "dtype"):
            raise TypeError(f"{name}[{n}] must be an array, got {type(one).__name__}")
        if type(one) is not type(first) or one.dtype != first.dtype:
            raise TypeError(
                f"{name}[{n}] is {type(one).__name__} of {one.dtype}; expected "
                f"{type(first).__name__} of {first.dtype}, as {name}[0]"
            )
        shape, expected = tuple(one.shape), tuple(first.shape)
        if len(shape) != 3 or shape[1:] != expected[1:]:
            rest = expected[1:] if len(expected) == 3 else ("heads", "size")
            raise ValueError(
                f"{name}[{n}] has shape {shape}; expected (rows, {rest[0]}, {rest[1]})"
            )


def _check_keys(lists: Mapping[str, Sequence[Any]]) -> None:
    """Check that all lists have equally many arrays, and key[n] and value[n] equally many rows."""
    counts = {name: len(one) for name, one in lists.items()}
    (first, count), *others = counts.items()
    for name, other in others:
        if other != count:
            raise ValueError(f"{name} has {other} arrays; expected {count}, as {first}")
    if ("key" in lists) != ("value" in lists):
        raise ValueError("one of key and value is a list of arrays; expected both to be, or none")
    for n, (key, value) in enumerate(
        zip(lists.get("key", ()), lists.get("value", ()), strict=True)
    ):
        if key.shape[0] != value.shape[0]:
            raise ValueError(
                f"value[{n}] has {value.shape[0]} rows; expected {key.shape[0]}, as key[{n}]"
            )


def _ends(arrays: Sequence[Any]) -> list[int]:
    """Return the offsets of the arrays in the packed one: len(arrays) + 1 numbers."""
    return list(itertools.accumulate((one.shape[0] for one in arrays), initial=0))


def _join(arrays: Sequence[Any], name: str) -> Any:
    """Return a new array of the same library that has the rows of all arrays, in their order."""
    first = arrays[0]
    if isinstance(first, np.ndarray):
        return np.concatenate(arrays)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(first, torch.Tensor):
        return torch.cat(list(arrays))
    if isinstance(first, _core.Tensor):
        ends = _ends(arrays)
        whole = _core.empty((ends[-1], *first.shape[1:]), first.dtype, first.device)
        for one, (start, end) in zip(arrays, itertools.pairwise(ends), strict=True):
            copy_into(whole[start:end], one)
        return whole
    if hasattr(first, "__array_namespace__"):
        return first.__array_namespace__().concat(list(arrays))
    raise TypeError(
        f"{name} is a list of {type(first).__name__}; expected arrays of NumPy, torch or JAX, or "
        "clattn.Tensor: pack others, and give offsets"
    )
