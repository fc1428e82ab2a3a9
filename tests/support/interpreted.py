# SPDX-License-Identifier: MIT
"""Kernels of tools/gpu_check as PTX: tools/ptx executes them as a GPU would."""

import tempfile
from pathlib import Path

import numpy as np
from machine_code import common, nvidia
from ptx.machine import Machine, Refused
from support.gpu_check import load

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

    def ptx(self):
        return self.text


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

    def load(self, binary):
        return Program(binary.decode())

    def buffer(self, contents):
        return Buffer(bytes(contents))

    def release(self, *buffers):
        pass

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
