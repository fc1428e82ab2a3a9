# SPDX-License-Identifier: MIT
"""Kernels for NVIDIA GPUs: clang compiles a kernel to PTX, ptxas the PTX to machine code.

A row gives registers of a work-item, bytes spilled (stores and loads), bytes of stack and of local
memory, instructions of matrix units (HMMA), those of groups of warps (HGMMA), loads of matrices
(LDSM) and asynchronous copies (LDGSTS). Instructions are counted in the machine code if nvdisasm is
found, else in the PTX. It is the code of this clang; a driver's own compiler may take a few
registers more or less.
"""

import importlib.util
import re
import shutil
import tempfile
from pathlib import Path

from machine_code.common import CLANGS, ROOT, CheckError, find_library, run
from machine_code.table import RETARGETED, with_macros

SHIM = Path(__file__).with_name("ptx_shim.h")
LIBRARY = "nvptx64--nvidiacl.bc"

MOST_LOCAL = 48 << 10  # bytes of static local memory that ptxas takes

# What is counted: the instruction, and what stands for it in PTX.
COUNTED = {
    "HMMA": "\tmma.sync",
    "HGMMA": "wgmma.mma_async",
    "LDSM": "ldmatrix",
    "LDGSTS": "cp.async.cg",
}
DEVICES = "sm_80", "sm_90"


def installed(package, *places):
    """A file that a Python package brings, or None."""
    spec = importlib.util.find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        for place in places:
            if (Path(folder) / place).exists():
                return str(Path(folder) / place)
    return None


def find_programs():
    """clang, libclc, ptxas and, if there is one, nvdisasm; what is missing, in words."""
    clang = next(filter(None, map(shutil.which, CLANGS)), None)
    library = find_library(LIBRARY)
    ptxas = (
        shutil.which("ptxas")
        or installed("nvidia", "cuda_nvcc/bin/ptxas", "cu13/bin/ptxas")
        or installed("triton", "backends/nvidia/bin/ptxas")
    )
    nvdisasm = shutil.which("nvdisasm") or installed("triton", "backends/nvidia/bin/nvdisasm")
    needed = {
        "clang (apt-get install clang-16)": clang,
        f"{LIBRARY} (apt-get install libclc-16)": library,
        "ptxas (pip install nvidia-cuda-nvcc-cu12)": ptxas,
    }
    missing = [what for what, found in needed.items() if found is None]
    return (clang, library, ptxas, nvdisasm), missing


def compiler(programs):
    """The command that makes PTX, up to options, -o, the PTX and the kernel."""
    clang, library = programs[:2]
    return [clang, "-target", "nvptx64-nvidia-nvcl", "-x", "cl", "-cl-std=CL1.2", "-O3", "-S",
            "-Xclang", "-target-cpu", "-Xclang", "sm_80",
            "-Xclang", "-target-feature", "-Xclang", "+ptx70",
            "-Xclang", "-finclude-default-header",
            "-Xclang", "-mlink-builtin-bitcode", "-Xclang", library, "-Wno-linker-warnings",
            "-Werror=undef",  # a kernel tests a macro that its plan lacks
            "-include", SHIM, "-I", ROOT]  # fmt: skip


def to_ptx(programs, kernel, options, ptx):
    run(*compiler(programs), *options, "-o", ptx, kernel)


def count(programs, ptx, cubin):
    nvdisasm = programs[3]
    if nvdisasm is None:
        text = ptx.read_text()
        return [text.count(in_ptx) for in_ptx in COUNTED.values()]
    code = run(nvdisasm, "-c", cubin)
    return [len(re.findall(rf"\s{name}\b", code)) for name in COUNTED]


def shrink(ptx):
    """Make PTX declare no more local memory than ptxas takes. NVIDIA's driver takes more.

    Return the bytes that are left out. Registers and instructions stay the same.
    """
    text = ptx.read_text()
    declared = re.search(r"\.shared .*\[(\d+)\];", text)
    more = int(declared[1]) - MOST_LOCAL if declared else 0
    if more > 0:
        ptx.write_text(text.replace(declared[0], declared[0].replace(declared[1], str(MOST_LOCAL))))
    return max(more, 0)


def retarget(text):
    """PTX for RETARGETED, as csrc/opencl/ptx.c makes it. clang's has an older version."""
    text = re.sub(r"\.target sm_\d+", f".target {RETARGETED}", text.replace("//@90a ", ""))
    return re.sub(r"\.version [0-7]\..*", ".version 8.0", text)


def give_all_registers(text, threads):
    """PTX whose kernels have one work-group of so many work-items on a unit.

    Without these directives ptxas leaves out setmaxnreg.
    """
    size = rf"\1\n.reqntid {threads}, 1, 1\n.minnctapersm 1\n"
    return re.sub(r"(\.entry\s+\w+\s*\([^)]*\))[^{]*", size, text)


def assemble(programs, ptx, architecture, left_out):
    """Numbers of one row. `left_out` is what `shrink` has returned."""
    cubin = ptx.with_suffix(f".{architecture}.cubin")
    said = run(programs[2], f"-arch={architecture}", "-v", ptx, "-o", cubin)
    if lost := re.search(r".*Potential Performance Loss.*", said):
        raise CheckError(lost[0])  # products of groups that wait for each other, for one
    stack, stores, loads = map(
        int, re.search(r"(\d+) bytes stack.*?(\d+) bytes spill stores, (\d+)", said).groups()
    )
    local = re.search(r"(\d+) bytes smem", said)
    return {
        "registers": int(re.search(r"Used (\d+) registers", said)[1]),
        "spilled": stores + loads,
        "scratch": stack,
        "local": int(local[1]) + left_out if local else 0,
        **dict(zip(COUNTED, count(programs, ptx, cubin), strict=True)),
    }


def compile_row(programs, kernel, options, devices, finish=retarget):
    """Numbers of a kernel and its macros for each device.

    `finish` changes PTX for RETARGETED.
    """
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        to_ptx(programs, kernel, with_macros(kernel, options), ptx)
        left_out = shrink(ptx)
        if tuple(devices) == (RETARGETED,):
            ptx.write_text(finish(ptx.read_text()))
        return [assemble(programs, ptx, device, left_out) for device in devices]
