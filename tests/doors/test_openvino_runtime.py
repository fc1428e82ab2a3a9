# SPDX-License-Identifier: MIT
"""clattn.openvino beside OpenVINO's runtime on the CPU in float32, where it is installed.

Both have to be within the tolerance of the oracle, which is so checked by an independent witness.
What the runtime does not do (repeated batches, zeros in empty rows) is told apart here.
"""

import functools

import clattn
import numpy as np
import pytest
import references.openvino as oracle
from support.checks import assert_close
from support.data import draw

FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32"}  # by default it may compute in bfloat16


pytestmark = pytest.mark.usefixtures("reference_kernel")


def given(query, key, value, attention_mask=None, scale=None, causal=False):
    return {"arrays": (query, key, value), "attention_mask": attention_mask, "scale": scale,
            "causal": causal}  # fmt: skip


def tensors(leads, L=5, S=7, E=8, Ev=8):
    q, k, v = leads if isinstance(leads[0], tuple) else (leads, leads, leads)
    return draw((*q, L, E), seed=1), draw((*k, S, E), seed=2), draw((*v, S, Ev), seed=3)


def some_keys(shape):
    """A bool mask that leaves each row its first key, as the runtime has NaN for empty rows."""
    seen = draw(shape, seed=4) > 0
    seen[..., 0] = True
    return seen


USUAL = tensors((2, 3))
MASK = draw((5, 7), seed=5)
MINUS_INFINITY = np.where(some_keys((2, 1, 5, 7)), 0, -np.inf).astype(np.float32)
CASES = {
    "3-D": given(*tensors((2,))),
    "4-D": given(*USUAL),
    "5-D": given(*tensors((2, 1, 3))),
    "another Ev": given(*tensors((2, 3), Ev=5)),
    "tiles and rests": given(*tensors((1, 2), L=33, S=200)),
    "one key head": given(*tensors(((2, 4), (2, 1), (2, 1)))),
    "one batch of keys": given(*tensors(((3, 2), (1, 2), (1, 2)))),
    "one batch of queries": given(*tensors(((1, 3), (2, 3), (2, 3)))),
    "causal": given(*USUAL, causal=True),
    "causal, more queries": given(*tensors((2, 3), L=9), causal=True),
    "causal, mask ignored": given(*USUAL, draw((5, 7), seed=6), causal=True),
    "scale": given(*USUAL, MASK, scale=np.array(0.7, np.float32)),
    "scale of one element": given(*USUAL, MASK, scale=np.array([-0.7], np.float32)),
    "scalar 0": given(*USUAL, np.zeros((), np.float32)),
    "float mask": given(*USUAL, MASK),
    "float mask of 3 dimensions": given(*USUAL, draw((3, 5, 7), seed=7)),
    "float mask of 4 dimensions": given(*USUAL, draw((2, 1, 5, 7), seed=7)),
    "float mask of keys": given(*USUAL, draw((1, 3, 1, 7), seed=7)),
    "float mask with -inf": given(*USUAL, MINUS_INFINITY),
    "bool mask": given(*USUAL, some_keys((5, 7))),
    "bool mask of 4 dimensions": given(*USUAL, some_keys((2, 3, 5, 7))),
    "bool mask of keys": given(*USUAL, some_keys((2, 1, 1, 7))),
    "no queries": given(*tensors((2, 3), L=0)),
}  # fmt: skip


def runtime(arrays, attention_mask=None, scale=None, causal=False):
    """The operator as the only node of a model, compiled for the CPU."""
    openvino = pytest.importorskip("openvino")
    opset = pytest.importorskip("openvino.opset13")
    named = {"query": arrays[0], "key": arrays[1], "value": arrays[2]}
    named |= {"attention_mask": attention_mask, "scale": scale}
    named = {name: np.asarray(a) for name, a in named.items() if a is not None}
    nodes = {name: opset.parameter(list(a.shape), a.dtype) for name, a in named.items()}
    node = opset.scaled_dot_product_attention(**nodes, causal=causal)
    model = openvino.Model([node], list(nodes.values()))
    compiled = openvino.Core().compile_model(model, "CPU", FLOAT32)
    assert "float32" in str(compiled.get_property("INFERENCE_PRECISION_HINT"))
    return compiled(list(named.values()))[0].copy()


@functools.cache
def answer_of_the_runtime(name):
    """The runtime computes each case once, not once for every device."""
    return runtime(**CASES[name])


def split(case):
    """Positional and keyword arguments of oracle and operator."""
    arrays = case["arrays"]
    mask = () if case["attention_mask"] is None else (case["attention_mask"],)
    return (*arrays, *mask), {"scale": case["scale"], "causal": case["causal"]}


@pytest.mark.parametrize("name", CASES)
def test_the_runtime_agrees(device, name):
    args, options = split(CASES[name])
    theirs = answer_of_the_runtime(name)
    right, allowed = oracle.attention(*args, **options), oracle.tolerance(*args, **options)
    assert_close(theirs, right, allowed, "the runtime's result")
    ours = clattn.openvino.scaled_dot_product_attention(*args, **options, device=device)
    assert_close(ours, right, allowed)
    assert_close(ours, theirs.astype(np.float64), 2 * allowed)


REPEATED = {
    "the third example": ((1, 6, 5), (2, 2, 2), (4, 3, 10), (1, 2, 1)),
    "4 and 6 in 12": ((4,), (6,), (12,), (3,)),
}


@pytest.mark.parametrize("leads", REPEATED.values(), ids=REPEATED)
def test_repeated_batches_are_those_of_tensors_repeated_before(device, leads):
    """The runtime refuses them, so it is given what `numpy.tile` makes of them."""
    q, k, v = tensors(leads[:3], L=3, S=4)
    mask = draw((*leads[3], 3, 4), seed=8)
    with pytest.raises(RuntimeError, match="not compatible"):
        runtime((q, k, v), mask)
    lead = oracle.common_lead(*leads)
    tiled = [
        np.tile(a, [n // m for n, m in zip((*lead, 1, 1), (*a.shape[:-2], 1, 1), strict=True)])
        for a in (q, k, v, mask)
    ]
    theirs = runtime(tuple(tiled[:3]), tiled[3])
    ours = clattn.openvino.scaled_dot_product_attention(q, k, v, mask, device=device)
    assert_close(ours, theirs.astype(np.float64), 2 * oracle.tolerance(q, k, v, mask))
