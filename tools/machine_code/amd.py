# SPDX-License-Identifier: MIT
"""Kernels for AMD's GPUs: clang compiles them to assembly, which says what they take.

A row gives vector registers of a work-item and how many of them are spilled, scalar registers
spilled, bytes of stack and of local memory, and how many waves a SIMD has by registers alone.
"""

import re
import shutil

from machine_code.common import CLANGS, ROOT, find_library, run
from machine_code.table import with_macros

LIBRARY = "amdgcn--amdhsa.bc"
DEVICES = "gfx906", "gfx90a", "gfx1030", "gfx1100"
REGISTERS = {"gfx906": 256, "gfx90a": 512, "gfx1030": 1024, "gfx1100": 1536}  # of a SIMD, a lane

FOUND = {
    "registers": "vgpr_count",
    "spilled": "vgpr_spill_count",
    "scalars spilled": "sgpr_spill_count",
    "scratch": "private_segment_fixed_size",
    "local": "group_segment_fixed_size",
}


def find_programs():
    """clang and libclc; what is missing, in words."""
    clang = next(filter(None, map(shutil.which, CLANGS)), None)
    library = find_library(LIBRARY)
    needed = {
        "clang (apt-get install clang-16)": clang,
        f"{LIBRARY} (apt-get install libclc-16)": library,
    }
    return (clang, library), [what for what, found in needed.items() if found is None]


def compile_row(programs, kernel, options, devices):
    clang, library = programs
    return [numbers_of(clang, library, kernel, with_macros(kernel, options), d) for d in devices]


def numbers_of(clang, library, kernel, options, device):
    text = run(
        clang, "-target", "amdgcn-amd-amdhsa", "-x", "cl", "-cl-std=CL1.2", "-O3", "-S",
        f"-mcpu={device}", "-nogpulib", "-Wno-linker-warnings", "-Werror=undef",
        "-Xclang", "-finclude-default-header", "-Xclang", "-mlink-builtin-bitcode",
        "-Xclang", library, "-I", ROOT, "-o", "-", kernel, *options,
    )  # fmt: skip
    numbers = {name: int(re.search(rf"\.{key}: +(\d+)", text)[1]) for name, key in FOUND.items()}
    numbers["lanes"] = int(re.search(r"\.wavefront_size: +(\d+)", text)[1])
    numbers["waves"] = REGISTERS[device] // max(numbers["registers"], 1)
    return numbers
