"""What tasks do on a worker: attend to a chunk of keys, and merge results of several chunks."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from clattn import _core, flex, functional
from clattn.device import devices

__all__ = ["Call", "attend_pair", "get_lse", "get_output", "keep", "merge"]


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
    """

    options: dict[str, Any]
    shift: int
    mods: dict[str, Any]
    lead: tuple[int, ...]
    device: Any


def attend_pair(
    query: Any, key: Any, value: Any, *others: Any, call: Call, names: list[str], packs: bool
) -> Any:
    """Attend from a chunk of rows to a chunk of keys.

    `others` are a mask, sinks and origins of chunks, as `names` says. A packed result has the shape
    (..., Hq, L, 1, Ev + 1), lse last.
    """
    # A dimension that the result lacks comes as a list of its one chunk.
    query, key, value, *rest = (
        a[0] if isinstance(a, list) else a for a in (query, key, value, *others)
    )
    arguments = {name: a for name, a in zip(names, rest, strict=True) if name != "origin"}
    origins = [int(a[0]) for name, a in zip(names, rest, strict=True) if name == "origin"]
    if packs:
        dtype = np.float64 if query.dtype == np.float64 else np.float32
        query, key, value = (a.astype(dtype, copy=False) for a in (query, key, value))
    arguments |= {"return_lse": packs, "device": _find_device(call.device)}
    if call.mods:
        leads = [a.shape[:-3] for a in (query, key, value)]
        mods = _shift_mods(call.mods, np.broadcast_shapes(*leads), call.lead, origins)
        result = flex.flex_attention(query, key, value, **mods, **call.options, **arguments)
    else:
        if origins:
            arguments["query_offset"] = origins[-2] - origins[-1] + call.shift
        result = functional.scaled_dot_product_attention(
            query, key, value, **call.options, **arguments
        )
    if not packs:
        return result
    out, lse = result
    return np.concatenate([out, lse[..., None]], -1)[..., None, :]


def _find_device(device: Any) -> Any:
    if not isinstance(device, tuple):
        return device
    for found in devices():
        if (found.platform, found.name) == device:
            return found
    raise _core.DeviceError(f"this worker has no device '{device[1]}' of platform '{device[0]}'")


def _shift_mods(
    mods: dict[str, Any], lead: tuple[int, ...], whole: tuple[int, ...], origins: list[int]
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


def keep(part: np.ndarray, axis: Any, keepdims: bool) -> np.ndarray:
    """Return a part as it is: what a reduction does with each part first."""
    return part


def merge(parts: np.ndarray, axis: Any, keepdims: bool) -> np.ndarray:
    """Merge packed results (..., L, parts, Ev + 1) over the parts, by their log-sum-exp."""
    lse = parts[..., -1:]
    high = lse.max(axis=-2)
    base = np.where(np.isneginf(high), 0, high)
    total = np.zeros_like(base)
    merged = np.zeros_like(parts[..., 0, :])
    with np.errstate(divide="ignore", invalid="ignore"):
        for n in range(parts.shape[-2]):
            weight = np.exp(lse[..., n, :] - base)
            total += weight
            merged[..., :-1] += weight * parts[..., n, :-1]
        merged[..., :-1] /= np.where(total == 0, 1, total)
        merged[..., -1:] = base + np.log(total)
    return merged[..., None, :] if keepdims else merged


def get_output(packed: np.ndarray, sinks: np.ndarray | None = None, *, dtype: Any) -> np.ndarray:
    """Return the output; a sink is one more part, whose row is zeros."""
    output = packed[..., :-1]
    if sinks is not None:
        lse = packed[..., -1]
        total = _add_sinks(lse, sinks)
        with np.errstate(invalid="ignore"):
            share = np.exp(lse - np.where(np.isneginf(total), 0, total))
        output = output * share[..., None]
    return output.astype(dtype, copy=False)


def get_lse(packed: Any, sinks: np.ndarray | None = None, *, dtype: Any) -> np.ndarray:
    """Return lse. The last dimension, which it lacks, comes as a list of its one chunk."""
    lse: np.ndarray = packed[0][..., -1]
    return lse if sinks is None else _add_sinks(lse, sinks)


def _add_sinks(lse: np.ndarray, sinks: np.ndarray) -> np.ndarray:
    total: np.ndarray = np.logaddexp(lse, sinks.astype(lse.dtype)[:, None])
    return total
