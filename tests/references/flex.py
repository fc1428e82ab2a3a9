# SPDX-License-Identifier: MIT
"""The oracle of flex_attention in plain NumPy: mods called with arrays of all positions at once.

    score = scale * query . key
    score = score_mod(score, b, h, q_idx, kv_idx)       -inf excludes the key
    score = softcap * tanh(score / softcap)             where softcap > 0
    a key is attended to where mask_mod(b, h, q_idx, kv_idx) holds

A row without a key is zeros, its log-sum-exp -inf. b numbers the dimensions before the heads, in
order; without dimensions before the rows b and h are 0. Widths and tolerances are those of
attention.py.
"""

from typing import NamedTuple

import numpy as np
from clattn._commands.rounding import explained, half_step
from references.attention import (
    bases,
    bounds,
    cast,
    compute_dtype,
    eps,
    float64,
    in_halves,
    relative_error,
    score_bounds,
    weighted_sum,
    wide_type,
)

# OpenCL C lets the functions of mods be off by so many units in the last place: tanh 5, exp 3.
ULPS = 5


def positions(shape):
    """b, h, q_idx, kv_idx of scores (B, H, L, S), as int32 that broadcast to them."""
    return tuple(
        np.arange(n, dtype=np.int32).reshape([-1 if d == axis else 1 for d in range(4)])
        for axis, n in enumerate(shape)
    )


def in_four(array):
    """(..., H, L, X) as (B, H, L, X)."""
    lead = (1, 1, *array.shape[:-2])
    B = int(np.prod(lead[:-1], dtype=np.int64))
    return array.reshape(B, lead[-1], *array.shape[-2:])


def scores_in(dtype, query, key, score_mod, mask_mod, scale, softcap=0.0):
    """Scores, which keys count, and the largest magnitude of each score on the way."""
    with np.errstate(all="ignore"):
        scores = np.matmul(query, np.swapaxes(key, -1, -2)) * dtype.type(scale)
        lead = scores.shape
        scores = in_four(scores)
        place = positions(scores.shape)
        seen = np.ones(scores.shape, bool)
        top = np.abs(scores)
        if score_mod is not None:
            scores = np.broadcast_to(score_mod(scores, *place), scores.shape).astype(dtype)
            seen = scores != -np.inf
            top = np.fmax(top, np.abs(scores))
        if softcap:
            scores = dtype.type(softcap) * np.tanh(scores / dtype.type(softcap))
        if mask_mod is not None:
            allowed = np.asarray(mask_mod(*place))
            assert allowed.dtype == bool
            seen = seen & allowed
    return scores.reshape(lead), seen.reshape(lead), top.reshape(lead)


class Steps(NamedTuple):
    """What flex attention computes on its way."""

    result: np.ndarray
    lse: np.ndarray
    weights: np.ndarray
    seen: np.ndarray
    top: np.ndarray  # the largest magnitude of each score on the way
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    scale: np.ndarray
    total: np.ndarray  # of a row's weights, of which the largest is 1


def flex_in(dtype, query, key, value, score_mod=None, mask_mod=None, scale=None,
            enable_gqa=False, softcap=0.0, weights_dtype=None, base=0):  # fmt: skip
    """The steps of flex attention, computed in `dtype`."""
    q, k, v = (cast(a, dtype) for a in (query, key, value))
    if enable_gqa:
        group = q.shape[-3] // k.shape[-3]
        k, v = np.repeat(k, group, axis=-3), np.repeat(v, group, axis=-3)
    lead = np.broadcast_shapes(*(a.shape[:-2] for a in (q, k, v)))
    q, k, v = (np.broadcast_to(a, (*lead, *a.shape[-2:])) for a in (q, k, v))
    if scale is None:
        scale = 1 / np.sqrt(np.longdouble(max(q.shape[-1], 1)))
    scores, seen, top = scores_in(dtype, q, k, score_mod, mask_mod, scale, softcap)
    with np.errstate(all="ignore"):
        scores = np.where(seen, scores, -np.inf)
        empty = ~seen.any(axis=-1, keepdims=True)
        peak = np.where(empty, 0, scores.max(axis=-1, keepdims=True, initial=-np.inf))
        weights = np.where(seen, np.exp(scores - peak), 0).astype(dtype)
        total = weights.sum(axis=-1, keepdims=True, dtype=dtype)
        lse = np.where(empty, -np.inf, peak + np.log(total))[..., 0]
        total = np.where(empty, 1, total).astype(dtype)
        exact = weights / total
        sums = total
        if weights_dtype is not None:
            weights = in_halves(weights, weights_dtype, base)
            sums = np.where(empty, 1, weights.sum(axis=-1, keepdims=True, dtype=dtype))
        result = weighted_sum(weights, v, seen) / sums.astype(dtype)
    return Steps(result.astype(dtype), lse.astype(dtype), exact, seen, top, q, k, v, scale, total)


def flex(query, key, value, **options):
    """The right answer, (result, lse), and how far a kernel may be from each.

    As attention.judged has it; the scores are those that the mods make.
    """
    rounds_weights = options.pop("rounds_weights", False)
    dtype, compute = query.dtype, compute_dtype(query.dtype)
    right = flex_in(wide_type(query), query, key, value, **options)
    near = flex_in(compute, query, key, value, **options)
    rounded = [
        flex_in(compute, query, key, value, weights_dtype=dtype, base=base, **options).result
        for base in bases(near.result)
        if rounds_weights
    ]
    # What is off in a mod's functions is relative to its scores, of which the row's largest counts.
    top = np.where(right.seen & np.isfinite(right.top), right.top, 0)
    top = top.max(axis=-1, keepdims=True, initial=0).astype(float64)
    most = score_bounds(right.query, right.key, right.scale, right.seen)
    relative = relative_error(compute, most + 2 * ULPS * top)
    allowed = bounds(right.result, near.result, right.weights, right.value, relative, dtype,
                     rounded=rounded, total=right.total.astype(float64))  # fmt: skip
    with np.errstate(all="ignore"):
        unit = relative[..., 0] + ULPS * eps(compute) * np.abs(right.lse).astype(float64)
    allowed_lse = half_step(right.lse, compute) + explained(right.lse, near.lse, unit)
    return (right.result, allowed), (right.lse, allowed_lse)


def blocks(mask_mod, B, H, rows, keys, size):
    """0 empty, 1 partial, 2 full: uint8 of shape (B, H, blocks of rows, blocks of keys).

    `size` is that of rows and keys, or a pair.
    """
    sizes = size if isinstance(size, tuple) else (size, size)
    shape = (B or 1, H or 1, rows, keys)
    mask = np.broadcast_to(mask_mod(*positions(shape)), shape)
    held, places = mask.astype(np.int64), np.ones(shape, np.int64)
    for axis, length in ((2, rows), (3, keys)):
        starts = np.arange(0, length, sizes[axis - 2])
        held, places = (np.add.reduceat(a, starts, axis) for a in (held, places))
    return ((held > 0).astype(np.uint8) + (held == places)).astype(np.uint8)
