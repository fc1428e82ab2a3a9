"""Checks of a call, and arrays whose chunks fit each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import dask.array as da
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Layout", "check_arrays", "check_call", "empty_like", "lay_out", "seen_keys"]


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
        A chunk of key's heads is for the chunk of query's heads with the same number.
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
        unified: Any = da.unify_chunks(key, key_names, value, value_names)
        key, value = unified[1]
    # The chunks of a dimension are those of the first array that has all of its size.
    lead: dict[int, tuple[int, ...]] = {}
    for n, size in zip(range(-ndim, -2), shape, strict=False):
        lead[n] = next(
            a.chunks[n] for a in (query, key, value) if a.ndim >= -n and a.shape[n] == size
        )
    query = _rechunk(query, lead)
    if enable_gqa and key.ndim > 2 and key.shape[-3] not in (1, query.shape[-3]):
        beside = {n: sizes for n, sizes in lead.items() if n != -3}
        key, value = (_serve_heads(_rechunk(a, beside), query) for a in (key, value))
    else:
        key, value = (_rechunk(array, lead) for array in (key, value))
    chunks = (*lead.values(), query.chunks[-2], key.chunks[-2])
    if mask is not None:
        mask = _rechunk(_as_dask(mask), dict(zip(range(-ndim, 0), chunks, strict=True)))
    if sinks is not None:
        sinks = _rechunk(_as_dask(sinks), {-1: lead[-3]})
    origins = tuple(np.cumsum([0, *sizes[:-1]]) for sizes in chunks)
    return Layout(chunks, origins, query, key, value, mask, sinks)


def _serve_heads(array: da.Array, query: da.Array) -> da.Array:
    """Return keys or values with a chunk of heads for each chunk of query's heads.

    A chunk of query's heads that has whole groups, or is within one, gets the heads of these
    groups. Any other gets a head for each of its own, so that each is a group by itself.
    """
    group = query.shape[-3] // array.shape[-3]
    ends = np.cumsum(query.chunks[-3]).tolist()
    parts = []
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        # Without heads it gets one all the same: da.concatenate leaves empty arrays out.
        first = min(begin // group, array.shape[-3] - 1)
        last = max(-(-end // group), first + 1)
        whole = begin % group == end % group == 0
        if whole or last - first == 1:
            heads = [slice(first, last)]
        else:
            heads = [slice(n // group, n // group + 1) for n in range(begin, end)]
        part = da.concatenate([array[..., some, :, :] for some in heads], axis=-3)
        parts.append(part.rechunk({-3: -1}))
    return da.concatenate(parts, axis=-3)


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


def seen_keys(
    layout: Layout, bounds: tuple[int | None, int | None] | None, shift: int
) -> list[list[int]]:
    """Return for each chunk of rows the numbers of the chunks of keys that it attends to.

    Row i attends to the keys from ``i + shift - left`` to ``i + shift + right``.
    """
    left, right = bounds or (None, None)
    keys = np.array(layout.chunks[-1])
    starts = layout.origins[-1]
    found = []
    for first, count in zip(layout.origins[-2].tolist(), layout.chunks[-2], strict=True):
        seen = (keys > 0) & (count > 0)
        if left is not None:
            seen &= starts + keys > first + shift - left
        if right is not None:
            seen &= starts < first + count + shift + right
        found.append(np.flatnonzero(seen).tolist())
    return found
