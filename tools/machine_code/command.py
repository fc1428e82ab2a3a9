# SPDX-License-Identifier: MIT
"""Compile kernels for GPUs without having one, and print what the machine code is like.

    python tools/machine_code                    # the kernels of table.py, for the tightest devices
    python tools/machine_code --all              # for all devices of Intel and AMD
    python tools/machine_code kernels/attention/tiled.cl -DDTYPE=1   # any kernel, any macros
    python tools/machine_code prepare            # brings the compiler for Intel's GPUs

A kernel of MACROS (table.py) has the macros named there, except those that the options define. The
compilers are ptxas for NVIDIA, ocloc for Intel, clang for AMD: nvidia.py, intel.py and amd.py say
what they need and what the numbers are. `--for nvidia` (or intel, amd) leaves the others out.

The exit status is 1 if a kernel does not compile, spills registers, keeps arrays on its stack or in
scratch memory, or has fewer than two waves on a SIMD, except where its row says so. It is 2 if no
compiler is installed.
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from machine_code import amd, intel, nvidia, table
from machine_code.common import ROOT, CheckError

COMPILERS = {"nvidia": nvidia, "intel": intel, "amd": amd}
COLUMNS = ("registers", "spilled", "scratch", "local", "scalars spilled", "lanes", "waves",
           *nvidia.COUNTED)  # fmt: skip


def rows_of(name, every):
    """The rows of a compiler."""
    listed = {"nvidia": table.NVIDIA, "intel": table.INTEL, "amd": table.AMD}[name]
    return listed if every or name == "nvidia" else [row for row in listed if table.is_short(row)]


def is_fine(row, numbers):
    return (
        numbers.get("spilled", 0) == 0
        and (row.scratch or numbers["scratch"] == 0)
        and numbers.get("scalars spilled", 0) <= row.scalars
        and numbers.get("waves", row.waves) >= row.waves
    )


def print_rows(found, jobs, pool):
    """Prints the rows of one compiler; whether all are as they should be."""
    compiler, programs = found
    good = True

    def outcome(job):
        row, kernel = job
        try:
            options = [f"-D{macro}" for macro in row.macros]
            return compiler.compile_row(programs, kernel, options, row.devices)
        except CheckError as error:
            return error

    for (row, kernel), outcomes in zip(jobs, pool.map(outcome, jobs), strict=True):
        macros = " ".join(row.macros)
        name = f"{kernel.parent.stem}_{kernel.stem}"
        if isinstance(outcomes, CheckError):
            good = False
            print(f"{kernel.name} {macros} {' '.join(row.devices)}: {outcomes}", file=sys.stderr)
            continue
        for device, numbers in zip(row.devices, outcomes, strict=True):
            fine = is_fine(row, numbers)
            good = good and fine
            cells = " | ".join(str(numbers.get(column, "")) for column in COLUMNS)
            print(f"| {name} | {macros} | {device} | {cells} |{'' if fine else ' BAD'}", flush=True)
    return good


def main():
    parser = argparse.ArgumentParser(prog="machine_code", description=__doc__.partition("\n")[0])
    parser.add_argument("kernel", nargs="?", help="a file, or `prepare`; by default those listed")
    parser.add_argument("--all", action="store_true", help="all devices of Intel and AMD")
    parser.add_argument("--for", choices=COMPILERS, dest="only", help="one compiler alone")
    arguments, options = parser.parse_known_args()
    if arguments.kernel == "prepare":
        intel.prepare()
        return 0
    found = {}
    for name in [arguments.only] if arguments.only else COMPILERS:
        programs, missing = COMPILERS[name].find_programs()
        if missing:
            print(f"machine_code: no {name}, not found: {', '.join(missing)}", file=sys.stderr)
        else:
            found[name] = COMPILERS[name], programs
    if not found:
        return 2
    print("| kernel | macros | device | " + " | ".join(COLUMNS) + " |")
    print("|---" * (3 + len(COLUMNS)) + "|")
    good = True
    with ThreadPoolExecutor() as pool:
        for name, one in found.items():
            if arguments.kernel:
                macros = tuple(option.removeprefix("-D") for option in options)
                row = table.Row("", macros, tuple(one[0].DEVICES))
                jobs = [(row, Path(arguments.kernel).resolve())]
            else:
                listed = rows_of(name, arguments.all)
                jobs = [(row, ROOT / "kernels" / row.file) for row in listed]
            good = print_rows(one, jobs, pool) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
