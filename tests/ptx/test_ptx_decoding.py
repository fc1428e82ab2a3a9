# SPDX-License-Identifier: MIT
"""The experiment in which the last work-group of a row merges the splits of its keys, as PTX."""

import pytest
from machine_code import nvidia
from support.interpreted import Interpreted, tool
from support.ptx_device import programs_or_skip

NAME = "splits merged by the last group"
EXPERIMENT = tool.experiments.EXPERIMENTS[NAME]
BARRIER = "barrier(CLK_GLOBAL_MEM_FENCE); /* the group's writes"
# A text of the kernel, another one in its place, and what the machine or the comparison says.
FAULTS = {
    "no fence before the count": ("FENCE_ALL(); /* the split", "/* the split", "a race"),
    "no fence behind the count": ("FENCE_ALL(); /* the count", "/* the count", "a race"),
    "no barrier before the count": (BARRIER, "/* the group's writes", "a race"),
    "every group merges": ("if (before == (uint)splits - 1u)", "if (true)", "never|a race"),
    "a count that stays": (
        "(uint)splits - 1u);\n        F",
        "0xffffffffu);\n        F",
        "second call",
    ),
}


@pytest.fixture(scope="module")
def programs():
    return programs_or_skip()


def values(programs, old="", new=""):
    text = tool.opencl.joined(tool.opencl.ROOT, EXPERIMENT.source())
    assert old in text
    context = Interpreted(programs)
    program = tool.experiment.by_driver(context, EXPERIMENT, text.replace(old, new, 1))
    return EXPERIMENT.values(context, program)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(programs, fault):
    old, new, says = FAULTS[fault]
    with pytest.raises(tool.opencl.Error, match=says):
        values(programs, old, new)


def test_machine_code(programs):
    """Nothing is spilled, and the count is one instruction between two fences."""
    if programs[2] is None:
        pytest.skip("there is no ptxas")
    kernel = tool.opencl.ROOT / EXPERIMENT.source()
    (row,) = nvidia.compile_row(programs, kernel, EXPERIMENT.options().split(), ["sm_90a"],
                                EXPERIMENT.finish)  # fmt: skip
    assert row["spilled"] == row["scratch"] == 0
