# SPDX-License-Identifier: MIT
"""Heads that share a mask or a bias, in calls of enough heads and rows that kernels load these
once for several of them."""

import clattn
import numpy as np
import pytest
from references.attention import bfloat16, float16, float32, float64
from support.helpers import assert_close, check, draw, qkv
from support.sizes import WIDE

pytestmark = pytest.mark.tensors

LEAD, L, S, E = (3, 8), 41, 70, WIDE
MASKS = {
    "bool": lambda *shape: draw(shape, seed=9) > -0.3,
    "float": lambda *shape: np.where(draw(shape, seed=8) > 1, -np.inf, draw(shape)),
}


def mask_of(kind, *shape):
    return MASKS[kind](*shape).astype(bool if kind == "bool" else np.float32)


@pytest.mark.parametrize("lead", [(4, 5), (4, 8), (1, 16)], ids=str)
def test_numbers_of_heads(device, lead):
    """Some are divided into items of several, an odd number may be one item."""
    check(*qkv(lead, L, S, E), device=device, attn_mask=mask_of("float", L, S))


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"is_causal": "lower_right"},
        {"window": (9, 3)},
        {"softcap": 2.0},
        {"scale": -0.3},
    ],
    ids=str,
)
def test_options(device, kind, options):
    check(*qkv(LEAD, L, S, E), device=device, attn_mask=mask_of(kind, L, S), **options)


@pytest.mark.parametrize("shape", [(1, S), (3, 1, L, S), (3, 1, 1, S), (8, L, S), (3, 8, L, S)],
                         ids=str)  # fmt: skip
def test_shared_by_rows_batches_and_heads(device, shape):
    """The last two shapes have a mask for each head, which nothing shares."""
    check(*qkv(LEAD, L, S, E), device=device, attn_mask=mask_of("float", *shape))


@pytest.mark.parametrize("dtype", [float16, bfloat16, float32, float64])
def test_dtypes(device, dtype):
    q, k, v = qkv(LEAD, L, S, E, dtype=dtype)
    check(q, k, v, device=device, attn_mask=mask_of("bool", L, S))
    check(q, k, v, device=device, attn_mask=mask_of("float", L, S).astype(dtype))


def test_heads_of_a_group(device):
    q, k, v = qkv(LEAD, L, S, E)
    mask = mask_of("float", L, S)
    check(q, k[:, :2], v[:, :2], device=device, attn_mask=mask, enable_gqa=True)


def test_excluded_blocks_and_rows(device):
    """A block that the mask excludes for all rows, rows without a key, NaN where nobody looks."""
    q, k, v = qkv(LEAD, L, 300, E)
    mask = mask_of("bool", L, 300)
    mask[:, 96:250] = False
    mask[5] = False
    k[..., 100:240, :] = np.nan
    v[..., 100:240, :] = np.inf
    check(q, k, v, device=device, attn_mask=mask)


def test_a_nan_of_one_head_stays_there(device):
    q, k, v = qkv(LEAD, L, S, E)
    k[1, 4, 3] = np.nan
    result = check(q, k, v, device=device, attn_mask=np.ones((L, S), bool))
    assert np.isnan(result[1, 4]).all()
    assert not np.isnan(np.delete(result, 4, axis=1)).any()


def test_dropout_is_the_reference_kernels(device, monkeypatch):
    """Which weights are dropped is a matter of head and row, not of who computes them."""
    q, k, v = qkv(LEAD, L, S, E)
    options = {"attn_mask": mask_of("bool", L, S), "dropout_p": 0.4, "seed": 7}
    fast = clattn.scaled_dot_product_attention(q, k, v, device=device, **options)
    monkeypatch.setenv("CLATTN_KERNEL", "reference")
    slow = clattn.scaled_dot_product_attention(q, k, v, device=device, **options)
    assert_close(fast, slow, 2e-6)


def test_scores_and_past_of_each_head(device, monkeypatch):
    """ONNX: scores with a shared mask, past keys, and present ones, which are not shared out."""
    q, k, v = qkv(LEAD, L, S, E)
    past_k, past_v = draw((*LEAD, 20, E), seed=3), draw((*LEAD, 20, E), seed=4)
    mask = mask_of("float", L, S + 20)
    options = {"attn_mask": mask, "past_key": past_k, "past_value": past_v}
    for mode in (1, 3):
        options |= {"return_qk": True, "qk_matmul_output_mode": mode}
        fast = clattn.onnx.attention(q, k, v, device=device, **options)
        monkeypatch.setenv("CLATTN_KERNEL", "reference")
        slow = clattn.onnx.attention(q, k, v, device=device, **options)
        monkeypatch.delenv("CLATTN_KERNEL")
        for a, b in zip(fast, slow, strict=True):
            assert_close(a, b, 1e-5)


def test_a_bias_without_a_mask(device):
    """DirectML's relative position bias of one head's size, as the mask that is added."""
    q, k, v = (np.ascontiguousarray(a.swapaxes(1, 2).reshape(3, n, -1))
               for a, n in zip(qkv(LEAD, L, S, E), (L, S, S), strict=True))  # fmt: skip
    bias = np.broadcast_to(draw((1, 1, L, S)), (*LEAD, L, S))
    got = clattn.directml.multihead_attention(
        q, k, v, head_count=8, scale=0.25, relative_position_bias=bias, device=device
    )
    got = got[0] if isinstance(got, tuple) else got
    heads = [a.reshape(3, -1, 8, E).swapaxes(1, 2) for a in (q, k, v)]
    right = clattn.scaled_dot_product_attention(
        *heads, attn_mask=np.ascontiguousarray(bias[0, 0]), scale=0.25, device=device
    )
    assert_close(got.reshape(3, L, 8, E).swapaxes(1, 2), right, 2e-6)
