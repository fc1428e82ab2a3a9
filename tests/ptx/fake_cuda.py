# SPDX-License-Identifier: MIT
"""CUDA's driver without a GPU: machine.py executes what support/fake_cuda.c is given.

A process has the fake instead of a driver:

    run_on_cuda(environment, "check(*qkv((1, 1), 20, 90, 64, dtype=float16), device=device)")
"""

import ctypes
import os
import textwrap
import traceback

import numpy as np
import pytest
from ptx.device import INLINE, cuda_machine
from ptx.machine import Machine
from support.helpers import run_python
from support.variants import forced

LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_uint32,
    ctypes.POINTER(ctypes.c_void_p),
)  # fmt: skip

LAUNCH_OUT_OF_RESOURCES = 701

SETUP = """
import numpy as np
import clattn
from clattn import _core
from support.forced import FORCED
from support.helpers import check, draw, qkv, sdpa
from references.attention import bfloat16, float16
from ptx.fake_cuda import Cuda

cuda = Cuda()
device = clattn.devices()[0]
arrays = qkv((1, 1), 20, 90, 64, dtype=float16)

def refusal(action):
    "The text of the error."
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise SystemExit("no error")
"""


class Cuda:
    """The driver, in this process and before clattn opens it."""

    def __init__(self):
        self.library = ctypes.CDLL(os.environ["CLATTN_CUDA_LIBRARY"])
        self.library.fake_size.argtypes = [ctypes.c_uint64]
        self.library.fake_size.restype = ctypes.c_size_t
        self.library.fake_disguise.restype = ctypes.c_uint64
        self.library.fake_leave.argtypes = [ctypes.c_size_t]
        self.disguise = self.library.fake_disguise()
        self.function = LAUNCH(self.launch)
        ctypes.c_void_p.in_dll(self.library, "fake_launch").value = ctypes.cast(
            self.function, ctypes.c_void_p
        ).value
        self.machines = {}
        self.launched = []
        self.refused = None  # the kernel whose launches fail

    @property
    def modules(self):
        return ctypes.c_int.in_dll(self.library, "fake_modules").value

    def launch(self, ptx, name, groups, work_items, arguments):
        try:
            name = name.decode()
            if name == self.refused:
                return LAUNCH_OUT_OF_RESOURCES
            key = (ptx, name, work_items)
            if key not in self.machines:
                self.machines[key] = Machine(ptx.decode(), name, work_items)
            machine = self.machines[key]
            self.launched.append(name)
            sizes = [size for _, size in machine.program.parameters]
            values = [self.argument(arguments[n], size) for n, size in enumerate(sizes)]
            machine.launch(groups, values)
        except Exception:
            traceback.print_exc()
            return LAUNCH_OUT_OF_RESOURCES
        return 0

    def argument(self, place, size):
        """Returns an argument as Machine.launch takes it."""
        value = ctypes.string_at(place, size)
        address = int.from_bytes(value, "little")
        length = self.library.fake_size(address) if size == 8 else 0
        if length == 0:
            return value
        contents = (ctypes.c_ubyte * length).from_address(address ^ self.disguise)
        return np.frombuffer(contents, np.uint8), address


def prepare(folder):
    """Builds the loader and the fake. Returns what child processes need to find them."""
    found, _ = cuda_machine.nvidia.find_programs()
    if cuda_machine.C_COMPILER is None or None in found[:2]:
        pytest.skip("there is no C compiler, or no clang and libclc for PTX")
    fake = folder / "libcuda.so.1"
    cuda_machine.build(fake, "fake_cuda.c")
    environment = cuda_machine.environment(folder, str(fake))
    environment["CLATTN_CUDA_COMPILER"] += " " + " ".join(INLINE)
    return environment


def run_on_cuda(environment, code, kernel=None, **more):
    """Runs code after SETUP in a child process, which it returns. `kernel` forces a variant."""
    env = environment | forced(kernel) | more
    return run_python(SETUP + textwrap.dedent(code), env=env)
