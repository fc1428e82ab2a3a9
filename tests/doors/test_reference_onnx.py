# SPDX-License-Identifier: MIT
"""The oracle of ONNX Attention itself: numbers by hand, and how near `plain` is.

test_onnx_nodes.py holds the oracle to the ONNX project's own node tests.
"""

import math

import numpy as np
import pytest
from references.attention import DTYPES, max_error
from references.onnx import attention, plain, tolerances
from support.data import qkv


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_is_near(dtype):
    """No further off than its dtype explains; what is allowed is more than that, by little."""
    q, k, v = qkv((2, 2), 17, 33, 8, dtype=dtype)
    error = max_error(plain(q, k, v).Y, attention(q, k, v).Y)
    limit = {"float64": 1e-15, "float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-2}[str(dtype)]
    assert 0 < error < limit
    assert error <= tolerances(q, k, v).Y.each.max() < 10 * limit
