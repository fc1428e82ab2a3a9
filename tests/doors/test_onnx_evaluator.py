# SPDX-License-Identifier: MIT
"""Models of ONNX that onnx's own evaluator runs, with Attention by clattn."""

from functools import partial

import clattn
import numpy as np
import pytest
from clattn import onnx as module
from support.data import draw
from support.processes import run_python

pytest.importorskip("onnx", "1.23")

import onnx
import onnx.inliner
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

# torch's exporter uses a name of torch that is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning")


@pytest.fixture
def calls(monkeypatch):
    """The options of the calls of clattn."""
    seen = []
    attention = module.attention

    def watch(*args, **options):
        seen.append(options)
        return attention(*args, **options)

    monkeypatch.setattr(module, "attention", watch)
    return seen


def make_model(inputs, outputs=("Y",), opset=25, **attributes):
    """One node, whose inputs are named by the arrays that are given."""
    node = helper.make_node("Attention", inputs, outputs, **attributes)
    info = partial(helper.make_tensor_value_info, shape=None)
    dtypes = {"M": TensorProto.BOOL, "N": TensorProto.INT64}
    graph = helper.make_graph(
        [node],
        "graph",
        [info(name, dtypes.get(name, TensorProto.FLOAT)) for name in inputs if name],
        [info(name, TensorProto.FLOAT) for name in outputs if name],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def run(model, arrays, device=None, **options):
    if device is not None:
        options = {"new_ops": clattn.onnx.reference_ops(device)}
    return ReferenceEvaluator(model, **options).run(None, arrays)


Q, K, V = draw((2, 4, 5, 8)), draw((2, 2, 7, 8)), draw((2, 2, 7, 6))
FLAT = {name: array.swapaxes(1, 2).reshape(2, array.shape[2], -1)
        for name, array in {"Q": Q, "K": K, "V": V}.items()}  # fmt: skip
HEADS = {"q_num_heads": 4, "kv_num_heads": 2}
MASK = np.random.default_rng(0).random((5, 7)) < 0.7
PAST = {"PK": draw((2, 2, 3, 8)), "PV": draw((2, 2, 3, 6))}
ALL = ("Y", "present_key", "present_value", "qk")
CASES = {
    "causal": ({}, {"is_causal": 1}),
    "softcap, scale": ({}, {"softcap": 0.5, "scale": 0.2}),
    "mask, opset 23": ({"M": MASK}, {"opset": 23}),
    "flat": (FLAT, HEADS),
    "all of flat": (FLAT, HEADS | {"outputs": ALL}),
    "past": (PAST, {"is_causal": 1, "outputs": ALL[:3]}),
    "presents alone": ({}, {"outputs": ALL[:3]}),
    "scores": ({}, {"outputs": ("Y", "", "", "qk"), "qk_matmul_output_mode": 3}),
    "lengths, window": ({"N": np.array([7, 4])}, {"left_window_size": 2}),
    "lengths, opset 24": ({"N": np.array([7, 4])}, {"is_causal": 1, "opset": 24}),
}


def test_models_of_one_node(device, calls):
    for name, (arrays, options) in CASES.items():
        arrays = {"Q": Q, "K": K, "V": V} | arrays
        inputs = ["Q", "K", "V"]
        for n, at in {"M": 3, "PK": 4, "PV": 5, "N": 6}.items():
            if n in arrays:
                inputs += [""] * (at - len(inputs)) + [n]
        model = make_model(inputs, **options)
        ours, theirs = run(model, arrays, device), run(model, arrays)
        assert calls[-1]["device"] == device, name
        assert len(ours) == len(theirs)
        for left, right in zip(ours, theirs, strict=True):
            assert left.dtype == right.dtype
            # both err by a few eps of numbers of a few units
            np.testing.assert_allclose(left, right, rtol=0, atol=4e-6, err_msg=name)


@pytest.mark.cpus
def test_the_scores_are_made_where_they_are_asked_for(calls):
    run(make_model(["Q", "K", "V"]), {"Q": Q, "K": K, "V": V}, "cpu")
    assert not calls[-1]["return_qk"]


def test_a_function_of_the_model(device, calls):
    """onnx hands new operators to the nodes of functions only once they are inlined."""
    node = helper.make_node("Attention", ["Q", "K", "V"], ["Y"])
    node.attribute.append(
        onnx.AttributeProto(name="scale", ref_attr_name="s", type=onnx.AttributeProto.FLOAT)
    )
    opsets = [helper.make_opsetid("", 25), helper.make_opsetid("local", 1)]
    function = helper.make_function(
        "local", "Attend", ["Q", "K", "V"], ["Y"], [node], opsets[:1], attributes=["s"]
    )
    model = make_model(["Q", "K", "V"])
    caller = helper.make_node("Attend", ["Q", "K", "V"], ["Y"], domain="local", s=0.25)
    model.graph.node[0].CopyFrom(caller)
    model = helper.make_model(model.graph, functions=[function], opset_imports=opsets)
    model = onnx.inliner.inline_local_functions(model)
    arrays = {"Q": Q, "K": K, "V": V}
    right = clattn.onnx.attention(Q, K, V, scale=0.25, device=device).Y
    np.testing.assert_array_equal(run(model, arrays, device)[0], right)
    assert len(calls) == 2


@pytest.mark.cpus
def test_what_clattn_refuses_reaches_the_user():
    with pytest.raises(ValueError, match="head"):
        run(make_model(["Q", "K", "V"]), {"Q": Q, "K": K[..., :7], "V": V}, "cpu")
    lengths = make_model(["Q", "K", "V", "", "", "", "N"], opset=23)  # which has none
    with pytest.raises(ValueError, match="nonpad_kv_seqlen"):
        run(lengths, {"Q": Q, "K": K, "V": V, "N": np.array([7, 4])}, "cpu")
    with pytest.raises(ValueError, match="no such device"):
        clattn.onnx.reference_ops("no such device")


def test_a_model_exported_by_torch(device, exported, calls):
    """Two layers, one with a mask and one causal."""
    model, arrays, right = exported
    nodes = [node.op_type for node in model.graph.node]
    assert nodes.count("Attention") == 2
    (result,) = run(model, arrays, device)
    assert len(calls) == 2
    np.testing.assert_allclose(result, right, rtol=0, atol=4e-6)


@pytest.fixture(scope="module")
def exported():
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")

    class Layers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inputs = torch.nn.Linear(16, 48)

        def forward(self, x, mask):
            for options in ({"attn_mask": mask}, {"is_causal": True, "scale": 0.3}):
                q, k, v = self.inputs(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
                y = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
                x = x + y.transpose(1, 2).flatten(2)
            return x

    torch.manual_seed(0)
    layers, given = Layers().eval(), (torch.randn(2, 5, 16), torch.rand(5, 5) < 0.7)
    with torch.no_grad():
        right = layers(*given).numpy()
        program = torch.onnx.export(
            layers, given, opset_version=23, dynamo=True, verbose=False,
            input_names=["x", "mask"],
        )  # fmt: skip
    return program.model_proto, {"x": given[0].numpy(), "mask": given[1].numpy()}, right


def test_without_onnx():
    code = r"""
        import sys, pytest
        import clattn
        assert "onnx" not in sys.modules
        sys.modules["onnx"] = None
        with pytest.raises(ImportError, match='pip install "onnx>=1.19"'):
            clattn.onnx.reference_ops()
    """
    run_python(code)
