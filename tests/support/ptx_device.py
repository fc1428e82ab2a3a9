# SPDX-License-Identifier: MIT
"""Processes that have the device of tools/ptx in the place of their own.

run_on_machine(library, "check_attention(*qkv((1, 1), 20, 90, 64, dtype=float16), device=device)")
"""

import textwrap
from pathlib import Path

import cuda_machine
import pytest
from machine_code import nvidia
from support.processes import run_python
from support.variants import forced

SETUP = """
import sys
import numpy as np
import clattn
from support.checks import check_attention
from support.data import draw, qkv, sdpa
from references.attention import bfloat16, float16
from ptx.device import Device
from machine_code import table

machine = Device(sys.argv[1])
"""

OPEN = "device = clattn.devices()[0]\n"


def programs_or_skip():
    """Returns the programs that make PTX of kernels. Without them, the test is skipped."""
    found, _ = nvidia.find_programs()
    if None in found[:2]:
        pytest.skip("there is no clang and libclc for PTX")
    return found


def build(folder):
    """Builds the loader in a folder."""
    programs, _ = nvidia.find_programs()
    if cuda_machine.C_COMPILER is None or None in programs[:2]:
        pytest.skip("there is no C compiler, or no clang and libclc for PTX")
    made = Path(folder) / "libmachine.so"
    cuda_machine.build(made, "opencl_machine.c", "interpreted_machine.c")
    return made


def run_on_machine(library, code, before="", kernel=None):
    """Runs `before`, opens the device and runs `code`, in a child process. Returns the process.

    `kernel` forces a variant. A variant that is not forced is tried at its first use.
    """
    code = SETUP + before + OPEN + textwrap.dedent(code)
    return run_python(code, library, env=forced(kernel))
