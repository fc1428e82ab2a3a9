# SPDX-License-Identifier: MIT
"""Run clattn on an NVIDIA GPU whose driver has no OpenCL, by the driver's library for CUDA.

    python tools/cuda_machine.py                              # python -m clattn: the listing
    python tools/cuda_machine.py -- python -m pytest tests    # any command, with its children

For tests and measurements. clattn finds a loader of OpenCL with one device, whose platform is
"CUDA by clattn's test loader" (tools/ptx: opencl_machine.c and cuda_machine.c). clang makes PTX
of each kernel, as in tools/machine_code, and libcuda.so.1 runs it. The code is that of clang, not
of the compiler in NVIDIA's driver for OpenCL.

FOLDER holds the loader and the PTX of all programs so far. A machine without a C compiler, clang or
libclc uses what another machine has left there. The other machine needs no GPU for this:

    python tools/cuda_machine.py --without-gpu --folder carried -- python -m clattn bench --gpu

A command after --without-gpu builds programs as for a GPU of capability 9.0, and launches nothing:
its results are zeros. Programs depend on kernels, dtypes, head sizes and options, and hardly on
lengths.

The exit status is that of the command; 2 if something is missing.
"""

import argparse
import ctypes
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from machine_code import common, nvidia

PTX = common.ROOT / "tools" / "ptx"
SOURCES = ("opencl_machine.c", "cuda_machine.c")
LOADER = "libOpenCL.so.1"
# Containers may have the driver in folders that the system does not search.
CUDA_LIBRARIES = (
    "libcuda.so.1",
    *(f"/usr/{folder}/libcuda.so.1" for folder in ("local/nvidia/lib64", "lib/wsl/lib")),
)
C_COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


class MissingError(Exception):
    """Something that the tool needs is not there."""


def default_folder():
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "clattn-cuda-machine"


def build(library, *sources):
    """Compile C files of tools/ptx to a library."""
    command = [C_COMPILER, "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-O1",
               "-pthread", "-o", library, *(PTX / name for name in sources),
               f"-Wl,-soname,{library.name}", "-ldl"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise MissingError(f"{sources[-1]} does not build:\n{done.stderr}")


def put_loader(folder):
    """Build the loader in the folder, or leave one that is there."""
    if C_COMPILER is not None:
        with tempfile.TemporaryDirectory(dir=folder) as own:  # other processes may do the same
            new = Path(own) / LOADER
            build(new, *SOURCES)
            new.replace(folder / LOADER)
    elif not (folder / LOADER).exists():
        raise MissingError(f"there is no C compiler, and no {LOADER} in {folder}")


def find_compiler(programs):
    """The command that makes PTX, or "", and who makes it. PTX by anyone else is deleted."""
    found, _ = nvidia.find_programs()
    note = programs / "made_by.txt"
    known = note.read_text() if note.exists() else ""
    if None in found[:2]:
        if not known:
            raise MissingError(f"there is no clang or no libclc, and no PTX in {programs}")
        return "", known.partition("\n")[0]
    command = shlex.join(map(str, nvidia.compiler(found)))
    said = subprocess.run([found[0], "--version"], capture_output=True, text=True, check=True)
    made_by = "\n".join((said.stdout, command, nvidia.SHIM.read_text()))
    if made_by != known:
        for program in programs.glob("*.ptx"):
            program.unlink(missing_ok=True)
        note.write_text(made_by)
    return command, made_by.partition("\n")[0]


def environment(folder, cuda):
    """What a process and its children need to find the loader and the driver's library."""
    programs = folder / "programs"
    programs.mkdir(parents=True, exist_ok=True)
    put_loader(folder)
    command, made_by = find_compiler(programs)
    # The library opens others by name, such as the compiler of PTX.
    paths = [str(folder), os.environ.get("LD_LIBRARY_PATH", ""), os.path.dirname(cuda)]
    return {
        "CLATTN_CUDA_LIBRARY": cuda,
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths)),
        "CLATTN_CUDA_COMPILER": command,
        "CLATTN_CUDA_PROGRAMS": str(programs),
        "CLATTN_CUDA_MADE_BY": made_by,
    }


def find_cuda():
    """The path or the name of the driver's library."""
    chosen = os.environ.get("CLATTN_CUDA_LIBRARY")
    reasons = []
    for library in (chosen,) if chosen else CUDA_LIBRARIES:
        try:
            ctypes.CDLL(library)
            return library
        except OSError as error:
            reasons.append(str(error))
    raise MissingError(f"there is no driver for CUDA: {'; '.join(reasons)}")


def imitate(folder, units):
    """Put a fake of CUDA's driver in its place, for a process and its children.

    clattn uses what has passed a probe, and keeps the verdict. So an interpreter runs the probes
    first; after that launches do nothing.
    """
    imitation = folder / "without_gpu"
    imitation.mkdir(parents=True, exist_ok=True)
    library = imitation / "libcuda.so.1"
    if C_COMPILER is None:
        raise MissingError("there is no C compiler")
    build(library, "fake_cuda.c")
    os.environ["CLATTN_CUDA_LIBRARY"] = str(library)
    os.environ["XDG_CACHE_HOME"] = str(imitation)
    os.environ["FAKE_CUDA_UNITS"] = str(units)
    added = environment(folder, str(library))
    paths = [str(common.ROOT / "tools"), os.environ.get("PYTHONPATH", "")]
    added["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    probe = "import ptx.fake_cuda as f; cuda = f.Cuda(); import clattn; clattn.get_default_device()"
    subprocess.run([sys.executable, "-c", probe], env=os.environ | added, check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=default_folder(), help="see above")
    parser.add_argument("--without-gpu", action="store_true", help="fill FOLDER; results are zeros")
    parser.add_argument("--units", type=int, default=132, help="of the GPU that is not there")
    parser.add_argument("command", nargs="*", help="by default: python -m clattn")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    try:
        if arguments.without_gpu:
            imitate(folder, arguments.units)
        added = environment(folder, find_cuda())
    except (MissingError, OSError, subprocess.CalledProcessError) as error:
        print(f"cuda_machine: {error}", file=sys.stderr)
        return 2
    command = arguments.command or [sys.executable, "-m", "clattn"]
    return subprocess.run(command, env=os.environ | added).returncode


if __name__ == "__main__":
    sys.exit(main())
