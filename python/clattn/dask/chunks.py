"""Checks of a call, and arrays whose chunks fit each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import dask.array as da
import numpy as np

from clattn._arguments.arrays import host_array
from clattn._parts.checks import check_flag, shape_of_call

if TYPE_CHECKING:
    from collections.abc import Callable

    from clattn._parts.bands import Band

__all__ = ["Layout", "check_arrays", "check_call", "lay_out", "read_operand", "seen_keys"]


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


def read_operand(name: str, array: Any) -> Any:
    """Return a mask or sinks as an array of dask or NumPy; None stays."""
    if isinstance(array, da.Array):
        _check_known(name, array)
    elif array is not None:
        array = host_array(array, name)
    return array


def _without_memory(array: Any) -> Any:
    """Return a NumPy array of the shape, the dtype and the kind of a dask array."""
    if not isinstance(array, da.Array):
        return array
    none = np.broadcast_to(np.zeros((), array.dtype), array.shape)
    return np.ma.masked_array(none) if isinstance(array._meta, np.ma.MaskedArray) else none


def check_call(
    attend: Callable[..., Any], arrays: tuple[da.Array, ...], return_lse: bool, **options: Any
) -> tuple[int, ...]:
    """Let the core check a call; return the shape (..., Hq, L) of the result's rows."""
    check_flag("return_lse", return_lse)
    options = {name: _without_memory(option) for name, option in options.items()}
    return shape_of_call(attend, *map(_without_memory, arrays), **options)[:-1]


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
    """Rechunk the arrays of a checked call; `shape` is (..., Hq, L) of the result."""
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
    has_groups = enable_gqa and min(query.ndim, key.ndim) > 2
    if has_groups and key.shape[-3] not in (1, query.shape[-3]):
        others = {n: sizes for n, sizes in lead.items() if n != -3}
        key, value = (_serve_heads(_rechunk(a, others), query) for a in (key, value))
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
    groups. Any other gets a head for each of its own, so that each is a group by itself. Eight
    heads of query in chunks of 4, 3 and 1, two heads of keys:

        heads of query   0 1 2 3 | 4 5 6 | 7
        their key heads  0 0 0 0 | 1 1 1 | 1
        what chunks get  0       | 1     | 1      of chunks 3 and 5: 0 | 0 1 1 1 1
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


def seen_keys(layout: Layout, band: Band) -> list[list[int]]:
    """Return for each chunk of rows the numbers of the chunks of keys that it attends to."""
    starts, counts = layout.origins[-1], np.array(layout.chunks[-1], np.int64)
    rows = zip(layout.origins[-2].tolist(), layout.chunks[-2], strict=True)
    return [np.flatnonzero(band.meets(row, n, starts, counts)).tolist() for row, n in rows]
