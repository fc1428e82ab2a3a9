"""What tasks do on a worker: attend to a chunk of keys, and merge results of several chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from clattn import _core, attention, flex
from clattn._arguments.dtypes import wide
from clattn.device import devices
from clattn.merging import merge_into

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Call", "attend", "attend_to_part", "blank", "finish", "merge"]


class Call(NamedTuple):
    """What is the same in all tasks of a call: plain values, and the functions of the user.

    Attributes
    ----------
    options : dict
        Arguments of the core's function that have no chunks.
    shift : int
        S - L of the whole arrays for "lower_right", else 0: row i stands at ``i + shift``.
    mods : dict
        score_mod and mask_mod; empty without both.
    lead : tuple of int
        The shape of the result before the heads, for mods.
    device : str, tuple or None
        A word, or the platform and the name of a device.
    return_lse : bool
        What the last tasks return: (output, lse), or the output alone.
    """

    options: dict[str, Any]
    shift: int
    mods: dict[str, Any]
    lead: tuple[int, ...]
    device: Any
    return_lse: bool


def attend(
    query: Any, key: Any, value: Any, mask: Any, origins: Sequence[int], sinks: Any, *, call: Call
) -> Any:
    """Attend from a chunk of rows to the only chunk of keys that they see.

    `origins` are the places in the whole arrays where the chunks begin, those of keys last.
    """
    return _attend(query, key, value, mask, origins, call, call.return_lse, sinks=sinks)


def attend_to_part(
    query: Any, key: Any, value: Any, mask: Any, origins: Sequence[int], *, call: Call
) -> Any:
    """Attend from a chunk of rows to one of several chunks of keys; (output, lse) in float32."""
    dtype = wide(query.dtype)
    query, key, value = (array.astype(dtype, copy=False) for array in (query, key, value))
    return _attend(query, key, value, mask, origins, call, True)


def _attend(
    query: Any, key: Any, value: Any, mask: Any, origins: Sequence[int], call: Call,
    return_lse: bool, **arguments: Any
) -> Any:  # fmt: skip
    arguments |= {"return_lse": return_lse, "device": _find_device(call.device)}
    if call.mods:
        lead = np.broadcast_shapes(*(array.shape[:-3] for array in (query, key, value)))
        mods = _shift_mods(call.mods, lead, call.lead, origins)
        return flex.flex_attention(query, key, value, **mods, **call.options, **arguments)
    offset = origins[-2] - origins[-1] + call.shift
    return attention.scaled_dot_product_attention(
        query, key, value, mask, query_offset=offset, **call.options, **arguments
    )


def _find_device(device: Any) -> Any:
    if not isinstance(device, tuple):
        return device
    for found in devices():
        if (found.platform, found.name) == device:
            return found
    raise _core.DeviceError(f"this worker has no device '{device[1]}' of platform '{device[0]}'")


def _shift_mods(
    mods: dict[str, Any], lead: tuple[int, ...], whole: tuple[int, ...], origins: Sequence[int]
) -> dict[str, Any]:
    """Return functions that get the numbers of batch, head, row and key in the whole arrays.

    `lead` is the shape of a chunk before the heads, `whole` that of the arrays, and `origins` where
    the chunk begins. b counts the entries of all dimensions before the heads.
    """
    *first, head = origins[:-2] or [0]
    row, key = origins[-2:]

    def shift_batch(b: Any) -> Any:
        places = []
        for size in reversed(lead[1:]):
            places.append(b % max(size, 1))
            b = b // max(size, 1)
        numbers = [n + origin for n, origin in zip([b, *reversed(places)], first, strict=False)]
        total = numbers[0] if numbers else b
        for number, size in zip(numbers[1:], whole[1:], strict=True):
            total = total * size + number
        return total

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mods["mask_mod"](shift_batch(b), h + head, q_idx + row, kv_idx + key)

    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mods["score_mod"](score, shift_batch(b), h + head, q_idx + row, kv_idx + key)

    given = {"mask_mod": mask, "score_mod": score}
    return {name: mod for name, mod in given.items() if mods[name] is not None}


def blank(shape: tuple[int, ...], dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return (output, lse) of rows that see no chunk of keys; `shape` is the output's."""
    return np.zeros(shape, dtype), np.full(shape[:-1], -np.inf, dtype)


def merge(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Merge results (output, lse) over several chunks of keys."""
    out, lse = (array.copy() for array in parts[0])
    for more, more_lse in parts[1:]:
        merge_into(out, lse, more.copy(), more_lse)
    return out, lse


def finish(
    parts: Sequence[tuple[np.ndarray, np.ndarray]], sinks: Any, *, call: Call, dtype: Any
) -> Any:
    """Merge the last parts of a chunk of rows, add the sinks and round to `dtype`."""
    out, lse = merge(parts)
    if sinks is not None:
        # A sink is one more part, whose row is zeros.
        logits = np.broadcast_to(sinks.astype(lse.dtype)[:, None], lse.shape)
        merge_into(out, lse, np.zeros_like(out), logits)
    out = out.astype(dtype, copy=False)
    return (out, lse) if call.return_lse else out
