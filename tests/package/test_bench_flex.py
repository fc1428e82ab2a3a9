# SPDX-License-Identifier: MIT
"""python -m clattn bench --flex: its rows, its tables, and what it refuses."""

import json
import os
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
from clattn._commands import timing
from clattn._commands.bench import contest, flex, limits, report
from clattn._commands.bench.flex import FLEX_ROWS, FlexRow
from clattn._commands.bench.rows import scaled
from clattn._commands.main import main
from rich.text import Text

BY_NAME = {row.name: row for row in FLEX_ROWS}


@pytest.fixture
def without_torch(monkeypatch):
    """Limits in no time, and nothing to compare with."""
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "LEAST_SECONDS", 1e-4)
    monkeypatch.setitem(sys.modules, "torch", None)


def bench(*arguments):
    return main(["bench", *map(str, arguments)])


# --- rows ------------------------------------------------------------------------------------


def test_six_rows_of_two_lengths():
    assert len(BY_NAME) == len(FLEX_ROWS) == 12
    for suffix, length in (("", 2048), ("-8k", 8192)):
        rows = [BY_NAME[name + suffix] for name in
                ("plain", "alibi", "causal", "alibi-causal", "window", "documents")]  # fmt: skip
        assert {row.shape for row in rows} == {(1, 8, 8, length, length, 64)}
        assert [row.window for row in rows] == [None] * 4 + [256, None]
        assert [row.own for row in rows] == [
            None, {"is_causal": False}, {"is_causal": True}, {"is_causal": True},
            {"window": (256, 0)}, None,
        ]  # fmt: skip
        assert [row.most_beside for row in rows] == [None, 1.15, 1.1, None, None, None]


@pytest.mark.parametrize("row", FLEX_ROWS, ids=BY_NAME)
def test_functions_are_what_the_check_against_float64_computes(row):
    """Called with NumPy's indices instead of symbols."""
    row = scaled(row, 32)
    length = row.shape[3]
    score_mod, mask_mod = flex.make_mods(row, np.asarray)
    head, i, j = np.ogrid[:8, :length, :length]
    rows = np.array([0, 5, length - 1])
    bias = row.bias(rows)
    if score_mod is None:
        assert bias is None
    else:
        np.testing.assert_array_equal(score_mod(0, 0, head, i, j)[:, rows], bias)
    seen = np.ones((length, length), bool) if mask_mod is None else mask_mod(0, 0, i, j)[0]
    np.testing.assert_array_equal(row.attended(), seen)
    np.testing.assert_array_equal(row.attended(rows), seen[rows])
    assert row.flop == 8 * int(seen.sum()) * 4 * 64
    assert seen.diagonal().all()


def test_documents_of_several_lengths():
    lengths = np.bincount(BY_NAME["documents"].document_of)
    assert lengths.sum() == 2048
    assert len(set(lengths)) == len(flex.ENDS)


# --- rounds ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "rounds"), [(0, 2), (60, 5)])
def test_a_slow_row_gets_two_rounds(seconds, rounds):
    done = []
    nobody = contest.Contestants({}, [], {}, {})
    row = FlexRow("small", (1, 1, 1, 16, 16, 16))
    contest.measure(row, nobody, 5, lambda: done.append(1), flex.flex_calls, seconds)
    assert len(done) == rounds


@pytest.mark.parametrize(("limit", "calls"), [(0, 1), (60, 2)])
def test_a_long_call_is_a_turn(monkeypatch, limit, calls):
    done, best = [], {"call": np.inf}
    monkeypatch.setattr(timing, "LONG_SECONDS", limit)
    monkeypatch.setattr(timing, "TURN_SECONDS", 0)
    timing.take_turns({"call": lambda: done.append(1)}, best)
    assert len(done) == calls
    assert 0 < best["call"] < 60


# --- the command -----------------------------------------------------------------------------


def test_rows_on_a_device(first_device, tmp_path, capsys, without_torch):
    """The table, its lines and the JSON, where torch is missing."""
    file = tmp_path / "bench.json"
    status = bench("--flex", "--rows", "alibi", "causal-8k", "--scale", 256, "--rounds", 1,
                   "--device", first_device.platform, "--json", file)  # fmt: skip
    said = capsys.readouterr().out
    assert status == 0, said
    assert max(map(len, said.splitlines())) <= 100
    assert "torch: torch is not installed" in said
    assert "create_block_mask, 128 x 128" in said
    content = json.loads(file.read_text())
    [(words, facts)] = content["devices"].items()
    assert facts["failed"] == {}
    assert facts["block_mask"]["length"] == 128
    assert facts["block_mask"]["seconds"] > 0
    assert facts["block_mask"]["memory"] >= 0
    assert [(row["name"], row["shape"]["L"]) for row in content["rows"]] == [
        ("alibi", 16), ("causal-8k", 32)
    ]  # fmt: skip
    for row in content["rows"]:
        assert set(row["results"]) == {words}
        result = row["results"][words]
        assert 0 < result["error"] <= row["allowed_error"]
        assert result["seconds"] > 0
        assert result["beside_seconds"] > 0
        assert (result["first_seconds"] is not None) == (row["name"] == "alibi")
        [line] = [line for line in said.splitlines() if line.split()[:1] == [row["name"]]]
        assert "missing" in line


def test_a_process_that_fails_is_named():
    alone = flex.measure_alone("no such device", [BY_NAME["plain"], BY_NAME["plain-8k"]], 256)
    assert (alone.first, alone.mask) == ({}, None)
    assert list(alone.missing) == ["plain, first call", "create_block_mask"]
    for reason in alone.missing.values():
        assert "no such device" in reason


def test_each_process_has_empty_caches(monkeypatch):
    folders = []

    def run(command, *, env, **options):
        assert env["XDG_CACHE_HOME"] == env["POCL_CACHE_DIR"]
        assert os.listdir(env["XDG_CACHE_HOME"]) == []
        folders.append(env["XDG_CACHE_HOME"])
        said = "1.5" if command[-2] else "[128, 0.5, null]"
        return SimpleNamespace(returncode=0, stdout=said + "\n", stderr="")

    monkeypatch.setattr(flex.subprocess, "run", run)
    alone = flex.measure_alone("cpu", [BY_NAME["plain"], BY_NAME["alibi"]], 256)
    assert alone == flex.Alone({"plain": 1.5, "alibi": 1.5}, flex.MaskCost(128, 0.5, None), {})
    assert len(set(folders)) == 3
    alone = flex.measure_alone("torch", [BY_NAME["plain"]], 256)
    assert alone == flex.Alone({"plain": 1.5}, None, {})


def test_torch_needs_a_compiler(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with ExitStack() as stack:
        found, missing = contest.find_peers(stack, [flex.TorchFlex])
    assert found == []
    assert missing == {
        "torch": "torch.compile needs a C++ compiler, and there is no no-such-compiler"
    }


@pytest.mark.parametrize(("arguments", "words"), [
    (["--flex", "--gpu"], "--gpu and --flex"),
    (["--flex", "--scaling", "128"], "--flex"),
    (["--flex", "--rows", "tiny"], "none of --flex"),
    (["--rows", "alibi"], "none without --gpu or --flex"),
    (["--scale", "2"], "--flex"),
])  # fmt: skip
def test_options_that_do_not_fit(arguments, words, capsys):
    assert bench(*arguments) == 2
    assert words in capsys.readouterr().err


def test_list(capsys):
    assert bench("--flex", "--list") == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(BY_NAME)
    assert lines[3].endswith("causal, ALiBi")


# --- what is asked ---------------------------------------------------------------------------


def results_of(row, seconds, beside, first, torch_first, mask=None, limit=1.5):
    """Results of one row on a device "d", which takes 1 s, and 1 / `limit` s at its limit."""
    one = contest.Measured(row, 1.0, {"d": 1.0, "torch": seconds}, {"d": 1e-6, "torch": 1e-6})
    one.beside = {"d": 1 / beside}
    one.limits = {"d": limit * row.flop}
    alone = {
        "d": flex.Alone({row.name: first}, mask, {}),
        "torch": flex.Alone({row.name: torch_first}, None, {}),
    }
    return report.FlexResults([one], contest.Contestants({}, [], {}, {}), alone)


@pytest.mark.parametrize(("name", "figures", "verdicts"), [
    ("alibi", (4.0, 1.14, 1.0, 5.1), ["met", "1.15 met", "met"]),
    ("alibi", (3.9, 1.16, 1.0, 4.9), ["not met", "1.15 not met", "not met"]),
    ("causal-8k", (4.0, 1.09, 1.0, 5.1), ["met", "1.1 met", "met"]),
    ("causal", (4.0, 1.11, 1.0, 5.1), ["met", "1.1 not met", "met"]),
    ("window", (3.9, 9.0, 1.0, 5.1), ["not met", "", "met"]),
    ("plain", (2.6, 1.0, 1.0, 5.1), ["past limit", "", "met"]),
])  # fmt: skip
def test_what_is_asked_is_met_or_not(name, figures, verdicts):
    results = results_of(BY_NAME[name], *figures)
    [one] = results.measured
    cells = [Text.from_markup(cell).plain for cell in report._flex_cells("d", one, results)]
    assert [cells[place] for place in (5, 7, 10)] == verdicts
    assert cells[3] == f"{figures[0]:.2f}"
    assert cells[4] == f"{figures[0] * 1.5:.2f}"
    assert cells[6] == f"{figures[1]:.2f}"


def test_a_limit_that_is_not_known():
    results = results_of(BY_NAME["plain"], 2.6, 1.0, 1.0, 5.1, limit=0.0)
    [one] = results.measured
    cells = [Text.from_markup(cell).plain for cell in report._flex_cells("d", one, results)]
    assert cells[3:6] == ["2.60", "", "not met"]


@pytest.mark.parametrize(("seconds", "memory", "words"), [
    (0.099, (16 << 20) - 1, "99 ms (asked < 100: met), 16.0 MiB (asked < 16: met)"),
    (0.101, 16 << 20, "101 ms (asked < 100: not met), 16.0 MiB (asked < 16: not met)"),
    (0.099, None, "99 ms (asked < 100: met)"),
])  # fmt: skip
def test_what_is_asked_of_a_block_mask(seconds, memory, words):
    mask = flex.MaskCost(32768, seconds, memory)
    results = results_of(BY_NAME["causal"], 4.0, 1.0, 1.0, 9.0, mask)
    [line] = report.flex_notes("d", results)
    assert line == f"d: create_block_mask, 32768 x 32768: {words}"
