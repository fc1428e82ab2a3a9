"""Checks of a call, and arrays whose chunks fit each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import dask.array as da
import numpy as np

from clattn._arguments.arrays import host_array
from clattn._arguments.operands import DIMENSIONS, FACTORS, Operands
from clattn._parts.checks import check_flag, shape_of_call

if TYPE_CHECKING:
    from collections.abc import Callable

    from clattn._parts.bands import Band

__all__ = ["Layout", "check_call", "lay_out", "read_operands", "seen_keys"]


def read_operands(operands: Operands) -> Operands:
    """Return the operands as arrays of dask or NumPy.

    Query, key and value have to be dask arrays with one chunk in the last dimension.
    """
    arrays = {}
    for name in DIMENSIONS:
        array = getattr(operands, name)
        if not isinstance(array, da.Array):
            if name in FACTORS:
                raise TypeError(
                    f"{name} must be a dask array, got {type(array).__name__}; expected one such "
                    f"as da.from_array({name}, chunks=…)"
                )
            arrays[name] = None if array is None else host_array(array, name)
            continue
        arrays[name] = array
        if any(np.isnan(size) for size in array.shape):
            raise ValueError(
                f"{name} has chunks of unknown size, shape {array.shape}; expected known ones: "
                f"{name}.compute_chunk_sizes()"
            )
        if name in FACTORS and array.ndim and array.numblocks[-1] != 1:
            raise ValueError(
                f"{name} has the chunks {array.chunks[-1]} in its last dimension; expected one "
                f"chunk: {name}.rechunk({{-1: -1}})"
            )
    return Operands(**arrays)


def _without_memory(array: Any) -> Any:
    """Return a NumPy array of the shape, the dtype and the kind of a dask array."""
    if not isinstance(array, da.Array):
        return array
    none = np.broadcast_to(np.zeros((), array.dtype), array.shape)
    return np.ma.masked_array(none) if isinstance(array._meta, np.ma.MaskedArray) else none


def check_call(
    attend: Callable[..., Any], operands: Operands, return_lse: bool, **options: Any
) -> tuple[int, ...]:
    """Let the core check a call; return the shape (..., Hq, L) of the result's rows."""
    check_flag("return_lse", return_lse)
    return shape_of_call(attend, **operands.map(_without_memory).given(), **options)[:-1]


class Layout(NamedTuple):
    """Arrays whose chunks fit. A dimension of size 1 that broadcasts is one chunk.

    Attributes
    ----------
    chunks : tuple of tuples
        Those of (..., Hq, L) of the result, then those of the keys.
    origins : tuple of arrays
        Where each of these chunks begins.
    operands : Operands
        Dask arrays. A chunk of key's heads is for the chunk of query's heads with the same number.
    """

    chunks: tuple[tuple[int, ...], ...]
    origins: tuple[np.ndarray, ...]
    operands: Operands


def lay_out(shape: tuple[int, ...], operands: Operands, enable_gqa: bool) -> Layout:
    """Rechunk the arrays of a checked call; `shape` is (..., Hq, L) of the result."""
    query, key, value = (getattr(operands, name) for name in FACTORS)
    ndim = len(shape) + 1
    # The chunks of a dimension are those of the first array that has all of its size.
    lead: dict[int, tuple[int, ...]] = {}
    for n, size in zip(range(-ndim, -2), shape, strict=False):
        lead[n] = next(
            a.chunks[n] for a in (query, key, value) if a.ndim >= -n and a.shape[n] == size
        )
    serves = enable_gqa and min(query.ndim, key.ndim) > 2 and key.shape[-3] not in (1, shape[-2])
    sizes = {"L": query.chunks[-2], "S": _unified(key.chunks[-2], value.chunks[-2])}
    if -3 in lead:
        sizes |= {"Hq": lead[-3]} if serves else {"Hq": lead[-3], "Hk": lead[-3]}
    arrays = {}
    for name, array in operands.given().items():
        last = DIMENSIONS[name]
        wanted = {n - len(last): sizes[one] for n, one in enumerate(last) if one in sizes}
        wanted |= {n + 3 - len(last): some for n, some in lead.items() if n < -3}
        arrays[name] = _rechunk(_as_dask(array), wanted)
        if serves and "Hk" in last:
            arrays[name] = _serve_heads(arrays[name], last.index("Hk") - len(last), lead[-3])
    chunks = (*lead.values(), sizes["L"], sizes["S"])
    origins = tuple(np.cumsum([0, *some[:-1]]) for some in chunks)
    return Layout(chunks, origins, Operands(**arrays))


def _unified(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """Return chunks of one dimension that two arrays with these chunks both take."""
    if one == other:
        return one
    both = (da.empty(sum(sizes), chunks=(sizes,)) for sizes in (one, other))
    unified: Any = da.unify_chunks(*(part for array in both for part in (array, "s")))
    chunks: tuple[int, ...] = unified[0]["s"]
    return chunks


def _serve_heads(array: da.Array, axis: int, chunks: tuple[int, ...]) -> da.Array:
    """Return keys or values with a chunk of heads for each of these chunks of query's heads.

    A chunk of query's heads that has whole groups, or is within one, gets the heads of these
    groups. Any other gets a head for each of its own, so that each is a group by itself. Eight
    heads of query in chunks of 4, 3 and 1, two heads of keys:

        heads of query   0 1 2 3 | 4 5 6 | 7
        their key heads  0 0 0 0 | 1 1 1 | 1
        what chunks get  0       | 1     | 1      of chunks 3 and 5: 0 | 0 1 1 1 1
    """
    group = sum(chunks) // array.shape[axis]
    ends = np.cumsum(chunks).tolist()
    parts = []
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        # Without heads it gets one all the same: da.concatenate leaves empty arrays out.
        first = min(begin // group, array.shape[axis] - 1)
        last = max(-(-end // group), first + 1)
        whole = begin % group == end % group == 0
        if whole or last - first == 1:
            heads = [slice(first, last)]
        else:
            heads = [slice(n // group, n // group + 1) for n in range(begin, end)]
        after = [slice(None)] * (-1 - axis)
        part = da.concatenate([array[(..., some, *after)] for some in heads], axis=axis)
        parts.append(part.rechunk({axis: -1}))
    return da.concatenate(parts, axis=axis)


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
