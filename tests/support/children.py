# SPDX-License-Identifier: MIT
"""Child processes of tests that need not import anything: they are forked from one that has.

A process of the tests starts this file once, as a program. It imports what most children import,
and opens no device. For each job it forks a child, which runs the job's code and ends as an
interpreter does.
"""

import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import types
from pathlib import Path

IMPORTS = (
    "numpy",
    "ml_dtypes",
    "pytest",
    "clattn",
    "support.checks",
    "support.data",
    "support.processes",
    "support.tensors",
)
# Variables that are read when a device is opened, or later. A forked child may change these. Others
# may be read while a process starts or imports a library, so they need a new process.
READ_LATE = ("CLATTN_", "FAULTS_", "OCLGRIND_", "OCL_ICD_", "POCL_", "PYOPENCL_", "PYTEST_",
             "XDG_CACHE_HOME")  # fmt: skip


class Forks:
    """The process that forks children, from its start on."""

    def __init__(self, env):
        self.env = dict(env)
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
        )

    def close(self):
        self.process.communicate()

    def takes(self, env):
        """Whether a child with these variables may be forked."""
        names = self.env.keys() | env.keys()
        changed = [name for name in names if self.env.get(name) != env.get(name)]
        return all(name.startswith(READ_LATE) for name in changed)

    def run(self, code, args, *, timeout, env, cwd):
        """As subprocess.run(["python", "-c", code, *args]) with captured text."""
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            own = f"/proc/{os.getpid()}/fd"
            job = {"code": code, "args": args, "env": env, "cwd": cwd or str(Path.cwd()),
                   "files": [f"{own}/{output.fileno()}", f"{own}/{errors.fileno()}"]}  # fmt: skip
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()
            child = int(self.process.stdout.readline())
            status, is_late = self._wait(child, timeout)
            said = []
            for file in (output, errors):
                file.seek(0)
                said.append(file.read())
        command = [sys.executable, "-c", code, *args]
        if is_late:
            raise subprocess.TimeoutExpired(command, timeout, *said)
        return subprocess.CompletedProcess(command, status, *said)

    def _wait(self, child, timeout):
        """The child's exit status, and whether it had to be killed."""
        handle = os.pidfd_open(child)
        try:
            is_late = not select.select([handle], [], [], timeout)[0]
        finally:
            os.close(handle)
        if is_late:
            os.kill(child, signal.SIGKILL)
        self.process.stdin.write(b"\n")  # it may be reaped
        self.process.stdin.flush()
        return int(self.process.stdout.readline()), is_late


def next_job():
    """In each child, the job; the process itself ends with its input."""
    jobs, answers = sys.stdin.buffer, sys.stdout.buffer
    while line := jobs.readline():
        child = os.fork()
        if child == 0:
            return json.loads(line)
        answers.write(f"{child}\n".encode())
        answers.flush()
        jobs.readline()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        answers.write(f"{status}\n".encode())
        answers.flush()
    raise SystemExit


def begin(job):
    """Makes this process one that was started for the job; returns the names of its module."""
    for place, path in enumerate(job["files"], start=1):
        file = os.open(path, os.O_WRONLY)
        os.dup2(file, place)
        os.close(file)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    sys.argv[:] = ["-c", *job["args"]]
    sys.modules["__main__"] = types.ModuleType("__main__")
    return sys.modules["__main__"].__dict__


if __name__ == "__main__":
    sys.path[0] = ""
    for name in IMPORTS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    job = next_job()
    exec(compile(job["code"], "<string>", "exec"), begin(job))
