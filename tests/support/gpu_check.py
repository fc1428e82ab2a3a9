# SPDX-License-Identifier: MIT
"""What the tests of tools/gpu_check share: its modules, files, processes that it has to stop."""

import contextlib
import fcntl
import functools
import importlib
import time
from pathlib import Path
from types import SimpleNamespace

from support.processes import ROOT

TOOL = ROOT / "tools" / "gpu_check"
POCL = Path("/etc/OpenCL/vendors/pocl.icd")
NAMES = ("drivers", "experiment", "experiments", "items", "needs", "opencl", "prefill", "probes",
         "programs", "running", "smoke", "steps", "tables")  # fmt: skip


@functools.cache
def load():
    """Return the tool's modules, by their names; `main` is the command."""
    found = {name: importlib.import_module(f"gpu_check.{name}") for name in NAMES}
    return SimpleNamespace(**found, main=importlib.import_module("gpu_check.command"))


def put(root, *paths, text=""):
    """Write files below a folder."""
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def code_that_holds(path):
    """Return code that locks a file, and holds the lock until its process is stopped."""
    return f"""
import fcntl, time
file = open({str(path)!r}, "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", file=file, flush=True)
time.sleep(60)
"""


def has_ended(path):
    """Return whether the process of `code_that_holds` has ended, or ends within seconds."""
    assert path.read_text() == "held\n", "the process did not start"
    with path.open() as file:
        for _ in range(100):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            time.sleep(0.05)
    return False
