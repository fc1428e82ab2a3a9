# SPDX-License-Identifier: MIT
"""The experiments of tools/gpu_check as PTX: values by the interpreter, registers by ptxas."""

import pytest
from machine_code import nvidia
from support.interpreted import Interpreted, tool
from support.ptx_device import programs_or_skip

EXPERIMENTS = tool.experiments.EXPERIMENTS


@pytest.fixture(scope="module")
def programs():
    return programs_or_skip()


def compare(programs, name, edit=None):
    """Compare an experiment's values, with an edit of its PTX."""
    experiment = EXPERIMENTS[name]
    context = Interpreted(programs, edit)
    text = tool.opencl.joined(tool.opencl.ROOT, experiment.source())
    return experiment.values(context, tool.experiment.by_driver(context, experiment, text))


# One of each program. Experiments with the same one differ in the case that is timed.
PROGRAMS = {(e.file, e.macros): name for name, e in EXPERIMENTS.items()}.values()


@pytest.mark.parametrize("name", PROGRAMS)
def test_values(programs, name):
    assert compare(programs, name)


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
    assert row["HGMMA"] > 0 or name == "boxes of tensors"


@pytest.mark.parametrize(("name", "old", "new", "says"), [
    ("products of groups", "fence.proxy.async", "wgmma.fence.sync.aligned; //", "not shown"),
    ("products of groups", "wgmma.wait_group.sync.aligned 0", "wgmma.wait_group.sync.aligned 1",
     "sums are wrong"),
    ("float32 by halves, E = 64", ", -8192;", ", -1;", "numbers are wrong"),  # no low halves
    ("float32 by halves, E = 64", "mul.rn.f16x2", "and.b32", "numbers are wrong"),
    ("float32 by halves, E = 64", "fence.proxy.async.shared::cta;", "", "was not shown to copies"),
    ("float32 by halves, E = 64", "cp.async.bulk", "//", "can go on"),
    ("boxes of tensors", "fence.proxy.tensormap::generic.acquire.gpu", "//", "no fence of this"),
    ("boxes of tensors", "cp.async.bulk.tensor.3d", "//", "can go on"),
    ("boxes of tensors", ", 8192;", ", 4096;", "can go on"),  # bytes that are expected
])  # fmt: skip
def test_faults(programs, name, old, new, says):
    with pytest.raises(tool.opencl.Error, match=says):
        compare(programs, name, (old, new))
