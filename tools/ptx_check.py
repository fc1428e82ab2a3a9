# SPDX-License-Identifier: MIT
"""Assemble kernels for NVIDIA GPUs without having one, and print what the machine code is like.

    python tools/ptx_check.py                              # the kernels listed in KERNELS
    python tools/ptx_check.py kernels/attention/tiled.cl -DDTYPE=1   # any kernel, clang's options

A kernel of MACROS has the macros named there, except those that the options define.

clang compiles a kernel to PTX, and ptxas compiles the PTX to machine code. The table has a row for
each kernel, its macros and each architecture. The row gives registers of a work-item, bytes spilled
(stores and loads), bytes of stack, bytes of local memory, instructions of matrix units (HMMA),
those of groups of warps (HGMMA), loads of matrices (LDSM) and asynchronous copies (LDGSTS). The
tool counts instructions in the machine code if it finds nvdisasm, else in the PTX.

The exit status is 1 if a kernel does not assemble, spills registers, or keeps arrays on its stack.
The exit status is 2 if a program is missing.

Needs clang, its library for OpenCL on NVPTX (Debian: clang-16 libclc-16) and ptxas of CUDA 12 or
later (on the path, or `pip install nvidia-cuda-nvcc-cu12`). It shows the code of this clang; a
driver's own compiler may take a few registers more or less.
"""

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
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

# What calls ask for, as kernels know it: the bits of OPTIONS.
USES = {
    name: int(bit)
    for name, bit in re.findall(
        r"#define CA_USES_(\w+) +(\d+)u", (ROOT / "kernels/attention/params.h").read_text()
    )
}


def uses(*names, mask_dtype=0):
    """Macros of a call that asks for these."""
    return f"OPTIONS={sum(USES[name] for name in names)}", f"MASK_DTYPE={mask_dtype}"


# All macros that a plan sets, for a call without options on an NVIDIA GPU: csrc/attention/plan_*.c.
# tests/ptx compares the names with those of real plans. DTYPE 1 is float16, 2 bfloat16, 3 float32.
DTYPES = "DTYPE=1 VALUE_DTYPE=DTYPE REAL64=0"
CALL = f"{DTYPES} OPTIONS=0 SLOTS=0 MASK_DTYPE=0"
SIZES = f"{CALL} HEAD_E=128 HEAD_EV=HEAD_E"
MACROS = {
    "attention/reference.cl": DTYPES,
    "attention/tiled.cl": f"{SIZES} TX=8 TY=16 MI=4 NJ=8 NC=(HEAD_EV/TX) EC=32 KC=32",
    "attention/mma.cl": f"{SIZES} WARPS=4 MT=1 STAGES=3 BN=32 CHUNK=16 LSE=0 ALIGNED=0 "
    "OUTPUT_ALIGNED=0 WARP=1 QUERIES=1 TOGETHER=1",
    "attention/decode_mma.cl": f"{SIZES} WARP=1 WARPS=4",
    "attention/decode_gpu.cl": f"{SIZES} WG=128 RT=1 KEY_LANES=8 BN=32 WIDE=1 EXCHANGE=2",
    "attention/decode_gpu_merge.cl": f"{CALL} HEAD_EV=128 WG=256 EXCHANGE=2",
    "probe/exchange.cl": "EXCHANGE=2 SUB_GROUP=0 LANES=32",
    "probe/warp.cl": "TEST=2",
    "probe/group.cl": "TEST=2",
    "probe/local.cl": "BYTES=49152",
}

ALIGNED = ("ALIGNED=1", "OUTPUT_ALIGNED=1")
BOOL_MASK = uses("MASK")
FLOAT_MASK = uses("MASK", "ADDED_MASK", mask_dtype=1)
SOFTCAP = uses("SOFTCAP")
BOTH_AND_LSE = (*uses("MASK", "ADDED_MASK", "SOFTCAP", mask_dtype=1), "LSE=1")
BOTH = ("sm_80", "sm_90")
RETARGETED = "sm_90a"  # PTX for it is other PTX, changed by clattn


def mma(dtype, size, tiles, keys, *more, architectures=BOTH):
    """A row of attention_mma, as attention/plan_mma.c makes it where queries stay in registers."""
    plain = not any(macro.startswith("OPTIONS") for macro in more)
    chunk = 32 if plain and keys >= 32 and (tiles == 1 or size <= 80) else 16
    macros = (f"DTYPE={dtype}", f"HEAD_E={size}", f"MT={tiles}", f"BN={keys}", f"CHUNK={chunk}")
    return "attention/mma.cl", (*macros, *more), architectures


def staying_mma(dtype, size, *more):
    """A row of attention_mma whose queries stay in local memory, of up to 96 KiB."""
    macros = (f"DTYPE={dtype}", f"HEAD_E={size}", "MT=2", "BN=64", "CHUNK=64", "STAGES=2")
    return "attention/mma.cl", (*macros, "QUERIES=2", *ALIGNED, *more), ("sm_90",)


def grouped_mma(dtype, size, warps, keys, *more):
    """A row of attention_mma whose warps multiply in groups of four."""
    macros = (f"DTYPE={dtype}", f"HEAD_E={size}", f"WARPS={warps}", f"BN={keys}", f"CHUNK={keys}")
    more = ("WARP=3", "TOGETHER=4", "MT=1", "STAGES=2", "QUERIES=2", *ALIGNED, *more)
    return "attention/mma.cl", (*macros, *more), (RETARGETED,)


def decode_mma(dtype, size, value_size, *more):
    macros = (f"DTYPE={dtype}", f"HEAD_E={size}", f"HEAD_EV={value_size}", *more)
    return "attention/decode_mma.cl", macros, BOTH


# File, macros that are not as in MACROS, architectures. exp2 is named as the driver's compiler
# makes it, which is not how libclc does.
KERNELS = [
    mma(1, 64, 2, 64, *ALIGNED),
    mma(1, 80, 2, 32, *ALIGNED),
    mma(1, 96, 2, 32, *ALIGNED),
    mma(1, 128, 1, 32, *ALIGNED),
    mma(1, 128, 2, 32, *ALIGNED, architectures=("sm_90",)),
    mma(1, 192, 1, 16, "HEAD_EV=128", *ALIGNED),
    mma(1, 192, 1, 16, *ALIGNED, *BOTH_AND_LSE),
    mma(1, 256, 1, 16, *ALIGNED),
    mma(1, 64, 2, 64, *ALIGNED, *BOTH_AND_LSE),
    mma(1, 80, 2, 32, *ALIGNED, *BOTH_AND_LSE),
    mma(1, 96, 2, 32, *ALIGNED, *BOTH_AND_LSE),
    mma(1, 96, 2, 32, "LSE=1"),
    mma(1, 128, 1, 32, *ALIGNED, *BOTH_AND_LSE),
    mma(1, 256, 1, 16, *ALIGNED, *SOFTCAP),
    mma(1, 256, 1, 16, *ALIGNED, *FLOAT_MASK),
    mma(1, 128, 1, 32),
    mma(2, 64, 2, 64, *ALIGNED, *BOOL_MASK),
    mma(2, 80, 2, 32, *ALIGNED, "LSE=1"),
    mma(2, 96, 2, 32, *ALIGNED),
    mma(2, 128, 2, 32, *ALIGNED, "LSE=1", architectures=("sm_90",)),
    mma(2, 256, 1, 16, *ALIGNED, *BOOL_MASK),
    mma(1, 64, 2, 64, *ALIGNED, "WARPS=8", "STAGES=2", architectures=("sm_90",)),
    mma(1, 128, 1, 32, *ALIGNED, "WARPS=8", "STAGES=2", architectures=("sm_90",)),
    mma(1, 128, 1, 16, *ALIGNED, "WARPS=2", "STAGES=4", architectures=("sm_90",)),
    staying_mma(1, 64),
    staying_mma(1, 128),
    staying_mma(2, 128, "LSE=1"),
    grouped_mma(1, 64, 4, 128),
    grouped_mma(1, 128, 4, 64),
    grouped_mma(2, 128, 4, 64, "LSE=1"),
    grouped_mma(1, 192, 8, 64),
    grouped_mma(1, 256, 8, 64),
    grouped_mma(1, 64, 4, 128, *BOOL_MASK),
    grouped_mma(2, 64, 4, 64, *BOOL_MASK),
    grouped_mma(2, 128, 4, 64, *BOOL_MASK, "LSE=1"),
    grouped_mma(1, 192, 8, 64, *BOOL_MASK),
    grouped_mma(1, 256, 8, 64, *BOOL_MASK),
    grouped_mma(1, 64, 4, 64, *FLOAT_MASK),
    grouped_mma(1, 64, 4, 64, *BOTH_AND_LSE),
    grouped_mma(2, 128, 4, 64, *SOFTCAP),
    grouped_mma(1, 128, 4, 64, *uses("MASK", "SOFTCAP"), "LSE=1"),
    ("attention/tiled.cl", ("DTYPE=3", "HEAD_E=64", "EC=64", "exp2=native_exp2"), BOTH),
    ("attention/tiled.cl", ("DTYPE=1", "HEAD_E=128", "exp2=native_exp2"), BOTH),
    ("attention/decode_gpu.cl", ("DTYPE=1", "HEAD_E=128", "RT=4"), BOTH),
    ("probe/exchange.cl", (), BOTH),
    *[("probe/warp.cl", (f"TEST={test}",), BOTH) for test in range(5)],
    ("probe/group.cl", (), (RETARGETED,)),
    mma(1, 128, 1, 32, *ALIGNED, "WARP=2"),
    decode_mma(1, 64, 64),
    decode_mma(1, 128, 128, *BOOL_MASK),
    decode_mma(2, 128, 128, *uses("MASK", "ADDED_MASK", "SOFTCAP", "BIAS", mask_dtype=1)),
    decode_mma(2, 192, 128),
]


class CheckError(Exception):
    """A kernel does not assemble."""


def with_macros(kernel, options):
    """clang's options, and the kernel's MACROS that they do not define."""
    defined = {option[2:].partition("=")[0] for option in options if option.startswith("-D")}
    macros = MACROS.get(f"{kernel.parent.name}/{kernel.name}", "").split()
    return [*options, *(f"-D{m}" for m in macros if m.partition("=")[0] not in defined)]


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
    versions = [f"clang-{n}" for n in range(25, 13, -1)]
    clang = next(filter(None, map(shutil.which, ["clang-16", *versions, "clang"])), None)
    folders = (
        Path("/usr/lib/clc"),
        Path("/usr/share/clc"),
        *Path("/usr/lib").glob("llvm-*/lib*/clc"),
    )
    library = next((f / LIBRARY for f in folders if (f / LIBRARY).exists()), None)
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


def run(*command):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise CheckError(f"{Path(str(command[0])).name}:\n{(done.stderr or done.stdout)[:2000]}")
    return done.stdout + done.stderr


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


def assemble(programs, ptx, architecture, left_out):
    """One row of the table: registers, spilled, stack and local memory in bytes, counts.

    `left_out` is what `shrink` has returned.
    """
    cubin = ptx.with_suffix(f".{architecture}.cubin")
    said = run(programs[2], f"-arch={architecture}", "-v", ptx, "-o", cubin)
    stack, stores, loads = map(
        int, re.search(r"(\d+) bytes stack.*?(\d+) bytes spill stores, (\d+)", said).groups()
    )
    registers = int(re.search(r"Used (\d+) registers", said)[1])
    local = re.search(r"(\d+) bytes smem", said)
    return [registers, stores + loads, stack, int(local[1]) + left_out if local else 0,
            *count(programs, ptx, cubin)]  # fmt: skip


def check(programs, kernel, options, architectures):
    """Rows of the table for one kernel and its macros."""
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        to_ptx(programs, kernel, with_macros(kernel, options), ptx)
        left_out = shrink(ptx)
        if architectures == (RETARGETED,):
            ptx.write_text(retarget(ptx.read_text()))
        return [(a, assemble(programs, ptx, a, left_out)) for a in architectures]


def check_all(programs, jobs):
    """Prints the table; whether everything assembles and stays in registers."""
    good = True
    titles = ["registers", "spilled", "stack", "local", *COUNTED]
    print("| kernel | macros | for | " + " | ".join(titles) + " |")
    print("|---" * (3 + len(titles)) + "|")

    def outcome(job):
        try:
            return check(programs, *job)
        except CheckError as error:
            return error

    with ThreadPoolExecutor() as pool:
        for (kernel, options, _), rows in zip(jobs, pool.map(outcome, jobs), strict=True):
            macros = " ".join(option.removeprefix("-D") for option in options)
            if isinstance(rows, CheckError):
                good = False
                print(f"{kernel.name} {macros}: {rows}", file=sys.stderr)
                continue
            for architecture, numbers in rows:
                _, spilled, stack, *_ = numbers
                good = good and spilled == 0 and stack == 0
                cells = " | ".join(map(str, numbers))
                kernel_name = f"{kernel.parent.stem}_{kernel.stem}"
                print(f"| {kernel_name} | {macros} | {architecture} | {cells} |")
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kernel", nargs="?", type=Path, help="a file; by default those listed")
    arguments, options = parser.parse_known_args()
    programs, missing = find_programs()
    if missing:
        print("ptx_check: not found: " + ", ".join(missing), file=sys.stderr)
        return 2
    if arguments.kernel:
        jobs = [(arguments.kernel.resolve(), options, BOTH)]
    else:
        jobs = [
            (ROOT / "kernels" / name, [f"-D{macro}" for macro in macros], architectures)
            for name, macros, architectures in KERNELS
        ]
    good = check_all(programs, jobs)
    if programs[3] is None:
        print("Instructions are counted in the PTX: nvdisasm was not found.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
