# SPDX-License-Identifier: MIT
"""Builds kernels as clattn does, and keeps what the driver's compiler makes of them.

python -m gpu_check.programs --device WORDS --folder FOLDER FILE PROGRAM...

The first line of each PTX file names the kernel and its macros. tools/ptx/device.py executes such
files, and tools/ptx_read.py reads them.
"""

import argparse
import json
import re
from pathlib import Path

from machine_code import table

from gpu_check import items
from gpu_check.opencl import ROOT, Context, joined

CARRIED = "programs.json"  # programs that the interpreter of PTX runs in tests, by their names
FOR_ANY_GPU = "attention/tiled.cl", "attention/decode_gpu.cl", "attention/reference.cl"
FOR_CLANG = "exp2="  # the compiler of a driver knows exp2


def names(device, carried):
    """Return the programs for a device, each a kernel and its macros."""
    rows = [
        ("attention/reference.cl", ("DTYPE=3",)),
        *((row.file, row.macros) for row in table.NVIDIA),
    ]
    if float(device.get("capability", 0)) < 8:
        rows = [
            (file, (*macros, "WARP_SHUFFLES=0")) for file, macros in rows if file in FOR_ANY_GPU
        ]
    found = [name_of(file, macros) for file, macros in rows]
    more = Path(carried) / CARRIED
    if more.exists() and float(device.get("capability", 0)) >= 8:
        found += json.loads(more.read_text())
    return list(dict.fromkeys(found))


def name_of(file, macros):
    """Return a kernel's name with all its macros, as numbers."""
    options = [f"-D{macro}" for macro in macros if not macro.startswith(FOR_CLANG)]
    every = table.with_macros(Path(file), options)
    defined = dict(option[2:].split("=") for option in every)
    kernel = file.removesuffix(".cl").replace("/", "_")
    return " ".join([kernel, *sorted(f"{n}={number(x, defined)}" for n, x in defined.items())])


def number(text, defined):
    """Return the number of a macro, which may be computed from others: (HEAD_EV/TX)."""
    while found := re.search(r"[A-Z_]\w*", text):
        text = text.replace(found[0], f"({defined[found[0]]})")
    if not re.fullmatch(r"[\d()/*+ -]+", text):
        raise ValueError(f"{text!r} is no number")
    return int(eval(text))  # digits and operators alone


def build(context, folder, name):
    kernel, *macros = name.split()
    file = "kernels/" + kernel.replace("_", "/", 1) + ".cl"
    options = " ".join(f"-D{macro}" for macro in macros)
    is_nvidia = "capability" in context.facts
    program = context.build(joined(ROOT, file), options + (" -cl-nv-verbose" if is_nvidia else ""))
    program.kernel(kernel)
    log, text = program.log(), program.ptx()
    stem = f"{len(list(folder.iterdir())):02}-{kernel}"
    if text:
        (folder / f"{stem}.ptx").write_text(f"// {name}\n{text}")
    else:
        (folder / f"{stem}.bin").write_bytes(program.binary())
    (folder / f"{stem}.log").write_text(f"{name}\n{log}")
    return "passed", f"{stem}: {usage(log) or 'no log'}; built in {program.seconds:.2f} s"


def usage(log):
    """Return registers, spills and stack from a compiler's log."""
    found = re.findall(r"Used (\d+) registers|(\d+) bytes (stack frame|spill \w+|smem)", log)
    return ", ".join(f"{a} registers" if a else f"{b} bytes {c}" for a, b, c in found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("--device", "--folder"):
        parser.add_argument(name, required=True)
    parser.add_argument("file")
    parser.add_argument("names", nargs="+", metavar="PROGRAM")
    arguments = parser.parse_args()
    context = Context(arguments.device)
    items.work("programs", arguments.file, arguments.names,
               lambda name: build(context, Path(arguments.folder), name))  # fmt: skip


if __name__ == "__main__":
    main()
