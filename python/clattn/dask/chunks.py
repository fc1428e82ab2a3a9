"""Checks of a call, and arrays whose chunks fit each other."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import dask.array as da
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Layout", "check_arrays", "check_call", "empty_like", "find_groups", "lay_out", "take"]


def check_arrays(*arrays: Any) -> tuple[da.Array, ...]:
    """Return query, key and value if they are dask arrays with one chunk in the last dimension."""
    for name, array in zip(("query", "key", "value"), arrays, strict=True):
        if not isinstance(array, da.Array):
            raise TypeError(
                f"{name} must be a dask array, got {type(array).__name__}; expected one such as "
                f"da.from_array({name}, chunks=…)"
            )
        _check_known(name, array)
        if array.ndim and array.numblocks[-1] != 1:
            raise ValueError(
                f"{name} has the chunks {array.chunks[-1]} in its last dimension; expected one "
                f"chunk: {name}.rechunk({{-1: -1}})"
            )
    return arrays


def _check_known(name: str, array: da.Array) -> None:
    if any(np.isnan(size) for size in array.shape):
        raise ValueError(
            f"{name} has chunks of unknown size, shape {array.shape}; expected known ones: "
            f"{name}.compute_chunk_sizes()"
        )


def empty_like(name: str, array: Any) -> Any:
    """Return an array of the same shape and dtype without memory; what is no array, as it is."""
    if isinstance(array, da.Array):
        _check_known(name, array)
    elif not isinstance(array, np.ndarray):
        return array
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)


def check_call(
    attend: Callable[..., Any], arrays: tuple[da.Array, ...], return_lse: bool, **options: Any
) -> tuple[int, ...]:
    """Let the core check a call; return the shape (..., Hq, L) of the result's rows.

    A result without columns has nothing to compute, and so needs no device. A call that is refused
    is repeated with value's own shape, for the message.
    """
    query, key, value = (empty_like("array", array) for array in arrays)
    none = np.empty((0, 0), np.float32)
    try:
        rows = attend(query, key, value[..., :0], **options)
        attend(none, none, none, return_lse=return_lse)
    except (TypeError, ValueError):
        attend(query, key, value, return_lse=return_lse, **options)
        raise
    return tuple(rows.shape[:-1])


class Layout(NamedTuple):
    """Arrays whose chunks fit. A dimension of size 1 that broadcasts is one chunk.

    Attributes
    ----------
    chunks : tuple of tuples
        Those of (..., Hq, L) of the result, then those of the keys.
    origins : tuple of arrays
        Where each of these chunks begins.
    query, key, value : dask arrays
    mask, sinks : dask arrays or None
    """

    chunks: tuple[tuple[int, ...], ...]
    origins: tuple[np.ndarray, ...]
    query: da.Array
    key: da.Array
    value: da.Array
    mask: da.Array | None
    sinks: da.Array | None


def lay_out(
    shape: tuple[int, ...],
    arrays: tuple[da.Array, ...],
    mask: Any,
    sinks: Any,
    enable_gqa: bool,
) -> Layout:
    """Rechunk the arrays of a call that is right; `shape` is (..., Hq, L) of the result."""
    query, key, value = arrays
    ndim = len(shape) + 1
    if key.chunks[-2] != value.chunks[-2]:
        names = ([f"{name}{n}" for n in range(a.ndim)] for name, a in (("k", key), ("v", value)))
        key_names, value_names = names
        key_names[-2] = value_names[-2] = "s"
        _, (key, value) = da.unify_chunks(key, key_names, value, value_names)
    # The chunks of a dimension are those of the first array that has all of its size.
    lead: dict[int, tuple[int, ...]] = {}
    for n, size in zip(range(-ndim, -2), shape, strict=False):
        lead[n] = next(
            a.chunks[n] for a in (query, key, value) if a.ndim >= -n and a.shape[n] == size
        )
    grouped = {}
    if enable_gqa and key.ndim > 2 and key.shape[-3] not in (1, query.shape[-3]):
        grouped[-3] = _key_heads(query, key)
    key, value = (_rechunk(array, lead | grouped) for array in (key, value))
    query = _rechunk(query, lead)
    chunks = (*lead.values(), query.chunks[-2], key.chunks[-2])
    if mask is not None:
        mask = _rechunk(_as_dask(mask), dict(zip(range(-ndim, 0), chunks, strict=True)))
    if sinks is not None:
        sinks = _rechunk(_as_dask(sinks), {-1: lead[-3]})
    origins = tuple(np.cumsum([0, *sizes[:-1]]) for sizes in chunks)
    return Layout(chunks, origins, query, key, value, mask, sinks)


def _key_heads(query: da.Array, key: da.Array) -> tuple[int, ...]:
    """Return the chunks of key's heads, if each serves the whole groups of a chunk of query's."""
    group = query.shape[-3] // key.shape[-3]
    served = tuple(group * count for count in key.chunks[-3])
    if served != query.chunks[-3]:
        raise ValueError(
            f"query has the chunks {query.chunks[-3]} of heads, and key {key.chunks[-3]} with "
            f"groups of {group}; expected chunks of query that have the groups of one chunk of "
            f"key: query.rechunk({{-3: {served}}})"
        )
    return tuple(key.chunks[-3])


def _as_dask(array: Any) -> da.Array:
    return array if isinstance(array, da.Array) else da.from_array(np.asarray(array), chunks=-1)


def _rechunk(array: da.Array, chunks: dict[int, tuple[int, ...]]) -> da.Array:
    """Give dimensions, counted from the end, these chunks; one chunk where size 1 broadcasts."""
    wanted = {
        n: sizes if sum(sizes) == array.shape[n] else (1,)
        for n, sizes in chunks.items()
        if -n <= array.ndim
    }
    return array.rechunk(wanted)


def find_groups(
    layout: Layout, bounds: tuple[int | None, int | None] | None, shift: int
) -> list[tuple[slice, slice]]:
    """Return chunks of rows, and the chunks of keys that they attend to.

    Row i attends to the keys from ``i + shift - left`` to ``i + shift + right``, so a chunk of
    rows attends to chunks that are neighbours. Rows that attend to the same ones are a group.
    """
    rows, keys = layout.chunks[-2:]
    starts = layout.origins[-1]
    ends = starts + keys
    spans = []
    for first, count in zip(layout.origins[-2].tolist(), rows, strict=True):
        seen = np.ones(len(keys), bool)
        if bounds is not None:
            left, right = bounds
            seen = (ends > starts) & (count > 0)
            if left is not None:
                seen &= ends > first + shift - left
            if right is not None:
                seen &= starts < first + count + shift + right
        found = np.flatnonzero(seen)
        spans.append((int(found[0]), int(found[-1]) + 1) if found.size else (0, 0))
    groups = []
    end = 0
    for span, same in groupby(spans):
        begin, end = end, end + len(list(same))
        groups.append((slice(begin, end), slice(*span)))
    return groups


def take(layout: Layout, rows: slice, keys: slice) -> Layout:
    """Return the arrays of some chunks of rows and of keys. Without keys S is 0."""
    lead, (row_chunks, key_chunks) = layout.chunks[:-2], layout.chunks[-2:]
    lead_origins, (row_origins, key_origins) = layout.origins[:-2], layout.origins[-2:]
    query = layout.query.blocks[..., rows, :]
    mask = layout.mask
    if keys.start == keys.stop:
        key, value = (_without_keys(array) for array in (layout.key, layout.value))
        mask, keys, key_chunks = None, slice(1), (0,)
    else:
        key, value = (array.blocks[..., keys, :] for array in (layout.key, layout.value))
    if mask is not None:
        last = zip(mask.shape[-2:], (rows, keys)[-mask.ndim :], strict=True)
        mask = mask.blocks[(..., *(slice(None) if size == 1 else s for size, s in last))]
    return Layout(
        (*lead, row_chunks[rows], key_chunks[keys]),
        (*lead_origins, row_origins[rows], key_origins[keys]),
        query, key, value, mask, layout.sinks,
    )  # fmt: skip


def _without_keys(array: da.Array) -> da.Array:
    shape = (*array.shape[:-2], 0, array.shape[-1])
    return da.zeros(shape, dtype=array.dtype, chunks=(*array.chunks[:-2], 0, array.shape[-1]))
