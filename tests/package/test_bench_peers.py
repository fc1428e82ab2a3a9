# SPDX-License-Identifier: MIT
"""What bench measures and with what: rows, the check against float64, other implementations."""

import sys
from contextlib import ExitStack

import clattn
import numpy as np
import pytest
from clattn._commands.bench import contest, exact
from clattn._commands.bench.rows import MODEL_ROWS, ROWS, Row, contiguous, draw
from references.attention import attention, max_error, tolerance

SMALL = {
    "plain": Row("plain", (2, 3, 3, 40, 50, 16)),
    "float mask": Row("float mask", (2, 3, 3, 40, 50, 16), mask="float"),
    "bool mask": Row("bool mask", (2, 3, 3, 40, 50, 16), mask="bool"),
    "causal": Row("causal", (2, 3, 3, 50, 50, 16), is_causal=True),
    "window": Row("window", (1, 2, 2, 50, 50, 16), is_causal=True, window=7),
    "decode": Row("decode", (2, 4, 4, 1, 50, 16), limit="read"),
    "groups": Row("groups", (2, 4, 2, 1, 50, 16), limit="read"),
    "groups, rows": Row("groups, rows", (2, 4, 2, 3, 50, 16), limit="read"),
    "float16": Row("float16", (1, 2, 2, 40, 50, 16), "float16"),
    "bfloat16": Row("bfloat16", (1, 2, 2, 40, 40, 16), "bfloat16", is_causal=True),
    "float64": Row("float64", (1, 2, 2, 40, 50, 16), "float64"),
    "projections": Row("projections", (2, 4, 4, 40, 50, 16), layout="projections"),
    "projections, groups": Row("projections, groups", (2, 4, 2, 3, 50, 16),
                               is_causal="lower_right", layout="projections"),
    "packed": Row("packed", (2, 3, 3, 50, 50, 16), is_causal=True, layout="packed"),
    "stacked": Row("stacked", (1, 3, 3, 50, 50, 16), layout="stacked"),
    "padding": Row("padding", (4, 3, 3, 50, 50, 16), mask="padding", is_causal=True),
    "lowest": Row("lowest", (4, 3, 3, 50, 50, 16), mask="lowest", is_causal=True),
}  # fmt: skip
small_rows = pytest.mark.parametrize("row", SMALL.values(), ids=SMALL)


def options_of(problem):
    """A problem's options, for clattn and for the reference."""
    row = problem.row
    return {
        "attn_mask": problem.mask,
        "is_causal": False if row.is_padded else row.is_causal,
        "window": None if row.window is None else (row.window, 0),
        "enable_gqa": row.shape[1] != row.shape[2],
    }


# --- rows ------------------------------------------------------------------------------------


def test_rows_of_models_come_first():
    """In every layout that models have, and by every door whose inputs lie in one."""
    assert ROWS[: len(MODEL_ROWS)] == MODEL_ROWS
    assert not any(row.is_plain for row in MODEL_ROWS)
    assert {row.layout for row in MODEL_ROWS} == {"projections", "packed", "stacked"}
    assert {row.door for row in MODEL_ROWS} == {"torch", "onnx", "directml"}
    assert {row.shape[3] for row in MODEL_ROWS if row.is_grouped} == {1, 9, 16, 64, 1024}


@pytest.mark.parametrize("layout", ["projections", "packed", "stacked"])
def test_layouts(layout):
    """Views of one array whose heads lie side by side; copies are contiguous and equal."""
    row = Row("r", (2, 3, 3, 5, 5, 8), layout=layout)
    problem, copies = draw(row), contiguous(draw(row))
    for name in ("query", "key", "value"):
        view, copy = getattr(problem, name), getattr(copies, name)
        assert view.shape == copy.shape == (2, 3, 5, 8)
        assert view.strides[1] < view.strides[2] and copy.flags.c_contiguous
        np.testing.assert_array_equal(view, copy)
    assert copies.row.is_plain


@pytest.mark.parametrize("door", ["onnx", "directml"])
def test_doors_compute_the_same(device, door):
    layout = "projections" if door == "onnx" else "stacked"
    problem = draw(Row("r", (2, 3, 3, 5, 5, 8), layout=layout, door=door))
    right = exact.exact_rows(problem)
    assert right.error(contest.clattn_call(problem, device).result()) <= right.allowed


def test_what_is_counted():
    plain, causal = SMALL["plain"], SMALL["causal"]
    assert plain.flop == 2 * 3 * 40 * 50 * 4 * 16
    assert causal.flop == 2 * 3 * (50 * 51 // 2) * 4 * 16
    assert SMALL["window"].flop == 1 * 2 * (50 * 8 - 7 * 8 // 2) * 4 * 16
    assert SMALL["groups"].bytes_read == 2 * (2 * 2 * 50 * 16) * 4
    assert SMALL["float16"].bytes_read == 2 * (1 * 2 * 50 * 16) * 2


@small_rows
def test_shapes_and_dtypes_of_the_data(row):
    problem = draw(row)
    B, Hq, Hk, L, S, E = row.shape
    assert problem.query.shape == (B, Hq, L, E)
    assert problem.key.shape == problem.value.shape == (B, Hk, S, E)
    assert {a.dtype.name for a in (problem.query, problem.key, problem.value)} == {row.dtype}
    if row.mask is None:
        assert problem.mask is None
    else:
        assert problem.mask.shape == ((B, 1, L, S) if row.is_padded else (L, S))
        is_bool = row.mask in ("bool", "padding")
        assert problem.mask.dtype == (bool if is_bool else row.dtype)


# --- the check in the same run ---------------------------------------------------------------


@small_rows
def test_exact_rows_are_those_of_the_reference(row):
    problem = draw(row)
    arrays = (problem.query, problem.key, problem.value)
    right = exact.exact_rows(problem)
    whole, _ = attention(*arrays, **options_of(problem))
    assert {0, row.shape[3] - 1} <= set(right.rows)
    assert max_error(right.result, whole[:, :, right.rows]) < 1e-13
    rounds = problem.query.dtype.itemsize == 2  # as on matrix units
    allowed, _ = tolerance(*arrays, rounds_weights=rounds, **options_of(problem))
    assert 0 < right.allowed <= 2 * allowed.max()


def test_errors_are_noticed():
    problem = draw(SMALL["plain"])
    right = exact.exact_rows(problem)
    result = attention(problem.query, problem.key, problem.value)[0]
    assert right.error(result) < 1e-13
    for wrong in (1e-3, np.nan, np.inf):
        spoilt = result.copy()
        spoilt[1, 2, -1, 3] += wrong
        assert right.error(spoilt) > right.allowed
    assert right.error(result[:, :1]) > right.allowed
    assert right.error(result[..., :-1]) > right.allowed


# --- peers -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def peers():
    """Every peer that is installed, by its label; a device's driver is loaded before them."""
    clattn.devices()
    with ExitStack() as stack:
        yield {peer.label: peer for peer in contest.find_peers(stack, contest.peer_classes())[0]}


UNSUPPORTED = {
    "ORT Attn": {"bfloat16", "float64"},
    "ORT MHA": {"bool mask", "groups", "groups, rows", "bfloat16", "float64",
                "projections, groups", "padding"},
    "OpenVINO": {"float64", "projections, groups"},
    "JAX": set(),
    "torch": set(),
}  # fmt: skip
# Some versions of JAX refuse float16 on CPUs, and compute float64 in float32.
INEXACT = {("JAX", "float16"), ("JAX", "float64")}


@pytest.mark.parametrize("label", UNSUPPORTED)
@small_rows
def test_peers_compute_the_same(peers, label, row):
    """Each what is asked for, or nothing: support may grow, but not wrong results."""
    if label not in peers:
        pytest.skip(f"{label} is not installed")
    problem = draw(row)
    if row.name in UNSUPPORTED[label]:
        assert peers[label].prepare(problem) is None
        return
    if (label, row.name) in INEXACT:
        measured = contest.measure(row, contest.Contestants({}, [peers[label]], {}, {}), 1)
        is_noted = any(note.startswith(f"{label}: ") for note in measured.notes)
        assert is_noted != (label in measured.errors), "a wrong peer is left out with a note"
        return
    right = exact.exact_rows(problem)
    call = peers[label].prepare(problem)
    result = call.result()
    assert result.shape == problem.query.shape
    assert result.dtype == problem.query.dtype
    assert right.error(result) <= exact.PEER_FACTOR * right.allowed
    call.run()
    assert right.error(call.result()) <= exact.PEER_FACTOR * right.allowed


def test_a_package_that_is_missing_is_named(monkeypatch):
    for name in ("torch", "onnx", "openvino", "jax"):
        monkeypatch.setitem(sys.modules, name, None)
    with ExitStack() as stack:
        found, missing = contest.find_peers(stack, contest.peer_classes())
    assert found == []
    assert "torch is not installed" in missing["torch"]
    assert set(missing) == set(UNSUPPORTED)
