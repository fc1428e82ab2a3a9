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
from references.attention import compute_dtype, eps, float64, largest, max_error, weighted_sum
from support.helpers import native

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


def attention_in(dtype, query, key, value, dropout_p, seed, *, weights_dtype=None, **options):
    """The result in `dtype`: probabilities of `reference`, some of them dropped, times values.

    With `weights_dtype` the probabilities are rounded to this type before.
    """
    gqa = options.get("enable_gqa", False)
    leading = leading_shape(query, key, value, gqa)
    keys = key.shape[-2]
    mask = options.get("attn_mask")
    seen = reference.attended(leading[-1], keys, mask, options.get("is_causal", False),
                              options.get("window"))  # fmt: skip
    # A value matrix of ones on the diagonal gives the probabilities themselves.
    ones = np.broadcast_to(np.eye(keys, dtype=query.dtype), (*key.shape[:-2], keys, keys))
    probability, _ = reference.attention_in(dtype, query, key, ones, **options)
    used = seen & ~dropped(leading, keys, dropout_p, seed)
    if not used.any():
        return np.zeros((*leading, value.shape[-1]), dtype)
    with np.errstate(all="ignore"):
        kept = np.where(used, probability * dtype.type(1 / (1 - float(dropout_p))), 0)
        kept = kept.astype(dtype if weights_dtype is None else weights_dtype)
        value = reference.cast(value, dtype)
        if gqa:
            value = np.repeat(value, leading[-2] // value.shape[-3], axis=-3)
        return weighted_sum(kept.astype(dtype), value, used)


def wide_type(query):
    return np.dtype(np.longdouble) if query.dtype == float64 else float64


def attention(query, key, value, dropout_p, seed, **options):
    """The right answer, wider than any kernel's arithmetic."""
    return attention_in(wide_type(query), query, key, value, dropout_p, seed, **options)


def tolerance(query, key, value, dropout_p, seed, *, rounds_weights=False, **options):
    """How far a result may be from `attention`: as `reference.tolerance` says.

    The probabilities add up to 1 / (1 - p) at most, so the floor grows by that.
    """
    right = attention(query, key, value, dropout_p, seed, **options)
    dtype = compute_dtype(query.dtype)
    options["weights_dtype"] = query.dtype if rounds_weights else None
    near = attention_in(dtype, query, key, value, dropout_p, seed, **options).astype(query.dtype)
    del options["weights_dtype"]
    rounding = largest(right) * eps(query.dtype) / (1 if rounds_weights else 2)
    score = reference.score_magnitude(query, key, options)
    total = 1 / (1 - float(dropout_p)) if largest(right) else 1
    floor = largest(value) * eps(dtype) * (1 + score / 2) * total
    return max(2 * max_error(near, right), rounding) + floor


def translated(query, key, value, options):
    """The arrays of a call in the machine's byte order, and the options that both oracles know."""
    known = {n: a for n, a in options.items() if n not in ("out", "return_lse", "device")}
    if known.get("attn_mask") is not None:
        known["attn_mask"] = native(known["attn_mask"])
    return tuple(native(a) for a in (query, key, value)), known
