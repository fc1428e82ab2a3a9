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


@pytest.mark.parametrize("row", FLEX_ROWS, ids=BY_NAME)
def test_functions_are_what_the_check_against_float64_computes(row):
    """Called with NumPy's indices instead of symbols."""
    row = row.scaled(32)
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
def test_a_slow_row_gets_two_rounds(monkeypatch, seconds, rounds):
    done = []
    monkeypatch.setattr(contest, "take_turns", lambda runs, best: done.append(1))
    nobody = contest.Contestants({}, [], {}, {})
    row = FlexRow("small", (1, 1, 1, 16, 16, 16))
    contest.measure(row, nobody, 5, flex.flex_calls, seconds)
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
        assert result["beside_seconds"]["own"] > 0
        assert (result["first_seconds"] is not None) == (row["name"] == "alibi")


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


def test_the_table(first_device):
    """Ratios of torch's time and of clattn's own call, and first calls of both."""
    row = BY_NAME["alibi"]
    one = contest.Measured(row, 1.0, {"d": 1.0, "torch": 4.0}, {"d": 1e-6, "torch": 1e-6})
    one.best, one.beside, one.limits = "torch", {"d": {"own": 0.8}}, {"d": 1.6 * row.flop}
    mask = flex.MaskCost(32768, 0.099, 16 << 20)
    alone = {
        "d": flex.Alone({row.name: 1.5}, mask, {}),
        "torch": flex.Alone({row.name: 9}, None, {}),
    }
    torch = SimpleNamespace(label="torch", name="torch", version="torch 3")
    rivals = contest.Contestants(
        {"d": first_device}, [torch], {"d": limits.Limits(first_device)}, {}
    )
    results = report.Results([one], rivals, 1, alone)
    table = report.make_table("d", results)
    shown = {
        str(column.header).replace("\n", " "): Text.from_markup(*column.cells).plain
        for column in table.columns
    }
    assert shown == {"row": "alibi", "ms": "1000.0", "beside own": "1.25", "limit": "62%",
                     "best": "4.00", "torch": "4.00", "first s": "1.50", "torch's s": "9.00",
                     "error": "1e-06"}  # fmt: skip
    assert "d: create_block_mask, 32768 x 32768: 99 ms, 16.0 MiB" in report.notes(results)


def test_the_json_is_written_after_each_row(first_device, tmp_path, monkeypatch, without_torch):
    """A long run may be stopped."""
    file = tmp_path / "bench.json"
    monkeypatch.setattr(
        flex, "measure_alone", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    assert bench("--flex", "--rows", "alibi", "--scale", 256, "--rounds", 1,
                 "--device", first_device.platform, "--json", file) == 130  # fmt: skip
    [row] = json.loads(file.read_text())["rows"]
    assert row["name"] == "alibi"
