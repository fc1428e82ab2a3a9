# SPDX-License-Identifier: MIT
"""Data whose results tell what a kernel did, in any precision: numbers by design, not at random."""

import numpy as np
from references.attention import bfloat16
from support.masks import seen_in_band


def check_keys(variant, heads, L, S, *, device, dtype=None, **options):
    """A key that is lost, counted twice or taken for another one shows its number.

    All keys weigh the same. The values of a key have a one in the column of a digit of its number,
    of the last one and then of the one before, so that a column of the result times the keys that a
    row sees is how many of them have the digit. One key more or less shows in each dtype, where
    rounding of random numbers hides it.
    """
    dtype = dtype or variant.dtype
    B, Hq, Hk = heads
    q, k, _ = variant.arrays((B, Hq, Hk, L, S), dtype)
    seen = seen_in_band(L, S, **options)
    numbers, base = np.arange(S), variant.E
    wrong = []
    for place in (0, 1):
        digits = numbers // base**place % base
        value = np.broadcast_to(np.eye(base, dtype=dtype)[digits], (B, Hk, S, base))
        result, lse = variant.call(np.zeros_like(q), k, value.copy(), device=device, **options)
        visible = seen.sum(axis=-1, keepdims=True)
        right = np.stack([seen[:, digits == n].sum(axis=-1) for n in range(base)], axis=-1)
        counts = np.rint(result.astype(np.float64) * visible)
        wrong += [
            f"row {at[:-1]}: digit {at[-1]} of place {place} {counts[tuple(at)]:.0f} times, "
            f"expected {right[tuple(at[-2:])]}"
            for at in np.argwhere(counts != right)
        ]
        right_lse = np.broadcast_to(np.log(visible[:, 0]), lse.shape)
        np.testing.assert_allclose(lse, right_lse, rtol=1e-5, atol=1e-6)
    assert not wrong, f"digits in base {base}: " + "; ".join(map(str, wrong[:4]))


def check_ones(variant, *, device, dtype=None):
    """4001 equal keys: in a half type a sum of ones ends at 256 or 2048, and a product of queries
    and keys at 65504.
    """
    dtype = dtype or variant.dtype
    q, k, v = (np.zeros_like(a) for a in variant.arrays((1, 1, 1, 2, 4001), dtype))
    v[...] = 1
    result = variant.check(q, k, v, device=device)
    np.testing.assert_array_equal(result.astype(np.float32), 1)
    q[...], k[...] = 100, 100
    k[..., 1::2, :] = -100
    v[..., 1::2, :] = -1
    result = variant.check(q, k, v, device=device, scale=1.0)
    np.testing.assert_array_equal(result.astype(np.float32), 1)


def check_scores(variant, shape, *, device, dtype=None):
    """Scores of 24 and a few 512ths, which a half type would round by up to 4 or 32 of these.

    Values have the sign of that error, so their mean shows it.
    """
    dtype = dtype or variant.dtype
    q, k, v = (np.zeros_like(a) for a in variant.arrays(shape, dtype))
    period = 64 if dtype == bfloat16 else 8
    numbers = np.arange(k.shape[-2])
    q[..., :2] = 1
    k[..., 0] = 24
    k[..., 1] = numbers % 128 / 512
    v[...] = np.where((numbers - 1) % period < period // 2, 1, -1)[:, None]
    variant.check(q, k, v, device=device, scale=1.0)
