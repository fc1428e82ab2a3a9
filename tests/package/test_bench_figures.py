# SPDX-License-Identifier: MIT
"""python -m clattn bench --markdown and --from: tables and charts of results that were written."""

import json
import re
import shlex

import pytest
from clattn._commands.bench import command, contest, figures, limits, report
from clattn._commands.bench.rows import GPU_ROWS, ROWS, TITLES
from clattn._commands.main import main
from support.processes import ROOT, png_size

DOCS = ROOT / "docs"
COMMAND = re.compile(r"python -m clattn bench (--from (?!.*--plot).*)")


def bench(*arguments):
    return main(["bench", *map(str, arguments)])


def result(name, best=None, **seconds):
    return {"name": name, "best_peer": best,
            "results": {who: {"seconds": time} for who, time in seconds.items()}}  # fmt: skip


def machine(name, *rows, **more):
    """What one run has written: a device, and two peers with a version."""
    device = {"name": "EPYC", "platform": "Intel", "driver_version": "2026.2"}
    peer = {"name": "peer", "version": "1.32"}
    return {"name": name, "processor": "AMD EPYC", "threads": 2, "clattn": "0.1",
            "date": "2026-11-25", "devices": {"cpu": device}, "peers": {"a": peer, "b": peer},
            "rows": rows, **more}  # fmt: skip


QUICK = machine("quick", result("tiny", "a", cpu=8e-6, a=6e-6, b=9e-6), result("odd", cpu=0.013))
SLOW = machine("slow", result("tiny", "b", cpu=2e-3, b=4e-3), result("llama", cpu=1.27))


@pytest.mark.parametrize(("number", "text"), [
    (0.75, "0.75"), (1.98, "2.0"), (0.996, "1.0"), (9.96, "10"), (19.4, "19"), (1273, "1300"),
    (0.008, "0.0080"),
])  # fmt: skip
def test_two_digits(number, text):
    assert figures.two_digits(number) == text


def test_machines_beside_each_other():
    names = figures.names_in([QUICK, SLOW], None)
    assert (
        figures.as_markdown([QUICK, SLOW], names)
        == f"""\
| call | quick, ms | best | slow, ms | best |
|---|---|---|---|---|
| {TITLES["tiny"]} | 0.0080 | 0.75 | 2.0 | 2.0 |
| odd | 13 |  |  |  |
| {TITLES["llama"]} |  |  | 1300 |  |

- quick: AMD EPYC; 2 threads each; Intel 2026.2; 1.32; clattn 0.1; 2026-11-25.
- slow: AMD EPYC; 2 threads each; Intel 2026.2; 1.32; clattn 0.1; 2026-11-25.
"""
    )


def test_devices_of_a_machine_have_their_platforms():
    device = {"name": "H200", "platform": "NVIDIA", "driver_version": "580"}
    both = machine("both", result("tiny", cpu=1e-3, gpu=2e-3),
                   devices=SLOW["devices"] | {"gpu": device})  # fmt: skip
    said = figures.as_markdown([both], ["tiny"])
    assert said.startswith("| call | both, Intel, ms | best | both, NVIDIA, ms | best |\n")
    assert "| 1.0 |  | 2.0 |  |" in said
    assert "Intel 2026.2; H200, NVIDIA 580; 1.32" in said


def test_threads_are_those_of_rows_on_the_host():
    of_gpu = machine("h", result("tiny", cpu=1.0) | {"on_device": True})
    assert "threads" not in figures.caption(of_gpu)


def test_titles_are_those_of_rows():
    assert TITLES.keys() <= {row.name for row in (*ROWS, *GPU_ROWS)}
    assert [row.name for row in command._rows("calls")] == list(TITLES)
    assert len({*TITLES.values()}) == len(TITLES)


@pytest.mark.parametrize(("text", "name"), [
    ("cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n", "AMD EPYC (family 25, model 17)"),
    ("CPU part\t: 0xd0c\n", None),
    (None, None),
])  # fmt: skip
def test_the_processor(tmp_path, monkeypatch, text, name):
    monkeypatch.setattr(report.platform, "processor", lambda: "other")
    monkeypatch.setattr(report.platform, "machine", lambda: "other")
    listed = tmp_path / "cpuinfo"
    if text is not None:
        listed.write_text(text)
    assert report.processor(listed) == (name or "other")


# --- the command -----------------------------------------------------------------------------


def written(folder, *records):
    for index, record in enumerate(records):
        (folder / f"{index}.json").write_text(json.dumps(record))
    return [folder / f"{index}.json" for index in range(len(records))]


def test_what_a_run_writes_is_what_it_shows_again(first_device, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "LEAST_SECONDS", 1e-4)
    monkeypatch.setattr(contest, "peer_classes", lambda on_gpu: [])
    file, table = tmp_path / "bench.json", tmp_path / "bench.md"
    assert bench("--rows", "tiny", "odd", "--rounds", 1, "--device", first_device.platform,
                 "--name", "this", "--json", file, "--markdown", table) == 0  # fmt: skip
    text = table.read_text()
    assert text.startswith("| call | this, ms | best |\n|---|---|---|\n| odd | ")
    what = f"{first_device.platform} {first_device.driver_version}; clattn 0."
    assert what in " ".join(text.split())
    assert re.search(r"; \d{4}-\d\d-\d\d\.\n$", text)
    capsys.readouterr()
    assert bench("--from", file) == 0
    assert capsys.readouterr().out == text


def test_rows_are_chosen_in_order(tmp_path, capsys):
    words = ("--rows", "llama", "tiny", "odd", "causal")
    assert bench("--from", *written(tmp_path, QUICK, SLOW), *words) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split(" | ")[0] for line in lines[2:5]]
    assert shown == [f"| {TITLES['llama']}", f"| {TITLES['tiny']}", "| odd"]
    assert lines[5] == ""


def test_a_chart_of_machines(tmp_path, capsys):
    picture = tmp_path / "bench.png"
    for records in ([QUICK], [QUICK, SLOW]):
        assert bench("--from", *written(tmp_path, *records), "--plot", picture) == 0
        png_size(picture)
        picture.unlink()
    capsys.readouterr()
    assert bench("--from", *written(tmp_path, SLOW), "--rows", "llama", "--plot", picture) == 0
    assert "no chart" in capsys.readouterr().out
    assert not picture.exists()


@pytest.mark.parametrize("text", [None, "no JSON", "[]", '{"rows": []}'])
def test_a_file_that_is_no_result(tmp_path, capsys, text):
    path = tmp_path / "bench.json"
    if text is not None:
        path.write_text(text)
    assert bench("--from", path) == 2
    assert str(path) in capsys.readouterr().err


def test_measuring_and_showing_at_once(tmp_path, capsys):
    assert bench("--from", *written(tmp_path, QUICK), "--json", tmp_path / "new.json") == 2
    assert "leave out --json" in capsys.readouterr().err


# --- the page --------------------------------------------------------------------------------


def test_tables_of_pages_are_those_of_their_commands(capsys, monkeypatch):
    """Three pages have what the commands of docs/benchmarks.md print."""
    monkeypatch.chdir(DOCS / "figures")
    commands = COMMAND.findall((DOCS / "benchmarks.md").read_text(encoding="utf-8"))
    assert len(commands) == 4
    for words in commands:
        pages = [f"{name}.md" for name in ("train", "serve") if name in words]
        page = DOCS / (pages or ["performance.md"])[0]
        assert bench(*shlex.split(words)) == 0
        assert capsys.readouterr().out in page.read_text(encoding="utf-8")
