# SPDX-License-Identifier: MIT
"""What attention_tiled does besides the kernel contract: the shapes of its tile.

The tests limit a device's local memory, so that the plan chooses smaller tiles.
"""

import numpy as np
import pytest
from references.attention import attention, bfloat16, eps, float16, float32, float64
from support.checks import check
from support.data import qkv, sdpa
from support.launches import chosen
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
        check(*qkv((1, 2), L, keys, E, Ev, dtype), device=device)
    check(*qkv((1, 2), L, S, E, Ev, dtype), device=device, is_causal="lower_right")


def test_bases_that_rise(device):
    """In the last blocks of a row too."""
    for L, S in ((1, 1), (17, 33), (40, 200)):
        check(*qkv((1, 2), L, S, 16), device=device)
    check(*qkv((1, 2), 40, 90, 16), device=device, is_causal=True)
    q, k, v = qkv((1, 2), 40, 200, 16)
    k *= np.linspace(0, 4, 200, dtype=np.float32)[:, None]  # bases rise on and on
    check(q, k, v, device=device)


@pytest.mark.full(slowest=True)
@with_kernels("tiled")
def test_the_widest_tile(device, variant, monkeypatch):
    force(monkeypatch, "tiled")
    check(*qkv((1, 2), 40, 70, 24, 512), device=device)


# --- numbers --------------------------------------------------------------------------


@pytest.mark.full
@with_kernels("tiled")
def test_float64(device, variant, monkeypatch):
    """Also where scores are beyond the range of the floats that bases are."""
    force(monkeypatch, "tiled", local_memory=16384)
    q, k, v = qkv((1, 2), 40, 70, 16, dtype=float64)
    check(q, k, v, device=device)
    for factor in (1e25, -1e25):  # scores of 1e50
        right, _ = attention(q, k, v, scale=factor * 1e25)
        got = sdpa(q, k, v, device=device, scale=factor * 1e25)
        np.testing.assert_allclose(got, right.astype(float64), rtol=1e-14, atol=1e-14)


def test_scores_of_infinity(device):
    """A row of them is NaN, as in plain NumPy; those of -inf count nothing beside others."""
    q, k, v = qkv((1, 1), 20, 40, 16)
    q[..., 0] = np.abs(q[..., 0]) + 1
    k[..., 7, :], k[..., 7, 0] = 0, -np.inf
    check(q, k, v, device=device)
    k[..., 7, 0] = np.inf
    assert np.isnan(sdpa(q, k, v, device=device)).all()


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


def test_the_same_call_gives_the_same_bits(device):
    """Groups that run side by side share no local memory."""
    arrays = qkv((2, 4), 70, 90, 16)
    results = {sdpa(*arrays, device=device).tobytes() for _ in range(100)}
    assert len(results) == 1


# --- the choice -----------------------------------------------------------------------


def test_it_is_refused_where_it_cannot_run(device, monkeypatch):
    """Forced, it says what it takes."""
    refusal = 'CLATTN_KERNEL is "tiled", whose kernel takes head sizes of 1 to 512'
    with pytest.raises(ValueError, match=refusal):
        sdpa(*qkv((1,), 2, 3, 513), device=device)
    force(monkeypatch, "tiled", local_memory=1000)
    with pytest.raises(ValueError, match=refusal):
        sdpa(*qkv((1,), 2, 3, 16), device=device)


@pytest.mark.parametrize("words", ["0", "-1", "16k", "1e4", "9999999999"])
def test_wrong_local_memory_is_refused(monkeypatch, words):
    with pytest.raises(ValueError, match=f'CLATTN_LOCAL_MEMORY is "{words}"; expected a number'):
        force(monkeypatch, "tiled", local_memory=words)


def test_gpus_choose_it(device):
    """On its own account it is for GPUs alone."""
    arrays = qkv((1, 2), 40, 70, WIDE)
    fast = "cpu" if takes_cpu_kernels(device) else "tiled"
    assert chosen(None, sdpa, *arrays, device=device) == fast
