# SPDX-License-Identifier: MIT
"""Run clattn on an NVIDIA GPU whose driver has no OpenCL, by the driver's library for CUDA.

    python tools/cuda_machine.py                              # python -m clattn: the listing
    python tools/cuda_machine.py -- python -m pytest tests    # any command, with its children

For tests and measurements. clattn finds a loader of OpenCL with one device, of the platform "CUDA by
clattn's test loader" (tests/support/opencl_machine.c and cuda_machine.c). clang, as in
tools/ptx_check.py, makes PTX of each kernel, and libcuda.so.1 runs it. The code is that of clang,
not of the compiler in NVIDIA's driver for OpenCL.

FOLDER holds the loader and the PTX of all programs so far. A machine without a C compiler, clang or
libclc uses what another machine has left there.

The exit status is that of the command; 2 if something is missing.
"""

import argparse
import ctypes
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import ptx_check

SUPPORT = ptx_check.ROOT / "tests" / "support"
SOURCES = ("opencl_machine.c", "cuda_machine.c")
LOADER = "libOpenCL.so.1"
C_COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


class MissingError(Exception):
    """Something that the tool needs is not there."""


def default_folder():
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "clattn-cuda-machine"


def build(library, *sources):
    """Compile C files of tests/support to a library."""
    command = [C_COMPILER, "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-O1",
               "-pthread", "-o", library, *(SUPPORT / name for name in sources),
               f"-Wl,-soname,{library.name}", "-ldl"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise MissingError(f"{sources[-1]} does not build:\n{done.stderr}")


def prepare(folder):
    """Fill the folder, as far as there are compilers. Returns the command that makes PTX, or ""."""
    programs = folder / "programs"
    programs.mkdir(parents=True, exist_ok=True)
    if C_COMPILER is not None:
        new = folder / f"{os.getpid()}" / LOADER  # other processes may do the same
        new.parent.mkdir()
        try:
            build(new, *SOURCES)
            new.replace(folder / LOADER)
        finally:
            shutil.rmtree(new.parent)
    elif not (folder / LOADER).exists():
        raise MissingError(f"there is no C compiler, and no {LOADER} in {folder}")
    found, _ = ptx_check.find_programs()
    if None in found[:2]:
        if not any(programs.glob("*.ptx")):
            raise MissingError(f"there is no clang or no libclc, and no PTX in {programs}")
        return ""
    command = shlex.join(map(str, ptx_check.compiler(found)))
    version = subprocess.run([found[0], "--version"], capture_output=True, text=True).stdout
    forget_others(programs, "\n".join((version, command, ptx_check.SHIM.read_text())))
    return command


def forget_others(programs, made_by):
    """Delete PTX that was made in another way than this one."""
    note = programs / "made_by.txt"
    if not note.exists() or note.read_text() != made_by:
        for program in programs.glob("*.ptx"):
            program.unlink(missing_ok=True)
        note.write_text(made_by)


def check_cuda():
    library = os.environ.get("CLATTN_CUDA_LIBRARY", "libcuda.so.1")
    try:
        ctypes.CDLL(library)
    except OSError as error:
        raise MissingError(f"there is no driver for CUDA: {error}") from None


def environment(folder):
    """What a process and its children need to find the loader."""
    command = prepare(folder)
    paths = [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths)),
        "CLATTN_CUDA_COMPILER": command,
        "CLATTN_CUDA_PROGRAMS": str(folder / "programs"),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=default_folder(), help="see above")
    parser.add_argument("command", nargs="*", help="by default: python -m clattn")
    arguments = parser.parse_args()
    try:
        check_cuda()
        added = environment(arguments.folder.resolve())
    except (MissingError, OSError) as error:
        print(f"cuda_machine: {error}", file=sys.stderr)
        return 2
    command = arguments.command or [sys.executable, "-m", "clattn"]
    return subprocess.run(command, env=os.environ | added).returncode


if __name__ == "__main__":
    sys.exit(main())
