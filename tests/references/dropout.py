# SPDX-License-Identifier: MIT
"""The oracle of dropout: which probabilities are dropped, and the result without them.

Philox 4x32-10 (Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3"). Its key is the
seed, low word first. Its counter is (low, high) of q = j // 4 and (low, high) of r, where j is the
index of the key and r that of the query's row, counted in the result's leading shape (..., Hq, L)
in C order. Word j % 4 of the block belongs to key j; the probability is dropped if the word is
below p * 2**32, and multiplied by 1 / (1 - p) if not.
"""

import math

import numpy as np
import references.attention as reference
from references.attention import bases, bounds, compute_dtype, in_halves, weighted_sum, wide_type
from support.checks import native

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
LOW = 0xFFFFFFFF


def philox(counter, key):
    """Four words from a counter of four words and a key of two; words may be arrays."""
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) for word in counter)
    k0, k1 = key
    for _ in range(ROUNDS):
        p0 = np.uint64(MULTIPLIERS[0]) * c0
        p1 = np.uint64(MULTIPLIERS[1]) * c2
        c0, c1, c2, c3 = (
            (p1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            p1 & np.uint64(LOW),
            (p0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            p0 & np.uint64(LOW),
        )
        k0, k1 = (k0 + KEY_STEPS[0]) & LOW, (k1 + KEY_STEPS[1]) & LOW
    return c0, c1, c2, c3


def words(leading, keys, seed):
    """The word of every probability: uint64 below 2**32, shape (*leading, keys)."""
    seed = int(seed)
    r = np.arange(math.prod(leading), dtype=np.uint64)[:, None]
    q = np.arange(-(-keys // 4), dtype=np.uint64)[None, :]
    r, q = np.broadcast_arrays(r, q)
    low, high = np.uint64(LOW), np.uint64(32)
    block = philox((q & low, q >> high, r & low, r >> high), (seed & LOW, seed >> 32))
    flat = np.stack(block, axis=-1).reshape(r.shape[0], 4 * r.shape[1])
    return flat[:, :keys].reshape(*leading, keys)


def threshold(dropout_p):
    """p * 2**32, rounded to an integer; words are below 2**32, so 1 drops all of them."""
    return min(round(dropout_p * 2**32), 2**32)


def dropped(leading, keys, dropout_p, seed):
    """Which probabilities are dropped: bool, shape (*leading, keys); leading is (..., Hq, L)."""
    return words(leading, keys, seed) < np.uint64(threshold(float(dropout_p)))


def leading_shape(query, key, value, enable_gqa=False):
    """(..., Hq, L) of the result."""
    group = query.shape[-3] // max(key.shape[-3], 1) if enable_gqa else 1
    heads = [a.shape[:-2] for a in (key, value)]
    if enable_gqa:
        heads = [(*lead[:-1], lead[-1] * group) for lead in heads]
    return (*np.broadcast_shapes(query.shape[:-2], *heads), query.shape[-2])


def steps_in(dtype, query, key, value, dropout_p, seed, *, weights_dtype=None, base=0, **options):
    """The result in `dtype`, the steps of `reference`, and its weights, some of them dropped.

    With `weights_dtype` the weights are rounded to this type before: see `reference.in_halves`.
    """
    steps = reference.steps_in(dtype, query, key, value, **options)
    leading = leading_shape(query, key, value, options.get("enable_gqa", False))
    used = steps.seen & ~dropped(leading, key.shape[-2], dropout_p, seed)
    if not used.any():
        zeros = np.zeros((*leading, value.shape[-1]), dtype)
        return zeros, steps, np.zeros(used.shape, dtype)
    with np.errstate(all="ignore"):
        kept = np.where(used, steps.weights * dtype.type(1 / (1 - float(dropout_p))), 0)
        kept = kept.astype(dtype)
        if weights_dtype is not None:
            kept = in_halves(kept, weights_dtype, base)
        return weighted_sum(kept, steps.value, used), steps, kept


def attention(query, key, value, dropout_p, seed, **options):
    """The right answer, wider than any kernel's arithmetic."""
    return steps_in(wide_type(query), query, key, value, dropout_p, seed, **options)[0]


def judged(query, key, value, dropout_p, seed, *, rounds_weights=False, **options):
    """The right result and lse, and how far a kernel may be from each: see `reference.judged`."""
    given, dtype = (query, key, value, dropout_p, seed), query.dtype
    right, steps, kept = steps_in(wide_type(query), *given, **options)
    compute = compute_dtype(dtype)
    near = steps_in(compute, *given, **options)[0]
    rounded = [
        steps_in(compute, *given, weights_dtype=dtype, base=base, **options)[0]
        for base in bases(near)
        if rounds_weights
    ]
    whole = reference.judged(query, key, value, **options)
    allowed = bounds(right, near, kept, steps.value, whole.relative, dtype, rounded=rounded)
    return (right, allowed), (whole.lse, whole.allowed_lse)


def tolerance(*args, **options):
    """How far each number of a result may be from `attention`."""
    return judged(*args, **options)[0][1].each


def translated(query, key, value, options):
    """The arrays of a call in the machine's byte order, and the options that both oracles know."""
    known = {n: a for n, a in options.items() if n not in ("out", "return_lse", "device")}
    if known.get("attn_mask") is not None:
        known["attn_mask"] = native(known["attn_mask"])
    return tuple(native(a) for a in (query, key, value)), known
