# SPDX-License-Identifier: MIT
"""float32 attention as products of halves: scales, and how far a result may be off."""

import numpy as np

LIFT = 2048.0  # of the low halves of values


def scale_of(array):
    """Return the power of two that brings the largest magnitude to 2^14 … 2^15."""
    return 2.0 ** (15 - np.frexp(np.abs(array).max())[1])


def attention_in(dtype, arrays, causal):
    """Return attention in a type, and the weights. Causal rows attend to keys 0 … row.

    Arrays are query (heads, L, E), key and value (heads, S, E).
    """
    query, key, value = (x.astype(dtype) for x in arrays)
    scores = query @ key.swapaxes(-1, -2) * dtype(1 / np.sqrt(query.shape[2]))
    if causal:
        scores = np.where(np.tri(query.shape[1], key.shape[1], dtype=bool), scores, dtype(-np.inf))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights @ value, weights


def allowed_error(arrays, causal):
    """Return the result in float64, and how far each number of a float32 one may be from it.

    The bound is that of the tests: docs/numerics.md.
    """
    from clattn._commands.rounding import epsilon, explained, half_step, unit_of

    right, weights = attention_in(np.float64, arrays, causal)
    plain, _ = attention_in(np.float32, arrays, causal)
    norms = [np.linalg.norm(x.astype(np.float64), axis=-1) for x in arrays[:2]]
    keys = np.where(weights > 0, norms[1][:, None], 0).max(-1)
    most = (norms[0] * keys / np.sqrt(arrays[0].shape[2]))[..., None]
    square = weights @ np.square(arrays[2].astype(np.float64))
    unit = unit_of(epsilon(np.float32) * (1 + most / 2), square, right)
    return right, half_step(right, np.float32) + explained(right, plain, unit)
