# SPDX-License-Identifier: MIT
"""What attention_tiled does besides the kernel contract: the shapes of its tile.

The tests limit a device's local memory, so that the plan chooses smaller tiles.
"""

import numpy as np
import pytest
from references.attention import attention, bfloat16, eps, float16, float32, float64
from support.checks import check_attention
from support.data import qkv, sdpa
from support.launches import chosen
from support.loops import looped
from support.sizes import WIDE
from support.variants import SMALL_TILE, force, takes_cpu_kernels, with_kernels


@pytest.fixture(autouse=True)
def tiled(device, monkeypatch):
    """attention_tiled with the tile of 16 rows and 32 keys."""
    force(monkeypatch, "tiled", local_memory=SMALL_TILE)


# --- shapes of the tile ---------------------------------------------------------------

TILES = {  # local memory, L, S, E, Ev, dtype
    "64 rows, 64 keys": (None, 70, 131, 64, 64, float32),
    "32 rows, 64 keys": (16384, 35, 70, 36, 200, bfloat16),
    "16 rows, 32 keys": (7000, 33, 65, 16, 16, float32),
    "8 rows, 32 keys": (16384, 6, 70, 511, 300, float16),
}


@pytest.mark.full
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@with_kernels("tiled")
def test_tiles(device, variant, monkeypatch, tile):
    """Slices of a head, chunks of values, columns and elements by fours, twos and ones."""
    local_memory, L, S, E, Ev, dtype = tile
    force(monkeypatch, "tiled", local_memory=local_memory)
    for keys in (1, S):
        check_attention(*qkv((1, 2), L, keys, E, Ev, dtype), device=device)
    check_attention(*qkv((1, 2), L, S, E, Ev, dtype), device=device, is_causal="lower_right")


@pytest.mark.full(slowest=True)
@with_kernels("tiled")
def test_the_widest_tile(device, variant, monkeypatch):
    force(monkeypatch, "tiled")
    check_attention(*qkv((1, 2), 40, 70, 24, 512), device=device)


# --- numbers --------------------------------------------------------------------------


@pytest.mark.full
@with_kernels("tiled")
def test_float64(device, variant, monkeypatch):
    """Also where scores are beyond the range of the floats that bases are."""
    force(monkeypatch, "tiled", local_memory=16384)
    q, k, v = qkv((1, 2), 40, 70, 16, dtype=float64)
    check_attention(q, k, v, device=device)
    for factor in (1e25, -1e25):  # scores of 1e50
        right, _ = attention(q, k, v, scale=factor * 1e25)
        got = sdpa(q, k, v, device=device, scale=factor * 1e25)
        np.testing.assert_allclose(got, right.astype(float64), rtol=1e-14, atol=1e-14)


def test_a_sum_of_many_keys(device):
    """Equal weights: sums of 32 keys are added up, so each value sees S / 32 roundings, of either
    sign; a plain sum of all would have 32 times as many.
    """
    S = 100_000
    q, k, v = qkv((1, 1), 2, S, 16)
    v += 1
    result = sdpa(q * 0, k, v, device=device)
    right = v.astype(float64).mean(axis=-2, keepdims=True)
    assert np.abs(result - right).max() < np.sqrt(S / 32) * eps(np.float32)


# --- the choice -----------------------------------------------------------------------


def test_it_is_refused_where_it_cannot_run(device, monkeypatch):
    """Forced, it says what it takes."""
    refusal = 'CLATTN_KERNEL is "tiled", whose kernel takes head sizes of 1 to 512'
    with pytest.raises(ValueError, match=refusal):
        sdpa(*qkv((1,), 2, 3, 513), device=device)
    force(monkeypatch, "tiled", local_memory=1000)
    with pytest.raises(ValueError, match=refusal):
        sdpa(*qkv((1,), 2, 3, 16), device=device)


@looped("words", ["0", "-1", "16k", "1e4", "9999999999"])
def test_wrong_local_memory_is_refused(monkeypatch, words):
    with pytest.raises(ValueError, match=f'CLATTN_LOCAL_MEMORY is "{words}"; expected a number'):
        force(monkeypatch, "tiled", local_memory=words)


def test_gpus_choose_it(device):
    """On its own account it is for GPUs alone."""
    arrays = qkv((1, 2), 40, 70, WIDE)
    fast = "cpu" if takes_cpu_kernels(device) else "tiled"
    assert chosen(None, sdpa, *arrays, device=device) == fast
