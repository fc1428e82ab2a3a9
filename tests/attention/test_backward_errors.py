# SPDX-License-Identifier: MIT
"""What scaled_dot_product_attention_backward refuses."""

import clattn
import numpy as np
import pytest
from references.attention import float32, float64
from support.data import qkv
from support.gradients import grads


def test_wrong_arguments():
    q, k, v = qkv((1, 2), L=5, S=6, E=4)
    output, lse = clattn.scaled_dot_product_attention(q, k, v, return_lse=True)
    G = grads(q, k, v)

    def call(**changed):
        given = {"grad_output": G, "query": q, "key": k, "value": v, "output": output, "lse": lse}
        return clattn.scaled_dot_product_attention_backward(**given | changed)

    wrong = [
        ({"grad_output": G[..., :3]}, ValueError, r"grad_output has shape \(1, 2, 5, 3\)"),
        ({"grad_output": G.astype(float64)}, TypeError, "grad_output has dtype float64; expected"),
        ({"output": output[:, :1]}, ValueError, "output has shape"),
        ({"lse": lse[..., :4]}, ValueError, r"lse has shape \(1, 2, 4\); expected \(1, 2, 5\)"),
        ({"lse": lse.astype(np.float16)}, TypeError, "lse has dtype float16; expected float32"),
        ({"lse": None}, TypeError, "lse must be"),
        ({"grad_lse": lse[0]}, ValueError, "grad_lse has shape"),
        ({"needs": "key"}, TypeError, r'needs must be a collection of names, got "key"'),
        ({"needs": 3}, TypeError, "needs must be a collection of names, got int"),
        ({"needs": ["keys"]}, ValueError, "needs has 'keys'; expected names of query, key"),
        ({"needs": ["attn_mask"]}, ValueError, 'needs has "attn_mask", but attn_mask is None'),
        ({"needs": ["sinks"]}, ValueError, 'needs has "sinks", but sinks is None'),
        ({"needs": ["attn_mask"], "attn_mask": np.ones(6, bool)}, TypeError, "of dtype bool"),
        ({"dropout_p": 0.5}, ValueError, "seed is None; expected that of the forward call"),
        ({"out": [q]}, TypeError, "out must be an AttentionGradients or a tuple of five"),
        ({"out": (q.copy(), None, None)}, TypeError, "out must be"),
        ({"out": (q, None, None, None, None)}, ValueError, "for query shares memory with query"),
        ({"out": (None, None, None, q.copy(), None)}, ValueError, "out has an array for attn_mask"),
        ({"out": (q[..., :2].copy(), None, None, None, None)}, ValueError, "out has shape"),
        ({"window": (-1, 0)}, ValueError, "window has the bound -1"),
    ]  # fmt: skip
    for changed, kind, message in wrong:
        with pytest.raises(kind, match=message):
            call(**changed)
    shared = np.empty((1, 2, 5, 4), float32)
    with pytest.raises(ValueError, match="out for value shares memory with that for query"):
        call(value=v[:, :, :5], key=k[:, :, :5], out=(shared, None, shared, None, None))
