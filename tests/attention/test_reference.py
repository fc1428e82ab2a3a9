# SPDX-License-Identifier: MIT
"""The oracle itself: against loops over the formula, and against torch in float64."""

import itertools
import math

import numpy as np
import pytest
from references.attention import DTYPES, attention, max_error, plain
from support.data import draw, qkv


def loops(query, key, value, mask=None, is_causal=False, window=None, softcap=0.0, scale=None):
    """One head, one row and one key at a time, from the text of api.md."""
    (L, E), (S, Ev) = query.shape, value.shape
    scale = 1 / math.sqrt(E) if scale is None else scale
    result, lse = np.zeros((L, Ev)), np.full(L, -np.inf)
    for i in range(L):
        p = i + S - L if is_causal == "lower_right" else i
        scores = {}
        for j in range(S):
            s = scale * sum(query[i, e] * key[j, e] for e in range(E))
            s = softcap * math.tanh(s / softcap) if softcap else s
            left, right = window or (None, None)
            if is_causal and j > p:
                continue
            if (left is not None and j < p - left) or (right is not None and j > p + right):
                continue
            if mask is not None and mask.dtype == bool and not mask[i, j]:
                continue
            if mask is not None and mask.dtype != bool:
                if mask[i, j] == -math.inf:
                    continue
                s += float(mask[i, j])
            scores[j] = s
        if scores:
            total = sum(math.exp(s) for s in scores.values())
            lse[i] = math.log(total)
            for j, s in scores.items():
                result[i] += math.exp(s) / total * value[j]
    return result, lse


CAUSAL = (False, True, "lower_right")
WINDOWS = (None, (1, 0), (None, 1), (2, None), (0, 0))
MASKS = ("none", "bool", "float")


@pytest.mark.parametrize("shape", [(5, 5), (3, 6), (6, 3)], ids=str)
def test_every_combination_agrees_with_loops(shape):
    L, S = shape
    q, k, v = (draw(shape, np.float64) for shape in ((L, 2), (S, 2), (S, 3)))
    masks = {
        "none": None,
        "bool": draw((L, S), seed=3) > 0,
        "float": np.where(draw((L, S), seed=4) > 1, -np.inf, draw((L, S), seed=5)),
    }
    for causal, window, kind, cap in itertools.product(CAUSAL, WINDOWS, MASKS, (0.0, 0.7)):
        options = {"is_causal": causal, "window": window, "softcap": cap, "scale": 0.9}
        got, lse = attention(q, k, v, attn_mask=masks[kind], **options)
        right, right_lse = loops(q, k, v, mask=masks[kind], **options)
        np.testing.assert_allclose(got, right, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(lse, right_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("kind", ["none", "bool", "float", "gqa", "broadcast"])
def test_agrees_with_torch(kind, causal):
    """Torch's own function in float64, the fused kernel's composition of mask and causal too."""
    torch = pytest.importorskip("torch")
    q, k, v = qkv((2, 4), 9, 9, 8, dtype=np.float64)
    options = {"is_causal": causal, "enable_gqa": kind == "gqa"}
    if kind == "gqa":
        k, v = k[:, :2], v[:, :2]
    if kind == "broadcast":
        k, v = k[:1], v[:1]
    if kind == "bool":
        options["attn_mask"] = (draw((9, 9)) > 0) | np.eye(9, dtype=bool)
    if kind == "float":
        options["attn_mask"] = draw((2, 1, 9, 9), np.float64)
    tensors = {n: torch.tensor(a) for n, a in options.items() if isinstance(a, np.ndarray)}
    got, _ = attention(q, k, v, **options)
    k, v = (np.ascontiguousarray(np.broadcast_to(a, (2, *a.shape[1:]))) for a in (k, v))
    right = torch.nn.functional.scaled_dot_product_attention(
        torch.tensor(q), torch.tensor(k), torch.tensor(v), **options | tensors
    )
    np.testing.assert_allclose(np.float64(got), right.numpy(), rtol=1e-12, atol=1e-12)


def test_what_api_md_says_of_special_numbers():
    """Excluded NaN does not matter, attended NaN shows, finfo.min rows and E = 0 are means."""
    q, k, v = qkv((1,), 3, 4, 2)
    k[0, 3], v[0, 3] = np.nan, np.inf
    seen = np.array([True, True, True, False])
    got, lse = attention(q, k, v, attn_mask=seen)
    right, right_lse = attention(q, k[:, :3], v[:, :3])
    np.testing.assert_allclose(got, right, rtol=1e-14)
    np.testing.assert_allclose(lse, right_lse, rtol=1e-14)
    assert np.isnan(attention(q, k, v)[0]).all()

    q, k, v = qkv((1,), 3, 4, 2)
    lowest = np.full((3, 4), np.finfo(np.float32).min, np.float32)
    mean = np.broadcast_to(v.mean(axis=-2, keepdims=True, dtype=np.float64), (1, 3, 2))
    np.testing.assert_allclose(attention(q, k, v, attn_mask=lowest)[0], mean, rtol=1e-12)
    np.testing.assert_allclose(attention(q[..., :0], k[..., :0], v)[0], mean, rtol=1e-12)
    got, lse = attention(q, k, v, attn_mask=np.zeros((3, 4), bool))
    assert not got.any() and np.isneginf(lse).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_is_near(dtype):
    """`plain` is the same function with roundings: no further off than its dtype explains."""
    q, k, v = qkv((2,), 17, 33, 8, dtype=dtype)
    error = max_error(plain(q, k, v)[0], attention(q, k, v)[0])
    limit = {"float64": 1e-15, "float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-2}[str(dtype)]
    assert 0 < error < limit
