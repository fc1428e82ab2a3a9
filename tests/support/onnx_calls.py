# SPDX-License-Identifier: MIT
"""Arguments of clattn.onnx.attention."""

import numpy as np
from references.attention import float32
from references.onnx import joined_heads
from support.data import draw

B, HQ, HK, L, S, E, P = 2, 4, 2, 17, 33, 8, 13


def inputs(L=L, S=S, heads=(HQ, HK), Ev=E, E=E, B=B, dtype=float32, v_dtype=None, seed=0):
    """Q, K, V with four dimensions."""
    hq, hk = heads
    K, V = draw((B, hk, S, E), dtype, seed + 1), draw((B, hk, S, Ev), v_dtype or dtype, seed + 2)
    return draw((B, hq, L, E), dtype, seed), K, V


def cache(P=P, heads=HK, Ev=E, E=E, B=B, dtype=float32, v_dtype=None):
    """past_key and past_value that belong to `inputs`."""
    return draw((B, heads, P, E), dtype, 5), draw((B, heads, P, Ev), v_dtype or dtype, 6)


def flat(arrays, heads=(HQ, HK)):
    """The same call with three dimensions: (arguments, options)."""
    Q, K, V, *rest = arrays
    options = {"q_num_heads": heads[0], "kv_num_heads": heads[1]}
    return [*(joined_heads(a) for a in (Q, K, V)), *rest], options


def mask_of(dtype, shape, seed=9):
    """True or False, small integers, or floats with -inf in a quarter of the places."""
    numbers = draw(shape, seed=seed)
    if dtype.kind == "b":
        return numbers > 0
    if dtype.kind in "iu":
        return np.abs(np.rint(2 * numbers)).astype(dtype) * (1 if dtype.kind == "u" else -1)
    return np.where(draw(shape, seed=seed + 1) > 0.7, -np.inf, numbers).astype(dtype)
