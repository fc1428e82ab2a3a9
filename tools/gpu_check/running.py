# SPDX-License-Identifier: MIT
"""Runs commands with a time limit, in an environment that keeps all changes in one folder."""

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PATIENCE = 15  # seconds between the request to end and the kill


@dataclass(frozen=True)
class Done:
    """The end and the output of a command."""

    status: int
    said: str
    seconds: float
    is_late: bool  # the command was stopped at its limit

    @property
    def is_fine(self):
        return self.status == 0 and not self.is_late

    def tail(self, lines=25):
        return "\n".join(self.said.strip().splitlines()[-lines:])

    def ended(self):
        """Return how the command ended, in words."""
        if self.is_late:
            return f"stopped after {self.seconds:.0f} s"
        if self.status < 0:
            return f"ended by {signal.Signals(-self.status).name}"
        return f"exit status {self.status}"


def run(command, seconds, *, env, log, cwd=None):
    """Run a command, its output in a file; at the limit interrupt it, then kill it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    is_late = False
    with log.open("w") as file:
        try:
            process = subprocess.Popen(
                list(map(str, command)), stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, env=env, cwd=cwd, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return Done(127, str(error), 0.0, False)
        try:
            process.wait(max(seconds, 1))
        except subprocess.TimeoutExpired:
            is_late = True
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
        finally:
            _kill_group(process)
    seconds = time.monotonic() - start
    return Done(process.returncode, log.read_text(errors="replace"), seconds, is_late)


def _kill_group(process):
    """Kill a command and all processes that it has left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def make_environment(folder, variables):
    """Return the environment of all commands; caches and temporary files are in the folder."""
    cache = Path(folder, "cache")
    temporary = Path(folder, "tmp")
    for path in (cache, temporary):
        path.mkdir(parents=True, exist_ok=True)
    site = Path(folder, "site")
    old = os.environ.get("PYTHONPATH")
    # A Python that was built elsewhere names the compiler of its build machine.
    compiler = next(filter(shutil.which, ("cc", "gcc", "clang")), "cc")
    return dict(
        os.environ,
        PYTHONPATH=os.pathsep.join([str(site), *([old] if old else [])]),
        PATH=os.pathsep.join([str(site / "bin"), os.environ.get("PATH", "")]),
        PYTHONDONTWRITEBYTECODE="1",
        XDG_CACHE_HOME=str(cache),
        CUDA_CACHE_PATH=str(cache / "cuda"),
        POCL_CACHE_DIR=str(cache / "pocl"),
        HYPOTHESIS_STORAGE_DIRECTORY=str(cache / "hypothesis"),
        MPLCONFIGDIR=str(cache / "matplotlib"),
        PIP_NO_CACHE_DIR="1",
        PIP_DISABLE_PIP_VERSION_CHECK="1",
        PIP_ROOT_USER_ACTION="ignore",
        CC=os.environ.get("CC", compiler),
        TMPDIR=str(temporary),
        **variables,
    )
