# SPDX-License-Identifier: MIT
"""The oracle of clattn.KVCache: arrays of every sequence by itself, attention row by row of masks.

Written from the contract. Nothing here is padded or shared between sequences: each has its keys
and values in two plain arrays, and `attend` gives the reference one sequence at a time, with every
rule (causality, window, mask) as one explicit mask.
"""

import numpy as np
from references.attention import compute_dtype, judged


def visible(rows, length, is_causal=True, window=None):
    """Which keys each query sees: row i stands at p = length - rows + i, the last row last."""
    p = length - rows + np.arange(rows)[:, None]
    j = np.arange(length)[None, :]
    seen = np.ones((rows, length), bool)
    if is_causal:
        seen &= j <= p
    left, right = window or (None, None)
    far = rows + length  # a bound beyond it excludes nothing, and adding it to p does not overflow
    if left is not None:
        seen &= p - min(left, far) <= j
    if right is not None:
        seen &= j <= p + min(right, far)
    return seen


class CacheModel:
    """What a KVCache holds and answers."""

    def __init__(self, batch, num_kv_heads, capacity, head_size, v_head_size=None, dtype="f4"):
        self.capacity, self.dtype = capacity, np.dtype(dtype)
        self.v_head_size = head_size if v_head_size is None else v_head_size
        self.keys = [np.zeros((num_kv_heads, 0, head_size), dtype) for _ in range(batch)]
        self.values = [np.zeros((num_kv_heads, 0, self.v_head_size), dtype) for _ in range(batch)]

    @property
    def lengths(self):
        return [keys.shape[1] for keys in self.keys]

    @property
    def length(self):
        return max(self.lengths)

    def fits(self, counts):
        """Whether as many more positions of every sequence have room."""
        return all(n + c <= self.capacity for n, c in zip(self.lengths, counts, strict=True))

    def append(self, key, value, counts=None):
        new = key.shape[2]
        counts = [new] * len(self.keys) if counts is None else [int(c) for c in counts]
        assert self.fits(counts)
        for b, count in enumerate(counts):
            last = slice(new - count, new)
            self.keys[b] = np.concatenate([self.keys[b], key[b, :, last]], axis=1)
            self.values[b] = np.concatenate([self.values[b], value[b, :, last]], axis=1)

    def truncate(self, n):
        lengths = [min(m, n) for m in self.lengths] if np.ndim(n) == 0 else [int(m) for m in n]
        self.keys = [keys[:, :m] for keys, m in zip(self.keys, lengths, strict=True)]
        self.values = [values[:, :m] for values, m in zip(self.values, lengths, strict=True)]

    def reset(self):
        self.truncate(0)

    def reorder(self, indices):
        self.keys = [self.keys[b] for b in indices]
        self.values = [self.values[b] for b in indices]

    def problems(self, query, attn_mask=None, is_causal=True, window=None, **options):
        """(query, key, value) and the reference's options of each sequence alone."""
        heads, rows = query.shape[1:3]
        if attn_mask is not None:
            full = (len(self.keys), heads, rows, self.length)
            attn_mask = np.broadcast_to(attn_mask, full)
        for b, length in enumerate(self.lengths):
            mask = np.broadcast_to(visible(rows, length, is_causal, window), (heads, rows, length))
            if attn_mask is not None and attn_mask.dtype == bool:
                mask = mask & attn_mask[b, :, :, :length]
            elif attn_mask is not None:
                # as wide as it is added, so that what is finite stays finite
                wide = attn_mask[b, :, :, :length].astype(np.float64)
                mask = np.where(mask, wide, -np.inf)
            arrays = query[b], self.keys[b], self.values[b]
            yield arrays, options | {"attn_mask": mask, "enable_gqa": True}

    def attend(self, query, *, rounds_weights=False, **options):
        """The right result (B, Hq, L, Ev), how far off each sequence's may be, empty rows."""
        results, allowed, empty = [], [], []
        for arrays, known in self.problems(query, **options):
            right = judged(*arrays, rounds_weights=rounds_weights, **known)
            results.append(right.result)
            allowed.append(right.allowed)
            empty.append(np.isneginf(right.lse))
        assert compute_dtype(query.dtype).itemsize <= results[0].dtype.itemsize
        return np.stack(results), allowed, np.stack(empty)
