# SPDX-License-Identifier: MIT
"""Every operator at least once, with small problems, on one device: results against the oracles.

Rows, head sizes and dtypes are selected so that each of them occurs with many rows and with one: a
cross product would build a program for each combination.
"""

import clattn
import numpy as np
import pytest
from references.attention import bfloat16, float16, float32, float64
from references.diagonal import assert_same
from references.directml import make
from references.flex import blocks
from support.cache_pair import Pair
from support.checks import check_attention, check_band
from support.data import draw, qkv, sdpa
from support.directml_calls import check_directml
from support.dropout_calls import check_dropout
from support.gradients import check_backward, grads
from support.mods import alibi, causal, check_flex
from support.onnx_calls import cache, check_onnx, inputs
from support.openvino_calls import check_openvino
from support.paged_pair import PagedPair
from support.ragged import check_sequences, packed
from support.tensors import same_bits

LEAD = (1, 2)
MANY = {"L": 20, "S": 50}
ONE = {"L": 1, "S": 400}  # so many keys that some devices split them; 1 MiB holds a head


def call_attention(device, has_float64=True):
    """Dtypes and head sizes, for many rows and for one."""
    bands = ({"is_causal": True}, {"window": (5, 2)}, {})
    for dtype, E in ((float32, 64), (float16, 80), (bfloat16, 128), (float64, 8), (float32, 520)):
        arrays = qkv(LEAD, **MANY, E=E, dtype=dtype)
        if dtype == float64 and not has_float64:
            with pytest.raises(clattn.DeviceError, match="float64"):
                sdpa(*arrays, device=device)
            continue
        for band in bands if E == 64 else bands[2:]:
            check_attention(*arrays, device=device, **band)
    for dtype, E in ((float32, 128), (float16, 64), (bfloat16, 8), (float64, 80), (float32, 520)):
        if dtype != float64 or has_float64:
            check_attention(*qkv(LEAD, **ONE, E=E, dtype=dtype), device=device)


def call_options(device):
    """Masks, softcap, sinks, dropout and weights, each with many rows; a mask with one row too."""
    q, k, v = qkv(LEAD, **MANY, E=8)
    check_attention(q, k, v, device=device, attn_mask=draw((20, 50)), softcap=3.0, sinks=draw((2,)),
                    query_offset=7)  # fmt: skip
    check_attention(q, k, v, device=device, attn_mask=draw((2, 20, 50)) > 0, return_weights=True)
    check_dropout(q, k, v, device=device)
    check_attention(*qkv(LEAD, **ONE, E=8), device=device, attn_mask=draw((400,)) > 0)


def call_flex(device):
    """Mods with and without blocks; create_block_mask against the oracle."""
    arrays = qkv(LEAD, **MANY, E=8)
    check_flex(*arrays, device=device, score_mod=alibi, mask_mod=causal)
    mask = clattn.create_block_mask(causal, None, None, 20, 50, device, 8)
    right = blocks(causal, None, None, 20, 50, 8)
    assert mask.shape == (1, 1, 20, 50)
    assert np.array_equal(mask.to_dense(), right > 0)
    check_flex(*arrays, device=device, score_mod=alibi, block_mask=mask)


def call_merge(device):
    """Results over two parts of the keys are the result over all keys."""
    q, k, v = qkv(LEAD, **MANY, E=64)
    parts = [sdpa(q, k[..., part, :], v[..., part, :], device=device, return_lse=True)
             for part in (slice(0, 7), slice(7, 50))]  # fmt: skip
    with clattn.use_device(device):
        out, lse = clattn.merge_attention(parts)
    right, right_lse = sdpa(q, k, v, device=device, return_lse=True)
    np.testing.assert_allclose(out, right, atol=1e-5)
    np.testing.assert_allclose(lse, right_lse, atol=1e-5)


def call_cache(device):
    """A prompt, a step and several rows; sequences exchanged and cut; codes."""
    pair = Pair(device, E=64, EV=64).append(9)
    pair.attend(9)
    pair.append(1).attend(1)
    pair.reorder([1, 0]).truncate(5).contents_agree()
    Pair(device, E=64, EV=64, dtype="int8").append(9, (9, 4)).contents_agree()


def call_sequences(device):
    """Packed sequences, pages of floats and of codes."""
    given = packed([20, 1], [50, 400], E=64)
    check_sequences(given, device, is_causal=True)
    check_sequences(given, device, page_size=16)
    pair = PagedPair(device, dtype="int8", E=64, EV=64)
    first, second = pair.open(2)
    pair.append([first, second], [9, 1])
    pair.append([pair.fork(first)], [2])
    output = pair.cache.attend(draw((10, 4, 64)), [second, first], [0, 1, 10])
    assert np.isfinite(output).all()


def call_matrices(device):
    """Bands of elements of each width; rows or columns that lie side by side."""
    wide = draw((3, 40, 70))
    for source in (wide, wide.swapaxes(1, 2), draw((2, 5, 7), np.float16), (9, 11)):
        check_band(source, 3, -2, 4, device=device)
    check_band(np.arange(600, dtype=np.int8).reshape(20, 30), 3, 4, -2, device=device)
    with clattn.use_device(device):
        assert_same(clattn.eye(5, 7), np.eye(5, 7, dtype=np.float32))
        assert_same(clattn.tril(wide, 2), np.tril(wide, 2))
        assert_same(clattn.triu(wide, -1), np.triu(wide, -1))


def call_doors(device):
    """The operators of ONNX, OpenVINO and DirectML."""
    check_onnx(*inputs(), None, *cache(), device=device)
    q, k, v = qkv(LEAD, **MANY, E=64)
    check_openvino(q, k, v, draw((20, 50)), device=device)
    check_directml(make(), device=device)
    check_directml(make("stacked_query_key_value", P=3, bias=True), device=device)
    matrix = draw((1, 1, 6, 9))
    band = clattn.directml.diagonal_matrix1(matrix, value=2.0, diagonal_fill_begin=0,
                                            diagonal_fill_end=2, device=device)  # fmt: skip
    assert_same(band, clattn.diagonal_matrix(matrix, 2.0, 0, 2, device=device))
    one = clattn.directml.diagonal_matrix(matrix, value=2.0, offset=1, device=device)
    assert_same(one, clattn.diagonal_matrix(matrix, 2.0, 1, 2, device=device))


def call_tensors(device):
    """Arrays in the device's memory: the same bits; views; copies of parts."""
    arrays = qkv(LEAD, **MANY, E=64)
    tensors = [clattn.tensor(array, device) for array in arrays]
    same_bits(sdpa(*tensors, device=device), sdpa(*arrays, device=device))
    same_bits(tensors[1][:, :, ::2], arrays[1][:, :, ::2])
    same_bits(clattn.tril(tensors[0]), np.tril(arrays[0]))


def call_gradients(device):
    arrays = qkv(LEAD, **MANY, E=64)
    check_backward(grads(*arrays), *arrays, device=device, is_causal=True)


def call_each_kernel(device):
    """Each kernel that GPUs have: many rows, one row, splits, a past, mask blocks, matrices."""
    call_gradients(device)
    check_attention(*qkv(LEAD, **MANY, E=64), device=device)
    check_attention(*qkv(LEAD, **MANY, E=64), device=device, return_weights=True)
    check_onnx(*qkv(LEAD, **MANY, E=64), None, *qkv(LEAD, 1, 3, 64)[1:], device=device)
    check_attention(*qkv(LEAD, **ONE, E=128), device=device)
    call_flex(device)
    call_matrices(device)


def call_few(device):
    """Many rows, one row and its splits, a matrix."""
    for length in (MANY, ONE):
        check_attention(*qkv(LEAD, **length, E=64), device=device)
    check_band((5, 7), 3, 0, 2, device=device)


def refuse_float64(device):
    """Each door to a computation in float64, and the words of its refusal."""
    said = f"this call computes in float64, which {device.name} cannot; use float32 or choose"
    wide, narrow = (qkv(LEAD, **MANY, E=8, dtype=dtype) for dtype in (float64, float32))
    cache = clattn.KVCache(1, 2, 60, 8, dtype=float64, device=device)
    cache.append(*wide[1:])
    calls = {
        "scaled_dot_product_attention": lambda: sdpa(*wide, device=device),
        "out": lambda: sdpa(*wide, device=device, out=np.empty_like(wide[0])),
        "Tensors": lambda: sdpa(*(clattn.tensor(a, device) for a in wide), device=None),
        "onnx, V": lambda: clattn.onnx.attention(*narrow[:2], wide[2], device=device),
        "onnx, softmax_precision": lambda: clattn.onnx.attention(
            *narrow, softmax_precision=11, device=device
        ),
        "flex_attention": lambda: clattn.flex_attention(*wide, alibi, device=device),
        "KVCache": lambda: cache.attend(wide[0]),
        "warm_up": lambda: clattn.warm_up(["float64"], ["decode"], device, head_sizes=[8]),
    }
    for name, call in calls.items():
        with pytest.raises(clattn.DeviceError) as caught:
            call()
        assert said in str(caught.value), name


def convert_float64(device):
    """Masks, sinks and tables of float64 are read as float32; matrices are copied."""
    q, k, v = qkv(LEAD, **MANY, E=8)
    mask = draw((20, 50), float64)
    check_attention(q, k, v, device=device, attn_mask=mask, sinks=draw((2,), float64))
    table = draw((3,), float64)
    check_flex(q, k, v, device=device,
               score_mod=lambda s, b, h, i, j: s + clattn.lookup(table, j % 3))  # fmt: skip
    # Numbers beyond float32's range saturate, so the lowest one excludes no key of a row that has
    # nothing else. Those below the range are 0.
    lowest, tiny = float(np.finfo(float64).min), 1e-300
    for number, kept in (
        (lowest, float(np.finfo(float32).min)),
        (-tiny, 0.0),
        (1 / 3, float(np.float32(1 / 3))),
        (1 + 2**-24, 1.0),  # halfway, to even
        (1 + 3 * 2**-24, 1 + 2**-22),
        (-np.inf, -np.inf),
        (np.nan, np.nan),
    ):
        one, zeros = np.full((1, 1), number), np.zeros((1, 8), np.float32)
        _, lse = sdpa(zeros, zeros, zeros, attn_mask=one, return_lse=True, device=device)
        np.testing.assert_array_equal(lse, np.float32(kept), err_msg=str(number))
    wide = draw((5, 7), float64)
    check_band(wide, 1 / 3, 0, 2, device=device)
    same_bits(clattn.tensor(wide, device).T, wide.T)


def call_every_operator(device, has_float64=True):
    call_attention(device, has_float64)
    for calls in (call_options, call_flex, call_merge, call_cache, call_sequences,
                  call_matrices, call_doors, call_tensors, call_gradients):  # fmt: skip
        calls(device)
