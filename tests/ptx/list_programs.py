# SPDX-License-Identifier: MIT
"""Prints the programs that test_ptx_kernels.py executes, as JSON: kernel and macros of each.

    PYTHONPATH=tests:tools python tests/ptx/list_programs.py

tools/gpu_check builds these with a driver and brings back its PTX, which the tests can execute
instead of clang's: see CLATTN_PTX in tools/ptx/device.py.
"""

import json
import os
import sys
import tempfile
from contextlib import redirect_stdout, suppress

import clattn
from ptx.device import title
from support.ptx_device import OPEN, SETUP, build
from test_ptx_kernels import ARRAYS, CASES, call_of


class Nothing:
    """In the place of a Machine: what it launches does not run."""

    def launch(self, groups, arguments):
        pass


def main():
    found = set()

    def note(source, macros, name, local, retargeted):
        found.add(title(name, macros))
        return Nothing()

    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        os.environ["XDG_CACHE_HOME"] = folder
        sys.argv[1:] = [str(build(folder))]
        names = {}
        exec(SETUP + OPEN + ARRAYS, names)
        names["machine"].machine = note
        clattn._core.force("", "", "off")  # there are no results to compare
        for name in CASES:
            with suppress(AssertionError):  # there are no results
                exec(call_of(name, checks=False), names)
    print(json.dumps(sorted(found)))


if __name__ == "__main__":
    main()
