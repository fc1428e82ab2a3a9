# SPDX-License-Identifier: MIT
"""Sequences on matrix units, with keys packed or in pages. On CPUs the units are emulated."""

import clattn
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from references.attention import attention, bfloat16, float16, tolerance
from support.checks import assert_close
from support.data import draw, sdpa
from support.launches import launched_once
from support.ragged import check_sequences, in_pages, packed, run
from support.variants import with_kernels

pytestmark = pytest.mark.full

mma = with_kernels("mma")
decode_mma = with_kernels("decode_mma")


# Rows and keys of sequences: none, fewer than a tile has, several tiles and blocks. A page of
# 128 keys holds whole blocks, a smaller one a part of a block.
SEQUENCES = [5, 0, 1, 70, 20], [7, 4, 0, 150, 20]
BANDS_OF_SEQUENCES = (
    {},
    {"is_causal": True},
    {"is_causal": "lower_right"},
    {"window_size": (20, 3)},
    {"window_size": (9, -1), "is_causal": True},
)


@pytest.mark.parametrize("page_size", [None, 128, 16, 7])
@mma
def test_sequences(device, variant, warps, page_size):
    """Rows of pages that no sequence uses hold NaN. None is read, so no row is computed again."""
    given = packed(*SEQUENCES, Hq=2, Hk=1, E=64, dtype=float16)
    for options in BANDS_OF_SEQUENCES:
        check_sequences(given, device, page_size, **options)
        launched = launched_once(run, given, device, page_size, **options)
        assert [one.kernel for one in launched] == ["attention_mma"], options


@pytest.mark.parametrize("page_size", [None, 1, 32])
@mma
def test_sequences_of_odd_heads(device, variant, page_size):
    """Of an odd head size, whose rows are not aligned, with sinks and a softcap."""
    given = packed([40, 3], [50, 90], E=69, Ev=21, dtype=bfloat16)
    check_sequences(given, device, page_size, "NHD", softcap=2.0, scale=-0.3, is_causal=True)
    sinks = draw((4,), np.float32, 9)
    got = run(given, device, page_size, sinks=sinks)[0]
    for b in range(2):
        right = sdpa(*given.of(b), sinks=sinks, enable_gqa=True, device=device)
        np.testing.assert_array_equal(got[slice(*given.cu_seq_q[b : b + 2])].swapaxes(0, 1), right)


@mma
def test_pages_that_lie_apart_by_an_odd_number(device, variant):
    given = packed([20], [130], Hq=1, Hk=1, E=64, dtype=float16)
    key, value, table = in_pages(given, 64)
    apart = [np.zeros((len(p), p[0].size + 3), float16) for p in (key, value)]
    views = [as_strided(memory, p.shape, (memory.strides[0], *p.strides[1:]))
             for memory, p in zip(apart, (key, value), strict=True)]  # fmt: skip
    for view, pages in zip(views, (key, value), strict=True):
        view[...] = pages
    got = clattn.varlen_attn(given.query, *views, given.cu_seq_q, block_table=table,
                             seqused_k=[130], page_layout="HND", device=device)  # fmt: skip
    np.testing.assert_array_equal(got, run(given, device, 64)[0])


@mma
def test_mods_of_sequences(device, variant):
    """Positions and the number of a sequence, in its own keys."""
    given = packed([20, 3], [30, 90], dtype=float16, E=64)

    def near(score, b, h, q_idx, kv_idx):
        return score + 0.125 * (kv_idx - q_idx) + 0.25 * b

    def odd(b, h, q_idx, kv_idx):
        return (kv_idx + q_idx + b) % 3 != 0

    for page_size in (None, 16):
        got = run(given, device, page_size, score_mod=near, mask_mod=odd)[0]
        for b in range(2):
            query, key, value = given.of(b)
            rows = slice(*given.cu_seq_q[b : b + 2])
            i, j = np.arange(query.shape[1])[:, None], np.arange(key.shape[1])[None]
            bias = np.where((i + j + b) % 3 != 0, 0.125 * (j - i) + 0.25 * b, -np.inf)
            call = {"attn_mask": bias.astype(float16), "enable_gqa": True}
            right = attention(query, key, value, **call)[0]
            allowed = tolerance(query, key, value, rounds_weights=True, **call)[0]
            assert_close(got[rows].swapaxes(0, 1), right, allowed)


# --- few rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [None, 64, 7])
@decode_mma
def test_few_rows(device, variant, page_size):
    given = packed([1, 0, 3, 1], [300, 4, 70, 0], Hq=8, Hk=2, E=64, dtype=float16)
    for options in ({}, {"is_causal": "lower_right"}, {"window_size": (90, 0)}):
        check_sequences(given, device, page_size, **options)


@pytest.mark.parametrize("page_size", [None, 16])
@decode_mma
def test_keys_of_few_rows_are_split(device, variant, page_size):
    """Those of the longest sequence. A split has 256 KiB."""
    given = packed([1, 2, 1], [2600, 3, 90], Hq=4, Hk=1, E=64, dtype=float16)
    check_sequences(given, device, page_size)
    launched = [one.kernel for one in launched_once(run, given, device, page_size)]
    assert launched == ["attention_decode_mma", "attention_decode_gpu_merge"]
