# SPDX-License-Identifier: MIT
"""attention/cpu.cl with pairs of bfloat16, by vectors and by AMX, besides the kernel contract.

Results are compared with float64, and where operators have no oracle here, with the reference
kernel in float64. Other devices convert bfloat16, as all other tests see.
"""

import clattn
import ml_dtypes
import numpy as np
import pytest
from references.attention import bfloat16, eps, judged, largest, max_error
from support.checks import assert_close, check_attention
from support.data import draw, qkv, sdpa
from support.launches import chosen
from support.loops import looped
from support.ragged import check_sequences, packed
from support.sizes import REST, WIDE
from support.variants import INSTRUCTIONS, force, force_or_skip, processor

HALF_AN_EPS = eps(bfloat16) / 2


@pytest.fixture(autouse=True, params=INSTRUCTIONS)
def word(device, monkeypatch, request):
    """The variant, where the device has its instruction."""
    force_or_skip(monkeypatch, device, request.param)
    return request.param


def test_they_are_chosen(device, word):
    """But not vectors of pairs on Intel's processors, which multiply floats faster.

    Where AMX can run, it comes first.
    """
    arrays = qkv((2, 3), 90, 200, 64, dtype=bfloat16)
    for forced in word, "cpu":
        assert chosen(forced, sdpa, *arrays, device=device) == forced
    fast = word != "pairs" or "GenuineIntel" not in processor()
    words = None if word == "amx" else "-amx"
    assert (chosen(words, sdpa, *arrays, device=device) == word) == fast


@pytest.mark.parametrize("word", ["pairs"], indirect=True)
def test_pairs_take_bfloat16_alone(device, word):
    with pytest.raises(ValueError, match='CLATTN_KERNEL is "pairs", whose kernel takes bfloat16'):
        sdpa(*qkv(), device=device)


def test_ranges(device):
    """Large numbers do not overflow, as 60 weights of more than 1 would make them."""
    limits = ml_dtypes.finfo(bfloat16)
    q, k, _ = qkv((1, 2), 40, 60, WIDE, dtype=bfloat16)
    for value in (2.0**121, 2.0**-100):
        got = sdpa(q, k, np.full((1, 2, 60, WIDE), value, bfloat16), device=device)
        np.testing.assert_allclose(got.astype(np.float64), value, rtol=float(limits.eps))
    far = (draw((1, 2, 40, WIDE)) * 1e15).astype(bfloat16)
    check_attention(far, k, draw((1, 2, 60, WIDE), bfloat16), device=device)


def test_error_is_that_of_rounding_the_weights(device):
    """By its root mean square, of enough rows that the check compares it."""
    arrays = qkv((1, 4), 128, 512, 64, dtype=bfloat16)
    assert np.isfinite(judged(*arrays, rounds_weights=True).allowed.rms)
    check_attention(*arrays, device=device)


@looped("layout", ["HND", "NHD"])
@looped("page_size", [None, 1, 2, 5, 16, 64])
def test_sequences(device, page_size, layout):
    """A block of pairs ends with its page, so even a few keys are several blocks."""
    for rows, keys in (([1, 33, 0, 90], [2, 40, 5, 90]), ([200], [300])):
        for E, Ev in ((8, 8), (WIDE, REST)):
            given = packed(rows, keys, 6, 2, E, Ev, bfloat16)
            check_sequences(given, device, page_size, layout, is_causal="lower_right")


def compare_with_reference(call, arrays, device, monkeypatch):
    """`call(arrays)` -> results, by pairs, beside the reference kernel in float64 and float32."""
    results = call(arrays)
    force(monkeypatch, "reference")
    right = call([a.astype(np.float64) for a in arrays])
    plain = call([a.astype(np.float32) for a in arrays])
    for got, exact, near in zip(results, right, plain, strict=True):
        rounded = near.astype(got.dtype).astype(np.float64)
        floor = largest(exact) * eps(got.dtype) / 2 + largest(exact) * HALF_AN_EPS / 16
        assert_close(got, exact, 2 * max_error(rounded, exact) + floor)


@pytest.mark.parametrize("size", [(20, 75, 33), (128, 300, 64)], ids=str)
def test_dropout(device, size, monkeypatch):
    """The same weights are dropped as by the reference kernel."""
    L, S, E = size

    def call(arrays):
        return [sdpa(*arrays, device=device, dropout_p=0.3, seed=11, is_causal=True)]

    compare_with_reference(call, qkv((2, 3), L, S, E, dtype=bfloat16), device, monkeypatch)


@pytest.mark.parametrize("mode", [1, 3])  # scores, and weights, which another pass writes
def test_past_present_and_scores(device, mode, monkeypatch, word):
    """Past and new keys meet within a pair: an odd number of each."""
    shapes = [(2, 4, 37, WIDE), (2, 2, 45, WIDE), (2, 2, 45, REST), (2, 2, 51, WIDE),
              (2, 2, 51, REST)]  # fmt: skip
    arrays = [draw(shape, bfloat16, n) for n, shape in enumerate(shapes)]

    def call(arrays):
        q, k, v, past_k, past_v = arrays
        return clattn.onnx.attention(
            q, k, v, None, past_k, past_v, is_causal=1, softcap=2.0, return_qk=True,
            qk_matmul_output_mode=mode, device=device)  # fmt: skip

    compare_with_reference(call, arrays, device, monkeypatch)
    force(monkeypatch, word)
    got = call(arrays)
    past_k, key = arrays[3], arrays[1]
    assert got.present_key.tobytes() == np.concatenate([past_k, key], axis=2).tobytes()
