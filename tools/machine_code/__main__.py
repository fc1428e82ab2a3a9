# SPDX-License-Identifier: MIT
"""`python3 tools/machine_code` is `python3 -m machine_code.command`, with tools in PYTHONPATH."""

import os
import subprocess
import sys
from pathlib import Path

paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
command = [sys.executable, "-m", "machine_code.command", *sys.argv[1:]]
sys.exit(subprocess.run(command, env=variables).returncode)
