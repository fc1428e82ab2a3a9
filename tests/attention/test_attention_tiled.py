# SPDX-License-Identifier: MIT
"""attention_tiled, the kernel for GPUs, forced on every device: on CPUs in all of its shapes.

CLATTN_SUB_GROUPS chooses sub-groups, CLATTN_LOCAL_MEMORY the tile: with 7000 bytes and head sizes
of 16 it has 16 rows and 32 keys, so a few dozen rows are several tiles. Each shape, head size and
set of options is a program to build, so most tests share one.
"""

import clattn
import numpy as np
import pytest
import references.directml as oracle
from references.attention import attention, bfloat16, eps, float16, float32, float64
from references.onnx import check as check_onnx
from support.directml_calls import compare
from support.dropout_calls import check as check_dropout
from support.helpers import BANDS, check, draw, qkv, sdpa
from support.sizes import WIDE

LOWEST = np.finfo(np.float32).min


@pytest.fixture(autouse=True)
def tiled(device, monkeypatch):
    """attention_tiled without sub-groups, with the tile of 16 rows and 32 keys."""
    monkeypatch.setenv("CLATTN_KERNEL", "tiled")
    monkeypatch.setenv("CLATTN_SUB_GROUPS", "0")
    monkeypatch.setenv("CLATTN_LOCAL_MEMORY", "7000")


def in_sub_groups(monkeypatch, device, size):
    monkeypatch.setenv("CLATTN_SUB_GROUPS", str(size))
    try:
        sdpa(*qkv((1,), 1, 1, 16), device=device)
    except ValueError as refusal:
        if "no sub-groups of that size" not in str(refusal):
            raise
        pytest.skip(str(refusal))


# --- shapes of the tile ---------------------------------------------------------------

TILES = {  # local memory, L, S, E, Ev, dtype
    "64 rows, 64 keys": ("", 70, 131, 64, 64, float32),
    "32 rows, 64 keys": ("16384", 35, 70, 36, 200, bfloat16),
    "16 rows, 32 keys": ("7000", 33, 65, 16, 16, float32),
    "8 rows, 32 keys": ("16384", 6, 70, 511, 300, float16),
}


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_tiles(device, monkeypatch, tile):
    """Parts of a head, chunks of values, columns and elements by fours, twos and ones."""
    local_memory, L, S, E, Ev, dtype = tile
    monkeypatch.setenv("CLATTN_LOCAL_MEMORY", local_memory)
    for keys in (1, S):
        check(*qkv((1, 2), L, keys, E, Ev, dtype), device=device)
    check(*qkv((1, 2), L, S, E, Ev, dtype), device=device, is_causal="lower_right")


@pytest.mark.parametrize("size", [8, 16, 32])
def test_sub_groups(device, monkeypatch, size):
    """Rows share by shuffles what they share by way of local memory without sub-groups."""
    in_sub_groups(monkeypatch, device, size)
    for L, S in ((1, 1), (17, 33), (40, 200)):
        check(*qkv((1, 2), L, S, 16), device=device)
    check(*qkv((1, 2), 40, 90, 16), device=device, is_causal=True)
    q, k, v = qkv((1, 2), 40, 200, 16)
    k *= np.linspace(0, 4, 200, dtype=np.float32)[:, None]  # bases rise on and on
    check(q, k, v, device=device)


def test_the_widest_tile_in_sub_groups(device, monkeypatch):
    in_sub_groups(monkeypatch, device, 32)
    monkeypatch.setenv("CLATTN_LOCAL_MEMORY", "")
    check(*qkv((1, 2), 40, 70, 24, 512), device=device)


# --- lengths, layouts, heads ----------------------------------------------------------


@pytest.mark.parametrize("L", [1, 15, 16, 17, 31, 48, 65])
def test_lengths(device, L):
    for S in (1, 4, 31, 32, 33, 64, 65, 200):
        q, k, v = qkv((2, 1), L, S + 1, 16)
        k[..., S, :] = v[..., S, :] = np.nan
        check(q, k[..., :S, :], v[..., :S, :], device=device)


def test_layouts(device):
    """Rows apart, at odd places, backwards, columns first; results too."""
    q, k, v = qkv((2, 2), 18, 40, 16)
    out = np.full((2, 2, 16, 18), np.nan, np.float32).swapaxes(2, 3)
    wide = draw((2, 2, 40, 65))
    check(q, wide[..., 3:19], wide[..., 30:46], device=device, out=out)
    check(q[..., ::-1, :], k[..., ::-2, ::-1], v[..., ::2, :], device=device)
    check(*(np.asfortranarray(a) for a in (q, k, v)), device=device)


def test_groups_of_heads(device):
    q, k, v = draw((2, 6, 19, 16)), draw((2, 2, 40, 16), seed=1), draw((2, 2, 40, 16), seed=2)
    check(q, k, v, device=device, enable_gqa=True, is_causal=True)
    check(draw((3, 2, 1, 2, 9, 16)), *qkv((2, 1, 1), 9, 33, 16)[1:], device=device)


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_bands(device, band):
    """Blocks that are outside for all rows of a tile, rows that see no key at all."""
    for L, S in ((50, 50), (20, 130), (130, 20)):
        q, k, v = qkv((1, 2), L, S, 16)
        check(q, k, v, device=device, **band)


def test_excluded_keys_do_not_matter(device):
    """NaN and infinities of keys that only other rows of the tile see."""
    q, k, v = qkv((1, 2), 40, 40, 16)
    k[..., 20, 3], v[..., 30, 5], v[..., 33, 2] = np.nan, np.inf, np.nan
    result = check(q, k, v, device=device, is_causal=True)
    assert np.isfinite(result[..., :20, :]).all()
    assert np.isnan(result[..., 20:, :]).all()


# --- numbers --------------------------------------------------------------------------


def test_float64(device, monkeypatch):
    """Also where scores are beyond the range of the floats that bases are."""
    monkeypatch.setenv("CLATTN_LOCAL_MEMORY", "16384")
    q, k, v = qkv((1, 2), 40, 70, 16, dtype=float64)
    check(q, k, v, device=device)
    for factor in (1e25, -1e25):  # scores of 1e50
        right, _ = attention(q, k, v, scale=factor * 1e25)
        got = sdpa(q, k, v, device=device, scale=factor * 1e25)
        np.testing.assert_allclose(got, right.astype(float64), rtol=1e-14, atol=1e-14)


def test_a_large_value_with_a_late_high_score(device):
    """Weights above 1 on the way must not make a sum overflow that ends within range."""
    key, value = np.zeros((2, 41, 16), np.float32)
    key[40, 0], value[40] = 2.7, 1e38
    check(np.ones((1, 16), np.float32), key, value, device=device, scale=1.0)


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


# --- options --------------------------------------------------------------------------


def test_bool_masks(device):
    """Blocks that are excluded for a tile in between, rows without keys, rows and keys apart."""
    seen = draw((2, 1, 40, 140)) > -0.5
    seen[:, :, 16:32, 32:96] = seen[:, :, 5] = seen[1, :, :, 70:] = False
    q, k, v = qkv((2, 3), 40, 140, 16)
    k[1, :, 100], v[1, :, 120] = np.nan, np.inf
    for mask in (seen, seen[:, :, ::-1], seen[..., :1, :], seen[..., 8:9],
                 np.zeros((40, 140), bool)):  # fmt: skip
        check(q[0], k[0], v[0], device=device, attn_mask=mask[0] if mask.ndim == 4 else mask)
    check(q, k, v, device=device, attn_mask=seen, is_causal="lower_right")


def test_float_masks_and_softcap(device):
    """Numbers that add up to -inf exclude, the lowest float does not."""
    mask = draw((3, 40, 140))
    mask[:, 3], mask[:, :, 32:64], mask[0, 7] = LOWEST, -np.inf, -np.inf
    check(*qkv((2, 3), 40, 140, 16), device=device, attn_mask=mask, softcap=0.9)


def test_dropout(device):
    check_dropout(*qkv((1, 2), 20, 70, 16), device=device)
    check_dropout(*qkv((1, 2), 40, 40, 16), device=device, is_causal=True)


def test_scores_with_a_past(device):
    """Weights, present keys and values, a mask that ends before the keys, an empty row.

    Scores are in test_a_softcap_after_the_mask, the other stages in test_oclgrind.py.
    """
    q, k, v = qkv((1, 2), 20, 30, 16)
    past = qkv((1, 2), 20, 37, 16, seed=1)[1:]
    v[..., 25, 3] = np.nan
    mask = draw((20, 50)) > -1
    mask[7] = False
    check_onnx(q, k, v, mask, *past, device=device, is_causal=1,
               return_qk=True, qk_matmul_output_mode=3)  # fmt: skip


def test_key_counts(device):
    """They end the keys, and shift the band."""
    counts = np.array([1, 40, 70])
    for options in ({}, {"is_causal": 1}):
        q, k, v = qkv((3, 1), 20, 70, 16)
        check_onnx(q, k, v, None, None, None, counts, device=device, **options)


@pytest.mark.parametrize("numbers", [False, True])
def test_a_softcap_after_the_mask(device, numbers):
    """The order first published for ONNX: excluded keys have a score of -softcap and a weight."""
    q, k, v = qkv((1, 2), 20, 70, 16)
    mask = draw((20, 65)) + 1
    mask[:, 40:], mask[3] = -np.inf, -np.inf
    options = {"softcap": 0.9, "opset": 24, "pre_errata": True, "device": device}
    if numbers:
        past = qkv((1, 2), 20, 37, 16, seed=1)[1:]
        k, v = k[:, :, :33], v[:, :, :33]
        check_onnx(q, k, v, mask, *past, is_causal=1, return_qk=True, qk_matmul_output_mode=1,
                   **options)  # fmt: skip
    else:
        check_onnx(q, k, v, mask > 0, **options)


def test_another_dtype_of_values(device):
    q, k, _ = qkv((1, 2), 20, 40, 16)
    check_onnx(q, k, draw((1, 2, 40, 24), float16), device=device)


def test_biases_and_a_filter(device):
    """Biases of inputs and scores, key lengths, past and present keys, a number for a mask."""
    call = dict(
        query=draw((2, 20, 32)), key=draw((2, 30, 32)), value=draw((2, 30, 32)),
        bias=draw((96,)), relative_position_bias=draw((2, 2, 20, 35)), head_count=2, scale=0.3,
        past_key=draw((2, 2, 5, 16)), past_value=draw((2, 2, 5, 16)),
        mask=np.array([35, 17], np.int32), mask_type="key_sequence_length",
        mask_filter_value=-1.5,
    )  # fmt: skip
    answer = clattn.directml.multihead_attention(**call, device=device, return_present=True)
    compare(call, answer.output)
    presents = (answer.present_key, answer.present_value)
    for got, right in zip(presents, oracle.present(call), strict=True):
        assert got.tobytes() == right.tobytes()


# --- the choice -----------------------------------------------------------------------


def test_it_is_refused_where_it_cannot_run(device, monkeypatch):
    """Forced, it says what it takes."""
    refusal = 'CLATTN_KERNEL is "tiled", whose kernel takes head sizes of 1 to 512'
    with pytest.raises(ValueError, match=refusal):
        sdpa(*qkv((1,), 2, 3, 513), device=device)
    monkeypatch.setenv("CLATTN_LOCAL_MEMORY", "1000")
    with pytest.raises(ValueError, match=refusal):
        sdpa(*qkv((1,), 2, 3, 16), device=device)


@pytest.mark.parametrize("words", ["4", "64", "-8", "8 ", "all"])
def test_wrong_sub_groups_are_refused(device, monkeypatch, words):
    monkeypatch.setenv("CLATTN_SUB_GROUPS", words)
    with pytest.raises(ValueError, match=f'CLATTN_SUB_GROUPS is "{words}"; expected 0, 8'):
        sdpa(*qkv((1,), 2, 3, 16), device=device)


@pytest.mark.parametrize("words", ["0", "-1", "16k", "1e4", "9999999999"])
def test_wrong_local_memory_is_refused(device, monkeypatch, words):
    monkeypatch.setenv("CLATTN_LOCAL_MEMORY", words)
    with pytest.raises(ValueError, match=f'CLATTN_LOCAL_MEMORY is "{words}"; expected a number'):
        sdpa(*qkv((1,), 2, 3, 16), device=device)


def test_gpus_choose_it(device, monkeypatch):
    """On its own account it is for GPUs alone."""
    monkeypatch.delenv("CLATTN_KERNEL")
    arrays = qkv((1, 2), 40, 70, WIDE)
    chosen = sdpa(*arrays, device=device)
    monkeypatch.setenv("CLATTN_KERNEL", "cpu" if device.type == "cpu" else "tiled")
    np.testing.assert_array_equal(sdpa(*arrays, device=device), chosen)
