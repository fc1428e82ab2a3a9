# SPDX-License-Identifier: MIT
"""python -m clattn bench --rows train: its rows, the check of gradients, and its tables."""

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import clattn
import numpy as np
import pytest
from clattn._commands.bench import command, contest, figures, limits, report
from clattn._commands.bench.exact import PEER_FACTOR
from clattn._commands.bench.exact_gradients import exact_gradients
from clattn._commands.bench.flex import FlexRow, make_alibi
from clattn._commands.bench.rows import ROWS, TRAIN_TITLES, Row, draw
from clattn._commands.bench.training import TRAIN_ROWS, TorchTraining, train_calls
from clattn._commands.main import main
from references.flex_gradients import flex_gradients, forward
from references.gradients import judged
from rich.text import Text
from support.data import sdpa

SMALL = {
    "plain": Row("plain", (2, 3, 3, 40, 50, 16), trains=True),
    "causal": Row("causal", (1, 2, 2, 50, 50, 16), is_causal=True, trains=True),
    "groups": Row("groups", (2, 6, 3, 20, 20, 16), layout="projections", trains=True),
    "packed": Row("packed", (2, 3, 3, 50, 50, 16), layout="packed", trains=True),
    "padding": Row("padding", (4, 2, 2, 50, 50, 16), mask="padding", trains=True),
    "float mask": Row("float mask", (1, 2, 2, 40, 50, 16), mask="float", trains=True),
    "float16": Row("float16", (1, 2, 2, 40, 50, 16), "float16", trains=True),
    "bfloat16": Row("bfloat16", (1, 2, 2, 40, 50, 16), "bfloat16", trains=True),
}
small_rows = pytest.mark.parametrize("row", SMALL.values(), ids=SMALL)
ALIBI = FlexRow("alibi", (2, 3, 3, 20, 20, 16), alibi=True, trains=True)


@pytest.fixture
def few_limits(monkeypatch):
    """Limits that are measured in no time, and so not what the device can do."""
    monkeypatch.setattr(limits, "LEAST_SECONDS", 1e-4)


def bench(*arguments):
    return main(["bench", *map(str, arguments)])


# --- rows ------------------------------------------------------------------------------------


def test_the_rows():
    """Each has a title. None is measured without being asked for."""
    assert [row.name for row in TRAIN_ROWS] == list(TRAIN_TITLES)
    assert {row.name for row in TRAIN_ROWS}.isdisjoint(row.name for row in ROWS)
    assert all(row.trains for row in TRAIN_ROWS) and not any(row.trains for row in ROWS)
    assert command._rows("train") == command._rows("train*") == list(TRAIN_ROWS)


def test_five_products_of_the_backward_pass():
    plain, causal, padding = SMALL["plain"], SMALL["causal"], SMALL["padding"]
    assert plain.backward_flop == 10 * (2 * 3 * 40 * 50) * 16
    assert plain.flop == plain.backward_flop + replace(plain, trains=False).flop
    assert causal.backward_flop == 10 * (2 * 50 * 51 // 2) * 16
    assert padding.backward_flop == 10 * (2 * 50 * (50 + 40 + 30 + 22)) * 16


def test_the_mask_of_padding_is_the_same_for_all_queries():
    problem = draw(SMALL["padding"])
    assert problem.mask.shape == (4, 1, 1, 50)
    np.testing.assert_array_equal(problem.mask.sum(axis=-1).ravel(), [50, 40, 30, 22])


@pytest.mark.parametrize("layout", ["heads", "projections", "packed"])
def test_the_gradient_lies_as_a_model_has_it(layout):
    grad = draw(Row("r", (2, 3, 3, 5, 5, 8), layout=layout)).grad_output
    assert grad.shape == (2, 3, 5, 8)
    assert (grad if layout == "heads" else grad.swapaxes(1, 2)).flags.c_contiguous


# --- the check in the same run ---------------------------------------------------------------


@small_rows
def test_exact_gradients_are_those_of_the_reference(first_device, row):
    problem = draw(row)
    arrays = (problem.query, problem.key, problem.value)
    options = {"attn_mask": problem.mask, "is_causal": bool(row.is_causal),
               "enable_gqa": row.is_grouped}  # fmt: skip
    output, _ = sdpa(*arrays, device=first_device, return_lse=True, **options)
    right, allowed = judged(problem.grad_output, *arrays, output, **options)
    exact = exact_gradients(problem)
    assert len(exact.right) == 3
    for k, (heads, mine, each) in enumerate(zip(exact.heads, exact.right, exact.each, strict=True)):
        assert {0, arrays[k].shape[1] - 1} <= set(heads)
        np.testing.assert_allclose(mine, right[k][:, heads], rtol=1e-11, atol=1e-13)
        assert 0.25 < each.max() / allowed[k].each[:, heads].max() < 4


def test_exact_gradients_of_slopes():
    problem = draw(ALIBI)
    arrays = (problem.query, problem.key, problem.value)
    options = {"mod_of": make_alibi, "captured": [ALIBI.slopes]}
    output = forward(*arrays, **options).output
    right = flex_gradients(problem.grad_output, *arrays, output, **options)
    exact = exact_gradients(problem)
    for (gradient, allowed), heads, mine, each in zip(
        [*right[:3], right.captured[0]], exact.heads, exact.right, exact.each, strict=True
    ):
        own = (heads,) if mine.ndim == 1 else (slice(None), heads)
        np.testing.assert_allclose(mine, gradient[own].astype(float), rtol=1e-9, atol=1e-11)
        assert (each < allowed[own]).all()


@pytest.mark.by_turns
@pytest.mark.parametrize("row", [*SMALL.values(), ALIBI], ids=lambda row: row.name)
def test_clattn_is_right_and_errors_are_noticed(device, row):
    problem = draw(row)
    exact = exact_gradients(problem)
    call, alone = train_calls(problem, device)
    alone = alone["backward"]
    got = call.result()
    assert exact.is_right(got)
    assert 0 < exact.error(got) <= exact.allowed
    assert alone.run().query.tobytes() == got[0].tobytes()
    for k in range(len(got)):
        for wrong in (10 * exact.each[k].max(), np.nan):
            spoilt = [gradient.copy() for gradient in got]
            spoilt[k].reshape(-1)[-1] += wrong
            assert not exact.is_right(spoilt)
            assert exact.error(spoilt) > exact.error(got)


# --- torch -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch_peer():
    pytest.importorskip("torch")
    with ExitStack() as stack:
        yield TorchTraining(stack)


@small_rows
def test_torch_computes_the_same(torch_peer, row):
    problem = draw(row)
    exact = exact_gradients(problem)
    call = torch_peer.prepare(problem)
    assert exact.is_right(call.result(), PEER_FACTOR)
    call.run()
    assert exact.is_right(call.result(), PEER_FACTOR), "gradients of two calls are not added up"


def test_a_row_without_torch_is_noted(torch_peer, monkeypatch):
    """Its FlexAttention may have no backward pass, or no compiler; other rows need neither."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    measured = contest.measure(ALIBI, contest.Contestants({}, [torch_peer], {}, {}), 1)
    assert "torch" not in measured.seconds
    [note] = measured.notes
    assert note.startswith("torch: torch.compile needs a C++ compiler")


# --- the command -----------------------------------------------------------------------------


def test_rows_on_a_device(device, tmp_path, capsys, monkeypatch, few_limits):
    """The table, the JSON and the Markdown, where torch is missing."""
    pytest.importorskip("pyopencl")
    monkeypatch.setitem(sys.modules, "torch", None)
    file, table = tmp_path / "bench.json", tmp_path / "bench.md"
    status = bench("--rows", "train-causal", "train-alibi", "--scale", 64, "--rounds", 1,
                   "--device", device.platform, "--name", "this", "--json", file,
                   "--markdown", table)  # fmt: skip
    said = capsys.readouterr().out
    assert status == 0, said
    assert max(map(len, said.splitlines())) <= 100
    content = json.loads(file.read_text())
    [words] = content["devices"]
    for row, name in zip(content["rows"], ("train-causal", "train-alibi"), strict=True):
        assert (row["name"], row["trains"], row["wrong"]) == (name, True, [])
        result = row["results"][words]
        assert result["backward_seconds"] > 0 and result["seconds"] > 0
        assert 0 < result["error"] <= row["allowed_error"]
        share = row["flop"] * 10 / 14 / result["backward_seconds"] / result["limit"]
        assert result["limit_share"] == pytest.approx(share)
    lines = table.read_text().splitlines()
    assert lines[0] == "| call | this, ms | other, ms | best | limit |"
    assert lines[2].startswith(f"| {TRAIN_TITLES['train-causal']} | ") and " % |" in lines[2]


def test_a_wrong_gradient_is_noticed(first_device, capsys, monkeypatch, few_limits):
    right = clattn.scaled_dot_product_attention_backward

    def wrong(*args, **options):
        gradients = right(*args, **options)
        return gradients._replace(key=gradients.key + np.float32(1e-3))

    monkeypatch.setattr(clattn, "scaled_dot_product_attention_backward", wrong)
    monkeypatch.setitem(sys.modules, "torch", None)
    words = ("--rows", "train-plain", "--scale", 64, "--rounds", 1)
    assert bench(*words, "--device", first_device.platform) == 1
    assert "train-plain: WRONG" in capsys.readouterr().out


def test_rows_of_training_stand_alone(capsys):
    assert bench("--rows", "train", "tiny") == 2
    assert "the rows of 'train' are measured without others" in capsys.readouterr().err
    assert bench("--flex", "--rows", "train") == 2
    assert bench("--rows", "train", "--list") == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(TRAIN_TITLES)


def test_the_table(first_device):
    """The share of the limit is that of the backward pass."""
    row = SMALL["plain"]
    one = contest.Measured(row, 1.0, {"d": 1.0, "torch": 1.5}, {"d": 1e-6, "torch": 1e-6})
    one.best, one.beside, one.limits = (
        "torch",
        {"d": {"backward": 0.8}},
        {"d": 2.5 * row.backward_flop},
    )
    torch = SimpleNamespace(label="torch", name="torch", version="torch 3")
    rivals = contest.Contestants(
        {"d": first_device}, [torch], {"d": limits.Limits(first_device)}, {}
    )
    results = report.Results([one], rivals, 1, name="this")
    table = report.make_table("d", results)
    shown = {
        str(column.header).replace("\n", " "): Text.from_markup(*column.cells).plain
        for column in table.columns
    }
    assert shown == {"row": "plain", "ms": "1000.0", "backward ms": "800.0", "limit": "50%",
                     "best": "1.50", "torch ms": "1500.0", "error": "1e-06"}  # fmt: skip
    said = figures.as_markdown([report.as_json(results)], ["plain"]).splitlines()
    assert said[0] == "| call | this, ms | torch, ms | best | limit |"
    assert said[2] == "| plain | 1000 | 1500 | 1.5 | 50 % |"
