# SPDX-License-Identifier: MIT
"""tools/gpu_check: what it finds, does and reports, with a CPU in the place of a GPU."""

import json
import os
import re
import sys
import time
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import is_named
from support.gpu_check import POCL, TOOL, code_that_holds, has_ended, load, put
from support.processes import OCLGRIND, ROOT, run, run_cli


@pytest.fixture(scope="module")
def tool():
    return load()


@pytest.fixture
def places(tmp_path):
    """Arguments that keep the tool's folders here."""
    return ["--folder", str(tmp_path / "folder"), "--carried", str(tmp_path / "carried")]


# --- drivers ---------------------------------------------------------------------------------

NVIDIA = "usr/local/nvidia/lib64/libnvidia-opencl.so.1"


def test_a_driver_without_an_icd_file(tool, tmp_path):
    """NVIDIA's driver in a container, its compiler beside it, and a loader that is carried."""
    root, carried, folder = (tmp_path / name for name in ("root", "carried", "folder"))
    put(root, NVIDIA)
    put(carried, "lib/libOpenCL.so.1")
    found = tool.drivers.find(carried, root)
    assert found.drivers == [tool.drivers.Driver(str(root / NVIDIA), None)]
    assert found.loader_is_carried
    variables = tool.drivers.environment(found, folder)
    [icd] = Path(variables["OCL_ICD_VENDORS"]).iterdir()
    assert icd.suffix == ".icd" and icd.read_text() == f"{root / NVIDIA}\n"
    assert variables["OCL_ICD_FILENAMES"] == str(root / NVIDIA)
    paths = variables["LD_LIBRARY_PATH"].split(":")
    assert paths[:2] == [str(folder / "lib"), str((root / NVIDIA).parent)]
    assert (folder / "lib/libOpenCL.so.1").resolve() == carried / "lib/libOpenCL.so.1"


def test_drivers_that_icd_files_name(tool, tmp_path):
    """AMD's driver by its path, Intel's by its name. Each is found once."""
    put(tmp_path, "etc/OpenCL/vendors/amdocl64.icd", text="/opt/rocm-6/lib/libamdocl64.so\n")
    put(tmp_path, "etc/OpenCL/vendors/intel.icd", text="libigdrcl.so\n")
    put(tmp_path, "etc/OpenCL/vendors/empty.icd")
    intel = "usr/lib/x86_64-linux-gnu/intel-opencl/libigdrcl.so"
    put(tmp_path, intel, "opt/rocm-6/lib/libamdocl64.so", "usr/lib/x86_64-linux-gnu/libOpenCL.so.1")
    found = tool.drivers.find(tmp_path / "carried", tmp_path)
    assert [(d.library, d.icd.name) for d in found.drivers] == [
        ("/opt/rocm-6/lib/libamdocl64.so", "amdocl64.icd"),
        (str(tmp_path / intel), "intel.icd"),
    ]
    assert found.loader == tmp_path / "usr/lib/x86_64-linux-gnu/libOpenCL.so.1"
    assert not found.loader_is_carried


def test_nothing_to_find_or_to_set(tool, tmp_path):
    """An empty machine has no driver. The loader finds drivers with .icd files by itself."""
    found = tool.drivers.find(tmp_path / "carried", tmp_path)
    assert (found.drivers, found.loader) == ([], None)
    driver = tool.drivers.Driver("/x/lib.so", Path("/etc/OpenCL/vendors/x.icd"))
    assert tool.drivers.environment(tool.drivers.Found([driver], None), tmp_path) == {}


@pytest.mark.skipif(not OCLGRIND.exists(), reason="Oclgrind is not installed")
def test_a_driver_is_seen_without_the_system_naming_it(tool, tmp_path):
    """Oclgrind under the name of NVIDIA's library; to OpenCL it is a GPU."""
    (tmp_path / NVIDIA).parent.mkdir(parents=True)
    (tmp_path / NVIDIA).symlink_to(OCLGRIND)
    found = tool.drivers.find(tmp_path / "carried", tmp_path)
    env = tool.drivers.environment(found, tmp_path / "folder")
    command = [sys.executable, "-m", "gpu_check.opencl_info"]
    said = run(command, timeout=60, check_exit=True, env=env, cwd=None).stdout
    [device] = json.loads(said)
    assert (device["platform"], device["type"]) == ("Oclgrind", "gpu")
    listed = run_cli(env=env | {"CLATTN_DEVICE": "gpu"}).stdout
    assert "1 OpenCL device\n" in listed and device["name"] in listed
    assert f"version        {device['version']}, driver {device['driver']}" in listed
    assert f"compute units  {device['compute units']}\n" in listed
    assert f"memory         {tool.tables.format_bytes(device['memory'])[:3]}" in listed
    assert "cl_khr_fp64" in device["extensions"]


# --- what is needed --------------------------------------------------------------------------


def test_versions_are_those_of_the_project(tool):
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = content["project"]["optional-dependencies"]
    asked = [*content["build-system"]["requires"], *extras["test"], *extras["bench"]]
    least = dict(re.fullmatch(r"([\w-]+)(?:\[.*\])?>=([\d.]+)", r).groups() for r in asked)
    needs = tool.needs
    wanted = needs.BUILD | needs.TEST | needs.BENCH | needs.LIMITS
    assert {name: least[name] for name in wanted} == wanted
    assert content["project"]["requires-python"] == f">={needs.OLDEST_PYTHON}"
    assert f"VERSION {needs.PROGRAMS['cmake']}" in (ROOT / "CMakeLists.txt").read_text()


@pytest.mark.parametrize(("version", "least", "expected"), [
    ("2.0", "2.0", True), ("2.10.1", "2.9", True), ("1.26.4", "2.0", False),
    ("3.10.12", "3.11", False), ("2.13.0+cu130", "2.13", True), ("13", "13", True),
])  # fmt: skip
def test_versions_are_compared_by_number(tool, version, least, expected):
    assert tool.needs.is_new_enough(version, least) == expected


def test_a_python_that_is_too_old_is_passed_over(tool, tmp_path, monkeypatch):
    old, new = tmp_path / "python3", tmp_path / "python3.13"
    for path, version in ((old, "3.10.12"), (new, "3.13.1")):
        path.write_text(f"#!/bin/sh\necho {version}\n")
        path.chmod(0o755)
    monkeypatch.setattr(tool.needs.sys, "executable", str(old))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tool.needs.find_python(None) == (str(new), "3.13.1")
    new.unlink()
    assert tool.needs.find_python(None)[0] is None
    assert "3.11" in tool.needs.find_python(str(old))[1]


# --- commands --------------------------------------------------------------------------------


def test_a_command_that_does_not_end_is_stopped(tool, tmp_path, monkeypatch):
    """Its child is stopped too, though both ignore the interrupt. Its output is kept."""
    monkeypatch.setattr(tool.running, "PATIENCE", 0.2)
    child = code_that_holds(tmp_path / "alive")
    code = f"""if True:
        import signal, subprocess, sys, time
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("started", flush=True)
        subprocess.Popen([sys.executable, "-c", {child!r}])
        time.sleep(60)"""
    start = time.monotonic()
    command = [sys.executable, "-c", code]
    done = tool.running.run(command, 1.5, env=dict(os.environ), log=tmp_path / "log")
    assert time.monotonic() - start < 20
    assert done.is_late and not done.is_fine
    assert done.said == "started\n"
    assert "stopped after" in done.ended()
    assert has_ended(tmp_path / "alive")


def test_a_program_that_there_is_not(tool, tmp_path):
    done = tool.running.run(["/no/such"], 5, env={}, log=tmp_path / "log")
    assert not done.is_fine and "/no/such" in done.said


def test_packages_are_added_to_those_installed(tool, tmp_path):
    """A new package replaces its old files and keeps the programs of other packages."""
    check = SimpleNamespace(site=tmp_path / "site")
    put(tmp_path, "a/bin/a", "a/a/__init__.py", "a/a/old.py", "b/bin/b", "b/b.py")
    put(tmp_path, "new/bin/a", "new/a/__init__.py", text="new")
    for name in ("a", "b", "new"):
        tool.steps.Check._merge(check, tmp_path / name)
    files = {str(f.relative_to(check.site)): f.read_text() for f in check.site.rglob("*.*")}
    assert files == {"a/__init__.py": "new", "b.py": ""}
    assert {f.name: f.read_text() for f in (check.site / "bin").iterdir()} == {"a": "new", "b": ""}


# --- the suite's log -------------------------------------------------------------------------


def suite(tool, tmp_path, *events, late=False):
    log = tmp_path / "suite.jsonl"
    lines = [json.dumps(event) for event in events]
    log.write_text("\n".join([*lines, '{"kind": "don']) if late else "\n".join([*lines, ""]))
    return tool.steps.summarise_suite(log, tool.running.Done(0, "", 9.0, late))


def happened(*kinds, test, says=""):
    """Events of one test."""
    return [{"kind": kind, "test": test, "says": says} for kind in kinds]


A = happened("start", "done", test="a")
B = happened("start", "done", test="b")


def end(status):
    return {"kind": "end", "status": status}


def test_a_suite_that_passes(tool, tmp_path):
    skipped = happened("skipped", test="b", says="no | torch")
    result = suite(tool, tmp_path, *A, B[0], *skipped, B[1], end(0))
    assert result.is_fine
    assert result.summary == "1 passed, 0 failed, 1 skipped"
    assert "| 1 | no \\| torch |" in result.body


def test_failures_are_listed(tool, tmp_path):
    failed = happened("failed", test="a", says="E  1 == 2")
    result = suite(tool, tmp_path, A[0], *failed, A[1], *B, end(1))
    assert result.is_fine is False
    assert "1 passed, 1 failed" in result.summary
    assert "### a\n" in result.body and "1 == 2" in result.body


def test_files_that_cannot_be_read(tool, tmp_path):
    """For want of a package: not measured. For another reason: a failure."""
    reason = "ModuleNotFoundError: No module named 'x'"
    lacking = happened("unread", test="t.py", says=f"E   {reason}")
    result = suite(tool, tmp_path, *lacking, *A, end(1))
    assert result.is_fine
    assert result.unmeasured == [f"t.py: {reason}"]
    wrong = happened("unread", test="t.py", says="E  Wrong")
    assert suite(tool, tmp_path, *wrong, *A, end(1)).is_fine is False


def test_a_suite_that_is_stopped(tool, tmp_path):
    """The report names the test that ran last."""
    result = suite(tool, tmp_path, *A, *happened("start", test="hangs"), late=True)
    assert result.is_fine is False
    assert "1 passed" in result.summary and "not all were run" in result.summary
    assert "Running at the end: hangs" in result.body
    assert any("part of the suite" in reason for reason in result.unmeasured)
    nothing = tool.steps.summarise_suite(tmp_path / "no", tool.running.Done(3, "no!", 1.0, False))
    assert nothing.is_fine is False and "no!" in nothing.body


SUITE = """
import os, pytest, time
from gpu_check import suite_log
suite_log.HANGS = 1

class DeviceError(Exception):
    pass

def test_a():
    pass

def test_fault():
    raise DeviceError("the device is lost")

def test_build():
    raise DeviceError("CL_BUILD_PROGRAM_FAILURE")

@pytest.mark.parametrize("variant", [(type("V", (), {"kernel": "mma"}), 0)], ids=["mma"])
def test_variant(variant):
    assert False

def test_hangs():
    time.sleep(60)

def test_b():
    pass
"""


def test_workers_are_started_again(tool, tmp_path):
    """After a fault of the device and after a test that hangs. A later run has only new tests."""
    log, had = tmp_path / "suite.jsonl", tmp_path / "had.json"
    put(tmp_path, "test_it.py", text=SUITE)
    put(tmp_path, "pytest.ini", text="[pytest]")
    env = {"PYTHONPATH": TOOL.parent, "CLATTN_SUITE_LOG": log, "CLATTN_SUITE_HAD": had,
           "CLATTN_KERNEL": "-mma,-tiled", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-p", "gpu_check.suite_log",
               "-n", "1", "-p", "no:cacheprovider"]  # fmt: skip

    def outcome():
        had.write_text(json.dumps(tool.steps.tests_that_ended(log)))
        done = run(command, timeout=60, check_exit=False, env=env, cwd=tmp_path)
        ended = tool.running.Done(done.returncode, done.stdout, 1.0, False)
        return tool.steps.summarise_suite(log, ended)

    result = outcome()
    assert result.summary == "2 passed, 3 failed, 0 skipped", result.body
    assert "### test_it.py::test_fault" in result.body and "the device is lost" in result.body
    assert "### test_it.py::test_hangs" in result.body and "test_variant" not in result.body
    put(tmp_path, "test_it.py", text=SUITE + "\n\ndef test_c():\n    pass\n")
    failed = [event["test"] for event in tool.items.read(log) if event["kind"] == "failed"]
    # Told by the worker that ends itself, and by pytest-xdist, which misses it.
    assert failed.count("test_it.py::test_fault") > 1 == failed.count("test_it.py::test_build")
    assert outcome().summary == "3 passed, 3 failed, 0 skipped"
    starts = [event["test"] for event in tool.items.read(log) if event["kind"] == "start"]
    assert starts.count("test_it.py::test_a") == starts.count("test_it.py::test_c") == 1


def test_tests_that_were_running_at_the_end_run_once_more(tool, tmp_path):
    log, hangs = tmp_path / "suite.jsonl", happened("start", test="hangs")
    suite(tool, tmp_path, *A, *hangs)
    assert tool.steps.tests_that_ended(log) == ["a"]
    suite(tool, tmp_path, *A, *hangs, *hangs)
    assert tool.steps.tests_that_ended(log) == ["a", "hangs"]
    failed = [event["test"] for event in tool.items.read(log) if event["kind"] == "failed"]
    assert failed == ["hangs"]
    assert tool.steps.tests_that_ended(tmp_path / "none") == []


@pytest.mark.parametrize(("words", "expected"), [
    ("gpu", True), ("cpu", False), ("cpu, GPU", True), ("nvid", True), ("h9", True), (" ,", False),
])  # fmt: skip
def test_the_devices_that_tests_run_on(words, expected):
    device = SimpleNamespace(type="gpu", name="NVIDIA H9", platform="NVIDIA CUDA")
    assert is_named(device, words) == expected


# --- steps and the report --------------------------------------------------------------------


STAND_INS = """
import json, os, subprocess, sys, time
from pathlib import Path
from gpu_check import command as main
from gpu_check.steps import Result
main.GRACE = 0.3

def step(name, is_fine=True):
    def run(check):
        with open({folder!r} + "/calls", "a") as calls:
            calls.write(name + " ")
        says = f"{{name}} | found {{check.options.device}}"
        (check.kept / "profile.txt").write_text(name)
        return Result(name, is_fine, says, "the body of " + name, [name + ": no time"])
    return run, 1

def starts_others(check):
    code = {holds!r}
    subprocess.Popen([sys.executable, "-c", code], preexec_fn=os.setpgrp)
    time.sleep(60)

def reads_the_report(check):
    text = (Path({folder!r}) / "out/report.md").read_text()
    return Result("reader", True, "first \\\\| found" in text and "read it" or "no report")

main.STEPS = {steps}
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.fixture
def stand_ins(tmp_path):
    """Run the tool with steps in the place of its own; returns the process and the report."""

    def call(steps, *arguments, device="a device", faults=None):
        code = STAND_INS.format(folder=str(tmp_path), steps=steps,
                                holds=code_that_holds(tmp_path / "alive"))  # fmt: skip
        command = [sys.executable, "-c", code, "--folder", tmp_path / "folder", "--carried",
                   tmp_path / "carried", "--out", tmp_path / "out", "--device", device,
                   *arguments]  # fmt: skip
        env = {"CLATTN_CHECK_FAULT": faults, "PYTHONDONTWRITEBYTECODE": "1"}
        done = run(list(map(str, command)), timeout=60, check_exit=False, env=env, cwd=tmp_path)
        return done, (tmp_path / "out/report.md").read_text()

    return call


def results_of(report):
    pattern = r"^\| (\w+) \| (passed|FAILED|left out) \| \d+ \| [^|]* \| (.*) \|$"
    return {name: more for name, *more in re.findall(pattern, report, re.MULTILINE)}


def test_a_fault_costs_one_step(stand_ins, tmp_path):
    """One step crashes, one hangs, one raises, one leaves a process: the others are all run."""
    steps = """{"first": step("first"), "crash": step("crash"), "hang": step("hang"),
                "raise": step("raise"), "others": (starts_others, 1), "last": step("last")}"""
    start = time.monotonic()
    faults = "crash=crash,hang=hang,raise=fail"
    done, report = stand_ins(steps, "--seconds", "5", faults=faults)
    assert done.returncode == 1 and time.monotonic() - start < 12
    found = results_of(report)
    assert found["first"] == ["passed", "first \\| found a device"]
    assert found["last"] == ["passed", "last \\| found a device"]
    assert found["crash"] == ["FAILED", "the step itself: ended by SIGABRT"]
    assert found["hang"][0] == "FAILED" and "stopped after" in found["hang"][1]
    assert found["raise"] == ["FAILED", "the step itself: exit status 1"]
    assert "RuntimeError: a fault for tests: raise=fail" in report
    assert "the body of first" in report and "- last: no time" in report
    assert found["others"][0] == "FAILED"
    assert has_ended(tmp_path / "alive")


def test_a_later_call_goes_on(stand_ins, tmp_path):
    """Steps that passed are not run again, unless they are asked for. Their results stay."""
    steps = '{"first": step("first"), "second": step("second"), "third": step("third", None)}'

    def calls():
        return (tmp_path / "calls").read_text().split()

    done, _ = stand_ins(steps, faults="second=crash")
    assert (done.returncode, calls()) == (1, ["first", "third"])
    done, report = stand_ins(steps)
    assert (done.returncode, calls()[2:]) == (0, ["second", "third"])
    found = {name: word for name, (word, _) in results_of(report).items()}
    assert found == {"first": "passed", "second": "passed", "third": "left out"}
    done, _ = stand_ins(steps, "--steps", "first")
    assert calls()[4:] == ["first"]
    done, report = stand_ins(steps, "--steps", "second", device="another")
    assert calls()[5:] == ["second"]
    assert results_of(report) == {"second": ["passed", "second \\| found another"]}
    assert "- first: the step was not run" in report


def test_what_is_brought_back(stand_ins, tmp_path):
    """The report is there before the next step runs. At most eight files, in one folder."""
    steps = '{"first": step("first"), "reader": (reads_the_report, 1)}'
    done, report = stand_ins(steps)
    assert done.returncode == 0, done.stderr
    assert results_of(report)["reader"] == ["passed", "read it"]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"report.md", "results.json", "profile.txt", "logs.zip"}
    assert (tmp_path / "out/profile.txt").read_text() == "first"
    logs = zipfile.ZipFile(tmp_path / "out/logs.zip").namelist()
    assert sorted(logs) == ["step-first.log", "step-reader.log"]
    content = json.loads((tmp_path / "out/results.json").read_text())
    assert content["first"]["is_fine"] is True


def test_all_that_is_brought_back_is_eight_files(tool, places):
    check = tool.steps.Check(tool.main.parse(places))
    assert len(check.brought) + len(("report.md", "results.json")) <= 8


def test_unknown_steps_are_refused(tool, places, capsys):
    with pytest.raises(SystemExit):
        tool.main.main([*places, "--steps", "devices,dance"])
    assert "dance" in capsys.readouterr().err


# --- bench and tuner ---------------------------------------------------------------------------


def stub_check(tool, tmp_path, commands, bench=""):
    """A check whose commands are a function of their name and words."""
    (tmp_path / "kept").mkdir()
    options = SimpleNamespace(bench=bench, device="gpu", limit=60, steps=None)
    check = SimpleNamespace(
        kept=tmp_path / "kept", options=options, device={"type": "gpu"}, python="python",
        env={"XDG_CACHE_HOME": str(tmp_path)}, left=lambda: 60.0, lacks=lambda wanted: [],
        begin=lambda name, file: tmp_path / "kept" / file,
    )  # fmt: skip
    check.run = lambda name, command, seconds, **more: commands(list(map(str, command)))
    check.run_watched = lambda name, command, file, seconds: commands(list(map(str, command)))
    return check


def test_a_row_that_ends_the_process_costs_one_row(tool, tmp_path):
    """The rows behind it are measured by another process. A later call has nothing left to do."""
    rows, calls = tool.steps.KEY_ROWS, []

    def bench(command):
        asked = command[command.index("--rows") + 1 :]
        calls.append(asked)
        done = asked[: asked.index(rows[2])] if rows[2] in asked else asked
        content = {"rows": [bench_row(name) for name in done], "devices": {}, "peers": {},
                   "missing": {}}  # fmt: skip
        Path(command[command.index("--json") + 1]).write_text(json.dumps(content))
        return tool.running.Done(-11 if done != asked else 0, "a fault", 1.0, False)

    check = stub_check(tool, tmp_path, bench)
    result = tool.steps.check_bench(check)
    assert calls == [list(rows), list(rows[3:])]
    assert result.summary == f"{len(rows) - 1} rows, wrong or failed: {rows[2]}"
    assert result.is_fine is False and f"{rows[2]}: ended by SIGSEGV" in result.unmeasured
    assert tool.steps.rows_left(tmp_path / "kept/bench.json", {}) == [rows[2]]


def test_the_tuner_where_there_is_one(tool, tmp_path):
    def tune(command):
        if "--help" not in command:
            assert command[-4:] == ["--device", "gpu", "--seconds", "55"]
            put(tmp_path, "clattn/_host/tuned/a.json", text='{"MT": 2}')
        return tool.running.Done(0, "a table", 1.0, False)

    result = tool.steps.check_tune(stub_check(tool, tmp_path, tune))
    assert result.is_fine and "a table" in result.body
    assert json.loads((tmp_path / "kept/tuned.json").read_text()) == {"a.json": {"MT": 2}}
    (tmp_path / "no").mkdir()
    refuses = stub_check(
        tool, tmp_path / "no", lambda command: tool.running.Done(2, "", 1.0, False)
    )
    result = tool.steps.check_tune(refuses)
    assert (result.is_fine, result.summary) == (None, "this clattn has no command tune")


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


PTX = "import sys; print('a table'); print('no clang', file=sys.stderr); sys.exit({})"


@pytest.mark.parametrize(("status", "carried", "expected"), [
    (0, "", (True, "on this machine: exit status 0", "a table")),
    (1, "exit status 0\nold", (False, "on this machine: exit status 1", "a table")),
    (2, "exit status 0\nold", (True, "beforehand", "old")),
    (2, "no clang there", (None, "no clang", "")),
    (None, "", (None, "there is no tools/machine_code", "")),
])  # fmt: skip
def test_the_check_of_ptx(tool, tmp_path, monkeypatch, status, carried, expected):
    """The check runs here. Without its programs (status 2) the carried result is used, if any."""
    monkeypatch.setattr(tool.needs, "ROOT", tmp_path)
    put(tmp_path, "carried/machine_code.txt", text=carried)
    if status is not None:
        put(tmp_path, "tools/machine_code", text=PTX.format(status))
    check = SimpleNamespace(left=lambda: 60, carried=tmp_path / "carried")
    result = tool.steps.check_ptx(check)
    is_fine, summary, body = expected
    assert result.is_fine is is_fine
    assert summary in result.summary and body in result.body
    assert bool(result.unmeasured) == (is_fine is None)


# --- end to end ------------------------------------------------------------------------------


def put_wheel(folder):
    """A wheel of the clattn that is installed."""
    installed = metadata.distribution("clattn")
    tag = re.search(r"^Tag: (\S+)$", installed.read_text("WHEEL"), re.MULTILINE)[1]
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / f"clattn-{installed.version}-{tag}.whl", "w") as wheel:
        for file in installed.files:
            if file.name not in ("INSTALLER", "REQUESTED", "direct_url.json"):
                wheel.write(file.locate(), str(file))


@pytest.mark.cpus
@pytest.mark.skipif(not POCL.exists(), reason="a driver of the system's is needed: PoCL")
def test_from_end_to_end(tmp_path):
    """Building fails here, so the carried wheel is installed, and the other steps use it."""
    put_wheel(tmp_path / "carried/wheels")
    command = [sys.executable, TOOL, "--device", "Portable", "--limit", 200, "--carried",
               tmp_path / "carried", "--folder", tmp_path / "folder",
               "--steps", "devices,build,tests,bench",
               "--tests=tests/opencl/test_devices.py -k 'attributes and not set'",
               "--bench=--rows f16-E80-2k --scale 128 --rounds 1"]  # fmt: skip
    env = {"CC": "/no/compiler", "CLATTN_DEVICE": None, "OCL_ICD_VENDORS": None}
    done = run(list(map(str, command)), timeout=240, check_exit=False, env=env, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    text = (tmp_path / "folder/out/report.md").read_text()
    steps = dict(re.findall(r"^\| (\w+) \| (passed|FAILED|left out) \|", text, re.MULTILINE))
    expected = {"devices": "passed", "build": "FAILED", "tests": "passed", "bench": "passed"}
    assert steps == expected, text
    for words in ("clattn's wheel made beforehand, in its place: exit status 0",
                  "1 passed, 0 failed, 0 skipped", "| f16-E80-2k |", "| OpenCL driver |",
                  "cl_khr_fp64", "- ptx: the step was not run"):  # fmt: skip
        assert words in text
    assert {path.name for path in tmp_path.iterdir()} == {"carried", "folder"}
