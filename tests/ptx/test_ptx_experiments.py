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


# One of each program. Experiments with the same one differ in the case that is timed.
PROGRAMS = {(e.file, e.macros): name for name, e in EXPERIMENTS.items()}.values()
LAUNCH = tool.experiment.Launch("producer", threads=384, rows=128)
CLOCKS = [name for name in EXPERIMENTS if "clock" in name]


@pytest.mark.parametrize("name", sorted({*PROGRAMS} - {*CLOCKS}))
def test_values(programs, name):
    assert compare(programs, name)


@pytest.mark.parametrize("name", CLOCKS)
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


@pytest.mark.parametrize("name", PROGRAMS)
def test_machine_code(programs, name):
    """No registers are spilled, and products run while the group does other work."""
    if programs[2] is None:
        pytest.skip("there is no ptxas")
    experiment = EXPERIMENTS[name]
    kernel = tool.opencl.ROOT / experiment.source()
    options = experiment.options().split()
    (row,) = nvidia.compile_row(programs, kernel, options, ["sm_90a"], experiment.finish)
    assert row["spilled"] == row["scratch"] == 0
    assert row["HGMMA"] > 0 or "merged" in name


@pytest.mark.parametrize(("old", "new", "says"), [
    ("fence.proxy.async", "wgmma.fence.sync.aligned; //", "not shown"),
    ("wgmma.wait_group.sync.aligned 0", "wgmma.wait_group.sync.aligned 1", "sums are wrong"),
])  # fmt: skip
def test_faults_of_products(programs, old, new, says):
    with pytest.raises(tool.opencl.Error, match=says):
        compare(programs, "products of groups", (old, new))


WAIT_EMPTY = "phase_wait(EMPTY(warp->start, t), PARITY(t) ^ 1u);"
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
    ("ahead", "REGISTERS_DOWN(24);", "", "all warps wait"),
    ("ahead", "REGISTERS_UP(REGISTERS);", "REGISTERS_UP(REGISTERS + 8);", "all warps wait"),
    ("turns", "end_turn(&warp); /* the first group begins */", "", "all warps wait"),
    ("turns", "NAMED_ARRIVE(2u -", "NAMED_ARRIVE(1u +", "all warps wait"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "old", "new", "says"), FAULTS)
def test_faults_of_producers(programs, name, old, new, says):
    """A case of more tiles than stages, for one work-group."""
    experiment = EXPERIMENTS[name]
    macros = [macro.replace("STAGES=8", "STAGES=4") for macro in experiment.macros]
    case = tool.experiment.Case(1, 1, 70, 300, 128)
    experiment = replace(experiment, macros=macros, values=LAUNCH.values([case]))
    text = tool.opencl.joined(tool.opencl.ROOT, experiment.source())
    assert old in text
    program = by_clang(programs, experiment, text.replace(old, new))
    if says is None:
        assert experiment.values(*program)
        return
    with pytest.raises(tool.opencl.Error, match=says):
        experiment.values(*program)
