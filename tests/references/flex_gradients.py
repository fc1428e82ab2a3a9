# SPDX-License-Identifier: MIT
"""The oracle of flex_attention's backward pass in plain NumPy, from the formulas.

With weights P, output O, its gradient G, and g the gradient of the log-sum-exp:

    delta  = G . O - g                                  of each row
    dV     = P^T G
    dS     = P * (G V^T - delta)                        of scores after the softcap
    dM     = dS * (1 - tanh^2)                          of what the score_mod returns
    dZ     = dM * (derivative of the mod by the score)
    dQ     = scale * dZ K,  dK = scale * dZ^T Q
    dT[n]  = sum of dM * (derivative of the mod by element n)
    dsink  = - sum of P_sink * delta

Derivatives of the mod are central differences of the function itself, called with arrays of all
positions. All is computed in long double.
"""

from typing import NamedTuple

import numpy as np
from references.attention import cast, compute_dtype, eps, float64, half_step
from references.flex import in_four

wide = np.dtype(np.longdouble)
STEP = wide.type(2) ** -19  # of central differences: off by the square of it, 4e-12

# What is allowed, in roundings of the kernel's arithmetic. One adds to each of a term's factors:
# scores, exp, sums, products, the mod's functions.
ROUNDINGS = 16


class Judged(NamedTuple):
    """The right gradients, each with how far a kernel may be off.

    `scores` are those of what the score_mod returns, (B, H, L, S), and the same of each.
    """

    query: tuple
    key: tuple
    value: tuple
    captured: tuple
    sinks: tuple | None
    scores: tuple


def positions(shape, offset):
    """b, h, q_idx, kv_idx of scores (B, H, L, S), as int32 that broadcast to them."""
    b, h, q, k = (
        np.arange(n, dtype=np.int32).reshape([-1 if d == axis else 1 for d in range(4)])
        for axis, n in enumerate(shape)
    )
    shift = np.asarray(offset, np.int32)
    return b, h, q + shift.reshape(-1, 1, 1, 1), k


def summed(gradient, like, enable_gqa=False):
    """The sum over heads of a group, and over what was broadcast from the shape of `like`."""
    if enable_gqa:
        heads = like.shape[-3]
        split = (*gradient.shape[:-3], heads, gradient.shape[-3] // heads, *gradient.shape[-2:])
        gradient = gradient.reshape(split).sum(axis=-3)
    gradient = gradient.sum(axis=tuple(range(gradient.ndim - like.ndim)))
    ones = tuple(d for d, n in enumerate(like.shape) if n == 1)
    return gradient.sum(axis=ones, keepdims=True).reshape(like.shape)


def difference(function, x):
    """The derivative of a function at x, NaN where there is none."""
    with np.errstate(all="ignore"):
        return (function(x + STEP) - function(x - STEP)) / (2 * STEP)


class Steps(NamedTuple):
    """A forward pass. Of (B, H, L, S) but for query, key and value."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    scale: np.ndarray
    products: np.ndarray  # scaled
    modified: object  # function of products and captured arrays
    made: np.ndarray  # by the mod
    seen: np.ndarray
    tanh: np.ndarray
    weights: np.ndarray
    sink: np.ndarray  # its weight
    output: np.ndarray  # of the call's shape
    lse: np.ndarray


def forward(query, key, value, *, mod_of=None, captured=(), mask_mod=None, scale=None,
            enable_gqa=False, softcap=0.0, sinks=None, query_offset=0):  # fmt: skip
    """The steps. `mod_of(*captured)` makes the score_mod."""
    q, k, v = (cast(a, wide) for a in (query, key, value))
    arrays = [cast(a, wide) for a in captured]
    if enable_gqa:
        group = q.shape[-3] // k.shape[-3]
        k, v = np.repeat(k, group, axis=-3), np.repeat(v, group, axis=-3)
    scale = 1 / np.sqrt(wide.type(q.shape[-1])) if scale is None else wide.type(scale)
    z = np.matmul(q, np.swapaxes(k, -1, -2)) * scale
    lead, z = z.shape, in_four(z)
    place = positions(z.shape, query_offset)

    def modified(z, *arrays):
        made = z if mod_of is None else mod_of(*arrays)(z, *place)
        return np.broadcast_to(made, z.shape).astype(wide)

    with np.errstate(all="ignore"):
        m = modified(z, *arrays)
        seen = m != -np.inf
        if mask_mod is not None:
            seen = seen & np.broadcast_to(mask_mod(*place), z.shape)
        tanh = np.tanh(m / softcap) if softcap else np.zeros_like(m)
        s = np.where(seen, softcap * tanh if softcap else m, -np.inf)
        base = s.max(axis=-1, keepdims=True, initial=-np.inf)
        logit = np.full((1, 1, 1, 1), -np.inf, wide)
        if sinks is not None:
            logit = cast(sinks, wide).reshape(1, -1, 1, 1)
        base = np.maximum(base, logit)
        base = np.where(np.isneginf(base), 0, base)
        P, extra = np.exp(s - base), np.exp(logit - base)
        total = P.sum(axis=-1, keepdims=True) + extra
        lse = (base + np.log(total))[..., 0]
        total = np.where(total == 0, 1, total)
        P = P / total
    v = np.broadcast_to(v, (*lead[:-2], *v.shape[-2:]))
    output = np.where(seen[..., None], P[..., None] * in_four(v)[:, :, None], 0).sum(axis=-2)
    return Steps(q, k, v, scale, z, modified, m, seen, tanh, P, extra / total,
                 output.reshape(*lead[:-1], v.shape[-1]), lse.reshape(lead[:-1]))  # fmt: skip


def flex_gradients(grad_output, query, key, value, output, *, grad_lse=None, captured=(),
                   **options):  # fmt: skip
    """Judged gradients. `output` is what a call gave; the options are those of `forward`."""
    steps = forward(query, key, value, captured=captured, **options)
    q, k, v, scale, z, modified, m, seen, tanh, P, sink, *_ = steps
    G, O = (cast(a, wide) for a in (grad_output, output))  # noqa: E741
    lead = (*steps.lse.shape, z.shape[-1])
    arrays = [cast(a, wide) for a in captured]
    sinks, enable_gqa = options.get("sinks"), options.get("enable_gqa", False)
    slope = difference(lambda z: modified(z, *arrays), z)

    G4, O4, v4, q4, k4 = (in_four(np.broadcast_to(a, (*lead[:-2], *a.shape[-2:])))
                          for a in (G, O, v, q, k))  # fmt: skip
    g = np.zeros_like(sink) if grad_lse is None else in_four(cast(grad_lse, wide)[..., None])
    empty = ~seen.any(axis=-1, keepdims=True)
    delta = np.where(empty, 0, (G4 * O4).sum(axis=-1, keepdims=True)) - g
    dot = np.matmul(G4, np.swapaxes(v4, -1, -2))
    dS = np.where(seen, P * (dot - delta), 0)
    dM = np.where(seen, dS * (1 - tanh * tanh), 0)
    dZ = np.where(seen, dM * slope, 0) * scale

    # The magnitudes of the terms, by which roundings count.
    unit = eps(compute_dtype(query.dtype)) * ROUNDINGS
    size = np.abs(z).max(axis=-1, keepdims=True) + np.abs(np.where(seen, m, 0)).max(
        axis=-1, keepdims=True
    )
    delta_size = (np.abs(G4) * np.abs(O4)).sum(axis=-1, keepdims=True) + np.abs(g)
    dS_size = np.where(seen, P, 0) * (np.matmul(np.abs(G4), np.swapaxes(np.abs(v4), -1, -2)) +
                                      delta_size) * (1 + size)  # fmt: skip
    dZ_size = np.where(seen, dS_size * (1 + np.abs(slope)), 0) * abs(scale)

    def judged(right, magnitude, like):
        right, magnitude = (np.asarray(a).reshape(like.shape) for a in (right, magnitude))
        allowed = unit * magnitude.astype(float64) + half_step(right, like.dtype)
        return right, allowed + float(STEP * STEP) * np.abs(right).max(initial=0)

    def reduced(by, magnitude, array, gqa=False):
        by, magnitude = (summed(a.reshape(*lead[:-2], *a.shape[-2:]), array, gqa)
                         for a in (by, magnitude))  # fmt: skip
        return judged(by, magnitude, array)

    def turned(a):
        return np.swapaxes(a, -1, -2)

    by_captured = []
    for n, array in enumerate(arrays):
        right, magnitude = np.zeros(array.shape, wide), np.zeros(array.shape, wide)
        for index in np.ndindex(array.shape):

            def moved(step, n=n, index=index):
                other = [a.copy() for a in arrays]
                other[n][index] += step
                return modified(z, *other)

            by_element = np.where(seen, difference(moved, wide.type(0)), 0)
            right[index] = (dM * by_element).sum()
            magnitude[index] = (dS_size * np.abs(by_element)).sum()
        by_captured.append(judged(right, magnitude, captured[n]))
    by_sinks = None
    if sinks is not None:
        terms = (-sink * delta, np.abs(sink) * delta_size * (1 + size))
        by_sinks = judged(*[a.sum(axis=(0, 2, 3)) for a in terms], sinks)
    return Judged(
        reduced(dZ @ k4, dZ_size @ np.abs(k4), query),
        reduced(turned(dZ) @ q4, turned(dZ_size) @ np.abs(q4), key, enable_gqa),
        reduced(turned(np.where(seen, P, 0)) @ G4,
                turned(np.where(seen, P, 0) * (1 + size)) @ np.abs(G4), value, enable_gqa),
        tuple(by_captured),
        by_sinks,
        (dM, unit * dS_size),
    )  # fmt: skip
