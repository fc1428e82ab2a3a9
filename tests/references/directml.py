# SPDX-License-Identifier: MIT
"""The oracle of DML_MULTIHEAD_ATTENTION_OPERATOR_DESC, written from its specification.

A call is a dict of clattn.directml.multihead_attention's arguments. As in `reference`, the answer
is computed in float64 and the plain computation in float32, whose error gives the tolerance.
"""

import numpy as np
from references.attention import (
    Allowed,
    bases,
    bounds,
    compute_dtype,
    in_halves,
    lost_in_sums,
    relative_error,
    score_bounds,
    weighted_sum,
)
from support.checks import native
from support.data import draw

SOURCES = ("separate", "stacked_query_key", "stacked_key_value", "stacked_query_key_value")
FLOATS = (*SOURCES[1:], "query", "key", "value", "bias", "relative_position_bias", "past_key",
          "past_value")  # fmt: skip


def make(source="separate", *, B=2, L=5, S=7, H=2, E=8, Ev=8, P=None, bias=False,
         dtype=np.float32, seed=0, **others):  # fmt: skip
    """A correct call. Stacked tensors settle S = L and Ev = E where they have to; P is the past."""
    if source in ("stacked_query_key", "stacked_query_key_value"):
        S = L
    if source in ("stacked_key_value", "stacked_query_key_value"):
        Ev = E
    shapes = {
        "query": (B, L, H * E),
        "key": (B, S, H * E),
        "value": (B, S, H * Ev),
        "stacked_query_key": (B, L, H, 2, E),
        "stacked_key_value": (B, S, H, 2, E),
        "stacked_query_key_value": (B, L, H, 3, E),
    }
    names = {
        "separate": ("query", "key", "value"),
        "stacked_query_key": ("stacked_query_key", "value"),
        "stacked_key_value": ("query", "stacked_key_value"),
        "stacked_query_key_value": ("stacked_query_key_value",),
    }[source]
    call = {name: draw(shapes[name], dtype, seed + n) for n, name in enumerate(names)}
    if bias:
        call["bias"] = draw((2 * H * E + H * Ev,), dtype, seed + 3)
    if P is not None:
        call["past_key"] = draw((B, H, P, E), dtype, seed + 4)
        call["past_value"] = draw((B, H, P, Ev), dtype, seed + 5)
    return call | {"scale": 0.4, "head_count": H} | others


def inputs(call):
    """The call's float tensors, in the machine's byte order; None where there is none."""
    return {name: native(call.get(name)) for name in FLOATS}


def split_heads(array, heads):
    """(1, …, B, N, H·X) -> (B, H, N, X)."""
    batch, length, hidden = array.shape[-3:]
    return array.reshape(batch, length, heads, hidden // heads).swapaxes(1, 2)


def unstack(array):
    """(B, N, H, count, X) -> count times (B, H, N, X)."""
    return [array[:, :, :, n].swapaxes(1, 2) for n in range(array.shape[3])]


def sources(call):
    """New query, key and value as (B, H, N, X), wherever they come from, without bias or past."""
    given, heads = inputs(call), call["head_count"]
    if given["stacked_query_key_value"] is not None:
        return unstack(given["stacked_query_key_value"])
    if given["stacked_query_key"] is not None:
        return [*unstack(given["stacked_query_key"]), split_heads(given["value"], heads)]
    if given["stacked_key_value"] is not None:
        return [split_heads(given["query"], heads), *unstack(given["stacked_key_value"])]
    return [split_heads(given[name], heads) for name in ("query", "key", "value")]


def operands(call, dtype):
    """Query, key and value in `dtype`: bias added to what is new, which goes behind the past.

    The biased tensors are rounded to the tensors' own type on the way, as they are in a graph that
    adds the bias in a node of its own, and in the present outputs.
    """
    given, heads, found = inputs(call), call["head_count"], sources(call)
    own = found[0].dtype
    wide = [a.astype(dtype) for a in found]
    if given["bias"] is not None:
        bias = given["bias"].reshape(-1).astype(dtype)
        at = 0
        for n, array in enumerate(wide):
            size = array.shape[-1] * heads
            part = bias[at : at + size].reshape(heads, 1, array.shape[-1])
            wide[n], at = array + part, at + size
        assert at == bias.size
        wide = [a.astype(own).astype(dtype) for a in wide]
    for n, name in ((1, "past_key"), (2, "past_value")):
        if given[name] is not None:
            past = given[name].reshape(given[name].shape[-4:]).astype(dtype)
            wide[n] = np.concatenate([past, wide[n]], axis=2)
    return wide


def padding(call, batch, length, total):
    """Which positions get the filter value: bool, broadcasts to (B, H, L, T)."""
    mask, kind = call.get("mask"), call.get("mask_type", "none")
    if kind == "none":
        return np.zeros((1, 1, 1, 1), bool)
    mask = native(mask)
    if kind == "boolean":
        if mask.ndim >= 4:  # a leading 1 of the fifth dimension is dropped
            return mask.reshape(mask.shape[-4:]) == 0
        if mask.shape[-2:] == (batch, total) and mask.size == batch * total:
            return mask.reshape(batch, 1, 1, total) == 0
        return mask.reshape(batch, 1, length, total) == 0
    flat, start = mask.reshape(-1), 0
    end = flat[:batch]
    if kind == "key_sequence_end_start":
        start = flat[batch:].reshape(batch, 1, 1, 1)
    j, end = np.arange(total), end.reshape(batch, 1, 1, 1)
    return (j < start) | (j >= end)


def attention_in(dtype, call, weights_dtype=None, base=0):
    """(result, scores, weights), per head: (B, H, L, Ev), and twice (B, H, L, T)."""
    query, key, value = operands(call, dtype)
    batch, length, total = query.shape[0], query.shape[2], key.shape[2]
    with np.errstate(all="ignore"):
        scores = np.matmul(query, key.swapaxes(-1, -2)) * dtype.type(call["scale"])
        seen = np.ones((1, 1, 1, 1), bool)
        added = inputs(call)["relative_position_bias"]
        if added is not None:
            added = added.reshape(added.shape[-4:]).astype(dtype)
            scores = scores + added
            seen = added != -np.inf
        shifted = scores + dtype.type(call.get("mask_filter_value", -10000.0))
        scores = np.where(padding(call, batch, length, total), shifted, scores)
        seen = np.broadcast_to(seen, scores.shape)
        scores = np.where(seen, scores, -np.inf)
        empty = ~seen.any(axis=-1, keepdims=True)
        peak = np.where(empty, 0, scores.max(axis=-1, keepdims=True, initial=-np.inf))
        weights = np.where(seen, np.exp(scores - peak), 0).astype(dtype)
        if weights_dtype is not None:
            weights = in_halves(weights, weights_dtype, base)
        sums = np.where(empty, 1, weights.sum(axis=-1, keepdims=True, dtype=dtype))
        result = weighted_sum(weights, value, seen) / sums.astype(dtype)
        return result.astype(dtype), scores, weights / sums


def as_output(call, result):
    """(B, H, L, Ev) -> (B, L, H·Ev), with the query's leading 1s."""
    joined = np.ascontiguousarray(result.swapaxes(1, 2))
    joined = joined.reshape(*joined.shape[:2], joined.shape[2] * joined.shape[3])
    query = call.get("query")
    return joined if query is None else joined.reshape(*query.shape[:-3], *joined.shape)


def attention(call):
    """The right output."""
    return as_output(call, attention_in(np.dtype(np.float64), call)[0])


def present(call):
    """Past followed by new key and value: exact sums, rounded once to the tensors' type."""
    dtype = sources(call)[0].dtype
    return tuple(a.astype(dtype) for a in operands(call, np.dtype(np.float64))[1:])


def judged(call, *, rounds_weights=False):
    """The right output, and how far a kernel may be from it: see `attention.judged`."""
    wide = np.dtype(np.float64)
    right, scores, weights = attention_in(wide, call)
    dtype = sources(call)[0].dtype
    compute = compute_dtype(dtype)
    near = attention_in(compute, call)[0]
    query, key, value = operands(call, wide)
    raw = np.matmul(query, key.swapaxes(-1, -2)) * call["scale"]
    most = score_bounds(query, key, call["scale"], np.isfinite(scores))
    lost = lost_in_sums(compute, raw, scores)
    relative = relative_error(compute, most, lost=lost, weights=weights)
    rounded = [
        attention_in(compute, call, weights_dtype=dtype, base=base)[0]
        for base in bases(right)
        if rounds_weights
    ]
    allowed = bounds(right, near, weights, value, relative, dtype, rounded=rounded)
    each = as_output(call, np.broadcast_to(allowed.each, right.shape))
    return as_output(call, right), Allowed(each, allowed.rms)


def tolerance(call):
    """How far each number of the output may be from `attention`."""
    return judged(call)[1].each
