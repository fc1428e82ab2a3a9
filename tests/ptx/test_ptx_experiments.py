# SPDX-License-Identifier: MIT
"""The experiments of tools/gpu_check as PTX: values by the interpreter, registers by ptxas."""

import re
from dataclasses import replace

import pytest
from machine_code import nvidia
from support.interpreted import Interpreted, tool
from support.ptx_device import programs_or_skip

EXPERIMENTS = tool.experiments.EXPERIMENTS


@pytest.fixture(scope="module")
def programs():
    return programs_or_skip()


def by_clang(programs, experiment, text, edit=None):
    """Return a context and the program of a text, with an edit of its PTX."""
    context = Interpreted(programs, edit)
    return context, tool.experiment.by_driver(context, experiment, text)


def compare(programs, name, edit=None):
    """Compare an experiment's values."""
    experiment = EXPERIMENTS[name]
    text = tool.opencl.joined(tool.opencl.ROOT, experiment.source())
    return experiment.values(*by_clang(programs, experiment, text, edit))


# One of each program and launch. Experiments with the same ones differ in the case that is timed.
PROGRAMS = {(e.file, e.macros, "staying" in name): name for name, e in EXPERIMENTS.items()}.values()
LAUNCH = tool.experiment.Launch("producer", threads=384, rows=128)
CLOCKS = [name for name in EXPERIMENTS if "clock" in name]
# What runs each time: a part of a kernel each. The others run with -m rest.
SOME = (
    "products of groups", "ahead, shown by producers", "turns, E 64", "ahead, boxes",
    "ahead, 2k, staying", "float32 by halves, E = 64", "splits merged by the last group",
)  # fmt: skip
assert {*SOME} <= {*PROGRAMS}


def some(names):
    """Return names as parameters, of which SOME run each time."""
    return [pytest.param(name, marks=() if name in SOME else pytest.mark.rest) for name in names]


@pytest.mark.parametrize("name", some(sorted({*PROGRAMS} - {*CLOCKS})))
def test_values(programs, name):
    assert compare(programs, name)


def test_what_is_carried(programs, tmp_path):
    """PTX that a driver loads as it is."""
    experiment = EXPERIMENTS["ahead"]
    assert tool.experiment.prepare(tmp_path, [experiment]) == 0
    text = experiment.carried(tmp_path).read_text()
    assert ".target sm_90a" in text and ".reqntid 384, 1, 1\n.minnctapersm 1\n{" in text
    assert "\tsetmaxnreg.inc.sync.aligned.u32 240;" in text
    missing = replace(experiment, macros=("HEAD_E=64",))
    assert tool.experiment.prepare(tmp_path, [missing]).startswith("ahead: clang")


@pytest.mark.parametrize("name", some(CLOCKS))
def test_clocks(programs, name):
    """The parts of the work are in the first row of each group; other rows are results.

    The interpreter's clock counts what all warps do.
    """
    experiment = EXPERIMENTS[name]
    names = tool.prefill.PARTS["AHEAD" if "ahead" in name else "BEHIND"]
    case = tool.experiment.Case(1, 1, 128, 300, 128)
    text = tool.opencl.joined(tool.opencl.ROOT, experiment.source())
    context, program = by_clang(programs, experiment, text)
    said = LAUNCH.parts(case, names)(context, program)
    found = re.findall(r"([a-z ]+) (\d+)", said.partition(":")[2])
    assert [words.strip() for words, _ in found] == [*names, "together"]
    assert 0 < int(found[-1][1]) < 1000
    with pytest.raises(tool.opencl.Error, match="numbers are wrong, the first at \\(0, 0, 0"):
        LAUNCH.compare(context, program, case)


@pytest.mark.parametrize("name", some(PROGRAMS))
def test_machine_code(programs, name):
    """No registers are spilled, and products run while the group does other work."""
    if programs[2] is None:
        pytest.skip("there is no ptxas")
    experiment = EXPERIMENTS[name]
    kernel = tool.opencl.ROOT / experiment.source()
    options = experiment.options().split()
    (row,) = nvidia.compile_row(programs, kernel, options, ["sm_90a"], experiment.finish)
    assert row["spilled"] == row["scratch"] == 0
    assert row["HGMMA"] > 0 or name == "boxes of tensors" or "merged" in name


@pytest.mark.parametrize(("name", "old", "new", "says"), [
    ("products of groups", "fence.proxy.async", "wgmma.fence.sync.aligned; //", "not shown"),
    ("products of groups", "wgmma.wait_group.sync.aligned 0", "wgmma.wait_group.sync.aligned 1",
     "sums are wrong"),
    ("float32 by halves, E = 64", ", -8192;", ", -1;", "numbers are wrong"),  # no low halves
    ("float32 by halves, E = 64", "mul.rn.f16x2", "and.b32", "numbers are wrong"),
    ("float32 by halves, E = 64", "fence.proxy.async.shared::cta;", "", "was not shown to copies"),
    ("float32 by halves, E = 64", "cp.async.bulk", "//", "all warps wait"),
    ("boxes of tensors", "fence.proxy.tensormap::generic.acquire.gpu", "//", "no fence of this"),
    ("boxes of tensors", "cp.async.bulk.tensor.3d", "//", "all warps wait"),
    ("boxes of tensors", ", 8192;", ", 4096;", "all warps wait"),  # bytes that are expected
])  # fmt: skip
def test_faults_of_text(programs, name, old, new, says):
    with pytest.raises(tool.opencl.Error, match=says):
        compare(programs, name, (old, new))


WAIT_EMPTY = "phase_wait(EMPTY(warp->start, t), PARITY(t) ^ 1u);"
WAIT_QUERIES = "phase_wait(QUERIES(warp->start, turn), QUERY_PARITY(turn) ^ 1u);"
LAST_RELEASE = "release(warp, rows->tile + 2 * (uint)blocks - 1);"
WAIT_FULL = "phase_wait(FULL(warp->start, t), PARITY(t));"
RELEASE = "phase_arrive(EMPTY(warp->start, t));"
RESULT = "    GROUP_WAIT(1);\n    group_keep(next[0], BN);\n"
EARLY_RELEASE = f"{RESULT}    release(warp, t);\n", f"    release(warp, t);\n{RESULT}"

# An experiment, a text of its kernel, another one in its place, and what the machine says.
FAULTS = [
    ("copying warps", "", "", None),
    ("copying warps", WAIT_EMPTY, "", "a race"),
    ("copying warps", WAIT_EMPTY, WAIT_EMPTY.replace(" ^ 1u", ""), "all warps wait"),
    ("copying warps", WAIT_EMPTY, WAIT_EMPTY.replace("t)", "t - min(t, 1u))"), "a race"),
    ("copying warps", WAIT_FULL, "", "never written"),
    ("copying warps", WAIT_FULL, WAIT_FULL.replace("PARITY(t)", "0u"), "on its way"),
    ("copying warps", WAIT_FULL, WAIT_FULL.replace("PARITY(t)", "PARITY(t) ^ 1u"),
     "never written"),
    ("copying warps", RELEASE, "", "all warps wait"),
    ("copying warps", "t), WARPS);", "t), 4);", "8 arrivals at a barrier that awaits 4"),
    ("copying warps", "t), COPYING);", "t), 1);", "arrivals at a barrier that awaits 1"),
    ("copying warps", "group_copies_arrive();", "", "not shown"),
    ("ahead, shown by producers", "group_copies_arrive();", "", "not shown"),
    ("ahead, shown by producers", "WARP_COPIES_WAIT(warp, BEHIND_COPIES);", "", "on its way"),
    ("copying warps", "barrier(CLK_LOCAL_MEM_FENCE);", "", "a race"),
    ("ahead", *EARLY_RELEASE, "has read before|a product reads"),
    ("ahead, 2k, staying", "", "", None),
    ("ahead, 2k, staying", WAIT_QUERIES, "", "a race"),
    ("ahead, 2k, staying", "phase_arrive(QUERIES(warp->start, rows->turn));", "", "all warps wait"),
    ("ahead, 2k, staying", LAST_RELEASE, "", "all warps wait"),
    ("ahead", "REGISTERS_DOWN(24);", "", "all warps wait"),
    ("ahead", "REGISTERS_UP(REGISTERS);", "REGISTERS_UP(REGISTERS + 8);", "all warps wait"),
    ("turns", "end_turn(&warp); /* the first group begins */", "", "all warps wait"),
    ("turns", "NAMED_ARRIVE(2u -", "NAMED_ARRIVE(1u +", "all warps wait"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "old", "new", "says"), FAULTS)
def test_faults_of_producers(programs, name, old, new, says):
    """A case of more tiles than stages, for one work-group. It may have three pieces of work."""
    experiment = EXPERIMENTS[name]
    macros = [macro.replace("STAGES=8", "STAGES=4") for macro in experiment.macros]
    stays = "staying" in name
    case = tool.experiment.Case(1, 3 if stays else 1, 70, 40 if stays else 300, 128)
    values = replace(LAUNCH, stays=stays).values([case])
    experiment = replace(experiment, macros=macros, values=values)
    text = tool.opencl.joined(tool.opencl.ROOT, experiment.source())
    assert old in text
    program = by_clang(programs, experiment, text.replace(old, new))
    if says is None:
        assert experiment.values(*program)
        return
    with pytest.raises(tool.opencl.Error, match=says):
        experiment.values(*program)
