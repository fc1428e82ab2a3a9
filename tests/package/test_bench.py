# SPDX-License-Identifier: MIT
"""python -m clattn bench: what it measures, writes and refuses."""

import fnmatch
import json
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import clattn
import numpy as np
import pytest
from clattn._commands.bench import command, contest, limits, report
from clattn._commands.bench.gpu import ALL_GPU_ROWS
from clattn._commands.bench.peers import Call
from clattn._commands.bench.rows import MODEL_ROWS, ROWS, Row
from clattn._commands.main import main
from references.attention import attention
from rich.text import Text
from support.processes import png_size, run_cli


class Fake:
    """A peer that computes in NumPy, and may be wrong, fail, or not support anything."""

    name, version = "fake", "fake 1"

    def __init__(self, label, add=0.0, failure=None, supports=True):
        self.label, self.add, self.failure, self.supports = label, add, failure, supports

    def prepare(self, problem):
        if self.failure:
            raise RuntimeError(self.failure)
        if not self.supports:
            return None
        arrays = (problem.query, problem.key, problem.value)
        result = attention(*arrays)[0] + self.add
        return Call(lambda: None, lambda: result)


@pytest.fixture
def few_limits(monkeypatch):
    """Limits that are measured in no time, and so not what the device can do."""
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "LEAST_SECONDS", 1e-4)


@pytest.fixture
def fake_peer(monkeypatch, few_limits):
    """One in place of all that are installed."""
    monkeypatch.setattr(contest, "peer_classes", lambda on_gpu: [lambda stack: Fake("fake")])


def contestants(device, *peers):
    return contest.Contestants({"d": device}, peers, {"d": limits.Limits(device)}, {})


# --- a row in turn ---------------------------------------------------------------------------

PLAIN = Row("plain", (2, 3, 3, 40, 50, 16))


def test_a_peer_that_fails_or_is_wrong_is_left_out(device, few_limits):
    fakes = [
        Fake("good"),
        Fake("wrong", add=0.1),
        Fake("broken", failure="no such\nkernel"),
        Fake("absent", supports=False),
    ]
    rivals = contestants(device, *fakes)
    measured = contest.measure(PLAIN, rivals, 1)
    assert set(measured.seconds) == {"d", "good"}
    assert measured.best == "good"
    assert [note.partition(":")[0] for note in measured.notes] == ["wrong", "broken"]
    assert measured.notes[1] == "broken: no such kernel"
    assert measured.wrong == []


# --- limits ----------------------------------------------------------------------------------


@pytest.fixture
def kernels(device):
    pytest.importorskip("pyopencl")
    return limits.Kernels(device)


def test_multiply_adds(device, kernels):
    """x = x / 2 + 1 in every chain, from 0 … 11; twice the steps are twice the work."""
    for dtype in ("float32", "float64") if device.float64 else ("float32",):
        seconds, flop, means = kernels.fma(dtype, 100)
        assert seconds > 0 and flop > 0
        np.testing.assert_allclose(means, 2, rtol=1e-6)
        assert kernels.fma(dtype, 200)[1] == 2 * flop
        for steps, mean in ((0, 5.5), (1, 5.5 / 2 + 1)):
            np.testing.assert_allclose(kernels.fma(dtype, steps)[2], mean, rtol=1e-6)


@pytest.mark.cpus
def test_exponentials(kernels):
    """x = 2 ** -x in every chain ends near 0.6412, from 0 … 11 after a step near 0.1666."""
    for steps, mean in ((0, 5.5), (1, np.mean(2.0 ** -np.arange(12))), (60, 0.6411857445)):
        seconds, count, means = kernels.exp(steps)
        assert seconds > 0
        assert count == steps * kernels.fma("float32", 1)[1] / 2
        np.testing.assert_allclose(means, mean, rtol=1e-6)


@pytest.mark.parametrize(("size", "tiles"), [(1, 1), (3 << 19, 2), (5 << 20, 5), (9 << 20, 5)])
def test_reading(kernels, size, tiles, monkeypatch):
    """Whole tiles of ones, one tile at least, and at most as many as the array has."""
    monkeypatch.setattr(limits, "READ_BYTES", 5 << 20)
    for passes in (1, 3):
        seconds, count, sums = kernels.read(size, passes)
        assert seconds > 0
        assert count == 4 * sums.sum(dtype=np.float64) == (tiles << 20) * passes


@pytest.mark.parametrize("problem", ["pyopencl is not installed", "pyopencl lists 0 of"])
def test_without_limits(device, tmp_path, capsys, monkeypatch, fake_peer, problem):
    """The rows are measured, and a line says why their limits are not."""
    if "lists" in problem:
        pyopencl = pytest.importorskip("pyopencl")
        monkeypatch.setattr(pyopencl, "get_platforms", list)
    else:
        monkeypatch.setitem(sys.modules, "pyopencl", None)
    file = tmp_path / "bench.json"
    arguments = ("--rows", "tiny", "--rounds", 1, "--device", device.platform, "--json", file)
    assert bench(*arguments) == 0
    content = json.loads(file.read_text())
    [(words, about)] = content["devices"].items()
    assert about["fma"] == {}
    assert content["rows"][0]["results"][words]["limit_share"] is None
    assert content["missing"][f"limits of {words}"].startswith(problem)
    assert f"limits of {words}: {problem}" in " ".join(capsys.readouterr().out.split())


# --- the command -----------------------------------------------------------------------------


def bench(*arguments):
    return main(["bench", *map(str, arguments)])


def test_rows_on_a_device(device, tmp_path, capsys, fake_peer):
    """The table, the JSON and the chart; no line is wider than the table may be.

    A long device name is wrapped above the table, so it is compared without white space.
    """
    pytest.importorskip("pyopencl")
    file = tmp_path / "bench.json"
    status = bench("--rows", "tiny", "odd", "--rounds", 2, "--device", device.platform,
                   "--json", file, "--plot", tmp_path / "bench.png")  # fmt: skip
    said = capsys.readouterr().out
    assert status == 0
    assert "".join(device.name.split()) in "".join(said.split())
    assert re.search(r"^ *odd .*%", said, re.MULTILINE)
    assert said.index("odd") < said.index("tiny"), "in the table's order"
    assert max(map(len, said.splitlines())) <= 100
    content = json.loads(file.read_text())
    [(words, facts)] = content["devices"].items()
    assert facts["name"] == device.name
    assert facts["fma"]["float32"] > 0
    assert content["rounds"] == 2
    assert [row["name"] for row in content["rows"]] == ["odd", "tiny"]
    for row in content["rows"]:
        assert row["best_peer"] == "fake"
        result = row["results"][words]
        assert result["seconds"] > 0
        assert 0 < result["error"] <= row["allowed_error"]
        assert result["limit_share"] > 0
        assert row["wrong"] == row["notes"] == []
    png_size(tmp_path / "bench.png")


def test_all_devices_beside_every_peer(tmp_path):
    """As a user runs it; what is installed takes part."""
    file, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    said = run_cli("bench", "--rows", "tiny", "--rounds", 1, "--device", "all", "--json", file,
                   "--plot", picture).stdout  # fmt: skip
    content = json.loads(file.read_text())
    assert len(content["devices"]) == len(clattn.devices())
    [row] = content["rows"]
    assert set(row["results"]) == {*content["devices"], *content["peers"]}
    assert row["shape"] == {"B": 1, "Hq": 8, "Hk": 8, "L": 16, "S": 16, "E": 64}
    assert set(content["peers"]) | set(content["missing"]) == {
        p.label for p in contest.peer_classes()
    }
    for peer in content["peers"].values():
        assert peer["version"] in said
    if content["peers"]:
        assert row["best_peer"] in content["peers"]
        png_size(picture)


def test_without_peers_there_is_no_chart(tmp_path, capsys, monkeypatch, fake_peer):
    monkeypatch.setattr(contest, "peer_classes", lambda on_gpu: [])
    picture = tmp_path / "bench.png"
    assert bench("--rows", "tiny", "--rounds", 1, "--plot", picture) == 0
    assert "no chart" in capsys.readouterr().out
    assert not picture.exists()


def test_a_wrong_result_is_noticed(device, capsys, monkeypatch, tmp_path, fake_peer):
    right = clattn.scaled_dot_product_attention

    def wrong(*args, **options):
        return right(*args, **options) + np.float32(1e-4)

    monkeypatch.setattr(clattn, "scaled_dot_product_attention", wrong)
    file = tmp_path / "bench.json"
    arguments = ("--rows", "tiny", "--rounds", 1, "--device", device.platform, "--json", file)
    assert bench(*arguments) == 1
    said = capsys.readouterr().out
    assert "WRONG" in said
    assert json.loads(file.read_text())["rows"][0]["wrong"] != []


def test_patterns_choose_rows():
    assert [row.name for row in command._rows("*gqa")] == [
        row.name for row in (*ROWS, *ALL_GPU_ROWS) if row.name.endswith("gqa")
    ]


def test_models_are_a_group():
    assert command._rows("models") == list(MODEL_ROWS)


def test_a_row_of_models_stands_beside_contiguous_copies(tmp_path, capsys, fake_peer):
    file = tmp_path / "bench.json"
    assert bench("--rows", "whisper-cross", "tiny", "--rounds", 1, "--json", file) == 0
    assert "contiguous" in capsys.readouterr().out
    of_models, tiny = (row["results"] for row in json.loads(file.read_text())["rows"])
    assert any(
        result.get("beside_seconds", {}).get("contiguous", 0) > 0 for result in of_models.values()
    )
    assert not any("beside_seconds" in result for result in tiny.values())


@pytest.mark.parametrize("pattern", ["*", "*decode*"])
def test_list(capsys, pattern):
    assert bench("--list", "--rows", pattern) == 0
    said = capsys.readouterr().out
    names = [row.name for row in ROWS if fnmatch.fnmatch(row.name, pattern)]
    assert [line.split()[0] for line in said.splitlines()[1:]] == names


def test_rows_that_cannot_be_measured(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert bench("--rows", "llama-bf16") == 1
    assert "needs ml_dtypes: pip install ml_dtypes" in capsys.readouterr().err


@pytest.mark.parametrize("limit", ["fma", "product"])
def test_limits_that_fail(first_device, monkeypatch, limit):
    """The row is measured all the same, and a line says what has failed."""

    def fail(*args):
        raise RuntimeError("out of\nresources")

    monkeypatch.setattr(limits, "Kernels", lambda device: SimpleNamespace(fma=fail))
    fallible = {"d": limits.Limits(first_device, fail)}
    rivals = contest.Contestants({"d": first_device}, [], fallible, {})
    measured = contest.measure(replace(PLAIN, limit=limit), rivals, 2)
    assert measured.seconds["d"] > 0 and measured.limit_share("d") is None
    results = report.Results([measured], rivals, 2)
    assert "limits of d: out of resources" in report.notes(results)
    assert report.as_json(results)["missing"] == {"limits of d": "out of resources"}


def test_names_of_devices_are_no_markup(first_device):
    device = SimpleNamespace(name="[red]gfx90a[/]", platform="AMD [/]")
    rivals = contest.Contestants({"d": device}, [], {"d": limits.Limits(first_device)}, {})
    table = report.make_table("d", report.Results([], rivals, 1))
    assert Text.from_markup(table.title).plain == "[red]gfx90a[/] (AMD [/])"


@pytest.mark.parametrize(("arguments", "words"), [
    (["--rows", "no-such-row"], "names no row"),
    (["--rounds", "0"], "1 or more"),
    (["--rounds", "many"], "1 or more"),
    (["--no-such-option"], "usage"),
])  # fmt: skip
def test_wrong_arguments(arguments, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench(*arguments)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--plot", "--markdown"])
def test_a_file_that_cannot_be_written(option, tmp_path, capsys, monkeypatch):
    """It is refused before anything is measured."""
    monkeypatch.setattr(contest, "measure", None)
    for path in (tmp_path, tmp_path / "no" / "such"):
        assert bench("--rows", "tiny", option, path) == 2
        assert str(path) in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("package", "options"), [("rich", []), ("matplotlib", ["--plot"])])
def test_a_missing_library(package, options, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    assert bench("--rows", "tiny", *[a for o in options for a in (o, tmp_path / "a.png")]) == 1
    assert f'{package} is missing; install it with: pip install "rich>=13" "matplotlib>=3.9"' in (
        capsys.readouterr().err
    )
