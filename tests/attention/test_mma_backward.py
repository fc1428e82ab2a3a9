# SPDX-License-Identifier: MIT
"""What attention_mma_backward does besides test_backward.py. On CPUs matrix units are emulated.

Few of these tests run on PoCL, where a program takes many seconds.
"""

import clattn
import numpy as np
import pytest
from references.attention import bfloat16, eps, float16
from support.data import draw, qkv, sdpa
from support.gradients import backward, check_backward, grads
from support.launches import launched_once
from support.variants import force

pytestmark = pytest.mark.full(slowest=True)


@pytest.fixture(autouse=True)
def mma(device, monkeypatch):
    force(monkeypatch, "mma")


def halves(*shape):
    return qkv(*shape, dtype=float16)


SHAPES = {  # heads, L, S, E, Ev, dtype
    "two tiles of a warp": ((2, 2), 130, 140, 64, 64, float16),
    "one tile": ((1, 2), 70, 60, 96, 96, bfloat16),
    "wide": ((1, 1), 70, 131, 128, 128, float16),
    "parts of heads": ((1, 2), 18, 50, 70, 24, bfloat16),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(device, shape):
    *sizes, dtype = shape
    arrays = qkv(*sizes, dtype=dtype)
    for options in ({}, {"is_causal": "lower_right"}, {"window": (30, 5), "scale": -0.3}):
        check_backward(grads(*arrays), *arrays, device=device, **options)
    output, lse = sdpa(*arrays, device=device, return_lse=True)
    used = launched_once(clattn.scaled_dot_product_attention_backward, grads(*arrays), *arrays,
                         output, lse, device=device)  # fmt: skip
    mma, tiled = "attention_mma_backward", "attention_tiled_backward"
    assert [one.kernel for one in used] == [tiled, mma, mma]


OPTIONS = {
    "softcap, mask, sinks": {"softcap": 2.0, "attn_mask": draw((1, 1, 70, 90), seed=2),
                             "sinks": draw((2,), seed=4), "is_causal": True},
    "dropout, conditions": {"dropout_p": 0.3, "seed": 11,
                            "attn_mask": draw((2, 1, 1, 90), seed=3) > -0.5},
    "offsets": {"is_causal": True, "query_offset": [4, -3]},
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(device, options):
    arrays = halves((2, 2), 70, 90, 64)
    grad_lse = draw((2, 2, 70), seed=8)
    check_backward(grads(*arrays), *arrays, device=device, grad_lse=grad_lse, **options)


def near(got, right):
    """The reference, which does not round factors, computes some numbers in the place of others."""
    for one, other in zip(got[:3], right[:3], strict=True):
        one, other = one.astype("f8"), other.astype("f8")
        np.testing.assert_allclose(one, other, atol=2 * eps(float16) * np.abs(other).max())


def test_what_is_excluded_may_hold_nan(device):
    """Keys that no row attends to, and rows that attend to no key."""
    q, k, v = halves((1, 2), 70, 90, 64)
    G, mask = grads(q, k, v), draw((70, 90)) > -0.5
    mask[:, 20:40] = mask[:, 80:] = mask[5:9] = False
    right, _ = backward(G, q, k, v, device=device, attn_mask=mask)
    k[..., 20:40, :], v[..., 80:, :] = np.nan, np.inf
    q[..., 5:7, :] = G[..., 7:9, :] = np.nan
    got, _ = backward(G, q, k, v, device=device, attn_mask=mask)
    near(got, right)
    assert not got.key[..., 20:40, :].any()
    assert not got.value[..., 80:, :].any()
    assert not got.query[..., 5:9, :].any()


def test_attended_nans_stay_visible(device):
    q, k, v = halves((1, 1), 20, 40, 64)
    q[..., 3, 0] = np.nan
    got, _ = backward(grads(q, k, v), q, k, v, device=device, is_causal=True)
    assert np.isnan(got.query[..., 3, :]).all()
    assert np.isfinite(np.delete(got.query, 3, axis=2)).all()
    assert np.isnan(got.key[..., :4, :]).all()
    assert np.isfinite(got.key[..., 4:, :]).all()


def test_factors_beyond_the_half_type(device):
    """The reference computes what an infinite factor has reached."""
    q, k, v = halves((1, 1), 20, 40, 64)
    G = grads(q, k, v)
    large = np.float16(300)
    q, k = q / large, k / large
    right, _ = backward(G, q, k, v, device=device)
    got, _ = backward(G * large, q, k, v * large, device=device)
    assert np.isfinite(got.query).all()
    for one, other, factor in zip(got[:3], right[:3], (9e4, 9e4, 300), strict=True):
        one, other = one.astype("f8") / factor, other.astype("f8")
        np.testing.assert_allclose(one, other, atol=0.02 * np.abs(other).max())


def test_a_mask_of_the_user(device):
    """Blocks that are empty, full or neither."""
    q, k, v = halves((1, 2), 150, 140, 64)
    G = grads(q, k, v)

    def near_to(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx < 30 + 10 * h) & (kv_idx <= q_idx)

    h, i, j = np.ogrid[:2, :150, :140]
    right, _ = backward(G, q, k, v, device=device, attn_mask=near_to(0, h, i, j))
    blocks = clattn.create_block_mask(near_to, 1, 2, 150, 140, device=device)
    output, lse = clattn.flex_attention(q, k, v, return_lse=True, device=device, block_mask=blocks)
    got = clattn.flex_attention_backward(G, q, k, v, output, lse, device=device, block_mask=blocks)
    near(got, right)


def test_subsets(device):
    """Any of the three has the bits of all, also where key and value broadcast differently."""
    shapes = (2, 3, 9, 16), (2, 1, 40, 16), (1, 3, 40, 16)
    q, k, v = (draw(shape, float16, n) for n, shape in enumerate(shapes))
    G = grads(q, k, v)
    every = check_backward(G, q, k, v, device=device)
    for n, name in enumerate(("query", "key", "value")):
        got, _ = backward(G, q, k, v, device=device, needs=[name])
        np.testing.assert_array_equal(got[n], every[n])
        assert [one is None for one in got[:3]] == [m != n for m in range(3)]


@pytest.mark.parametrize(("size", "local_memory"), [(64, 30000), (160, None)])
def test_other_problems(device, monkeypatch, size, local_memory):
    """The reference computes what the kernel does not take, if the kernel is forced."""
    q, k, v = halves((1, 1), 5, 6, size)
    output, lse = sdpa(q, k, v, device=device, return_lse=True)
    force(monkeypatch, "mma", local_memory=local_memory)
    used = launched_once(
        clattn.scaled_dot_product_attention_backward, output, q, k, v, output, lse, device=device
    )
    assert {one.kernel for one in used} == {"attention_backward"}
