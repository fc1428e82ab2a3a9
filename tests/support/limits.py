# SPDX-License-Identifier: MIT
"""A loader whose one device has limits of support/devices.py: opencl_limits.c.

A process finds it by its environment alone, and so do that process's children.
"""

import os
import subprocess
from collections import Counter
from pathlib import Path

import clattn
import pytest
from support.faults import COMPILER
from support.processes import TESTS, run_python
from support.variants import POCL


def real_platform(devices):
    """The platform whose CPU is shown with other limits: PoCL, whose cache all of them share."""
    names = [device.platform for device in devices if device.type == "cpu"]
    return POCL if POCL in names else names[0]


def build(folder):
    """Make the loader; returns its folder, for LD_LIBRARY_PATH.

    The real loader has the same name. So it is linked as what an empty library calls itself, and
    that is the real loader's path.
    """
    if COMPILER is None:
        pytest.skip("there is no C compiler")
    clattn.get_default_device()
    real = os.path.realpath(os.fsdecode(clattn._core.loader()))
    folder = Path(folder)
    empty = folder / "empty.so"
    shared = [COMPILER, "-shared", "-fPIC"]
    subprocess.run([*shared, "-o", empty, "-x", "c", "/dev/null",
                    f"-Wl,-soname,{real}"], check=True)  # fmt: skip
    subprocess.run([*shared, "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread",
                    "-o", folder / "libOpenCL.so.1", TESTS / "support" / "opencl_limits.c",
                    "-Wl,--no-as-needed", empty, "-ldl"], check=True)  # fmt: skip
    empty.unlink()
    return folder


def listed(numbers):
    """{"attention_tiled": 64} as opencl_limits.c reads it."""
    return " ".join(f"{name}={number}" for name, number in numbers.items())


HANGS = 99


class Limited:
    """Runs code in processes whose one device is a row of the table.

    `groups` and `local_memory` are what built kernels tell, by their names; `ends` are the signals
    by which kernels end the process, or HANGS.
    """

    def __init__(
        self, library, platform, folder, limits, groups=None, local_memory=None, ends=None, **env
    ):
        self.log = Path(folder) / "log"
        paths = [str(library), os.environ.get("LD_LIBRARY_PATH", "")]
        self.env = limits.variables() | {
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths)),
            "LIMITS_REAL": platform,
            "LIMITS_LOG": str(self.log),
            "LIMITS_GROUPS": listed(groups or {}),
            "LIMITS_LOCALS": listed(local_memory or {}),
            "LIMITS_ENDS": listed(ends or {}),
            # Trials in other processes take a second each.
            "CLATTN_TRIALS": "here",
            # Kernels for GPUs take PoCL long to optimise.
            "POCL_EXTRA_BUILD_FLAGS": "-cl-opt-disable",
            "XDG_CACHE_HOME": str(folder), "CLATTN_DEVICE": None, "CLATTN_KERNEL": None,
        } | env  # fmt: skip

    def run(self, code, **options):
        return run_python(code, env=self.env, **options)

    def lines(self, word):
        """The lines of the log that begin with the word, without it."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.removeprefix(word + " ") for line in lines if line.startswith(word + " ")]

    def told(self):
        """What was refused; how often each kernel ran in groups of each size."""
        ran = (line.split() for line in self.lines("ran"))
        return self.lines("refused"), Counter((name, int(group)) for name, group, _ in ran)

    def processes(self):
        """How many processes have run kernels."""
        return len({line.split()[-1] for line in self.lines("ran")})
