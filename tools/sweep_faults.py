# SPDX-License-Identifier: MIT
"""Sweep faults over every operator, with each error of each function, and print a table.

    .venv/bin/python tools/sweep_faults.py

Rows of the table say what failed, on which device, in which mode of memory, and how many cases
raised an error or gave the right result. The exit status is 1 if a case did neither, or left
something over. `--device` takes a part of a platform's name. docs/reliability.md has the table.
tests/support/sweep_table.py makes it, with the sweeps of the tests.
"""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"

if __name__ == "__main__":
    command = [sys.executable, "-m", "support.sweep_table", *sys.argv[1:]]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(TESTS)})
    sys.exit(done.returncode)
