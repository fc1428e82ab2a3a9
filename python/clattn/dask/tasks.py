"""What tasks do on a worker: attend to a chunk of keys, and merge results of several chunks."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from clattn import _core, attention
from clattn._arguments.dtypes import wide
from clattn._arguments.operands import FACTORS, Operands
from clattn._parts import sums
from clattn.flex.attention import attend_with_mods

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clattn._parts.sums import Sums
    from clattn.dask.mods import ChunkMods

__all__ = ["Call", "attend", "attend_to_part", "merge", "merge_last", "packed"]


class Call(NamedTuple):
    """What is the same in all tasks of a call.

    Attributes
    ----------
    options : dict
        Arguments of the core's function that have no chunks.
    shift : int
        Row i stands at key ``i + shift`` of the whole arrays.
    mods : ChunkMods or None
        What the user's functions compute.
    device : str, int, bytes or None
        Words, or what `packed` makes of a Device.
    return_lse : bool
        What the last tasks return: (output, lse), or the output alone.
    """

    options: dict[str, Any]
    shift: int
    mods: ChunkMods | None
    device: Any
    return_lse: bool


def packed(device: Any) -> Any:
    """Return a device as a plain value: the scheduler reads graphs and may lack the device."""
    if not isinstance(device, _core.Device):
        return device
    try:
        return pickle.dumps(device)
    except (TypeError, ValueError):
        raise TypeError(
            f"device '{device.name}' is of a pyopencl queue, which workers do not have; give the "
            "Device that the queue is on, of clattn.devices()"
        ) from None


def attend(blocks: Sequence[Any], origins: Sequence[int], *, call: Call) -> Any:
    """Attend from a chunk of rows to the only chunk of keys that they see.

    `blocks` are the chunks of the operands. `origins` are the places in the whole arrays where the
    chunks begin, those of keys last.
    """
    function, arguments = _call_of(Operands(*blocks), origins, call)
    return function(**arguments, return_lse=call.return_lse)


def attend_to_part(blocks: Sequence[Any], origins: Sequence[int], *, call: Call) -> Sums:
    """Attend from a chunk of rows to one of several chunks of keys, in float32 at least."""
    operands = Operands(*blocks)
    dtype = wide(operands.query.dtype)
    operands = operands.map(lambda array: array.astype(dtype, copy=False), *FACTORS)
    function, arguments = _call_of(operands, origins, call)
    return sums.attend_to_part(function, **arguments)


def _call_of(operands: Operands, origins: Sequence[int], call: Call) -> tuple[Any, dict[str, Any]]:
    """Return the function of a pair of chunks and its arguments."""
    device = pickle.loads(call.device) if isinstance(call.device, bytes) else call.device
    arguments = operands.given() | call.options | {"device": device}
    if call.mods is not None:
        lead = np.broadcast_shapes(*(getattr(operands, name).shape[:-3] for name in FACTORS))
        heads = [0] * (3 - len(origins))  # two dimensions have none
        return attend_with_mods, arguments | {"mods": call.mods.at(lead, [*heads, *origins])}
    offset = origins[-2] - origins[-1] + call.shift
    return attention.scaled_dot_product_attention, arguments | {"query_offset": offset}


def merge(parts: list[Sums]) -> Sums:
    """Merge results over several chunks of keys; the output travels in their dtype."""
    merged = sums.merge(parts)
    return merged._replace(out=merged.out.astype(parts[0].out.dtype, copy=False))


def merge_last(parts: list[Sums], sinks: Any, *, call: Call, dtype: np.dtype[Any]) -> Any:
    """Merge the last parts of a chunk of rows, add the sinks and round to `dtype`."""
    merged = sums.merge(parts)
    if sinks is not None:
        sums.add_sinks(merged, sinks, wide(dtype))
    out, lse = sums.finish(merged)
    out = out.astype(dtype, copy=False)
    return (out, lse.astype(wide(dtype), copy=False)) if call.return_lse else out
