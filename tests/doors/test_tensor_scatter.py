# SPDX-License-Identifier: MIT
"""clattn.onnx.tensor_scatter against NumPy, the ONNX project's node tests, and ONNX Runtime."""

import importlib
import warnings

import clattn
import ml_dtypes
import numpy as np
import pytest
from references.diagonal import assert_same
from references.onnx import tensor_scatter
from support.checks import native
from support.data import draw
from support.foreign import JAX, TORCH
from support.layouts import byte_swapped, fortran, misaligned, negative_everywhere, sliced
from support.loops import looped
from support.onnx_model import run_model
from support.processes import has_memory, run_on
from support.refusals import (
    NUMBERS,
    cases,
    check_without_opencl,
    of,
    refuse,
    refuse_without_opencl,
    wrong,
    wrong_arrays,
    wrong_shapes,
)

FLOAT8 = [n for n in dir(ml_dtypes) if n.startswith("float8_")]
DTYPES = NUMBERS | {name: getattr(ml_dtypes, name) for name in FLOAT8}


def scatter(*arrays, device, **options):
    """The result, which is compared with NumPy's. No input has changed."""
    before = [a.tobytes() for a in arrays]
    got = clattn.onnx.tensor_scatter(*arrays, device=device, **options)
    assert [a.tobytes() for a in arrays] == before
    assert_same(got, tensor_scatter(*map(native, arrays), **options))
    return got


def arrays_of(shape=(3, 2, 9, 5), n=4, axis=2, dtype=np.float32):
    """A cache and an update whose bytes are any."""
    rng = np.random.default_rng(0)
    size = np.dtype(dtype).itemsize
    update = (*shape[:axis], n, *shape[axis + 1 :])
    most = 2 if np.dtype(dtype) == bool else 256
    return [
        rng.integers(0, most, (*s[:-1], s[-1] * size), np.uint8).view(dtype)
        for s in (shape, update)
    ]


@pytest.mark.tensors
def test_modes_and_axes(device):
    """Places that differ, that are equal for neighbours, and that go round."""
    for axis in (1, 2, -1):
        shape = (6, 4, 3)
        size = shape[axis]
        past = draw(shape)
        for n in range(size + 1):
            update = draw(tuple(n if d == axis % 3 else s for d, s in enumerate(shape)), seed=n + 1)
            scatter(past, update, axis=axis, device=device)
            first = np.arange(6) // 2 % (size - n + 1)
            scatter(past, update, first, axis=axis, device=device)
            for far in (0, 10**9, 2**63 - 8):
                given = {"mode": "circular", "axis": axis, "device": device}
                scatter(past, update, np.arange(6) + far, **given)
                scatter(past, update, np.full(6, far + 1), **given)


def test_the_modulo_is_that_of_positions(device):
    """ONNX's first text took it of batches and heads too: onnx issue 8353."""
    past, update = np.full((3, 2, 1), -1, np.int64), np.arange(1, 4).reshape(3, 1, 1)
    got = scatter(past, update, axis=1, mode="circular", device=device)
    assert got[..., 0].tolist() == [[1, -1], [2, -1], [3, -1]]
    past, update = np.full((1, 5, 4, 1), -1, np.int64), np.arange(5).reshape(1, 5, 1, 1)
    got = scatter(past, update, np.array([6]), mode="circular", device=device)
    assert got[0, :, 2, 0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.tensors
@pytest.mark.by_turns
def test_large_caches(device):
    """The device's kernels copy them; smaller ones are the host's work."""
    for axis in (1, 2, 3):
        past, update = arrays_of((3, 48, 64, 50), 40, axis)
        scatter(past, update, np.array([30, 0, 1]), axis=axis, mode="circular", device=device)


@looped("name", DTYPES)
def test_every_dtype(device, name):
    """Bits are copied, also those of a bool."""
    past, update = arrays_of(dtype=DTYPES[name])
    got = scatter(past, update, np.array([5, 0, 2], np.int32), device=device)
    assert got.dtype == past.dtype
    if name == "bool":
        past, update = (np.full(a.shape, 7, np.uint8).view(bool) for a in (past, update))
        got = clattn.onnx.tensor_scatter(past, update, device=device)
        assert (got.view(np.uint8) == 7).all()


@looped("lay", [fortran, sliced, negative_everywhere, misaligned, byte_swapped])
def test_layouts(device, lay):
    past, update = arrays_of()
    scatter(lay(past), lay(update), np.array([5, 0, 2, 9])[:3], device=device)
    scatter(lay(past), past[:, :, 2:6], np.array([9, 5, 9, 0, 9, 2])[1::2], device=device)
    scatter(past, past[:, ::-1, 1:5], np.array([5, 0, 2]), device=device)
    scatter(past, np.broadcast_to(update[:1, :1, :1], update.shape), device=device)
    large, rows = arrays_of((2, 3, 90, 70), 40)
    scatter(lay(large), lay(rows), np.array([5, 50]), device=device)


def test_empty(device):
    for shape, n in (((0, 3, 4), 2), ((2, 0, 4), 0), ((2, 3, 0), 1), ((2, 3, 4), 0)):
        past = draw(shape)
        for mode in ("linear", "circular"):
            update = draw((shape[0], n, shape[2]), seed=1)
            indices = np.zeros(shape[0], np.int64)
            scatter(past, update, indices, axis=1, mode=mode, device=device)


def test_tensors(device):
    """Tensors give a Tensor, also beside arrays. A chain reads what calls before have written."""
    past, update = arrays_of((2, 3, 70, 130), 33)
    indices = np.array([20, 60])
    options = {"mode": "circular", "device": device}
    right = tensor_scatter(past, update, indices, mode="circular")
    tensors = [clattn.tensor(a, device) for a in (past, update, indices)]
    for given in (tensors, [tensors[0], update, indices], [tensors[0], tensors[1], indices]):
        got = clattn.onnx.tensor_scatter(*given, **options)
        assert type(got) is clattn.Tensor and got.device == device
        assert_same(got.numpy(), right)
    got = clattn.onnx.tensor_scatter(past, tensors[1], tensors[2], **options)
    assert type(got) is np.ndarray
    assert_same(got, right)
    got = tensors[0]
    for n in range(5):
        got = clattn.onnx.tensor_scatter(got, got[:, :, n : n + 3], indices - n, mode="circular")
        right = past if n == 0 else right
        right = tensor_scatter(right, right[:, :, n : n + 3], indices - n, mode="circular")
    assert_same(got.numpy(), right)
    assert_same(tensors[0].numpy(), past)


@pytest.mark.parametrize("library", [TORCH, JAX], ids=str)
def test_float8_of_other_libraries(first_device, library):
    past, update = arrays_of(dtype=ml_dtypes.float8_e5m2)
    right = tensor_scatter(past, update, np.array([5, 0, 2]))
    kind = pytest.importorskip("torch").uint8 if library is TORCH else "uint8"
    float8 = pytest.importorskip("torch").float8_e5m2 if library is TORCH else past.dtype
    given = [library.of(a.view(np.uint8)).view(float8) for a in (past, update)]
    got = clattn.onnx.tensor_scatter(*given, np.array([5, 0, 2]), device=first_device)
    assert got.dtype == float8
    library.check(got.view(kind), right.view(np.uint8))


@pytest.mark.by_turns
def test_memory_modes(device):
    """Arrays of the host, whose rows the device copies, lie between others."""
    code = """
    import doors.test_tensor_scatter as t
    assert device.memory_mode == sys.argv[2]
    t.test_tensors(device)
    for axis in (2, 3):
        past, update = t.arrays_of((3, 4, 70, 130), 33, axis)
        t.scatter(past, update, np.array([37, 0, 1]), axis=axis, device=device)
    """
    for mode in [mode for mode in ("svm", "host", "copy") if has_memory(device, mode)]:
        run_on(device, code, mode, env={"CLATTN_MEMORY": mode})


def test_a_cache_that_attention_reads(device):
    """Rows are written where lengths end, or once round: causality is that of places."""
    keys, values = draw((2, 3, 9, 8)), draw((2, 3, 9, 8), seed=1)
    lengths, rows = np.array([2, 6]), draw((2, 2, 3, 3, 8), seed=2)
    query = draw((2, 3, 3, 8), seed=3)
    cache = [clattn.onnx.tensor_scatter(a, r, lengths, device=device)
             for a, r in zip((keys, values), rows, strict=True)]  # fmt: skip
    options = {"is_causal": 1, "device": device}
    got = clattn.onnx.attention(query, *cache, nonpad_kv_seqlen=lengths + 3, **options).Y
    for b, n in enumerate(lengths):
        past = (a[b : b + 1, :, :n] for a in (keys, values))
        new = (r[b : b + 1] for r in rows)
        one = clattn.onnx.attention(query[b : b + 1], *new, None, *past, **options).Y
        np.testing.assert_allclose(got[b : b + 1], one, rtol=1e-5, atol=1e-6)
    cache = [clattn.onnx.tensor_scatter(a, r, lengths + 6, mode="circular", device=device)
             for a, r in zip((keys, values), rows, strict=True)]  # fmt: skip
    for a, r in zip(cache, rows, strict=True):
        np.testing.assert_array_equal(a[0, :, [8, 0, 1]], r[0].swapaxes(0, 1))
    got = clattn.onnx.attention(query, *cache, nonpad_kv_seqlen=np.array([9, 9]), **options).Y
    right = clattn.scaled_dot_product_attention(query, *cache, is_causal="lower_right",
                                                device=device)  # fmt: skip
    np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-6)


# ---- other implementations ----


def nodes():
    """The ONNX project's node tests: (arrays, attributes, result) by name."""
    pytest.importorskip("onnx", "1.19")
    helper = importlib.import_module("onnx.helper")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        node_cases = importlib.import_module("onnx.backend.test.case.node")
        importlib.import_module("onnx.backend.test.case.node.tensorscatter")
    found = {}
    for case in node_cases._NodeTestCases:
        if case.name.startswith("test_tensorscatter") and "expanded" not in case.name:
            ((arrays, (result,)),) = case.data_sets
            attributes = case.model.graph.node[0].attribute
            attributes = {a.name: helper.get_attribute_value(a) for a in attributes}
            found[case.name] = arrays, attributes, result
    return found


def words(attributes):
    """Attributes whose bytes are text."""
    return {n: a.decode() if isinstance(a, bytes) else a for n, a in attributes.items()}


def test_the_nodes_of_the_project(device):
    found = nodes()
    assert len(found) >= 3
    for arrays, attributes, result in found.values():
        assert_same(tensor_scatter(*arrays, **words(attributes)), result)
        scatter(*arrays, device=device, **words(attributes))


@pytest.mark.cpus
def test_a_model(device):
    """By onnx's evaluator, whose operator is clattn's."""
    helper = pytest.importorskip("onnx.helper")
    reference = pytest.importorskip("onnx.reference")
    past, update = arrays_of()
    for names, attributes in (
        (["P", "U", "W"], {"mode": "circular", "axis": -2}),
        (["P", "U"], {}),
    ):
        node = helper.make_node("TensorScatter", names, ["Y"], **attributes)
        kinds = {"P": 1, "U": 1, "W": 7, "Y": 1}
        told = {n: helper.make_tensor_value_info(n, kind, None) for n, kind in kinds.items()}
        graph = helper.make_graph([node], "graph", [told[n] for n in names], [told["Y"]])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)])
        given = dict(zip("PUW", (past, update, np.array([8, 0, 30])), strict=True))
        evaluator = reference.ReferenceEvaluator(model, new_ops=clattn.onnx.reference_ops(device))
        (got,) = evaluator.run(None, {n: given[n] for n in names})
        assert_same(got, tensor_scatter(*(given[n] for n in names), **attributes))


# ---- what is refused ----

BASE = {"past_cache": of("f4", 3, 2, 9, 5), "update": of("f4", 3, 2, 4, 5)}


def indices(*numbers, dtype=np.int64):
    return {"write_indices": np.array(numbers, dtype)}


CIRCULAR = {"mode": "circular"}
ROWS = [
    *wrong_arrays("past_cache", (3, 2, 9, 5), ["float32", "float8"], none=None),
    *wrong_arrays("update", (3, 2, 4, 5), ["float32"], none=None),
    *wrong_shapes("past_cache", "f4", (), (9,)),
    *wrong_shapes("update", "f4", (3, 2, 10, 5), (3, 2, 4, 4), (3, 1, 4, 5), (1, 2, 4, 5),
                  (2, 4, 5), (1, 3, 2, 4, 5)),
    ("more rows than the cache has, circular", ValueError, r"\bupdate\b",
     {"update": of("f4", 3, 2, 10, 5)} | CIRCULAR),
    ("two kinds of float8", TypeError, "update has dtype float8_e5m2; expected float8_e4m3fn",
     {"past_cache": of(ml_dtypes.float8_e4m3fn, 3, 2, 9, 5),
      "update": of(ml_dtypes.float8_e5m2, 3, 2, 4, 5)}),
    *wrong("axis", ValueError, 0, -4, 4, 2**63, -(2**63), 2**70),
    *wrong("axis", TypeError, None, True, 1.0, "2"),
    *wrong("mode", ValueError, "", "ring", "LINEAR", "circular\0"),
    *wrong("mode", TypeError, None, b"linear", 0),
    *wrong_arrays("write_indices", (3,), ["int32", "int64"]),
    *wrong_shapes("write_indices", np.int64, (), (2,), (4,), (3, 1), (1, 3)),
    ("a negative index", ValueError, r"write_indices\[1\] is -1; expected 0 to 5",
     indices(0, -1, 0)),
    ("a negative index, circular", ValueError, r"write_indices\[2\] is -1; expected 0 or more",
     indices(0, 0, -1) | CIRCULAR),
    ("an index behind the last", ValueError, r"write_indices\[0\] is 6; expected 0 to 5, as update",
     indices(6, 0, 0, dtype=np.int32)),
    ("an index near 2 ** 63", ValueError, "write_indices", indices(0, 0, 2**63 - 1)),
    ("the lowest index", ValueError, "write_indices", indices(0, -(2**63), 0) | CIRCULAR),
    ("an index behind the cache of no rows", ValueError, "write_indices",
     indices(0, 10, 0) | {"update": of("f4", 3, 2, 0, 5)}),
    *wrong("device", TypeError, 0.5),
]  # fmt: skip


@cases(ROWS)
def test_wrong_arguments(device, row):
    refuse(clattn.onnx.tensor_scatter, row, BASE)
    scatter(*BASE.values(), device=device)


def test_the_runtime_refuses_the_same():
    """ONNX Runtime's indices, lengths and axes."""
    runtime = pytest.importorskip("onnxruntime")
    names = "past_cache", "update", "write_indices"

    def run(changed):
        given = {"write_indices": np.zeros(3, np.int64)} | BASE | changed
        options = {n: a for n, a in given.items() if n not in names}
        return run_model("TensorScatter", {n: given[n] for n in names}, ["Y"], **options)[0]

    try:
        run({})
    except runtime.capi.onnxruntime_pybind11_state.NotImplemented:
        pytest.skip("this ONNX Runtime has no TensorScatter")
    for changed in (
        indices(0, -1, 0), indices(0, -1, 0) | CIRCULAR, indices(6, 0, 0), {"axis": 0},
        {"update": of("f4", 3, 2, 10, 5)} | CIRCULAR,
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"write_indices|axis|update"):
            clattn.onnx.tensor_scatter(**BASE | changed)
        with pytest.raises(Exception, match=r"\[ONNXRuntimeError\]"):
            run(changed)
    past, update = arrays_of()
    for changed in (indices(5, 0, 2), indices(5, 8, 30) | CIRCULAR):
        changed |= {"past_cache": past, "update": update}
        assert_same(clattn.onnx.tensor_scatter(**changed), run(changed))


def refuse_all():
    """Run by test_arguments_are_checked_before_opencl in a process that has no driver."""
    call = clattn.onnx.tensor_scatter
    refuse_without_opencl(lambda: call(**BASE), lambda: [refuse(call, row, BASE) for row in ROWS])


def test_arguments_are_checked_before_opencl(tmp_path):
    check_without_opencl("doors.test_tensor_scatter", tmp_path)


def test_a_result_too_large_for_memory(device):
    past = np.broadcast_to(np.float32(1), (2**23, 2**23, 1))
    with pytest.raises(MemoryError):
        clattn.onnx.tensor_scatter(past, past[:, :1], device=device)
    scatter(*BASE.values(), device=device)
