# SPDX-License-Identifier: MIT
"""Numbers at the ends of their range, and arguments that misbehave while they are read."""

import clattn
import numpy as np
import pytest
from support.checks import check_attention
from support.data import qkv, sdpa
from support.loops import looped, looped_dtypes

pytestmark = pytest.mark.tensors


@looped("added", [False, True], ids=["products", "mask"])
def test_scores_that_jump(device, kernel, added):
    """A score may exceed all scores before it by thousands, in any chunk and block of keys."""
    q, k, v = qkv((1, 2), 40, 700, 8)
    jumps = np.zeros(700, np.float32)
    jumps[[5, 30, 31, 250, 690]] = 100, 300, 4000, 20000, 60000
    if added:
        check_attention(q, k, v, attn_mask=jumps, device=device, return_lse=True)
        return
    q[..., 0] = np.linspace(-1, 1, 40)
    k[..., 0] = jumps
    check_attention(q, k, v, device=device, return_lse=True)
    check_attention(q, k, v, device=device)


@looped("softcap", [1e-50, 1e-38, 3e38, 1e39, 1e300])
def test_softcaps_at_the_ends_of_float32(device, kernel, softcap):
    """One below every score makes all weights equal; one far above changes nothing."""
    q, k, v = qkv((1, 2), 5, 9, 8)
    right = sdpa(q * 0, k, v, device=device) if softcap < 1 else sdpa(q, k, v, device=device)
    got = sdpa(q, k, v, device=device, softcap=softcap)
    np.testing.assert_allclose(got, right, rtol=0, atol=1e-6)


@looped("name", ["scale", "softcap", "dropout_p"])
def test_a_whole_number_too_large_for_a_float(device, name):
    with pytest.raises(ValueError, match=name):
        sdpa(*qkv(), device=device, **{name: 10**400})


@looped_dtypes("dtype", ["float32", "float16"])
def test_a_scale_that_float32_does_not_hold(device, dtype):
    with pytest.raises(ValueError, match="scale"):
        sdpa(*qkv(dtype=dtype), device=device, scale=1e39)


def test_a_window_that_changes_while_it_is_read(device):
    q, k, v = qkv()

    class Bound(int):
        def __index__(self):
            window.clear()
            return 2

    class Plain:
        def __index__(self):
            window.clear()
            return 2

    for bound in (Plain(), Bound(2)):
        window = [bound, Plain()]
        got = sdpa(q, k, v, device=device, window=window)
        np.testing.assert_array_equal(got, sdpa(q, k, v, device=device, window=(2, 2)))


@looped("argument", ["query", "key", "value", "attn_mask"])
def test_an_empty_array_with_odd_strides(device, argument):
    """A field of a packed record, cut to nothing: its strides are no multiple of its size."""
    record = np.zeros((3, 2), [("a", "<f4"), ("b", "u1")])["a"]
    arrays = dict.fromkeys(("query", "key", "value"), np.ones((3, 2), np.float32))
    if argument in ("query", "key"):  # no columns: every score is 0
        arrays["query"] = arrays["key"] = record[:, :0]
        np.testing.assert_array_equal(
            clattn.scaled_dot_product_attention(**arrays, device=device), 1
        )
    elif argument == "value":
        arrays["value"] = record[:, :0]
        assert clattn.scaled_dot_product_attention(**arrays, device=device).shape == (3, 0)
    else:
        with pytest.raises(ValueError, match=r"attn_mask has shape \(3, 0\)"):
            clattn.scaled_dot_product_attention(**arrays, attn_mask=record[:, :0], device=device)


@looped_dtypes("dtype", ["float16", "float32", "float64"])
def test_subnormals(device, reference_kernel, dtype):
    """As numbers, as weights of a sum, as options: right, or zero where a device has none."""
    rng = np.random.default_rng(1)
    arrays = []
    for array in qkv((1, 2), 9, 33, 8, dtype=dtype):
        small = np.array(rng.integers(-999, 999, array.shape), f"i{array.itemsize}") & 0x3FF
        arrays.append(np.where(rng.random(array.shape) < 0.5, small.view(dtype), array))
    tiny = float(np.finfo(np.float32).smallest_subnormal)
    check_attention(*arrays, device=device)
    check_attention(*arrays, device=device, scale=tiny)
    check_attention(*arrays, device=device, attn_mask=np.full((9, 33), tiny, np.float32))
    check_attention(*arrays, device=device, sinks=np.full(2, tiny, np.float32))


@looped("words", ["cpu\0", "€" * 600, "\udc80", "cpu\ud800"], ids=ascii)
def test_words_for_a_device_that_are_no_text(device, words):
    for call in (
        lambda: clattn.scaled_dot_product_attention(*qkv(), device=words),
        lambda: clattn.set_default_device(words),
        lambda: clattn.tensor(np.ones(3), device=words),
    ):
        with pytest.raises(ValueError, match="device") as caught:
            call()
        assert caught.type is ValueError


def test_the_private_context_variable_with_something_else_in_it(device):
    token = clattn._core.device_override.set("cpu")
    try:
        with pytest.raises(TypeError):
            clattn.scaled_dot_product_attention(*qkv())
    finally:
        clattn._core.device_override.reset(token)
    check_attention(*qkv(), device=device)
