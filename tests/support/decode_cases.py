# SPDX-License-Identifier: MIT
"""What the tests of the kernels for few rows share: masks that say which keys are seen, and
comparisons with the reference kernel.
"""

import numpy as np
from references.attention import float64, tolerance
from support.helpers import assert_close, check, draw, qkv, sdpa

NAN, INF = np.nan, np.inf

PIECES = {  # which of 2500 keys are seen
    "the first": [slice(0, 1)],
    "the last": [slice(2499, 2500)],
    "one within": [slice(1111, 1112)],
    "a piece": [slice(1100, 1150)],
    "not the first part": [slice(1000, 2500)],
    "not the last part": [slice(0, 1000)],
    "both ends": [slice(0, 3), slice(2490, 2500)],
    "every 16th": [slice(15, 2500, 16)],
    "none": [],
}


def masked(seen, kind, seed=9):
    """A mask that says so: bool, or numbers with -inf."""
    if kind == "bool":
        return seen
    return np.where(seen, draw(seen.shape, seed=seed), -np.inf).astype(np.float32)


def spoil(arrays, seen):
    """NaN and infinities in the keys and values that no row sees."""
    q, k, v = (a.copy() for a in arrays)
    unseen = ~seen.reshape(-1, seen.shape[-1]).any(axis=0)
    k[..., unseen, :], v[..., unseen, 1:] = NAN, INF
    v[..., unseen, 0] = NAN
    return q, k, v


def reference_kernel(monkeypatch, *arrays, device, **options):
    with monkeypatch.context() as patch:
        patch.setenv("CLATTN_KERNEL", "reference")
        return sdpa(*arrays, device=device, return_lse=True, **options)


def bits(device, arrays, monkeypatch, name):
    """The result of a kernel, or with None of the one that is chosen."""
    with monkeypatch.context() as patch:
        patch.delenv("CLATTN_KERNEL", raising=False)
        if name:
            patch.setenv("CLATTN_KERNEL", name)
        return sdpa(*arrays, device=device).tobytes()


def check_scores_of_minus_infinity(monkeypatch, shape, keys, device):
    """Scores of these keys weigh nothing beside others; where there are no others the row is no
    number.
    """
    q, k, v = qkv(*shape)
    q = np.abs(q) + 1
    k[..., keys, 7] = -INF
    if not (k[..., 7] == -INF).all():
        assert np.isfinite(check(q, k, v, device=device)).all()
    else:
        result, lse = sdpa(q, k, v, device=device, return_lse=True)
        right, right_lse = reference_kernel(monkeypatch, q, k, v, device=device)
        assert np.isnan(result).all() and np.isnan(right).all()
        np.testing.assert_array_equal(lse, right_lse)


def check_sums_that_overflow(monkeypatch, shape, device):
    """Values near the largest number, products beyond it: as the reference kernel has it."""
    S = shape[2]
    q, k, v = qkv(*shape)
    high = np.float32(3e38)
    one_weighs = np.where(np.arange(S) == S - 2, 0, -200).astype(np.float32)
    two_weigh = np.where(np.arange(S) // 2 == S // 4, 0, -200).astype(np.float32)
    cases = [
        ((q, k, np.full_like(v, high)), {"attn_mask": one_weighs}),
        ((q, k, np.full_like(v, high)), {"attn_mask": two_weigh}),
        ((q * 0, k, np.full_like(v, -high)), {}),
        ((np.full_like(q, 1e20), np.full_like(k, 1e20), v), {"scale": 1.0}),
        ((np.full_like(q, 1e20), np.full_like(k, -1e20), v), {"scale": 1.0}),
        ((np.full_like(q, 1e18), np.full_like(k, 1e18), v), {"scale": 1.0}),
        ((np.full_like(q, 1e20), np.full_like(k, 1e20), v), {"softcap": 5.0}),
    ]
    for arrays, options in cases:
        right, right_lse = reference_kernel(monkeypatch, *arrays, device=device, **options)
        got, lse = sdpa(*arrays, device=device, return_lse=True, **options)
        near = np.where(np.isfinite(right), np.abs(right), 0).max() * 1e-5
        assert_close(got.astype(float64), right.astype(float64), near)
        near_lse = np.where(np.isfinite(right_lse), np.abs(right_lse), 0).max() * 1e-5
        assert_close(lse.astype(float64), right_lse.astype(float64), near_lse, "lse")


def check_beside_the_reference_kernel(monkeypatch, shape, device):
    """Another way to the same numbers."""
    _, L, S, _ = shape
    q, k, v = qkv(*shape)
    mask = masked(draw((L, S)) > 0, "float")
    for options in ({}, {"attn_mask": mask}, {"window": (20, 0), "is_causal": "lower_right"}):
        right, right_lse = reference_kernel(monkeypatch, q, k, v, device=device, **options)
        got, lse = sdpa(q, k, v, device=device, return_lse=True, **options)
        allowed, allowed_lse = tolerance(q, k, v, **options)
        assert_close(got, right, 2 * allowed)
        assert_close(lse, right_lse, 2 * allowed_lse, "lse")
