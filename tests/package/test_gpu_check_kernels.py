# SPDX-License-Identifier: MIT
"""tools/gpu_check: its items, smoke calls, probes and programs, on a CPU; what it prepares."""

import os
import re
import sys
import time
from types import SimpleNamespace

import clattn
import pytest
from support.gpu_check import POCL, load, put
from support.processes import environment, run
from support.variants import FORCED, VARIANTS, forced


@pytest.fixture(scope="module")
def tool():
    return load()


# --- items -------------------------------------------------------------------------------------

WORKER = """
import sys
from gpu_check import items
def run(name):
    if name == "skip":
        raise items.Skipped("not here")
    return "passed", "said " + name
items.work("work", sys.argv[1], sys.argv[2:], run)
"""


def test_a_fault_costs_one_item(tool, tmp_path, monkeypatch):
    """The process is started again behind the item. A later run takes only what is left."""
    file, log, started = tmp_path / "items.jsonl", tmp_path / "log", []
    monkeypatch.setenv("CLATTN_CHECK_FAULT", "work/b=crash,work/d=hang,work/e=fail")

    def start(rest):
        started.append(list(rest))
        command = [sys.executable, "-c", WORKER, file, *rest]
        with log.open("w") as output:
            return tool.running.launch(command, output, environment(None)), log

    names = ["a", "b", "skip", "d", "e", "f"]
    begun = time.monotonic()
    tool.items.supervise(file, names, start, 1, lambda: 60)
    assert time.monotonic() - begun < 20
    lines = tool.items.ended(file)
    assert started == [names, names[2:], names[4:], names[5:]]
    assert {name: line["kind"] for name, line in lines.items()} == {
        "a": "passed", "b": "failed", "skip": "left out", "d": "failed", "e": "failed",
        "f": "passed"}  # fmt: skip
    assert lines["b"]["says"].startswith("ended by signal 6")
    assert lines["d"]["says"].startswith("stopped after 1 s")
    assert "RuntimeError: a fault for tests" in lines["e"]["says"]
    assert (lines["a"]["says"], lines["skip"]["says"]) == ("said a", "not here")
    tool.items.supervise(file, [*names, "g"], start, 1, lambda: 60)
    assert started[4:] == [["g"]]
    result = tool.steps.describe_items("work", lines, [*names, "h"])
    assert result.summary == "2 passed, 3 failed, 1 left out; no time for 1"
    assert result.is_fine is False and result.unmeasured == ["work, h: no time"]


def test_items_without_time_or_without_a_process(tool, tmp_path):
    """Nothing is started without time left. A process that cannot begin fails all its items."""
    file, log = tmp_path / "items.jsonl", tmp_path / "log"

    def start(rest):
        with log.open("w") as output:
            command = [sys.executable, "-c", "raise SystemExit('no NumPy')"]
            return tool.running.launch(command, output, dict(os.environ)), log

    tool.items.supervise(file, ["a"], None, 1, lambda: 1.0)
    assert tool.items.ended(file) == {}
    tool.items.supervise(file, ["a", "b"], start, 5, lambda: 60)
    for line in tool.items.ended(file).values():
        assert (line["kind"], line["says"]) == ("failed", "exit status 1\nno NumPy")
    assert len(tool.items.ended(file)) == 2


CUDA = "usr/local/nvidia/lib64/libcuda.so.1"


def test_a_driver_for_cuda_alone(tool, tmp_path):
    """It is used where NVIDIA has no driver for OpenCL on the machine."""
    assert tool.drivers.find_cuda(tmp_path) is None
    put(tmp_path, CUDA)
    assert tool.drivers.find_cuda(tmp_path) == tmp_path / CUDA
    put(tmp_path, "usr/lib/x86_64-linux-gnu/libnvidia-opencl.so.1")
    assert tool.drivers.find_cuda(tmp_path) is None


@pytest.mark.parametrize("problem", ["", "there is no C compiler"])
def test_steps_run_by_the_driver_for_cuda(tool, tmp_path, monkeypatch, problem):
    """With what was carried along; where that does not work, the report says why."""

    def environment(folder, cuda):
        assert (folder / "programs" / "one.ptx").read_text() == "PTX"
        if problem:
            raise tool.steps.cuda_machine.MissingError(problem)
        return {"LD_LIBRARY_PATH": str(folder), "CLATTN_CUDA_LIBRARY": cuda}

    put(tmp_path, "carried/cuda/programs/one.ptx", text="PTX")
    monkeypatch.setattr(tool.drivers, "find_cuda", lambda: tmp_path / CUDA)
    monkeypatch.setattr(tool.steps.cuda_machine, "environment", environment)
    places = ["--folder", str(tmp_path / "folder"), "--carried", str(tmp_path / "carried")]
    check = tool.steps.Check(tool.main.parse([*places, "--device", "gpu"]))
    said = dict(tool.steps.machine.describe(check))["CUDA driver"]
    assert said.startswith(str(tmp_path / CUDA))
    assert said.endswith(problem or "by tools/cuda_machine.py")
    assert (check.env.get("CLATTN_CUDA_LIBRARY") == str(tmp_path / CUDA)) == (not problem)
    check = tool.steps.Check(tool.main.parse([*places, "--device", "cpu"]))
    assert not check.cuda_says


def test_variants_that_failed_are_left_out_of_what_follows(tool, tmp_path, monkeypatch):
    monkeypatch.delenv("CLATTN_KERNEL", raising=False)
    places = ["--folder", str(tmp_path / "folder"), "--carried", str(tmp_path / "carried")]
    check = tool.steps.Check(tool.main.parse(places))
    assert "CLATTN_KERNEL" not in check.environment()
    for name, kind in (("mma float16 mask", "failed"), ("tiled float32 mask", "passed"),
                       ("mma float16 causal", "passed"), ("pairs a b", "failed")):  # fmt: skip
        tool.items.write(check.kept / "smoke.jsonl", kind=kind, item=name, says="")
    assert check.environment()["CLATTN_KERNEL"] == "-mma,-pairs"
    code = "import clattn; clattn.devices()"
    run(
        [sys.executable, "-c", code], timeout=60, check_exit=True, env=check.environment(), cwd=None
    )


def test_variants_that_are_left_out_stay_left_out(monkeypatch):
    """In tests that force nothing, and in their child processes."""
    for words, expected in (("-mma,-tiled", "-mma,-tiled"), ("mma", None)):
        monkeypatch.setenv("CLATTN_KERNEL", words)
        assert forced()["CLATTN_KERNEL"] == expected
        assert forced("cpu")["CLATTN_KERNEL"] == "cpu"


# --- smoke calls -------------------------------------------------------------------------------


@pytest.fixture
def smoke(tool):
    yield tool.smoke
    clattn._core.force(*FORCED.words)


def test_smoke_calls_are_24(tool):
    for kind in ("cpu", "gpu"):
        names = tool.smoke.calls(kind)
        assert len(set(names)) == 24
        assert {name.split()[0] for name in names} <= {v.kernel for v in VARIANTS}


def test_smoke_calls_find_wrong_numbers(smoke, device, monkeypatch):
    """A wrong variant, one whose numbers change from call to call, a wrong reference kernel."""
    name = f"decode_{'cpu' if device.type == 'cpu' else 'gpu'} float32 groups"
    assert smoke.check_call(name, device)[0] == "passed"
    attend, forced = clattn.scaled_dot_product_attention, []
    spoilt = {}

    def spoil(*arrays, **options):
        result = attend(*arrays, **options)
        result[0, 0, 0, 0] += spoilt.get(forced[-1], 0)
        spoilt[forced[-1]] = spoilt.get(forced[-1], 0) * 2
        return result

    force = clattn._core.force
    monkeypatch.setattr(clattn, "scaled_dot_product_attention", spoil)
    monkeypatch.setattr(clattn._core, "force", lambda word: (forced.append(word), force(word)))
    word = name.split()[0]
    cases = {(word, 0.01): "wrong by", (word, 1e-6): "different numbers",
             ("reference", 0.01): "the reference kernel is wrong"}  # fmt: skip
    for (word, by), says in cases.items():
        spoilt.clear()
        spoilt[word] = by
        with pytest.raises(ValueError, match=says):
            smoke.check_call(name, device)


def test_a_call_that_is_refused_is_left_out(smoke, tool, device):
    with pytest.raises(tool.items.Skipped, match='CLATTN_KERNEL is "pairs"'):
        smoke.check_call("pairs float32 causal", device)


# --- probes and programs -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def context(tool):
    """A device by the tool's own binding of OpenCL."""
    if not POCL.exists():
        pytest.skip("a driver of the system's is needed: PoCL")
    return tool.opencl.Context("Portable")


# A probe, and what is wrong in its kernel; None: nothing.
SPOILT = [
    ("half types", None, None, None),
    ("half types", "vload_half(i, input)", "vload_half(i ^ 1, input)", "vload_half: .* wrong"),
    ("half types", "vstore_half_rte", "vstore_half_rtz", "vstore_half_rte: .* wrong"),
    ("local memory", "memory[i] = (uchar)(i * 7u", "memory[i] = (uchar)(i * 9u", "bytes wrong"),
    ("multiply float16", None, None, None),
    ("multiply float16", "right.xy", "right.yx", "row 0, column 0"),
    ("multiply bfloat16", "= warp_load_columns", "= warp_load", "transposed matrix"),
    ("asynchronous copies", None, None, None),
    ("asynchronous copies", "? 0u : 16u", "? 16u : 16u", "piece .* is wrong"),
    ("numbers of a warp", "x, 5u", "x, 4u", "exchange"),
    ("numbers of a warp", "warp_pack(x,", "warp_pack(-x,", "rounding"),
    ("numbers of a warp", "score_exp2(x)", "score_exp2(x + 1e-5f)", "exp2"),
    ("numbers of a warp", "item == 7u", "item == 77u", "vote"),
]  # fmt: skip


@pytest.mark.cpus
@pytest.mark.parametrize(("name", "old", "new", "says"), SPOILT)
def test_probes_find_wrong_numbers(tool, context, monkeypatch, name, old, new, says):
    source_of = tool.opencl.source_of

    def spoilt(file):
        text = source_of(file)
        assert old in text
        return text.replace(old, new)

    if old is None:
        tool.probes.PROBES[name](context)
        return
    monkeypatch.setattr(tool.probes, "source_of", spoilt)
    with pytest.raises(tool.opencl.Error, match=says):
        tool.probes.PROBES[name](context)


@pytest.mark.cpus
def test_probes_for_other_devices_are_left_out(tool, context):
    for name in ("inline PTX", "matrix units", "addresses"):
        with pytest.raises(tool.items.Skipped, match="capability"):
            tool.probes.PROBES[name](context)


def test_programs_are_those_of_plans(tool, tmp_path):
    """Macros are numbers. Programs of tests are added to those of tools/machine_code."""
    put(tmp_path, "programs.json", text='["attention_mma WARP=1"]')
    names = tool.programs.names({"capability": "9.0"}, tmp_path)
    assert len(names) > 25 and names[-1] == "attention_mma WARP=1"
    for name in names:
        assert re.fullmatch(r"\w+( \w+=\d+)*", name)
    tiled = next(name for name in names if "tiled" in name)
    assert "HEAD_E=64 HEAD_EV=64" in tiled and "NC=8" in tiled and "exp2" not in tiled
    others = tool.programs.names({}, tmp_path)
    assert others and all(" WARP=" not in name and "WARP_SHUFFLES=0" in name for name in others)


@pytest.mark.cpus
def test_programs_are_kept(tool, context, tmp_path, monkeypatch):
    """A binary that is no PTX as it is, PTX with a line that names the program."""
    name = "attention_reference DTYPE=3 REAL64=0 VALUE_DTYPE=3"
    kind, says = tool.programs.build(context, tmp_path, name)
    assert kind == "passed" and says.startswith("00-attention_reference: ")
    assert (tmp_path / "00-attention_reference.bin").stat().st_size
    assert (tmp_path / "00-attention_reference.log").read_text().startswith(name)
    text = ".version 7.0\n.entry attention_reference()"
    log = "ptxas info : Used 40 registers, 16 bytes smem\n8 bytes stack frame, 4 bytes spill stores"
    monkeypatch.setattr(tool.opencl.Program, "ptx", lambda self: text)
    monkeypatch.setattr(tool.opencl.Program, "log", lambda self: log)
    _, says = tool.programs.build(context, tmp_path, name)
    assert "40 registers, 16 bytes smem, 8 bytes stack frame, 4 bytes spill stores" in says
    assert (tmp_path / "02-attention_reference.ptx").read_text() == f"// {name}\n{text}"


# --- what is prepared ----------------------------------------------------------------------------


def test_preparing_without_packages(tool, tmp_path, capsys, monkeypatch):
    """Copies the loader of this machine, and uses no network."""
    monkeypatch.setattr(tool.needs, "run_machine_code", lambda: ("exit status 0\nfine", ""))
    monkeypatch.setattr(tool.needs, "list_programs", lambda: ('["a program"]', ""))
    asked = []
    monkeypatch.setattr(tool.needs, "make_ptx", lambda *given: asked.append(given) or "no clang")
    arguments = ["--prepare", "--wheels", "", "--carried", str(tmp_path / "carried")]
    status = tool.main.main(arguments)
    carried, said = tmp_path / "carried", capsys.readouterr()
    here = tool.drivers.find(tmp_path)
    assert (carried / "lib/libOpenCL.so.1").exists() == (here.loader is not None)
    assert (status == 0) == (here.loader is not None)
    assert (carried / "machine_code.txt").read_text() == "exit status 0\nfine"
    assert (carried / "programs.json").read_text() == '["a program"]'
    assert list((carried / "wheels").iterdir()) == []
    assert str(carried) in said.out
    assert asked == [(carried / "cuda", tool.main.KEY_ROWS)]
    assert "not there: PTX for CUDA: no clang" in said.err


def test_ptx_that_is_carried(tool, tmp_path, monkeypatch):
    """Of all smoke calls and of the rows. What is missing is said, and so is a call that failed."""
    programs, calls, status = tmp_path / "programs", [], 0

    def run(command, **options):
        calls.append(command)
        if status == 0:
            programs.mkdir(exist_ok=True)
            (programs / "1.ptx").write_text(".visible .entry attention_mma(")
        return SimpleNamespace(returncode=status, stderr="all zeros\nthere is no clang\n")

    monkeypatch.setattr(tool.needs.subprocess, "run", run)
    assert tool.needs.make_ptx(tmp_path, ["f16-E128"]) == ""
    assert [command[1:5] for command in calls] == 2 * [
        [str(tool.needs.ROOT / "tools/cuda_machine.py"), "--without-gpu", "--folder", str(tmp_path)]
    ]
    assert {*tool.smoke.calls("gpu")} < {*calls[0]}
    assert calls[1][-2:] == ["--rows", "f16-E128"]
    status = 2
    assert "there is no clang" in tool.needs.make_ptx(tmp_path, [])
    (programs / "1.ptx").unlink()
    status = 1
    assert tool.needs.make_ptx(tmp_path, []) == "there is no clang"


# --- experiments ---------------------------------------------------------------------------------


def test_predictions_stand_in_the_lab(tool):
    text = (tool.needs.ROOT / "docs/lab/gpus.md").read_text().partition("## Predictions")[2]
    for experiment in tool.experiments.EXPERIMENTS.values():
        assert f"\n| {experiment.name} | {experiment.predicted:g}" in text, experiment.name


@pytest.mark.cpus
def test_experiments_take_times(tool, monkeypatch):
    """Of a kernel, the least one, as a rate of a case; of clattn's own call, on any device."""
    case = tool.experiment.Case(1, 2, 20, 30, 64, causal=True)
    assert case.operations == 4 * 2 * (20 * 21 / 2) * 64
    seconds = iter([9.0, *[4e-9] * 5, 2e-9, *[4e-9] * 200])
    launch = tool.experiment.Launch("one", threads=128, rows=16)
    context = SimpleNamespace(buffer=lambda given: given, release=lambda *given: None,
                              seconds=lambda *given: next(seconds))  # fmt: skip
    program = SimpleNamespace(kernel=lambda name: name)
    rate = launch.measure(case)(context, program)
    assert rate == case.operations / 2e-9 / 1e12
    context.words = "cpu"
    assert "TFLOP/s now, 515 on" in tool.experiment.beside_shipped(case, 515)(context)
    context.words = "no such device"
    assert "515 TFLOP/s on an H200 before (now: " in tool.experiment.beside_shipped(case, 515)(
        context
    )


def test_experiments_stand_beside_their_predictions(tool, tmp_path):
    """The better of two compilers' figures counts. A compiler whose numbers are wrong is named."""
    rates = {"driver": 300.0, "clang": 450.0}

    def measure(context, program):
        if rates[program] is None:
            raise tool.opencl.Error("7 numbers are wrong")
        return rates[program]

    experiment = tool.experiment.Experiment(
        "one", "words", 500.0, "TFLOP/s", "one.cl", ("A=1",), lambda *given: "right", measure,
        rate=900.0,
    )  # fmt: skip
    put(tmp_path, str(experiment.carried("")), text="clang")
    driver = SimpleNamespace(ptx=lambda: "driver")
    context = SimpleNamespace(facts={"capability": "9.0"}, build=lambda *given: driver,
                              load=bytes.decode)  # fmt: skip
    kind, says, figures = tool.experiment.run(context, experiment, "", tmp_path)
    assert kind == "passed" and figures == {"measured": 450.0, "share": 0.9, "by": rates}
    assert says.startswith("driver: right; 300 TFLOP/s; clang: right; 450 TFLOP/s; 50% of")
    listed = {"one": {"claim": "words", "predicted": 500.0, "unit": "TFLOP/s"}}
    table = tool.tables.describe_experiments({**listed, "two": listed["one"]}, {"one": figures})
    assert table.splitlines()[2:] == [
        "| one | words | 500 TFLOP/s | 450 | 0.90 |",
        "| two | words | 500 TFLOP/s | not measured |  |",
    ]
    rates["clang"] = None
    _, says, figures = tool.experiment.run(context, experiment, "", tmp_path)
    assert figures["measured"] == 300.0 and "clang: 7 numbers are wrong" in says
    rates["driver"] = None
    with pytest.raises(tool.opencl.Error, match=r"driver: 7 numbers .*; clang: 7 numbers"):
        tool.experiment.run(context, experiment, "", tmp_path)
    context.facts = {"capability": "8.0"}
    with pytest.raises(tool.items.Skipped, match=r"capability 9\.0"):
        tool.experiment.run(context, experiment, "", tmp_path)
