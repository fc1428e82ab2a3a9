# SPDX-License-Identifier: MIT
"""The oracle of ONNX Attention itself: loops over its formula, numbers by hand, torch."""

import itertools
import math

import numpy as np
import pytest
from references.attention import DTYPES, max_error
from references.onnx import attention, joined_heads, plain, tolerances
from support.helpers import draw, qkv

B, HQ, HK, L, S, P = 2, 4, 2, 3, 5, 2


def loops(Q, K, V, mask=None, pk=None, pv=None, nonpad=None, is_causal=0, scale=None, softcap=0.0,
          left=-1, right=-1, opset=25, pre_errata=False):  # fmt: skip
    """One query, one key at a time, in Python's floats: Y and the four stages."""
    batches, heads, rows, width = Q.shape
    past = 0 if pk is None else pk.shape[2]
    total = past + K.shape[2]
    Y = np.zeros((batches, heads, rows, V.shape[3]))
    stages = np.zeros((4, batches, heads, rows, total))
    scale = 1 / math.sqrt(width) if scale is None else scale

    def cap(score):
        return softcap * math.tanh(score / softcap) if softcap else score

    for b, h, i in itertools.product(range(batches), range(heads), range(rows)):
        g = h // (heads // K.shape[1])

        def new_or_past(new, old, j, b=b, g=g):
            return old[b, g, j] if j < past else new[b, g, j - past]

        p = i + (past if nonpad is None else int(nonpad[b]) - rows)
        if pre_errata:
            p = i
        for j in range(total):
            score = scale * sum(Q[b, h, i] * new_or_past(K, pk, j))
            bias = 0.0 if mask is None else mask_at(mask, (b, h, i, j), opset)
            out = is_causal and j > p
            out = out or (left >= 0 and j < p - left) or (right >= 0 and j > p + right)
            out = out or (nonpad is not None and j >= nonpad[b])
            bias = -math.inf if out else bias
            if pre_errata:
                three = (score, score + bias, cap(score + bias))
            else:
                three = (score, cap(score), cap(score) + bias)
            stages[:3, b, h, i, j] = three
        last = stages[2, b, h, i]
        if (last > -math.inf).any():
            weights = np.exp(last - last.max())
            stages[3, b, h, i] = weights / weights.sum()
        for j in range(total):
            Y[b, h, i] += stages[3, b, h, i, j] * new_or_past(V, pv, j)
    return Y, stages


def mask_at(mask, place, opset):
    """What the mask adds there: aligned to the right; beyond its end -inf from 24 on."""
    place = list(place[4 - mask.ndim :])
    if place[-1] >= mask.shape[-1] and opset > 23:
        return -math.inf
    place = tuple(0 if n == 1 else i for i, n in zip(place, mask.shape, strict=True))
    value = mask[place]
    if mask.dtype == bool:
        return 0.0 if value else -math.inf
    return float(value)


def arrays(past):
    Q, K, V = draw((B, HQ, L, 2)), draw((B, HK, S, 2), seed=1), draw((B, HK, S, 3), seed=2)
    pk, pv = draw((B, HK, P, 2), seed=3), draw((B, HK, P, 3), seed=4)
    return tuple(a.astype(np.float64) for a in ((Q, K, V, pk, pv) if past else (Q, K, V)))


def masks(keys, opset):
    """Every kind and rank, short ones where they are allowed."""
    float_mask = np.where(draw((L, keys), seed=5) > 1, -np.inf, draw((L, keys), seed=6))
    yield None
    yield float_mask
    yield draw((keys,), seed=7) > -1
    yield draw((HQ, 1, keys), seed=8) > 0
    yield (draw((B, 1, L, 1), seed=9) * 3).astype(np.int64)
    if opset > 23:
        yield float_mask[:, : keys - 2]
        yield (draw((B, HQ, 1, keys - 1), seed=10) * 3).astype(np.int8)
        yield np.zeros((1, 0), np.uint8)


OPERATORS = [  # opset, what holds the cache, as first published
    (opset, cache, pre_errata)
    for opset in (23, 24, 25)
    for cache in ("none", "past", "nonpad")
    for pre_errata in (False, True)
    if (opset > 23 or cache != "nonpad") and (opset < 25 or not pre_errata)
]


@pytest.mark.parametrize(("opset", "cache", "pre_errata"), OPERATORS)
def test_every_combination_agrees_with_loops(opset, cache, pre_errata):
    windows = [(-1, -1), (1, 0), (0, -1), (-1, 1)] if opset == 25 else [(-1, -1)]
    given = arrays(cache == "past")
    keys = S + P if cache == "past" else S
    nonpad = np.array([S, 1]) if cache == "nonpad" else None
    every = itertools.product(masks(keys, opset), (0, 1), (0.0, 0.7), windows)
    for mask, causal, softcap, (left, right) in every:
        args = (*given[:3], mask, *(given[3:] or (None, None)), nonpad)
        common = {"is_causal": causal, "softcap": softcap, "scale": 0.9}
        common |= {"opset": opset, "pre_errata": pre_errata}
        Y, stages = loops(*args, **common, left=left, right=right)
        common |= {"left_window_size": left, "right_window_size": right}
        for mode in range(4):
            got = attention(*args, **common, qk_matmul_output_mode=mode)
            np.testing.assert_allclose(got.Y, Y, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(got.qk_matmul_output, stages[mode], rtol=1e-12, atol=1e-12)


def test_by_hand():
    """Two keys with scores 0 and ln 3: weights 1/4 and 3/4, then whatever comes in between."""
    Q = np.ones((1, 1, 1, 1))
    K = np.array([0, math.log(3)]).reshape(1, 1, 2, 1)
    V = np.array([4.0, 8.0]).reshape(1, 1, 2, 1)
    np.testing.assert_allclose(attention(Q, K, V).Y, 7)
    assert attention(Q, K, V, is_causal=1).Y == 4  # no past: the first key alone
    np.testing.assert_allclose(attention(Q, K[:, :, 1:], V[:, :, 1:], None, K[:, :, :1],
                                         V[:, :, :1], is_causal=1).Y, 7)  # fmt: skip
    lifted = np.array([math.log(3), 0.0])
    np.testing.assert_allclose(attention(Q, K, V, lifted).Y, 6)
    np.testing.assert_allclose(attention(Q, K, V, lifted[:1]).Y, 4)  # padded with -inf
    np.testing.assert_allclose(attention(Q, K, V, lifted[:1], opset=23).Y, 7)  # broadcast
    np.testing.assert_allclose(attention(Q, K, V, None, None, None, np.array([1])).Y, 4)
    assert attention(Q, K, V, None, None, None, np.array([0])).Y == 0
    assert attention(Q, K, V, np.zeros(0, bool)).Y == 0

    half = {"softcap": 0.5, "scale": 0.0}  # first published: -inf becomes -0.5, weight e**-0.5
    seen = np.array([True, False])
    masked = math.exp(-0.5) / (1 + math.exp(-0.5))
    old = attention(Q, K, V, seen, **half, opset=24, pre_errata=True).Y
    np.testing.assert_allclose(old, 4 + 4 * masked)
    np.testing.assert_allclose(attention(Q, K, V, seen, **half).Y, 4)


def test_three_dimensions_are_four_rearranged():
    Q, K, V, pk, pv = arrays(past=True)
    flat = [joined_heads(a) for a in (Q, K, V)]
    right = attention(Q, K, V, None, pk, pv, is_causal=1)
    got = attention(*flat, None, pk, pv, is_causal=1, q_num_heads=HQ, kv_num_heads=HK)
    np.testing.assert_array_equal(got.Y, joined_heads(right.Y))
    for mine, theirs in zip(got[1:], right[1:], strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_is_near(dtype):
    """No further off than its dtype explains; what is allowed is more than that, by little."""
    q, k, v = qkv((2, 2), 17, 33, 8, dtype=dtype)
    error = max_error(plain(q, k, v).Y, attention(q, k, v).Y)
    limit = {"float64": 1e-15, "float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-2}[str(dtype)]
    assert 0 < error < limit
    assert 2 * error <= tolerances(q, k, v).Y < 10 * limit
