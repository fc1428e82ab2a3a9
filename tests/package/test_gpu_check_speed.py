# SPDX-License-Identifier: MIT
"""Steps of tools/gpu_check that measure: the benchmark, first calls, the tuner."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.gpu_check import load, put


@pytest.fixture(scope="module")
def tool():
    return load()


def stub_check(tool, tmp_path, commands, bench=""):
    """A check whose commands are a function of their name and words."""
    (tmp_path / "kept").mkdir()
    options = SimpleNamespace(bench=bench, device="gpu", limit=60, steps=None)
    check = SimpleNamespace(
        kept=tmp_path / "kept", options=options, device={"type": "gpu"}, python="python",
        env={"XDG_CACHE_HOME": str(tmp_path)}, left=lambda: 60.0, why_not=lambda wanted: "",
        folder=tmp_path, begin=lambda name, file: tmp_path / "kept" / file,
    )  # fmt: skip
    check.run = lambda name, command, seconds, **more: commands(list(map(str, command)), **more)
    check.run_watched = lambda name, command, file, seconds: commands(list(map(str, command)))
    return check


def test_a_row_that_ends_the_process_costs_one_row(tool, tmp_path):
    """The rows behind it are measured by another process. A later call has nothing left to do."""
    rows, calls = tool.speed.KEY_ROWS, []

    def bench(command):
        asked = command[command.index("--rows") + 1 :]
        calls.append(asked)
        done = asked[: asked.index(rows[2])] if rows[2] in asked else asked
        content = {"rows": [bench_row(name) for name in done], "devices": {}, "peers": {},
                   "missing": {}}  # fmt: skip
        Path(command[command.index("--json") + 1]).write_text(json.dumps(content))
        return tool.running.Done(-11 if done != asked else 0, "a fault", 1.0, False)

    check = stub_check(tool, tmp_path, bench)
    result = tool.speed.check_bench(check)
    assert calls == [list(rows), list(rows[3:])]
    assert result.summary == f"{len(rows) - 1} rows, wrong or failed: {rows[2]}"
    assert result.is_fine is False and f"{rows[2]}: ended by SIGSEGV" in result.unmeasured
    assert tool.speed.rows_left(tmp_path / "kept/bench.json", {}) == [rows[2]]


def test_the_tuner_where_there_is_one(tool, tmp_path):
    def tune(command):
        if "--help" not in command:
            assert command[-4:] == ["--device", "gpu", "--seconds", "55"]
            put(tmp_path, "clattn/_host/tuned/a.json", text='{"MT": 2}')
        return tool.running.Done(0, "a table", 1.0, False)

    result = tool.speed.check_tune(stub_check(tool, tmp_path, tune))
    assert result.is_fine and "a table" in result.body
    assert json.loads((tmp_path / "kept/tuned.json").read_text()) == {"a.json": {"MT": 2}}
    (tmp_path / "no").mkdir()
    refuses = stub_check(
        tool, tmp_path / "no", lambda command: tool.running.Done(2, "", 1.0, False)
    )
    result = tool.speed.check_tune(refuses)
    assert (result.is_fine, result.summary) == (None, "this clattn has no command tune")


def test_first_calls_in_processes_that_share_caches(tool, tmp_path):
    """The folders stay the same; only the last two processes use the driver's cache."""
    seen = []

    def call(command, CUDA_CACHE_DISABLE="0", **folders):
        seen.append((CUDA_CACHE_DISABLE, *folders.values()))
        said = json.dumps({"device": 1.5, "mma float16 causal": 0.4 / len(seen)})
        return tool.running.Done(0, f"a warning\n{said}\n", 1.0, False)

    result = tool.speed.check_first_calls(stub_check(tool, tmp_path, call))
    assert result.is_fine and result.unmeasured == []
    assert "| device | 1500 | 1500 | 1500 |" in result.body
    assert "| mma float16 causal | 400 | 200 | 100 |" in result.body  # the third is not reported
    assert [disabled for disabled, *_ in seen] == ["1", "1", "0", "0"]
    assert {tuple(folders) for _, *folders in seen} == {(tmp_path / "first_calls",) * 3}


def test_a_first_call_that_fails(tool, tmp_path):
    seen = []

    def call(command, **variables):
        seen.append(command)
        return tool.running.Done(len(seen) - 1, '{"device": 1.5}\n', 1.0, False)

    result = tool.speed.check_first_calls(stub_check(tool, tmp_path, call))
    assert (result.is_fine, result.summary) == (False, "1 of 4 processes")
    assert "| device | 1500 |  |  |" in result.body and "exit status 1" in result.body


def bench_row(name, **more):
    row = {"name": name, "shape": dict.fromkeys("ab", 8), "dtype": "float16", "limit": "product",
           "best_peer": None, "allowed_error": 1e-3, "wrong": [], "failed": {}, "notes": [],
           "results": {}}  # fmt: skip
    return row | more


def test_the_table_of_the_bench(tool):
    own = {"seconds": 0.002, "rate": 3.5e14, "error": 5e-4, "limit_share": 0.5}
    rows = [
        bench_row("f", best_peer="flash", results={"gpu": own, "flash": {"seconds": 0.001}}),
        bench_row("d", limit="read", results={"gpu": own | {"rate": 4e12, "error": None}},
                  wrong=["gpu"], notes=["cuDNN: no | kernel"]),
        bench_row("broken", failed={"gpu": "no register"}),
    ]  # fmt: skip
    device = {"name": "H9", "platform": "CUDA", "driver_version": "1", "fma": {"float32": 6e13},
              "read": {"536870912": 4.2e12}, "product": {"float16": 7e14}}  # fmt: skip
    peers = {"flash": {"version": "torch 2"}, "cuDNN": {"version": "torch 2"}}
    text = tool.tables.describe_bench({"rows": rows, "devices": {"gpu": device}, "peers": peers})
    f, d, broken = text.splitlines()[4:7]
    assert f == "| f | 8, 8 | float16 | 2 | 350 |  | 50% | 0.50 | 0.50 |  | 5.0e-04 | 1.0e-03 |"
    assert d == "| d | 8, 8 | float16 | 2 |  | 4000 | 50% |  |  |  | **NaN wrong** | 1.0e-03 |"
    assert broken.startswith("| broken | 8, 8 | float16 | FAILED: no register |")
    assert broken.count("|") == f.count("|")
    assert (
        "fma float32 60 TFLOP/s, reading 512 MiB 4200 GB/s, torch's product float16 700 TFLOP/s"
        in text
    )
    assert "- d: cuDNN: no \\| kernel" in text and "Beside: torch 2." in text
