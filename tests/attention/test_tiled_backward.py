# SPDX-License-Identifier: MIT
"""What attention_tiled_backward does besides test_backward.py: the shapes of its tiles.

Some tests limit a device's local memory, so that the plan chooses smaller tiles.
"""

import clattn
import numpy as np
import pytest
from references.attention import bfloat16, float16, float32, float64
from support.data import draw, qkv, sdpa
from support.flex_gradients import check_gradients
from support.gradients import backward, check_backward, grads
from support.launches import launched_once
from support.variants import SMALL_TILE, force

pytestmark = pytest.mark.by_turns


@pytest.fixture(autouse=True)
def tiled(device, monkeypatch):
    force(monkeypatch, "tiled")


TILES = {  # local memory, L, S, E, Ev, dtype
    "64 rows, 64 keys": (None, 131, 129, 64, 64, float32),
    "heads of two sizes": (None, 70, 131, 65, 130, float32),
    "wide": (None, 35, 70, 256, 256, bfloat16),
    "wider": (None, 18, 33, 300, 3, float16),
    "small": (SMALL_TILE, 33, 65, 16, 16, float32),
    "small, columns by ones": (16384, 17, 33, 7, 5, float16),
    "float64": (16384, 35, 70, 24, 20, float64),
}


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_tiles(device, monkeypatch, tile):
    """Passes over a head, parts of a block, and columns by fours, twos and ones."""
    local_memory, L, S, E, Ev, dtype = tile
    force(monkeypatch, "tiled", local_memory=local_memory)
    arrays = qkv((1, 2), L, S, E, Ev, dtype)
    for options in ({}, {"is_causal": "lower_right"}):
        used = launched_once(check_backward, grads(*arrays), *arrays, device=device, **options)
        assert {one.kernel for one in used} == {"attention_tiled", "attention_tiled_backward"}


def test_a_mask_of_the_user(device):
    """Blocks that are empty, full or neither. Rows without a key hold NaN."""
    q, k, v = qkv((1, 2), L=150, S=140, E=16)
    G = grads(q, k, v)

    def near(b, h, q_idx, kv_idx):
        return (q_idx >= 5) & (q_idx - kv_idx < 30 + 10 * h) & (kv_idx <= q_idx)

    h, i, j = np.ogrid[:2, :150, :140]
    allowed = near(0, h, i, j)
    right, _ = backward(G, q, k, v, device=device, attn_mask=allowed)
    q[..., :5, :] = G[..., :5, :] = np.nan
    for blocks in (None, clattn.create_block_mask(near, 1, 2, 150, 140, device=device)):
        options = {"mask_mod": near} if blocks is None else {"block_mask": blocks}
        output, lse = clattn.flex_attention(q, k, v, return_lse=True, device=device, **options)
        got = clattn.flex_attention_backward(G, q, k, v, output, lse, device=device, **options)
        for one, other in zip(got[:3], right[:3], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_score_of_the_user(device):
    """Tiles and blocks with remainders. Gradients of arrays that it reads are the reference's."""
    slopes, table = draw((4,), seed=3), draw((4, 70 + 131 - 1), seed=4)

    def mod_of(slopes, table):
        def mod(score, b, h, q_idx, kv_idx):
            distance = q_idx - kv_idx
            shifted = score * clattn.lookup(slopes, h) + clattn.lookup(table, h, distance)
            return np.where(distance > 60, -np.inf, shifted)

        return mod

    q, k, v = qkv((2, 4), 70, 131, 24, 40)
    options = {"enable_gqa": True, "softcap": 2.0, "device": device}
    for captured in ((), (slopes, table)):
        arrays = captured or (slopes, table)
        used = launched_once(check_gradients, (q, k[:, :2], v[:, :2]),
                             lambda *given, arrays=arrays: mod_of(*(given or arrays)), captured,
                             **options)  # fmt: skip
        kernels = {one.kernel for one in used if one.macros.get("HAS_SCORE_MOD") == 1}
        assert kernels == {"attention_tiled_backward", *["attention_backward"] * bool(captured)}


def test_subsets(device):
    """Any of the three has the bits of all, also where key and value broadcast differently."""
    q, k, v = draw((2, 3, 9, 8)), draw((2, 1, 40, 8), seed=1), draw((1, 3, 40, 8), seed=2)
    G = grads(q, k, v)
    every = check_backward(G, q, k, v, device=device, is_causal=True)
    for n, name in enumerate(("query", "key", "value")):
        got, _ = backward(G, q, k, v, device=device, is_causal=True, needs=[name])
        np.testing.assert_array_equal(got[n], every[n])
        assert [one is None for one in got[:3]] == [m != n for m in range(3)]


def test_a_device_without_room(device, monkeypatch):
    """The reference computes what fits no tile."""
    q, k, v = qkv((1, 1), L=5, S=6, E=300)
    output, lse = sdpa(q, k, v, device=device, return_lse=True)
    force(monkeypatch, "tiled", local_memory=1000)
    used = launched_once(
        clattn.scaled_dot_product_attention_backward, output, q, k, v, output, lse, device=device
    )
    assert {one.kernel for one in used} == {"attention_backward"}
