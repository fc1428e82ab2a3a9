# SPDX-License-Identifier: MIT
"""Processes that have the fake of CUDA's driver of tools/ptx in the place of a driver.

run_on_cuda(environment, "check_attention(*qkv((1, 1), 20, 90, 64, dtype=float16), device=device)")
"""

import textwrap

import cuda_machine
import pytest
from ptx.device import INLINE
from support.processes import run_python
from support.variants import forced

SETUP = """
import numpy as np
import clattn
from clattn import _core
from support.forced import FORCED
from support.checks import check_attention
from support.data import draw, qkv, sdpa
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
