# SPDX-License-Identifier: MIT
"""Sinks: a logit for each query head that takes part in the softmax's sum and in no value."""

import clattn
import ml_dtypes
import numpy as np
import pytest
from references.attention import eps, float32, float64
from support.checks import assert_close, check_attention
from support.data import draw, qkv, sdpa
from support.layouts import negative_rows, sliced
from support.loops import looped
from support.masks import INF, NAN, seen_in_band, spoil
from support.variants import each, force, with_door, with_kernels

both_shapes = each(lambda v: v.shapes, "shape", data=True)
both_shapes_and_tensors = each(lambda v: v.shapes, "shape", tensors=True, data=True)

# Near the scores, none, and so far above or below them that exp would overflow.
LEVELS = (0.0, -INF, 9.0, -40.0, 100.0, -1e4, 1e4, 3e38, -3e38)


def sinks_of(heads, level=0.0, seed=5):
    """Sinks about a level; the first head has another one, near its scores."""
    sinks = (draw((heads,), seed=seed) + np.float32(level)).astype(float32)
    sinks[0] = 0.5
    return sinks


@pytest.mark.full
@pytest.mark.options
@both_shapes_and_tensors
def test_sinks(device, variant, shape):
    """Of each head, with and without a band that leaves the first rows without a key.

    The first head, whose sink stays the same, does not notice those of the others.
    """
    arrays = variant.arrays(shape)
    Hq = arrays[0].shape[1]
    first = variant.call(*arrays, device=device, sinks=sinks_of(Hq))
    for level in LEVELS:
        variant.check(*arrays, device=device, sinks=sinks_of(Hq, level))
        result, lse = variant.call(*arrays, device=device, sinks=sinks_of(Hq, level))
        np.testing.assert_array_equal(result[:, 0], first[0][:, 0])
        np.testing.assert_array_equal(lse[:, 0], first[1][:, 0])
    for options in ({"is_causal": "lower_right"}, {"is_causal": True, "query_offset": -2}):
        variant.check(*arrays, device=device, sinks=sinks_of(Hq), **options)


@looped("shape", [(1, 4, 1, 1), (4, 1, 1), (1, 4), (4, 1)])
def test_dimensions_of_one_do_not_count(device, shape):
    """As models hand sinks over, which broadcast them to (B, Hq, L, 1)."""
    q, k, v = qkv((2, 4), 3, 5, 8)
    sinks = sinks_of(4)
    for call in (clattn.scaled_dot_product_attention, clattn.flex_attention):
        right = call(q, k, v, sinks=sinks, device=device)
        given = sinks.reshape(shape)
        np.testing.assert_array_equal(call(q, k, v, sinks=given, device=device), right)
        strided = np.repeat(given, 2, -1)[..., ::2]
        np.testing.assert_array_equal(call(q, k, v, sinks=strided, device=device), right)


@pytest.mark.full
@pytest.mark.options
@both_shapes
def test_rows_without_a_key(device, variant, shape):
    """Zeros, with the sink as lse."""
    arrays = variant.arrays(shape)
    sinks = sinks_of(arrays[0].shape[1], 3.0)
    result, lse = variant.call(*arrays, device=device, sinks=sinks, is_causal=True, query_offset=-1)
    assert not result[..., 0, :].astype(float32).any()
    np.testing.assert_array_equal(lse[..., 0], np.broadcast_to(sinks, lse.shape[:-1]))


@pytest.mark.full
@pytest.mark.options
@both_shapes
def test_numbers(device, variant, shape):
    """A sink that is NaN shows in its head alone. Numbers of excluded keys do not matter."""
    q, k, v = arrays = variant.arrays(shape)
    sinks = sinks_of(q.shape[1])
    options = {"is_causal": "lower_right", "window": (30, 0)}
    seen = seen_in_band(q.shape[-2], k.shape[-2], **options)
    variant.check(*spoil(arrays, seen), device=device, sinks=sinks, **options)
    if q.shape[1] > 1:
        sinks[1] = NAN
        result = variant.check(q, k, v, device=device, sinks=sinks).astype(float32)
        assert np.isnan(result[:, 1]).all()
        assert np.isfinite(np.delete(result, 1, axis=1)).all()


@pytest.mark.full
@pytest.mark.options
@with_kernels("cpu", "pairs", "decode_cpu", tensors=True)
def test_sinks_with_masks(device, variant):
    """Programs for CPUs have all options as data. Grouped heads have sinks of their own."""
    for shape, kind in ((shape, kind) for shape in variant.shapes for kind in ("bool", "float")):
        q, k, v = variant.arrays(shape)
        L, S = q.shape[-2], k.shape[-2]
        mask = variant.mask(draw((q.shape[1], L, S)) > 0, kind)
        mask[:, 1] = False if kind == "bool" else -INF
        for softcap in (0.0, 3.0):
            options = {"attn_mask": mask, "softcap": softcap}
            variant.check(q, k, v, device=device, sinks=sinks_of(q.shape[1], 1.0), **options)


@pytest.mark.full
@pytest.mark.options
@with_door("dropout", ["cpu", "tiled"])
def test_sinks_scale_what_dropout_keeps(device, variant):
    """The same weights are dropped; each row is smaller by what the sink adds to its sum."""
    arrays = variant.arrays(next(iter(variant.shapes)))
    options = {"device": device, "dropout_p": 0.4, "seed": 7}
    plain, lse = variant.call(*arrays, **options)
    result, with_sinks = variant.call(*arrays, sinks=sinks_of(arrays[0].shape[1], 2.0), **options)
    right = plain * np.exp(lse.astype(float64) - with_sinks)[..., None]
    assert_close(result.astype(float64), right, 50 * eps(float32) * np.abs(plain).max())


@pytest.mark.tensors
@pytest.mark.parametrize("dtype", ["f2", ml_dtypes.bfloat16, "f4", "f8"], ids=str)
def test_dtypes(device, dtype):
    """Any float dtype and strides, beside queries of float32 and float64."""
    sinks = draw((2, 6), seed=3).astype(dtype)
    for queries in (float32, float64):
        q, k, v = qkv((2, 6), 3, 20, 16, dtype=queries)
        for view in (sinks[0], sinks[:, 2][::-1], negative_rows(sinks)[1], sliced(sinks)[0]):
            heads = len(view)
            check_attention(q[:, :heads], k[:, :heads], v[:, :heads], device=device, sinks=view)


def test_numbers_that_float32_does_not_hold(device):
    """Finite ones stay finite: the weights are 0 or as without a sink. +inf is as a score of it."""
    q, k, v = qkv((2, 4), 3, 20, 16)
    sinks = np.array([1e300, -1e300, 0, -INF])
    result, lse = sdpa(q, k, v, device=device, sinks=sinks, return_lse=True)
    plain, plain_lse = sdpa(q, k, v, device=device, return_lse=True)
    assert not result[:, 0].any() and (lse[:, 0] == np.finfo(float32).max).all()
    for head in (1, 3):
        np.testing.assert_allclose(result[:, head], plain[:, head], rtol=0, atol=1e-6)
        np.testing.assert_allclose(lse[:, head], plain_lse[:, head], rtol=1e-6)
    sinks[2] = INF
    result, lse = sdpa(q, k, v, device=device, sinks=sinks, return_lse=True)
    assert np.isnan(result[:, 2]).all() and np.isnan(lse[:, 2]).all()
    assert np.isfinite(np.delete(result, 2, axis=1)).all()


@pytest.mark.tensors
def test_no_keys(device):
    """S = 0, and several problems, because the leading dimensions do not fold."""
    sinks = sinks_of(4)
    for lead in ((4,), (3, 4), (2, 3, 4), (2, 1, 2, 3, 4)):
        q, k, v = qkv(lead, 3, 0, 16)
        result, lse = sdpa(q, k, v, device=device, sinks=sinks, return_lse=True)
        assert not result.any()
        np.testing.assert_array_equal(lse, np.broadcast_to(sinks[:, None], (*lead, 3)))
        check_attention(*qkv(lead, 3, 5, 16), device=device, sinks=sinks)
    assert sdpa(*qkv((2, 4), 0, 5, 16), device=device, sinks=sinks).shape == (2, 4, 0, 16)


@pytest.mark.tensors
def test_heads(device):
    """Grouped, broadcast, and none: two dimensions are one head."""
    q, k, v = qkv((2, 6), 5, 20, 16)
    check_attention(q, k[:, :2], v[:, :2], device=device, sinks=sinks_of(6), enable_gqa=True)
    check_attention(q[:, :1], k, v, device=device, sinks=sinks_of(6))
    check_attention(q, k[:, :1], v[:, :1], device=device, sinks=sinks_of(6))
    check_attention(q[0, 0], k[0, 0], v[0, 0], device=device, sinks=sinks_of(1))


@pytest.mark.parametrize("S", [20, 3000])
@pytest.mark.parametrize("L", [1, 40])
def test_a_sink_is_a_key_with_the_value_zero(device, L, S):
    """As an added mask with one more column, whose key is orthogonal to all queries."""
    q, k, v = qkv((2, 3), L, S, 16)
    sinks = sinks_of(3, 1.0)
    mask = draw((3, L, S), seed=8)
    zeros = np.zeros((2, 3, 1, 16), float32)
    column = np.broadcast_to(sinks[:, None, None], (3, L, 1))
    right, right_lse = sdpa(
        q, np.concatenate([k, zeros], -2), np.concatenate([v, zeros], -2), device=device,
        attn_mask=np.concatenate([mask, column], -1), return_lse=True,
    )  # fmt: skip
    result, lse = sdpa(q, k, v, device=device, attn_mask=mask, sinks=sinks, return_lse=True)
    np.testing.assert_allclose(result, right, rtol=0, atol=2e-6)
    np.testing.assert_allclose(lse, right_lse, rtol=2e-6)


def test_the_reference(device, monkeypatch):
    """Which redoes the rows of all others."""
    force(monkeypatch, "reference")
    for dtype in (float32, float64):
        arrays = qkv((2, 3), 5, 30, 9, dtype=dtype)
        for level in LEVELS:
            for options in ({}, {"is_causal": True, "query_offset": -2}, {"softcap": 2.0}):
                check_attention(*arrays, device=device, sinks=sinks_of(3, level), **options)


def test_scores_of_minus_infinity(device):
    """They have the weight 0 beside a sink: a row of them is zeros, whose lse is the sink."""
    q, k, v = qkv((1, 2), 2, 20, 16)
    q[..., 0, :], k[...] = 1, -3e38
    result, lse = sdpa(q, k, v, device=device, sinks=sinks_of(2), scale=3.0, return_lse=True)
    assert not result[..., 0, :].any()
    np.testing.assert_array_equal(lse[0, :, 0], sinks_of(2))


def test_a_sink_belongs_to_no_part():
    """Base and sum, by which parts of a call are merged, are those of keys alone."""
    q, k, v = (draw((2, 3, 8), seed=n) for n in range(3))
    with pytest.raises(ValueError, match="sinks have no base and sum"):
        clattn.scaled_dot_product_attention(
            q, k, v, sinks=draw((2,)), return_lse=clattn._core.base_and_sum
        )
