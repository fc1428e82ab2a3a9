# SPDX-License-Identifier: MIT
"""What type checkers say of results: mypy and pyright read this file, and nothing runs it."""

from typing import Any, assert_type

import clattn
import numpy as np
import pyopencl.array as cla
from clattn import Device, KVCache, Tensor, directml, onnx, openvino


def attention(x: np.ndarray, t: Tensor, some: bool) -> None:
    attend = clattn.scaled_dot_product_attention
    assert_type(attend(x, x, x), np.ndarray)
    assert_type(attend(x, t, t, out=x), np.ndarray)
    assert_type(attend(t, t, t, is_causal="lower_right", window=(3, None), device="cpu"), Tensor)
    assert_type(attend(x, x, x, return_lse=True), tuple[np.ndarray, Any])
    assert_type(attend(t, x, x, return_lse=True), tuple[Tensor, Tensor])
    assert_type(attend(t, t, t, return_weights=True), tuple[Tensor, Tensor])
    assert_type(attend(x, x, x, return_lse=True, return_weights=True)[2], np.ndarray)
    assert_type(attend(x, x, x, return_lse=some), Any)
    single = np.ones((2, 3, 8), np.float32)
    assert_type(attend(single, single, single).dtype, np.dtype[np.float32])


def flex(x: np.ndarray, t: Tensor) -> None:
    def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx >= kv_idx

    blocks = clattn.create_block_mask(causal, None, None, 64, 64)
    assert_type(blocks, clattn.BlockMask)
    assert_type(clattn.flex_attention(x, x, x, block_mask=blocks), np.ndarray)
    assert_type(clattn.flex_attention(t, t, t, mask_mod=causal, return_lse=True)[1], Tensor)
    assert_type(clattn.merge_attention([(t, x), (t, x)]), tuple[Tensor, np.ndarray])


def cache(x: np.ndarray, t: Tensor) -> None:
    kept = KVCache(1, 2, 100, 64, dtype="bfloat16")
    kept.append(x, t)
    kept.append(x, x, counts=np.array([1]))
    kept.truncate(np.array([0]))
    kept.reorder((0,))
    assert_type(kept.attend(x, None, True, score_mod=None, out=x), np.ndarray)
    assert_type(kept.attend(x), np.ndarray)
    assert_type(kept.attend(t, return_lse=True), tuple[Tensor, Tensor])
    assert_type(kept.key, Tensor)
    assert_type(kept.length, int)


def operators(x: np.ndarray, t: Tensor) -> None:
    assert_type(onnx.attention(t, t, t, is_causal=1).Y, Tensor)
    assert_type(onnx.attention(x, x, x), onnx.AttentionOutput[np.ndarray])
    assert_type(onnx.tensor_scatter(t, x), Tensor)
    assert_type(openvino.scaled_dot_product_attention(t, t, t), Tensor)
    assert_type(directml.multihead_attention(x, x, x, scale=1, head_count=2).output, np.ndarray)
    packed = directml.multihead_attention(stacked_query_key_value=x, scale=1, head_count=2)
    assert_type(packed.output, Any)
    assert_type(directml.diagonal_matrix(t, value=1, offset=0), Tensor)
    assert_type(directml.diagonal_matrix(sizes=(2, 2), dtype="f4", value=1, offset=0), np.ndarray)
    assert_type(
        directml.diagonal_matrix1(t, value=1, diagonal_fill_begin=0, diagonal_fill_end=1), Tensor
    )


def matrices(x: np.ndarray, t: Tensor) -> None:
    assert_type(clattn.tril(t), Tensor)
    assert_type(clattn.triu(x, 1, out=x), np.ndarray)
    assert_type(clattn.eye(3), np.ndarray)
    assert_type(clattn.diagonal_matrix((3, 3), 1, 0, 1), np.ndarray)
    assert_type(clattn.diagonal_matrix(t, 1, 0, 1), Tensor)
    assert_type(clattn.diagonal_matrix((3, 3), 1, 0, 1, out=t), Tensor)
    assert_type(clattn.diagonal_matrix(x, 1, 0, 1, out=x), np.ndarray)


def devices(x: np.ndarray) -> None:
    assert_type(clattn.tensor(x), Tensor)
    assert_type(clattn.tensor(x).to("cpu").T[0].numpy(), np.ndarray)
    assert_type(clattn.devices(), list[Device])
    assert_type(clattn.tensor(x, device=np.int64(0)), Tensor)
    with clattn.use_device("cpu") as device:
        assert_type(device, Device)
    assert_type(clattn.warm_up(["float32"]), float)


def refused(x: np.ndarray) -> None:
    """mypy and pyright find these mistakes: an ignore that nothing needs is an error."""
    clattn.scaled_dot_product_attention(x, x, x, mask=x)  # type: ignore[call-overload]
    clattn.scaled_dot_product_attention(x, x, x, layout="BSHD")  # type: ignore[call-overload]
    clattn.scaled_dot_product_attention([1.0], x, x)  # type: ignore[call-overload]
    clattn.KVCache(1, 2, 3)  # type: ignore[call-arg]
    directml.diagonal_matrix(x, offset=1)  # type: ignore[call-overload]


def pyopencl(x: cla.Array) -> None:
    assert_type(clattn.scaled_dot_product_attention(x, x, x), cla.Array)
