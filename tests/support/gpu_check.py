# SPDX-License-Identifier: MIT
"""The modules of tools/gpu_check, for its tests."""

import functools
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

from support.helpers import ROOT

TOOL = ROOT / "tools" / "gpu_check"
POCL = Path("/etc/OpenCL/vendors/pocl.icd")
NAMES = ("drivers", "items", "needs", "opencl", "probes", "programs", "running", "smoke", "steps",
         "tables")  # fmt: skip


@functools.cache
def load():
    """Return the tool's modules, by their names; `main` is the command."""
    sys.path.insert(0, str(TOOL))
    try:
        found = {name: importlib.import_module(name) for name in NAMES}
        spec = importlib.util.spec_from_file_location("gpu_check_main", TOOL / "__main__.py")
        found["main"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found["main"])
    finally:
        sys.path.remove(str(TOOL))
    return SimpleNamespace(**found)


def put(root, *paths, text=""):
    """Write files below a folder."""
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
