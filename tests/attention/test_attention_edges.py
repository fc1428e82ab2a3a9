# SPDX-License-Identifier: MIT
"""Corners that no table of options holds: infinities that meet, input that changes meanwhile."""

import clattn
import numpy as np
import pytest
from references.attention import bfloat16, float32, float64
from support.checks import check_attention
from support.data import draw, qkv, sdpa
from support.processes import index_of, run_python
from support.variants import decode_for, forced

pytestmark = pytest.mark.tensors

LOWEST = np.finfo(np.float32).min


def test_no_query_heads_for_heads_of_keys(device):
    """There is no group for them, though 0 is a multiple of every number."""
    key = draw((1, 2, 5, 4))
    with pytest.raises(ValueError, match="Q has 0 heads"):
        clattn.onnx.attention(np.ones((1, 0, 3, 4), np.float32), key, key, device=device)


def test_an_infinite_score_makes_its_row_nan(device, kernel):
    """exp(inf - inf) is NaN, whichever way a row is computed; other rows are as ever."""
    query, key, value = np.ones((1, 1, 2, 8), np.float32), draw((1, 1, 3, 8)), draw((1, 1, 3, 8))
    key[0, 0, 1] = 1
    query[0, 0, 0] = np.inf
    mask = np.array([[True, True, True], [True, False, True]])
    for added in (None, mask):
        got = clattn.onnx.attention(
            query, np.abs(key), value, added, return_qk=True, qk_matmul_output_mode=3, device=device
        )
        assert np.isnan(got.Y[0, 0, 0]).all()
        assert np.isnan(got.qk_matmul_output[0, 0, 0]).all()
        assert np.isfinite(got.Y[0, 0, 1]).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_two_lowest_numbers_do_not_exclude(device, kernel, dtype):
    """finfo.min is a number, and so is the sum of two of them: the mean of the values."""
    value = draw((1, 4, 8), dtype)
    got = clattn.directml.multihead_attention(
        draw((1, 2, 8), dtype), draw((1, 4, 8), dtype), value, scale=1.0, head_count=1,
        mask=np.zeros((1, 4), np.int32), mask_type="boolean", mask_filter_value=float(LOWEST),
        relative_position_bias=np.full((1, 1, 2, 4), np.finfo(dtype).min, dtype), device=device,
    )  # fmt: skip
    right = value.astype(np.float64).mean(axis=1)
    np.testing.assert_allclose(got.output[0], np.repeat(right, 2, axis=0), atol=2e-3)


def test_an_excluded_key_stays_so_beside_an_infinite_bias(device, kernel):
    """-inf excludes in either of two addends, whatever the other one is."""
    bias = np.zeros((1, 1, 2, 4), np.float32)
    bias[..., 1] = -np.inf
    value = draw((1, 4, 8))
    spoilt = value.copy()
    spoilt[0, 1] = np.nan
    options = dict(scale=1.0, head_count=1, relative_position_bias=bias, device=device,
                   mask=np.array([[1, 0, 1, 1]], np.int32), mask_type="boolean",
                   mask_filter_value=5.0)  # fmt: skip
    query, key = draw((1, 2, 8)), draw((1, 4, 8))
    got = clattn.directml.multihead_attention(query, key, spoilt, **options).output
    right = clattn.directml.multihead_attention(query, key, value, **options).output
    np.testing.assert_allclose(got, right, rtol=1e-6)


@pytest.mark.parametrize("sizes", [(2, 3, 0, 3, 2, 3), (0,) * 6, (0, 2, 0, 2, 0, 2)], ids=str)
def test_empty_leading_dimensions_that_no_stride_joins(device, sizes):
    """More of them than kernels walk: query has every other one, key and value the rest."""
    q = draw([s if n % 2 else 1 for n, s in enumerate(sizes)] + [4, 8])
    k = draw([1 if n % 2 else s for n, s in enumerate(sizes)] + [5, 8])
    for dropout in (0.0, 0.5):
        got = sdpa(q, k, k, device=device, return_lse=True, dropout_p=dropout, seed=1)
        assert [x.shape for x in got] == [(*sizes, 4, 8), (*sizes, 4)]


@pytest.mark.parametrize("L", [1, 20, 100])
def test_no_columns_at_all(device, L):
    """Keys and values of no bytes: each score is 0, and the lse is the log of their number."""
    q, k, v = np.ones((3, L, 0), float32), np.ones((3, 7, 0), float32), np.ones((3, 7, 0), float32)
    result, lse = sdpa(q, k, v, device=device, return_lse=True)
    assert result.shape == (3, L, 0)
    np.testing.assert_allclose(lse, np.log(7), rtol=1e-6)


@pytest.mark.by_turns
@pytest.mark.cpus
@pytest.mark.arrays_only  # its own process has no Tensors
@pytest.mark.parametrize("name", ["reference", "cpu", "decode"])
def test_lengths_that_change_after_the_check(device, name):
    """Another thread writes wild lengths while the kernel runs: no crash, no hang.

    It writes the right one after each, so the check, which holds the GIL, mostly sees that.
    """
    run_python(
        """
        import sys, threading, clattn, numpy as np
        device = clattn.devices()[int(sys.argv[1])]
        heads, rows = (1, 100) if sys.argv[2] == "reference" else (8, 600)  # some ten milliseconds
        query = np.ones((1, heads, rows, 64), np.float32)
        key = np.ones((1, heads, 4000, 64), np.float32)
        lengths = np.array([4000])
        def attend():
            clattn.onnx.attention(query, key, key, None, None, None, lengths, is_causal=1,
                                  device=device)
        done, passed, written = threading.Event(), 0, 0
        def disturb():
            global written
            while not done.is_set():
                lengths[0] = -(2**63)
                lengths[0] = 4000
                written += 1
        attend()
        thread = threading.Thread(target=disturb)
        thread.start()
        try:
            while passed < 3:
                before = written
                try:
                    attend()
                except ValueError:  # the check saw a wild length
                    continue
                passed += written > before + 1000
        finally:
            done.set()
            thread.join()
        """,
        index_of(device),
        name,
        env=forced(decode_for(device) if name == "decode" else name),
        timeout=60,
    )


@pytest.mark.by_turns
@pytest.mark.arrays_only  # large, and the kernels are the same
@pytest.mark.parametrize("dtype", [float32, float64, bfloat16])
def test_keys_that_no_cache_holds(device, dtype):
    """Kernels ask for such keys ahead, the last time beyond the end of the array."""
    S = 20011 if dtype == bfloat16 else 9001
    heads = 8 if dtype == float32 else 1  # enough for tiles of four vectors, or quick
    q, k, v = qkv((heads,), 61, S, 64, dtype=dtype)
    check_attention(q, k, v, device=device)
    check_attention(q, k, v, device=device, window=(50, S - 40))
