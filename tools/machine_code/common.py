# SPDX-License-Identifier: MIT
"""What the compilers of machine_code share."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CLANGS = ["clang-16", *(f"clang-{n}" for n in range(25, 13, -1)), "clang"]


class CheckError(Exception):
    """A kernel does not compile."""


def find_library(name):
    """A file of libclc, or None."""
    folders = [Path("/usr/lib/clc"), Path("/usr/share/clc")]
    folders += Path("/usr/lib").glob("llvm-*/lib*/clc")
    return next((folder / name for folder in folders if (folder / name).exists()), None)


def run(*command, **variables):
    """What a program says, with these variables of the environment."""
    done = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, env=os.environ | variables
    )
    if done.returncode != 0:
        raise CheckError(f"{Path(str(command[0])).name}:\n{(done.stderr or done.stdout)[:2000]}")
    return done.stdout + done.stderr
