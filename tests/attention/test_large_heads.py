# SPDX-License-Identifier: MIT
"""Head sizes around the columns that the reference kernel computes at a time, and the largest."""

import clattn
import numpy as np
import pytest
from references.attention import DTYPES, float32
from support.checks import check_attention
from support.data import draw, qkv, sdpa
from support.forced import force
from support.loops import looped

COLUMNS, KEYS = 64, 128  # CA_REFERENCE_COLUMNS and CA_REFERENCE_KEYS of kernels/attention/params.h
MOST = 65536


@pytest.mark.parametrize("S", [3, KEYS - 1, KEYS, KEYS + 1, 2 * KEYS + 3])
def test_columns_and_keys_around_a_block(device, monkeypatch, S):
    """Weights are kept from one part of a row's columns to the next, if its keys are one block."""
    force(monkeypatch, "reference")
    seen = draw((2, S), seed=3) > 0.5
    for Ev in (0, 1, COLUMNS - 1, COLUMNS, COLUMNS + 1, 2 * COLUMNS, 2 * COLUMNS + 1):
        q, k, v = qkv((1, 2), 2, S, 9, Ev)
        check_attention(q, k, v, device=device, is_causal="lower_right", sinks=q[0, :, 0, 0])
        same = np.broadcast_to(v[..., :1], v.shape)
        dropped = sdpa(q, k, same, device=device, dropout_p=0.4, seed=5)
        np.testing.assert_array_equal(dropped, np.broadcast_to(dropped[..., :1], dropped.shape))
        k[..., ~seen.any(0), :], v[..., ~seen.any(0), :] = np.nan, np.inf
        check_attention(q, k, v, device=device, attn_mask=seen)


@looped("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_the_largest_head_size(device, dtype):
    """Keys and values of stride 0 along the head, which take no memory."""
    q = draw((3, MOST), dtype)
    k, v = (np.broadcast_to(draw((5, 1), dtype, seed=n), (5, MOST)) for n in (1, 2))
    check_attention(q, k, v, device=device)
    check_attention(q, k, v, device=device, is_causal="lower_right")


def giant(*shape, size=MOST + 1):
    """An array without memory, whose last dimension is `size`."""
    return np.broadcast_to(np.float32(1), (*shape, size))


ONE = np.ones((1, 2, 3, 8), float32)
FLAT = np.ones((1, 3, 16), float32)
REFUSED = {
    "sdpa": ("query", lambda: sdpa(giant(3), giant(3), ONE[0, 0], device=None)),
    "sdpa, value": ("value", lambda: sdpa(ONE, ONE, giant(1, 2, 3), device=None)),
    "sdpa, no keys": ("value", lambda: sdpa(ONE, ONE[:, :, :0], giant(1, 2, 0), device=None)),
    "flex_attention": ("query", lambda: clattn.flex_attention(*[giant(1, 2, 3)] * 2, ONE)),
    "onnx": ("Q", lambda: clattn.onnx.attention(*[giant(1, 2, 3)] * 2, ONE)),
    "onnx, value": ("V", lambda: clattn.onnx.attention(ONE, ONE, giant(1, 2, 3))),
    "onnx, heads beside each other": ("V", lambda: clattn.onnx.attention(
        FLAT, FLAT, giant(1, 3, size=2 * MOST + 2), q_num_heads=2, kv_num_heads=2)),
    "openvino": ("query", lambda: clattn.openvino.scaled_dot_product_attention(
        *[giant(2, 3)] * 2, ONE[0])),
    "directml": ("query", lambda: clattn.directml.multihead_attention(
        *[giant(1, 3, size=2 * MOST + 2)] * 2, FLAT, head_count=2, scale=1.0)),
    "directml, value": ("value", lambda: clattn.directml.multihead_attention(
        FLAT, FLAT, giant(1, 3, size=2 * MOST + 2), head_count=2, scale=1.0)),
}  # fmt: skip


@looped("call", REFUSED)
def test_larger_head_sizes_are_refused(device, call):
    """By every function, whatever the kernel would be."""
    name, act = REFUSED[call]
    words = rf"^{name} has head size {MOST + 1} \(shape \(.*\)\); expected {MOST} at most$"
    with clattn.use_device(device), pytest.raises(ValueError, match=words):
        act()


@pytest.mark.parametrize("name", ["head_size", "v_head_size"])
def test_caches_of_larger_head_sizes_are_refused(device, name):
    given = {"head_size": 8, "v_head_size": 8, name: MOST + 1}
    with pytest.raises(ValueError, match=f"^{name} is {MOST + 1}; expected {MOST} at most$"):
        clattn.KVCache(1, 1, 0, **given, device=device)
    clattn.KVCache(1, 1, 0, **given | {name: MOST}, device=device)
