# SPDX-License-Identifier: MIT
"""What attention_cpu does besides the kernel contract: tiles of a work-item share loads.

Where there are enough heads and rows, a mask or bias is loaded once for several heads, and keys
that are packed are packed once for several tiles of rows.
"""

import clattn
import numpy as np
import pytest
from references.attention import DTYPES, float16
from support.checks import assert_close
from support.data import draw, sdpa
from support.layouts import far_rows
from support.loops import looped
from support.masks import masked
from support.variants import force, with_kernels

with_cpu = with_kernels("cpu", tensors=True)

SHAPE = B, H, _, L, S = (3, 8, 8, 41, 70)


def by_reference(call):
    with pytest.MonkeyPatch.context() as patch:
        force(patch, "reference")
        return call()


@looped("lead", [(4, 5), (4, 8), (1, 16)], ids=str)
@with_cpu
def test_numbers_of_heads(device, variant, lead):
    """Some are divided into items of several heads; an odd number may be one item."""
    arrays = variant.arrays((lead[0], lead[1], lead[1], L, S))
    mask = masked(draw((L, S)) > -1, "float")
    for options in ({}, {"scale": -0.3}, {"window": (9, 3)}):
        variant.check(*arrays, device=device, attn_mask=mask, **options)


@looped("heads", [1, 4], ids=["one mask", "of each head"])
@with_cpu
def test_work_items_of_all_batches(device, variant, heads):
    """The order of work-items depends on mask and rows. Each row of each head gets its own mask."""
    for rows in (7, 300, 700):
        mask = draw((3, heads, rows, 20)) > -0.3
        mask[1, ..., :9] = mask[2, ..., 12:] = False
        variant.check(*variant.arrays((3, 4, 4, rows, 20)), device=device, attn_mask=mask)


@with_cpu
def test_blocks_that_all_heads_exclude(device, variant):
    """For all rows at once, with NaN where nobody looks, and rows without a key."""
    q, k, v = variant.arrays((B, H, H, L, 300))
    mask = draw((L, 300)) > -0.3
    mask[:, 96:250] = mask[5] = False
    k[..., 100:240, :], v[..., 100:240, :] = np.nan, np.inf
    variant.check(q, k, v, device=device, attn_mask=mask)


# What some heads hold: an array, its rows, and the number that one column of them has.
SPOILT = {
    "values that overflow sums": ("v", slice(None), 3e38),
    "a large value": ("v", 30, 3e38),
    "an infinite value": ("v", 30, np.inf),
    "a value that is no number": ("v", 30, np.nan),
    "a key that is no number": ("k", 30, np.nan),
    "an infinite key": ("k", 30, np.inf),
    "a query that is no number": ("q", 30, np.nan),
}


@looped("L", [64, 75])
@looped("spoilt", SPOILT)
@with_kernels("cpu")
def test_one_packed_block(device, variant, spoilt, L):
    """One block has all keys: rows of models do not adjoin. One length has a part of a tile."""
    name, place, x = SPOILT[spoilt]
    arrays = {n: draw((2, rows, 4, 80), seed=i) for i, (n, rows) in
              enumerate({"q": L, "k": 77, "v": 77}.items())}  # fmt: skip
    arrays[name][:, place, 1:3, 20] = x
    q, k, v = (a.swapaxes(1, 2) for a in arrays.values())
    right = by_reference(lambda: sdpa(q, k, v, device=device))
    np.testing.assert_allclose(sdpa(q, k, v, device=device), right, rtol=1e-5, atol=2e-6)


@with_cpu
def test_a_nan_of_one_head_stays_there(device, variant):
    q, k, v = variant.arrays(SHAPE)
    k[1, 4, 3] = np.nan
    result = variant.check(q, k, v, device=device, attn_mask=np.ones((L, S), bool))
    assert np.isnan(result[1, 4]).all()
    assert not np.isnan(np.delete(result, 4, axis=1)).any()


@with_cpu
def test_dropout_is_the_reference_kernels(device, variant):
    """Which weights are dropped depends on head and row, not on who computes them."""
    options = {"attn_mask": draw((L, S)) > -0.3, "dropout_p": 0.4, "seed": 7}

    def call():
        return variant.call(*variant.arrays(SHAPE), device=device, **options)[0]

    assert_close(call(), by_reference(call), 2e-6)


@looped("mode", [1, 3])
@with_cpu
def test_scores_and_past_of_each_head(device, variant, mode):
    """ONNX: scores with a shared mask, and past and present keys, which no head shares."""
    past = variant.arrays((B, H, H, L, 20), seed=1)[1:]
    mask = masked(draw((L, S + 20)) > -1, "float")
    options = {"return_qk": True, "qk_matmul_output_mode": mode, "device": device}

    def call():
        return clattn.onnx.attention(*variant.arrays(SHAPE), mask, *past, **options)

    for got, right in zip(call(), by_reference(call), strict=True):
        assert_close(got, right, 1e-5)


@with_cpu
def test_a_bias_without_a_mask(device, variant):
    """DirectML's relative position bias, the same for all heads, is a mask that is added."""
    heads = variant.arrays(SHAPE)
    q, k, v = (np.ascontiguousarray(a.swapaxes(1, 2)).reshape(B, a.shape[2], -1) for a in heads)
    bias = draw((L, S))
    options = {"scale": 0.25, "device": device}
    answer = clattn.directml.multihead_attention(
        q, k, v, head_count=H, relative_position_bias=np.broadcast_to(bias, (B, H, L, S)), **options
    )
    right = clattn.scaled_dot_product_attention(*heads, attn_mask=bias, **options)
    assert_close(answer.output.reshape(B, L, H, -1).swapaxes(1, 2), right, 2e-6)


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@looped("options", [{}, {"is_causal": "lower_right"}, {"window": (40, 9)}],
                         ids=str)  # fmt: skip
@with_cpu
def test_packed_keys_give_the_bits_of_contiguous_ones(device, variant, options, dtype):
    """Projections (batch, rows, heads, E), for several tiles, whole ones and not."""
    shapes = ((1, 6, 2, 150, 410), (1, 3, 3, 70, 97), (2, 4, 4, 33, 30), (1, 2, 2, 70, 410))
    for shape, E in zip(shapes, (None, None, None, 100), strict=True):
        arrays = variant.arrays(shape, dtype, E)
        seen = [a.swapaxes(1, 2).copy().swapaxes(1, 2) for a in arrays]
        far = [far_rows(a) for a in arrays]
        right = variant.call(*arrays, device=device, **options)
        for views in (seen, far, [arrays[0], seen[1], far[2]]):
            got = variant.call(*views, device=device, **options)
            assert [a.tobytes() for a in got] == [a.tobytes() for a in right]
        variant.check(*seen, device=device, **options)


@looped("kind", ["bool", "float"])
@looped("heads", [(8, 8), (6, 2), (12, 1)], ids=str)
@with_cpu
def test_masks_of_heads_that_lie_side_by_side(device, variant, heads, kind):
    """As a table of biases looked up by position: (rows, keys, heads), permuted."""
    arrays = variant.arrays((2, *heads, 60, 130))
    mask = masked(draw((60, 130, heads[0])) > -1, kind).transpose(2, 0, 1)
    mask[3, :, 10:] = False if kind == "bool" else -np.inf  # excluded for one head only
    variant.check(*arrays, device=device, attn_mask=mask)


@looped("heads", [(8, 8), (6, 2)], ids=str)
@with_cpu
def test_blocks_that_are_all_true_or_all_false(device, variant, heads):
    """Left padding under a causal mask; then one bit of a block differs."""
    arrays = variant.arrays((2, *heads, 120, 210))
    mask = np.stack([np.tri(120, 210, 40, dtype=bool)] * 2)[:, None]
    mask[1, :, :, :130] = False
    variant.check(*arrays, device=device, attn_mask=mask)
    for row, key in ((0, 0), (31, 95), (119, 209), (64, 100)):
        other = np.ones((120, 210), bool)
        other[row, key] = False
        variant.check(*arrays, device=device, attn_mask=other)
        variant.check(*arrays, device=device, attn_mask=~other)


@looped("keys", [5, 77, 210])
@with_cpu
def test_a_bool_mask_alone(device, variant, keys):
    """Its program has no bounds, so the mask excludes the keys that the last chunk lacks."""
    arrays = variant.arrays((2, 4, 4, L, keys), E=24)
    every_second = np.ones((L, 2 * keys), bool)
    every_second[:, 1::2] = False
    row = np.ones((1, keys), bool)
    random = draw((2, 1, L, keys)) > 0
    for mask in (np.ones((L, keys), bool), every_second[:, ::2], row, random):
        variant.check(*arrays, device=device, attn_mask=mask)
        variant.check(*arrays, device=device, attn_mask=mask, is_causal=True)
        variant.check(*arrays, device=device, attn_mask=mask, window=(keys // 2, 3))


@with_cpu
def test_weights_of_blocks_that_a_mask_excludes(device, variant):
    """ONNX: the weights are written. Those of excluded blocks are zeros."""
    q, k, v = variant.arrays((2, 4, 4, 70, 410))
    mask = np.ones((70, 410), bool)
    mask[:, :200] = mask[40:, 300:] = mask[5] = False
    for mode in range(4):
        options = {"return_qk": True, "qk_matmul_output_mode": mode, "device": device}

        def call(options=options):
            return clattn.onnx.attention(q, k, v, mask, **options)

        got, right = call(), by_reference(call)
        assert_close(got.Y, right.Y, 1e-5)
        assert_close(got.qk_matmul_output, right.qk_matmul_output, 1e-5)


@with_cpu
def test_a_work_item_full_of_tiles(device, variant):
    """The results of one vector of rows are whole vectors, which need more room than columns."""
    shape = (4 * device.compute_units, 16, 16, 16, 20)
    arrays = variant.arrays(shape, E=111, Ev=17)
    variant.check(*arrays, device=device, attn_mask=draw((16, 20)) > -0.5)


@with_kernels("pairs")
def test_odd_head_sizes_in_pairs(device, variant):
    """A packed key ends in half a pair. Two heads with a shared mask lie behind each other."""
    for E, Ev in ((63, 63), (255, 257)):
        arrays = variant.arrays((2 * device.compute_units, 4, 4, 70, 200), E=E, Ev=Ev)
        variant.check(*arrays, device=device, attn_mask=draw((70, 200)) > -1)
        variant.check(*arrays, device=device)


@with_kernels("cpu", "pairs")
def test_columns_that_chunks_do_not_divide(device, variant):
    """Tiles of an item lie side by side in memory, and each is summed a few columns at a time."""
    dtype = float16 if variant.kernel == "cpu" else variant.dtype  # packed: tiles share keys
    for Ev in (20, 49, 128):
        variant.check(*variant.arrays((4, 4, 4, 200, 90), dtype, 64, Ev), device=device)
