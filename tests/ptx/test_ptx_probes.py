# SPDX-License-Identifier: MIT
"""The probes of tools/gpu_check as PTX: machine.py executes their kernels as a GPU would."""

import pytest
from support.interpreted import Interpreted, tool
from support.ptx_device import programs_or_skip


@pytest.fixture(scope="module")
def programs():
    return programs_or_skip()


@pytest.mark.parametrize("name", [
    "inline PTX", "multiply float16", "multiply bfloat16", "asynchronous copies",
    "numbers of a warp",
])  # fmt: skip
def test_probes_pass(programs, name):
    said = tool.probes.PROBES[name](Interpreted(programs))
    assert said.startswith("all forms that kernels use" if name == "inline PTX" else "PTX: ")


def test_addresses(programs):
    """The way of kernels is right; an array that is aligned to 4 bytes is refused."""
    said = tool.probes.PROBES["addresses"](Interpreted(programs)).split("; ")
    assert all("right at" in words for words in said[:2])
    assert "misaligned" in said[2]


@pytest.mark.parametrize(("name", "old", "new", "says"), [
    ("multiply float16", "ldmatrix.sync.aligned.m8n8.x4.trans", "ldmatrix.sync.aligned.m8n8.x4",
     "transposed"),
    ("asynchronous copies", "cp.async.wait_group 0", "cp.async.wait_group 1", "on its way"),
    ("asynchronous copies", "cp.async.wait_group 1", "cp.async.wait_group 2", "on its way"),
    ("numbers of a warp", "cvt.rn.f16x2.f32", "cvt.rn.bf16x2.f32", "rounding"),
    ("addresses", "cp.async.wait_group 0", "cp.async.wait_group 1", "on its way"),
])  # fmt: skip
def test_probes_find_faults(programs, name, old, new, says):
    with pytest.raises(tool.opencl.Error, match=says):
        tool.probes.PROBES[name](Interpreted(programs, (old, new)))
