# SPDX-License-Identifier: MIT
"""`python3 tools/gpu_check` is `python3 -m gpu_check.command`, with its modules in PYTHONPATH.

The command takes the place of this process, so signals reach it.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
paths = [str(ROOT / "tools"), str(ROOT / "cmake"), os.environ.get("PYTHONPATH", "")]
variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
os.execve(sys.executable, [sys.executable, "-m", "gpu_check.command", *sys.argv[1:]], variables)
