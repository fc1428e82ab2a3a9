# SPDX-License-Identifier: MIT
"""Which keys a row sees, said by masks and bands, and keys that no row sees."""

import numpy as np
from support.data import draw

NAN, INF = np.nan, np.inf


def masked(seen, kind, seed=9, dtype=np.float32):
    """A mask of bool, or of numbers with -inf, in which `seen` is what a row may see."""
    if kind == "bool":
        return seen
    return np.where(seen, draw(seen.shape, seed=seed), -INF).astype(dtype)


def spoil(arrays, seen):
    """NaN and infinities in the keys and values that no row sees."""
    q, k, v = (a.copy() for a in arrays)
    unseen = ~seen.reshape(-1, seen.shape[-1]).any(axis=0)
    k[..., unseen, :], v[..., unseen, 1:] = NAN, INF
    v[..., unseen, 0] = NAN
    return q, k, v


def seen_in_band(L, S, is_causal=False, window=(None, None)):
    """The keys that a band lets each row see."""
    offset = S - L if is_causal == "lower_right" else 0
    t = np.arange(S) - np.arange(L)[:, None] - offset
    left, right = (S + L if bound is None else bound for bound in window)
    return (t >= -left) & (t <= right) & ((t <= 0) | (is_causal is False))


def pieces(S):
    """Which of S keys are seen, by the name of the case."""
    return {
        "the first": [slice(0, 1)],
        "the last": [slice(S - 1, S)],
        "one within": [slice(4 * S // 9, 4 * S // 9 + 1)],
        "a piece": [slice(11 * S // 25, 23 * S // 50)],
        "not the first keys": [slice(2 * S // 5, S)],
        "not the last keys": [slice(0, 2 * S // 5)],
        "both ends": [slice(0, 3), slice(S - 10, S)],
        "every 16th": [slice(15, S, 16)],
        "none": [],
    }
