"""The graph of a call: tasks for pairs of chunks, and the trees that merge their results."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from operator import getitem
from typing import TYPE_CHECKING, Any

import dask.array as da
import dask.config
import numpy as np
from dask.base import tokenize
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph
from dask.utils import is_integer

from clattn._arguments.dtypes import wide
from clattn._arguments.operands import DIMENSIONS
from clattn._parts.sums import without_keys
from clattn.dask.chunks import seen_keys
from clattn.dask.tasks import Call, attend, attend_to_part, merge, merge_last

if TYPE_CHECKING:
    from clattn._arguments.operands import Operands
    from clattn._parts.bands import Band
    from clattn.dask.chunks import Layout

__all__ = ["build_graph"]


def build_graph(layout: Layout, call: Call, band: Band, split_every: int | None) -> Any:
    """Return output, or (output, lse)."""
    most = dask.config.get("split_every", 4) if split_every is None else split_every
    if not is_integer(most) or most < 2:
        raise ValueError(f"split_every is {most!r}; expected None or an int of 2 or more")
    token = tokenize(layout, call, most)
    tasks = _Tasks(layout, call, token, most)
    seen = seen_keys(layout, band)
    for index in product(*(range(len(sizes)) for sizes in layout.chunks[:-1])):
        tasks.add(index, seen[index[-1]])
    dtype = tasks.dtype
    chunks = (*layout.chunks[:-1], layout.operands.value.chunks[-1])
    arrays = list(layout.operands.given().values())
    result = _array(tasks.name, tasks.graph, arrays, chunks, dtype)
    if not call.return_lse:
        return result
    # The last tasks return pairs.
    output = _take(result, 0, f"output-{token}", chunks, dtype)
    return output, _take(result, 1, f"lse-{token}", chunks[:-1], wide(dtype))


def _array(
    name: str, tasks: dict[Any, Any], arrays: list[da.Array], chunks: Any, dtype: Any
) -> da.Array:
    graph = HighLevelGraph.from_collections(name, tasks, dependencies=arrays)
    return da.Array(graph, name, chunks, meta=np.empty((0,) * len(chunks), dtype))


def _take(pairs: da.Array, n: int, name: str, chunks: Any, dtype: Any) -> da.Array:
    """Return the n-th entry of all pairs, as an array."""
    keys = flatten(pairs.__dask_keys__())
    tasks = {(name, *key[1 : len(chunks) + 1]): (getitem, key, n) for key in keys}
    return _array(name, tasks, [pairs], chunks, dtype)


class _Tasks:
    """The tasks of a call; those of a chunk of the result end in one with the chunk's key."""

    def __init__(self, layout: Layout, call: Call, token: str, split_every: int) -> None:
        self.graph: dict[Any, Any] = {}
        self.name = f"attention-{token}"
        self.dtype = layout.operands.query.dtype.newbyteorder("=")
        # A row counts its sink once, when the parts of its keys are merged.
        self._of_part = replace(layout.operands, sinks=None)
        self._layout, self._call, self._token, self._most = layout, call, token, split_every

    def add(self, index: tuple[int, ...], keys: list[int]) -> None:
        """Add the tasks of a chunk (..., row) that attends to these chunks of keys."""
        operands = self._layout.operands
        if len(keys) == 1:
            alone = partial(attend, call=self._call)
            task: tuple[Any, ...] = (alone, *self._pair(operands, index, keys[0]))
        else:
            last = partial(merge_last, call=self._call, dtype=self.dtype)
            sinks = _block("sinks", operands.sinks, index, 0)
            task = (last, self._merge(index, self._parts(index, keys)), sinks)
        self.graph[(self.name, *index, 0)] = task

    def _parts(self, index: tuple[int, ...], keys: list[int]) -> list[Any]:
        """Add the tasks that attend; return their keys, or one task that makes a part."""
        if not keys:
            shape = [sizes[n] for sizes, n in zip(self._layout.chunks, index, strict=False)]
            size = self._layout.operands.value.shape[-1]
            return [(partial(without_keys, (*shape, size), wide(self.dtype)),)]
        part = partial(attend_to_part, call=self._call)
        tasks = {
            (f"attend-{self._token}", *index, n): (part, *self._pair(self._of_part, index, n))
            for n in keys
        }
        self.graph |= tasks
        return list(tasks)

    def _merge(self, index: tuple[int, ...], parts: list[Any]) -> list[Any]:
        """Add a tree that merges parts; return the keys of those that are left."""
        level = 0
        while len(parts) > self._most:
            groups = [parts[n : n + self._most] for n in range(0, len(parts), self._most)]
            parts = [(f"merge-{self._token}", *index, level, n) for n in range(len(groups))]
            self.graph |= {name: (merge, some) for name, some in zip(parts, groups, strict=True)}
            level += 1
        return parts

    def _pair(self, operands: Operands, index: tuple[int, ...], n: int) -> tuple[Any, ...]:
        """Return the arguments of a task that attends to chunk n of the keys."""
        origins = [int(a[k]) for a, k in zip(self._layout.origins, (*index, n), strict=True)]
        blocks = [_block(name, getattr(operands, name), index, n) for name in DIMENSIONS]
        return blocks, origins


def _block(name: str, array: da.Array | None, index: tuple[int, ...], n: int) -> Any:
    """Return the key of an operand's chunk for a chunk of the result and chunk n of the keys.

    `index` is (..., head, row), or (row,) without heads. One chunk of a dimension is for all.
    """
    if array is None:
        return None
    *before, head, row = (0, *index)
    places = {"Hq": head, "Hk": head, "L": row, "S": n}
    full = (*before, *(places.get(dimension, 0) for dimension in DIMENSIONS[name]))
    own = full[len(full) - array.ndim :]
    return (array.name, *(min(n, k - 1) for n, k in zip(own, array.numblocks, strict=True)))
