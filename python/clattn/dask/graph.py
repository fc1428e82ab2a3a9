"""The graph of a call: tasks for pairs of chunks, and the trees that merge their results."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import dask.array as da
import numpy as np
from dask.base import tokenize

from clattn import _core, flex
from clattn.dask.chunks import find_groups, take
from clattn.dask.tasks import Call, attend_pair, get_lse, get_output, keep, merge

if TYPE_CHECKING:
    from collections.abc import Callable

    from clattn.dask.chunks import Layout

__all__ = ["Call", "build_graph", "name_of"]


def build_graph(
    layout: Layout,
    call: Call,
    bounds: tuple[int | None, int | None] | None,
    return_lse: bool,
    split_every: int | None,
) -> Any:
    """Return output, or (output, lse).

    `bounds` are the keys to the left and to the right of a row's position that it attends to, None
    for all. Rows that attend to the same chunks of keys are one step of the loop.
    """
    token = tokenize(layout, call._replace(mods={}), return_lse, split_every, _mods_token(call))
    outs, lses = [], []
    for n, (rows, keys) in enumerate(find_groups(layout, bounds, call.shift)):
        part = take(layout, rows, keys)
        positions = bounds is not None or bool(call.mods)
        packs = return_lse or part.key.numblocks[-2] > 1
        result = _map_pairs(part, call, positions, packs, f"attend-{token}-{n}")
        if not packs:
            outs.append(result)
            continue
        keys_axis = result.ndim - 2
        merged = da.reduction(
            result, keep, merge, axis=keys_axis, combine=merge, dtype=result.dtype,
            meta=_meta(keys_axis + 1, result.dtype), split_every=split_every,
            name="attention",
        )  # fmt: skip
        outs.append(_unpack(get_output, merged, part, layout.query.dtype))
        if return_lse:
            lses.append(_unpack(get_lse, merged, part, merged.dtype))
    axis = outs[0].ndim - 2
    output, *lse = (
        arrays[0] if len(arrays) == 1 else da.concatenate(arrays, axis=axis)
        for arrays in (outs, lses)
        if arrays
    )
    return (output, *lse) if return_lse else output


def _meta(ndim: int, dtype: Any) -> np.ndarray:
    return np.empty((0,) * ndim, dtype)


def name_of(device: Any) -> Any:
    """Return a plain value that workers find the device by."""
    return (device.platform, device.name) if isinstance(device, _core.Device) else device


def _mods_token(call: Call) -> Any:
    """Return what functions compute and capture, as plain values and NumPy arrays."""
    if not call.mods:
        return None
    traced = flex.trace_mods(**call.mods)
    return traced.text, traced.numbers, [np.asarray(table) for table in traced.tables]


def _map_pairs(part: Layout, call: Call, positions: bool, packs: bool, name: str) -> da.Array:
    """Return the results of all pairs of chunks of rows and of keys.

    Packed ones have the shape (..., Hq, L, chunks of keys, Ev + 1), lse last. Others are of one
    chunk of keys. The last dimensions of all arrays share an index: each is one chunk.
    """
    ndim = len(part.chunks)
    *lead, rows, last, keys = range(ndim + 1)
    size = part.value.shape[-1]
    dtype = part.query.dtype
    arguments: list[Any] = []
    for array, own in (
        (part.query, (rows, last)),
        (part.key, (keys, last)),
        (part.value, (keys, last)),
    ):
        arguments += [array, (*lead[len(lead) + 2 - array.ndim :], *own)]
    names = []
    if part.mask is not None:
        names.append("attn_mask")
        arguments += [part.mask, (*lead, rows, keys)[ndim - part.mask.ndim :]]
    if part.sinks is not None and not packs:
        names.append("sinks")
        arguments += [part.sinks, (lead[-1],)]
    if positions:
        for n, origins in zip((*lead, rows, keys), part.origins, strict=True):
            if n in (rows, keys) or call.mods:
                names.append("origin")
                arguments += [da.from_array(origins, chunks=1), (n,)]
    adjusted = dict(zip((*lead, rows), part.chunks, strict=False))
    index = (*lead, rows, last)
    if packs:
        dtype = np.dtype(np.float64 if dtype == np.float64 else np.float32)
        adjusted |= {keys: (1,) * len(part.chunks[-1]), last: (size + 1,)}
        index = (*lead, rows, keys, last)
    else:
        adjusted |= {last: (size,)}
    return da.blockwise(
        partial(attend_pair, call=call, names=names, packs=packs), index, *arguments, name=name,
        dtype=dtype, meta=_meta(len(index), dtype), adjust_chunks=adjusted, align_arrays=False,
        concatenate=False,
    )  # fmt: skip


def _unpack(task: Callable[..., Any], merged: da.Array, part: Layout, dtype: Any) -> da.Array:
    """Return output or lse of packed results (..., Hq, L, Ev + 1)."""
    index = tuple(range(merged.ndim))
    arguments = [merged, index]
    if part.sinks is not None:
        arguments += [part.sinks, index[-3:-2]]
    out = index if task is get_output else index[:-1]
    word = "output" if task is get_output else "lse"
    return da.blockwise(
        partial(task, dtype=dtype), out, *arguments, name=f"{merged.name}-{word}",
        dtype=dtype, meta=_meta(len(out), dtype), align_arrays=False, concatenate=False,
        adjust_chunks={index[-1]: (part.value.shape[-1],)} if task is get_output else None,
    )  # fmt: skip
