# SPDX-License-Identifier: MIT
"""clattn.onnx.attention against the ONNX project's own node tests for Attention.

Those of the installed `onnx` (1.23 or later: the corrected operator, clattn's default), and those
of onnx 1.19.1 (the operator as first published, `pre_errata=True`), which is unpacked beside the
environment. Every test is named after its node test; the counts have tests of their own.
"""

import importlib
import importlib.util
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import clattn
import numpy as np
import pytest
from references.attention import bfloat16
from references.onnx import attention, plain, rounded
from support.processes import no_opencl, run_python
from support.variants import force

pytestmark = pytest.mark.tensors

OLD_ROOT = Path(sys.prefix) / "onnx-1.19.1"
OLD_CASES = OLD_ROOT / "onnx" / "backend" / "test" / "data" / "node"
INSTALL_OLD = f"pip install --no-deps --target {OLD_ROOT} onnx==1.19.1"


class Node(NamedTuple):
    """One call of Attention and what the ONNX project says it returns."""

    opset: int
    arguments: list[Any]
    attributes: dict[str, Any]
    outputs: list[str]
    expected: list[np.ndarray]
    rtol: float = 1e-3  # of every node test, and the defaults of onnx's own runner
    atol: float = 1e-7


def node(model, inputs, expected, **tolerance):
    """Names that are empty stand for inputs and outputs that are left out."""
    from onnx.helper import get_attribute_value

    operator = model.graph.node[0]
    given = iter(inputs)
    arguments = [next(given) if name else None for name in operator.input]
    attributes = {a.name: get_attribute_value(a) for a in operator.attribute}
    opset = model.opset_import[0].version
    return Node(opset, arguments, attributes, list(operator.output), expected, **tolerance)


def collect():
    """Name -> Node for the installed onnx. Importing the module of one operator runs its cases."""
    if importlib.util.find_spec("onnx") is None:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = importlib.import_module("onnx.backend.test.case.node")
        importlib.import_module("onnx.backend.test.case.node.attention")
    found = {}
    for case in cases._NodeTestCases:
        if case.name.startswith("test_attention_") and "expanded" not in case.name:
            ((inputs, expected),) = case.data_sets
            found[case.name] = node(case.model, inputs, expected, rtol=case.rtol, atol=case.atol)
    return found


NODES = collect()
OLD_NAMES = sorted(
    path.name for path in OLD_CASES.glob("test_attention_*") if "expanded" not in path.name
)
CHOSEN = [  # run with the kernel that clattn chooses too: each combination is a program to build
    "test_attention_4d",
    "test_attention_4d_fp16",
    "test_attention_4d_causal",
    "test_attention_4d_softcap",
    "test_attention_4d_attn_mask",
    "test_attention_4d_attn_mask_bool",
    "test_attention_3d_gqa_with_past_and_present",
    "test_attention_4d_causal_with_past_and_present",
    "test_attention_4d_gqa_causal_nonpad_decode",
    "test_attention_4d_causal_nonpad_negative_offset_structural_empty",
]
# They combine is_causal and attn_mask in opset 23, whose text in that release forbids it. Two of
# them also align causality with the past, and expect -inf in qk_matmul_output accordingly.
OLD_REFUSED = [
    "test_attention_4d_attn_mask_3d_causal",
    "test_attention_4d_attn_mask_4d_causal",
    "test_attention_4d_with_past_and_present_qk_matmul_bias_3d_mask_causal",
    "test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask_causal",
]
COMBINED = r"is_causal|attn_mask"


@cache
def old_node(name):
    """A folder of onnx 1.19.1: the model, its inputs and outputs by number."""
    import onnx

    def tensors(kind):
        files = (OLD_CASES / name / "test_data_set_0").glob(f"{kind}_*.pb")
        files = sorted(files, key=lambda path: int(path.stem.split("_")[1]))
        return [onnx.numpy_helper.to_array(onnx.load_tensor(path)) for path in files]

    return node(onnx.load(OLD_CASES / name / "model.onnx"), tensors("input"), tensors("output"))


def need_new():
    if not NODES:
        pytest.skip("onnx is missing: pip install 'onnx>=1.23'")


def need_old():
    need_new()
    if not OLD_NAMES:
        pytest.skip(f"onnx 1.19.1 is missing: {INSTALL_OLD}")


def call(case, **options):
    """As the node asks: its opset, its attributes, the fourth output where it is named."""
    asked = len(case.outputs) > 3 and bool(case.outputs[3])
    options |= {"opset": case.opset, "return_qk": asked}
    return clattn.onnx.attention(*case.arguments, **case.attributes, **options)


def compare(case, answer):
    """As onnx's runner: the dtype, then rtol and atol, where bfloat16 has two units more."""
    named = [output for name, output in zip(case.outputs, answer, strict=False) if name]
    assert len(named) == len(case.expected)
    for got, wanted in zip(named, case.expected, strict=True):
        assert got.dtype == wanted.dtype
        assert got.shape == wanted.shape
        rtol = max(case.rtol, 2**-6) if wanted.dtype == bfloat16 else case.rtol
        got, wanted = got.astype(np.float64), wanted.astype(np.float64)
        np.testing.assert_allclose(got, wanted, rtol=rtol, atol=case.atol)


@pytest.mark.parametrize("name", NODES or ["onnx is missing"])
def test_node(device, reference_kernel, name):
    need_new()
    compare(NODES[name], call(NODES[name], device=device))


@pytest.mark.parametrize("name", CHOSEN)
def test_node_with_the_kernel_that_clattn_chooses(device, monkeypatch, name):
    need_new()
    force(monkeypatch)
    compare(NODES[name], call(NODES[name], device=device))


@pytest.mark.parametrize("name", OLD_NAMES or ["onnx 1.19.1 is missing"])
def test_node_as_first_published(device, reference_kernel, name):
    need_old()
    case = old_node(name)
    if name in OLD_REFUSED:
        with pytest.raises(ValueError, match=COMBINED):
            call(case, device=device, pre_errata=True)
    else:
        compare(case, call(case, device=device, pre_errata=True))


def test_at_least_93_node_tests():
    need_new()
    assert len(NODES) >= 93
    assert set(CHOSEN) <= set(NODES)
    assert {case.opset for case in NODES.values()} == {23, 24, 25}


def test_all_62_node_tests_as_first_published():
    """And the four that are refused are all that combine causality and a mask in opset 23."""
    need_old()
    assert len(OLD_NAMES) == 62
    nodes = {name: old_node(name) for name in OLD_NAMES}
    assert {case.opset for case in nodes.values()} == {23, 24}
    combined = [
        name
        for name, case in nodes.items()
        if case.opset == 23 and case.attributes.get("is_causal") and len(case.arguments) > 3
    ]
    assert combined == OLD_REFUSED


def test_the_oracle_passes_every_node_test():
    """The oracle gives what the ONNX project's node tests expect, so other tests may rely on it.

    Exactly, and rounded as a kernel would: so no node test asks for more than float32 can give.
    """
    need_old()
    old = {name: old_node(name) for name in OLD_NAMES if name not in OLD_REFUSED}
    for cases, pre_errata in ((NODES, False), (old, True)):
        for case in cases.values():
            options = case.attributes | {"opset": case.opset, "pre_errata": pre_errata}
            for oracle in (attention, plain):
                right = oracle(*case.arguments, **options)
                dtype = case.arguments[0].dtype
                qk = rounded(right.qk_matmul_output, dtype)
                compare(case, right._replace(Y=rounded(right.Y, dtype), qk_matmul_output=qk))


def test_nodes_that_are_refused_are_refused_without_opencl(tmp_path):
    """Run in a process without a driver: a node that is right fails for the want of a device."""
    need_old()
    code = """
        import clattn, pytest, doors.test_onnx_nodes as t
        for name in t.OLD_REFUSED:
            with pytest.raises(ValueError, match=t.COMBINED):
                t.call(t.old_node(name), pre_errata=True)
        with pytest.raises(clattn.DeviceError):
            t.call(t.NODES["test_attention_4d"])
    """
    run_python(code, env=no_opencl(tmp_path))
