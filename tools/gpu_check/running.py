# SPDX-License-Identifier: MIT
"""Runs steps and commands, each in a process of its own with a time limit.

The environment keeps all changes in one folder.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATHS = str(ROOT / "tools"), str(ROOT / "cmake")  # of the packages here, and of embed_kernels
PATIENCE = 5  # seconds between the request to end and the kill


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
            process = launch(command, file, env, cwd)
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
            kill_group(process)
    seconds = time.monotonic() - start
    return Done(process.returncode, log.read_text(errors="replace"), seconds, is_late)


def launch(command, file, env, cwd=None):
    """Start a command as a group of processes, its output in an open file."""
    return subprocess.Popen(
        list(map(str, command)), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
        env=env, cwd=cwd, process_group=0,
    )  # fmt: skip


def run_apart(function, seconds, *, log):
    """Call a function in a process of its own; at the limit kill it and all that it started."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        _call(function, log)
    status, is_late = None, False
    try:
        while status is None and not is_late:
            done, status = os.waitpid(child, os.WNOHANG)
            status = status if done else None
            is_late = status is None and time.monotonic() - begun > seconds
            time.sleep(0.02)
    finally:
        kill_session(child)
        if status is None:
            status = os.waitpid(child, 0)[1]
    said = log.read_text(errors="replace")
    return Done(os.waitstatus_to_exitcode(status), said, time.monotonic() - begun, is_late)


def _call(function, log):
    """In the new process: call a function as the leader of a session, and end."""
    status = 1
    try:
        os.setsid()
        with log.open("w") as file, open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        function()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def kill_session(leader):
    """Kill all processes of a session, those of its groups too."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):  # it has ended meanwhile
            fields = file.read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader:
                os.kill(int(file.parent.name), signal.SIGKILL)


def kill_group(process):
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
    old = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    paths = dict.fromkeys([str(site), *PATHS, *old])  # each once
    # A Python that was built elsewhere names the compiler of its build machine.
    compiler = next(filter(shutil.which, ("cc", "gcc", "clang")), "cc")
    return dict(
        os.environ,
        PYTHONPATH=os.pathsep.join(paths),
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
