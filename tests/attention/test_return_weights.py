# SPDX-License-Identifier: MIT
"""return_weights: what each key counts for in a row."""

import numpy as np
import pytest
from references.attention import DTYPES, compute_dtype, eps, float32
from support.checks import check_attention
from support.data import draw, qkv, sdpa
from support.masks import INF, NAN, seen_in_band, spoil
from support.variants import WITH_SCORES, each, force, with_kernels

both_shapes = each(lambda v: v.shapes if v.kernel in WITH_SCORES else (), "shape", tensors=True)


@pytest.mark.full
@pytest.mark.options
@both_shapes
def test_weights(device, variant, shape):
    """With bands, sinks and rows without a key; numbers of keys that no row sees do not matter."""
    arrays = variant.arrays(shape)
    Hq, L = arrays[0].shape[1:3]
    options = {"device": device, "return_weights": True}
    sinks = draw((Hq,))
    for level in (0, 50, -50, 1e30):
        variant.check(*arrays, sinks=sinks + np.float32(level), **options)
    options["sinks"] = np.full(Hq, -INF, float32)
    for band in ({}, {"is_causal": "lower_right"}, {"is_causal": True, "query_offset": -2}):
        variant.check(*arrays, **options, **band)
    seen = seen_in_band(L, arrays[1].shape[-2], window=(9, 4))
    variant.check(*spoil(arrays, seen), window=(9, 4), **options)


@pytest.mark.full
@pytest.mark.options
@with_kernels("cpu", "pairs", "decode_cpu")
def test_weights_with_masks(device, variant):
    for shape in variant.shapes:
        q, k, v = variant.arrays(shape)
        for kind in ("bool", "float"):
            mask = variant.mask(draw((q.shape[1], q.shape[-2], k.shape[-2])) > 0, kind)
            mask[:, 1] = False if kind == "bool" else -INF
            for softcap in (0.0, 3.0):
                variant.check(q, k, v, device=device, return_weights=True, attn_mask=mask,
                              softcap=softcap, sinks=draw((q.shape[1],)))  # fmt: skip


@pytest.mark.tensors
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results(device, dtype):
    """Their order, dtype and shape, with `out` too; a row's weights add up to 1."""
    q, k, v = qkv((2, 3), 5, 20, 16, 8, dtype=dtype)
    out = np.full((2, 3, 5, 8), 7.5, dtype)
    first, weights = sdpa(q, k, v, device=device, return_weights=True, out=out)
    again, lse, same = sdpa(q, k, v, device=device, return_weights=True, return_lse=True)
    np.testing.assert_array_equal(again, out)
    np.testing.assert_array_equal(first, out)
    np.testing.assert_array_equal(weights, same)
    assert weights.dtype == dtype and weights.shape == (2, 3, 5, 20) and lse.shape == (2, 3, 5)
    # Each of them is rounded by half a step at most, so their sum by half a step of 1; the sum of
    # 20 weights, by which each is divided, by 20 steps of the wider type.
    wide = eps(compute_dtype(np.dtype(dtype)))
    sums = weights.astype("f8").sum(-1)
    np.testing.assert_allclose(sums, 1, rtol=0, atol=eps(np.dtype(dtype)) / 2 + 20 * wide)
    check_attention(q, k, v, device=device, return_weights=True)


@pytest.mark.tensors
def test_shapes(device):
    """Two dimensions, grouped heads, broadcasting; no keys, rows or columns of values."""
    q, k, v = qkv((2, 6), 5, 20, 16)
    check_attention(q[0, 0], k[0, 0], v[0, 0], device=device, return_weights=True)
    check_attention(q, k[:, :2], v[:, :2], device=device, return_weights=True, enable_gqa=True)
    check_attention(q[:, :1], k, v[:1], device=device, return_weights=True)
    check_attention(q, k, v[..., :0], device=device, return_weights=True)
    check_attention(*qkv((2, 3, 2, 3, 2), 5, 9, 16), device=device, return_weights=True)
    for L, S in ((5, 0), (0, 5)):
        result, weights = sdpa(*qkv((2, 3), L, S, 16), device=device, return_weights=True)
        assert not result.any() and weights.shape == (2, 3, L, S)


def test_dropout_comes_after_the_weights(device):
    q, k, v = qkv((2, 3), 5, 20, 16)
    options = {"device": device, "return_weights": True}
    right = sdpa(q, k, v, **options)[1]
    dropped = sdpa(q, k, v, dropout_p=0.5, seed=1, **options)
    np.testing.assert_allclose(dropped[1], right, rtol=1e-6)
    assert np.abs(dropped[0] - sdpa(q, k, v, device=device)).max() > 0.1


def test_numbers(device):
    """A NaN that a row sees is in its weights, and in no other row's."""
    q, k, v = qkv((1, 2), 5, 20, 16)
    q[0, 1, 2, 3] = NAN
    weights = sdpa(q, k, v, device=device, return_weights=True)[1]
    assert np.isnan(weights[0, 1, 2]).all() and np.isnan(weights).sum() == 20


def test_the_reference(device, monkeypatch):
    force(monkeypatch, "reference")
    arrays = qkv((2, 3), 5, 30, 9)
    for options in ({}, {"sinks": draw((3,))}, {"is_causal": True, "query_offset": [-3, 4]}):
        check_attention(*arrays, device=device, return_weights=True, **options)
