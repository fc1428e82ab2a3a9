# SPDX-License-Identifier: MIT
"""What tools/sweep_faults.py runs: the sweeps of sweep.py for each device, in rows of a table."""

import argparse
import ast
import importlib.util
import sys
import tempfile

import clattn
from support import faults, sweep
from support.processes import run_python

WARM = """
device = clattn._core.all_devices()[index]
if not device.usable:
    print("unusable")
else:
    print(sweep.sweep_loader(sweep.Loader(library, device), everything=True))
"""
COLD = "print(sweep.sweep_cold(library, index, everything=True))"
ALLOCATIONS = """
import clattn
from support import sweep
print(sweep.{name}(clattn._core.all_devices()[{index}]))
"""


def rows_of(device, folder):
    """(what fails, mode of memory, function that runs the sweep) of each row of a device."""
    loader = faults.build(folder, "opencl_sweep")
    preload = faults.build(folder, "failing_memory")
    index = clattn._core.all_devices().index(device)

    def allocations(name, env):
        code = ALLOCATIONS.format(name=name, index=index)
        return lambda: run_python(code, env=env, timeout=3600)

    for memory in ("svm", "host", "copy"):
        if sweep_has(device, memory):
            yield (
                "OpenCL, warm",
                memory,
                lambda memory=memory: faults.sweep_with(
                    loader, device, WARM, timeout=3600, CLATTN_MEMORY=memory
                ),
            )
    yield (
        "OpenCL, first calls",
        "",
        lambda: faults.sweep_with(loader, device, COLD, timeout=3600),
    )
    yield "allocations of clattn", "", allocations("sweep_memory", {"LD_PRELOAD": preload})
    if importlib.util.find_spec("_testcapi") is not None:
        yield "allocations of Python", "", allocations("sweep_python", {})


def sweep_has(device, memory):
    """Whether the device has that mode of memory."""
    order = ("svm", "host", "copy")
    return order.index(memory) >= order.index(device.memory_mode)


def main():
    parser = argparse.ArgumentParser(prog="sweep_faults.py")
    parser.add_argument("--device", help="only this device, by a part of its platform's name")
    words = parser.parse_args().device or ""
    failed = False
    errors = sum(len(sweep.errors_of(function)) for function in sweep.FUNCTIONS)
    print(f"{len(sweep.FUNCTIONS)} functions of OpenCL, {errors} errors\n")
    print("| what fails | platform | memory | raised | right all the same | wrong |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for device in clattn.devices():
            if words.lower() not in device.platform.lower():
                continue
            for what, memory, run in rows_of(device, folder):
                try:
                    counts = ast.literal_eval(run().stdout.splitlines()[-1])
                    wrong = 0
                except AssertionError as error:
                    print(error, file=sys.stderr)
                    counts, wrong, failed = {"raised": "?", "right": "?"}, "1 or more", True
                right = counts.get("right", "")
                print(f"| {what} | {device.platform} | {memory} | {counts['raised']} | {right} "
                      f"| {wrong} |", flush=True)  # fmt: skip
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
