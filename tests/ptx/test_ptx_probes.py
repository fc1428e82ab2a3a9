# SPDX-License-Identifier: MIT
"""The probes of tools/gpu_check as PTX: machine.py executes their kernels as a GPU would."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from machine_code import common, nvidia
from ptx.machine import Machine, Refused
from support.gpu_check import load
from support.ptx_device import programs_or_skip

tool = load()


class Buffer:
    """Bytes at an address that is a multiple of 256."""

    last = 1 << 20

    def __init__(self, contents):
        self.bytes = np.frombuffer(bytearray(contents), np.uint8)
        self.address = Buffer.last = (Buffer.last + len(self.bytes) + 511) // 256 * 256


class Program:
    def __init__(self, text):
        self.text = text

    def kernel(self, name):
        return lambda local: Machine(self.text, name, local)


class Interpreted:
    """In the place of a Context of tools/gpu_check/opencl.py, by clang and the interpreter."""

    def __init__(self, programs, edit=None):
        self.programs, self.edit = programs, edit
        self.facts = {"capability": "9.0", "type": "gpu", "local memory": 48 << 10}
        self.has_matrix_units = self.is_gpu = True

    def build(self, text, options=""):
        with tempfile.TemporaryDirectory() as folder:
            kernel, ptx = Path(folder) / "kernel.cl", Path(folder) / "kernel.ptx"
            kernel.write_text(text)
            try:
                nvidia.to_ptx(self.programs, kernel, options.split(), ptx)
            except common.CheckError as error:
                raise tool.opencl.Error(str(error)) from error
            made = ptx.read_text()
        if self.edit:
            assert self.edit[0] in made
            made = made.replace(*self.edit)
        return Program(made)

    def buffer(self, contents):
        return Buffer(bytes(contents))

    def write(self, buffer, contents):
        buffer.bytes[:] = np.frombuffer(contents, np.uint8)

    def read(self, buffer, size):
        return buffer.bytes[:size].tobytes()

    def run(self, kernel, size, local, *arguments):
        given = [
            (a.bytes, a.address) if isinstance(a, Buffer) else bytes(a) for a in arguments
        ]  # fmt: skip
        try:
            kernel(local).launch(size // local, given)
        except Refused as refused:
            raise tool.opencl.Error(str(refused)) from refused


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
