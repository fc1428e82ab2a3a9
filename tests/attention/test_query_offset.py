# SPDX-License-Identifier: MIT
"""query_offset: row i stands at position i + query_offset, for causality and windows."""

import numpy as np
import pytest
from references.attention import float32
from support.checks import check_attention
from support.data import draw, qkv, sdpa
from support.masks import masked
from support.variants import each, force, with_kernels

both_shapes = each(lambda v: v.shapes, "shape", data=True)
both_shapes_and_tensors = each(lambda v: v.shapes, "shape", tensors=True, data=True)

BANDS = [{"is_causal": True}, {"is_causal": "lower_right"}, {"window": (7, 3)},
         {"window": (None, 2)}, {"window": (20, None)},
         {"is_causal": True, "window": (9, 9)}]  # fmt: skip
NEAR = (-70, -3, 0, 1, 25, 100)
FAR = (-(2**70), -(2**63), -(2**62), -(2**40), 2**40, 2**62, 2**63 - 1, 2**100)


@pytest.mark.full
@both_shapes
def test_an_int(device, variant, shape):
    """It is data, as all bands are."""
    arrays = variant.arrays(shape)
    for band in BANDS:
        for offset in NEAR:
            variant.check(*arrays, device=device, query_offset=offset, **band)


@pytest.mark.full
@pytest.mark.options
@both_shapes_and_tensors
def test_one_for_each_sequence(device, variant, shape):
    """Rows of a sequence may see no key while those of the next one see all."""
    _, Hq, Hk, L, S = variant.shapes[shape]
    arrays = variant.arrays((4, Hq, Hk, L, S))
    for band in BANDS:
        for offsets in ([0, 5, -3, S], [S - L, S - L - 1, 2 * S, -2 * S]):
            variant.check(*arrays, device=device, query_offset=np.array(offsets), **band)


@pytest.mark.full
@pytest.mark.options
@with_kernels("cpu", "pairs", "decode_cpu")
def test_with_masks(device, variant):
    """Masks stay where they are. Heads with one mask, and those of one key head, are together."""
    for _, Hq, Hk, L, S in variant.shapes.values():
        arrays = variant.arrays((3, Hq, Hk, L, S))
        for kind in ("bool", "float"):
            mask = masked(draw((L, S)) > -1, kind, dtype=variant.mask_dtype)
            variant.check(*arrays, device=device, query_offset=[3, S - L, -2], is_causal=True,
                          attn_mask=mask)  # fmt: skip


def test_far_offsets(device):
    """Rows that stand far before or behind the keys, in windows of any size: nothing overflows.

    Where a bound and an offset are far in opposite directions, they add up exactly.
    """
    arrays = qkv((2, 3), 5, 20, 16)
    far = 2**62 - 1
    for offset in (*FAR, far - 3, 3 - far):
        for band in (*BANDS, {"window": (far, far)}, {"window": (far, None)}):
            check_attention(*arrays, device=device, query_offset=offset, **band)
            if -(2**63) <= offset < 2**63:
                check_attention(*arrays, device=device, query_offset=[offset, 3], **band)


@pytest.mark.parametrize("L", [1, 4, 40])
@pytest.mark.parametrize("start", [0, 7, 60])
def test_rows_of_a_longer_call(device, L, start):
    """The rows from `start` on of a causal call of 100 positions."""
    q, k, v = qkv((2, 3), 100, 100, 16)
    for options in ({"is_causal": True}, {"is_causal": True, "window": (30, None)}):
        whole = sdpa(q, k, v, device=device, **options)
        rows = q[:, :, start : start + L]
        part = sdpa(rows, k, v, device=device, query_offset=start, **options)
        np.testing.assert_allclose(part, whole[:, :, start : start + L], rtol=0, atol=2e-6)
        length = rows.shape[-2]
        lower = {**options, "is_causal": "lower_right"}  # adds S - L
        part = sdpa(rows, k, v, device=device, query_offset=start + length - 100, **lower)
        np.testing.assert_allclose(part, whole[:, :, start : start + L], rtol=0, atol=2e-6)


@pytest.mark.tensors
def test_leading_dimensions(device):
    """Offsets belong to query's first dimension, wherever it lies in the result's."""
    k, v = draw((2, 3, 4, 20, 16)), draw((2, 3, 4, 20, 16))
    for lead, offsets in (((2, 3, 4), [3, 9]), ((3, 4), [3, 9, -2]), ((1, 3, 4), [5]),
                          ((3, 1), [3, 9, -2])):  # fmt: skip
        for keys in ((k, v), (k[:1], v[:1]), (k[:, :, :1], v[:, :, :1])):
            check_attention(
                draw((*lead, 5, 16)), *keys, device=device, query_offset=offsets, is_causal=True
            )
    q = draw((2, 3, 1, 5, 16))  # one head: the last leading dimension is that of the offsets
    check_attention(draw((6, 1, 5, 16)), draw((1, 1, 20, 16)), draw((1, 1, 20, 16)), device=device,
                    query_offset=np.arange(6) * 3, is_causal=True)  # fmt: skip
    check_attention(q, k[:, :, :1], v[:, :, :1], device=device, query_offset=[1, 8], window=(4, 0))


def test_integers_of_any_kind(device):
    arrays = qkv((2, 3), 5, 20, 16)
    right = sdpa(*arrays, device=device, is_causal=True, query_offset=[4, 9])
    numbers = np.array([9, 4])
    for offsets in ((4, 9), range(4, 10, 5), numbers[::-1], numbers[::-1].astype("u1"),
                    numbers[::-1].astype(">i4")):  # fmt: skip
        got = sdpa(*arrays, device=device, is_causal=True, query_offset=offsets)
        np.testing.assert_array_equal(got, right)
    right = sdpa(*arrays, device=device, is_causal=True, query_offset=4)
    for offset in (np.int8(4), np.uint64(4), np.array(4)):
        got = sdpa(*arrays, device=device, is_causal=True, query_offset=offset)
        np.testing.assert_array_equal(got, right)


def test_the_reference(device, monkeypatch):
    force(monkeypatch, "reference")
    arrays = qkv((3, 2), 5, 30, 9)
    for band in BANDS:
        for offset in (*NEAR, [0, 7, -3]):
            check_attention(*arrays, device=device, query_offset=offset, **band)


def test_without_a_band_nothing_changes(device):
    arrays = qkv((2, 3), 5, 20, 16)
    right = check_attention(*arrays, device=device)
    for offset in (7, [7, -300]):
        got = sdpa(*arrays, device=device, query_offset=offset)
        np.testing.assert_allclose(got, right, rtol=0, atol=float(np.finfo(float32).eps) * 4)
