# SPDX-License-Identifier: MIT
"""What variants on matrix units do besides the kernel contract. On CPUs the units are emulated.

A program takes PoCL many seconds to build, so most tests share one: float16, head size 64, with
the lse.
"""

import threading

import clattn
import numpy as np
import pytest
import support.tuning as tuning
from numpy.lib.stride_tricks import as_strided
from references.attention import attention, bfloat16, eps, float16
from support.data import draw, qkv, sdpa
from support.loops import looped
from support.threads import run_together
from support.variants import with_kernels

pytestmark = pytest.mark.full

mma = with_kernels("mma")
decode_mma = with_kernels("decode_mma")


def halves(*shape):
    return qkv(*shape, dtype=float16)


@pytest.mark.parametrize("half", [float16, bfloat16])
@mma
def test_widest_tiles_of_two(device, variant, half):
    """Head size 128, and what fills the local memory, queries first."""
    arrays = qkv((2, 4), 130, 140, 128, dtype=half)
    variant.check(*arrays, device=device, return_lse=False)


@mma
def test_groups_that_do_not_fit_the_local_memory(device, variant):
    """Warps multiply alone then."""
    tuning.tune_all(device, "float16", "mma", tuning.WARPS["together"])
    variant.check(*halves((2, 4), 130, 140, 128), device=device, return_lse=False)
    tuning.clear(device)


@mma
def test_scores_that_grow(device, variant, warps):
    """The base of exponents rises: weights are beyond half's range under the first base."""
    q, k, v = halves((1, 1), 40, 200, 64)
    k *= np.linspace(0, 16, 200, dtype=float16)[:, None]
    variant.check(q, k, v, device=device)
    variant.check(q, k[..., ::-1, :].copy(), v, device=device)


@mma
def test_error_is_that_of_rounded_weights(device, variant, warps):
    """Root mean square: that of plain arithmetic, rounded once, and as much again."""
    q, k, v = halves((1, 1), 64, 257, 64)
    result = variant.call(q, k, v, device=device)[0].astype("f8")
    right = attention(q, k, v)[0]
    plain = right.astype(float16).astype("f8")
    error, once = (np.sqrt(np.mean((x - right) ** 2)) for x in (result, plain))
    assert error < 2 * once
    assert np.abs(result - right).max() < 2 * eps(float16) * np.abs(v.astype("f8")).max()


@mma
def test_elements_at_odd_places(device, variant, warps):
    """Rows that begin anywhere and columns apart are read element by element."""
    q, k, v = halves((1, 2), 18, 70, 64)
    out = np.full((1, 2, 64, 18), np.nan, float16).swapaxes(2, 3)
    wide = draw((1, 2, 70, 200), float16)
    variant.check(q, wide[..., 3:67], wide[..., 81:145], device=device, out=out)
    variant.check(q[..., ::-1, :], k[..., ::-2, ::-1], v[..., ::2, :], device=device)


@pytest.mark.parametrize(
    "bounds",
    [
        {},
        {"is_causal": True},
        {"is_causal": "lower_right"},
        {"window": (20, 5)},
        {"is_causal": True, "window": (3, 0)},
        {"scale": -0.5},
    ],
    ids=str,
)
@mma
def test_blocks_that_bounds_cut(device, variant, warps, bounds):
    """More and fewer keys than a block has, and than rows: some rows see no key of some blocks."""
    for L, S in ((70, 200), (130, 64), (3, 65), (90, 1), (200, 70)):
        variant.check(*halves((1, 2), L, S, 64), device=device, **bounds)


@looped("place", range(5))
@mma
def test_places_in_memory(device, variant, warps, place):
    """Rows of whole 16 bytes that begin anywhere."""
    arrays = []
    for n, rows in enumerate((18, 70, 70)):
        memory = np.zeros(rows * 64 + 32, float16)
        start = -memory.ctypes.data % 16 // 2
        array = as_strided(memory[start + place :], (1, 1, rows, 64), (0, 0, 128, 2))
        array[...] = draw(array.shape, float16, n)
        arrays.append(array)
    variant.check(*arrays, device=device)


def masks(L, S):
    """Bool masks of every kind of block, and of every way to read them."""
    rows, keys = np.arange(L)[:, None], np.arange(S)
    random = np.random.default_rng(3).random((L, S)) < 0.6
    wide = np.random.default_rng(4).random((L, 2 * S + 37)) < 0.6
    return {
        "all true": np.ones((L, S), bool),
        "all false": np.zeros((L, S), bool),
        "random": random,
        "a triangle": keys <= rows,
        "a band": abs(keys - rows - 100) < 5,
        "documents": rows // 70 == keys // 70,
        "some blocks": (keys // 64 % 3 != 0) & (random | (keys // 64 % 3 == 1)),
        "one key": keys == S - 3,
        "for keys": random[:1],
        "for rows": random[:, :1],
        "rows that begin anywhere": wide[:, 3 : S + 3],
        "columns apart": wide[:, 1 : 2 * S : 2],
        "other bytes than 1": (np.where(random, 1 + rows % 255, 0).astype("u1")).view(bool),
    }


@looped("mask", masks(130, 330))
@mma
def test_bool_masks(device, variant, warps, mask):
    variant.check(*halves((1, 2), 130, 330, 64), device=device, attn_mask=masks(130, 330)[mask])


@mma
def test_bool_masks_with_bounds(device, variant, warps):
    for mask in "random", "some blocks", "rows that begin anywhere":
        for bounds in {"is_causal": True}, {"window": (150, 5)}, {"scale": -0.5}:
            arrays = halves((1, 2), 130, 330, 64)
            variant.check(*arrays, device=device, attn_mask=masks(130, 330)[mask], **bounds)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("added", [False, True])
@mma
def test_numbers_that_are_added(device, variant, warps, added, softcap):
    rng = np.random.default_rng(5)
    mask = rng.standard_normal((2, 130, 330)).astype(float16)
    mask[rng.random(mask.shape) < 0.3] = -np.inf
    mask = mask if added else mask > 0
    options = {"attn_mask": mask, "softcap": softcap, "is_causal": "lower_right"}
    variant.check(*halves((1, 2), 130, 330, 64), device=device, **options)


# ---- the warps of attention_decode_mma, which take 16 keys each in turn ----


@mma
def test_a_group_has_one_count_of_keys(device, variant, warps):
    """Another thread writes to the counts during calls. A row that sees n keys is (n - 1) / 2."""
    if device.memory_mode == "copy":
        pytest.skip("the device has a copy of the counts")
    counts = np.array([40])
    q, k = np.zeros((1, 64, 16, 64), float16), np.zeros((1, 64, 168, 64), float16)
    v = np.broadcast_to(np.arange(168, dtype=float16)[:, None], k.shape)
    right = {(n - 1) / 2 for n in (40, 168)}
    done = threading.Event()

    def write():
        while not done.is_set():
            counts[0] = 168
            counts[0] = 40

    def call():
        try:
            for _ in range(20):
                rows, *_ = clattn.onnx.attention(q, k, v, nonpad_kv_seqlen=counts, device=device)
                assert set(np.unique(rows)) <= right
        finally:
            done.set()

    run_together(write, call)


@decode_mma
def test_weights_are_rounded_before_they_are_summed(device, variant):
    """Equal values come back. Weights are 1, of the first key, and of the last, which the same
    warp has, some number below 2^8.
    """
    q, k, v = variant.arrays((1, 8, 1, 2, 65))
    q[...] = np.linspace(4, 5.5, 16).reshape(8, 2, 1)
    k[...], k[..., 0, :], k[..., 64, :] = -1, 0, 0.125
    v[...] = (2 - np.arange(64) / 512)[None]
    result = sdpa(q, k, v, device=device, enable_gqa=True)
    np.testing.assert_array_equal(result, np.broadcast_to(v[..., :1, :], result.shape))


@decode_mma
def test_warps_without_keys(device, variant):
    """What one warp finds in 16 keys, four find in as many each.

    The results are those of rounded weights, not those of a row that is computed again.
    """
    q, k, v = variant.arrays((1, 4, 1, 4, 16))
    one = sdpa(q, k, v, device=device, enable_gqa=True)
    tile = (1, 1, 4, 1)
    four = sdpa(q, np.tile(k, tile), np.tile(v, tile), device=device, enable_gqa=True)
    assert (one != four).mean() < 0.01
