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

import numpy as np
from references.attention import (
    cast,
    compute_dtype,
    eps,
    float64,
    largest,
    max_error,
    weighted_sum,
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


def scores_in(dtype, query, key, score_mod, mask_mod, scale=None, softcap=0.0):
    """Scores of four dimensions, which keys count, and the largest magnitude on the way."""
    width = query.shape[-1]
    if scale is None:
        scale = 1 / np.sqrt(np.longdouble(max(width, 1)))
    with np.errstate(all="ignore"):
        scores = np.matmul(query, np.swapaxes(key, -1, -2)) * dtype.type(scale)
        lead = scores.shape
        scores = in_four(scores)
        place = positions(scores.shape)
        seen = np.ones(scores.shape, bool)
        top = largest(scores)
        if score_mod is not None:
            scores = np.broadcast_to(score_mod(scores, *place), scores.shape).astype(dtype)
            seen = scores != -np.inf
            top = max(top, largest(scores))
        if softcap:
            scores = dtype.type(softcap) * np.tanh(scores / dtype.type(softcap))
        if mask_mod is not None:
            allowed = np.asarray(mask_mod(*place))
            assert allowed.dtype == bool
            seen = seen & allowed
    return scores.reshape(lead), seen.reshape(lead), top


def flex_in(dtype, query, key, value, score_mod=None, mask_mod=None, scale=None,
            enable_gqa=False, softcap=0.0, weights_dtype=None):  # fmt: skip
    """Result, log-sum-exp, and the largest magnitude of a score, computed in `dtype`."""
    q, k, v = (cast(a, dtype) for a in (query, key, value))
    if enable_gqa:
        group = q.shape[-3] // k.shape[-3]
        k, v = np.repeat(k, group, axis=-3), np.repeat(v, group, axis=-3)
    lead = np.broadcast_shapes(*(a.shape[:-2] for a in (q, k, v)))
    q, k, v = (np.broadcast_to(a, (*lead, *a.shape[-2:])) for a in (q, k, v))
    scores, seen, top = scores_in(dtype, q, k, score_mod, mask_mod, scale, softcap)
    with np.errstate(all="ignore"):
        scores = np.where(seen, scores, -np.inf)
        empty = ~seen.any(axis=-1, keepdims=True)
        peak = np.where(empty, 0, scores.max(axis=-1, keepdims=True, initial=-np.inf))
        weights = np.where(seen, np.exp(scores - peak), 0).astype(dtype)
        total = weights.sum(axis=-1, keepdims=True, dtype=dtype)
        lse = np.where(empty, -np.inf, peak + np.log(total))[..., 0]
        if weights_dtype is not None:
            weights = weights.astype(weights_dtype).astype(dtype)
            total = weights.sum(axis=-1, keepdims=True, dtype=dtype)
        result = weighted_sum(weights, v, seen) / np.where(empty, 1, total).astype(dtype)
    return result.astype(dtype), lse.astype(dtype), top


def flex(query, key, value, **options):
    """The right answer, (result, lse), and how far a kernel may be from each.

    That is twice the error of the plain computation in the kernel's precision, and the floor of
    attention.tolerance. The scores of the floor are those that the mods make.
    """
    rounds_weights = options.pop("rounds_weights", False)
    wide = np.dtype(np.longdouble) if query.dtype == float64 else float64
    compute = compute_dtype(query.dtype)
    right, right_lse, score = flex_in(wide, query, key, value, **options)
    weights = query.dtype if rounds_weights else None
    near, near_lse, _ = flex_in(compute, query, key, value, weights_dtype=weights, **options)
    near = near.astype(query.dtype)
    rounding = largest(right) * eps(query.dtype) / (1 if rounds_weights else 2)
    floor = largest(value) * eps(compute) * (1 + ULPS * score)
    lse_floor = ULPS * eps(compute) * max(1.0, score, largest(right_lse))
    return (
        (right, max(2 * max_error(near, right), rounding) + floor),
        (right_lse, 2 * max_error(near_lse, right_lse) + lse_floor),
    )


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
