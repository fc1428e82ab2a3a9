# SPDX-License-Identifier: MIT
"""Child processes, and what they need to find."""

import functools
import os
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
import traceback
from pathlib import Path

import clattn
import pytest
from support.children import Forks

TESTS = Path(__file__).resolve().parents[1]


ROOT = TESTS.parent


# What a child process imports from.
IMPORTED_FROM = [str(TESTS), str(ROOT / "tools"), str(ROOT / "cmake")]


# Oclgrind as an OpenCL driver, where Debian puts it.
OCLGRIND = Path("/usr/lib/oclgrind/liboclgrind-rt-icd.so")


WHAT_TO_INSTALL = ("intel-opencl-rt", "pocl-opencl-icd")


def run_python(code, *args, timeout=120, check_exit=True, env=None, cwd=None):
    """Run code in a process that has opened no device and can import the helpers; returns it.

    `env` is added to this process's environment; a value of None removes the variable. The
    process is forked from one that has imported the helpers (children.py), unless `env` has
    variables that would be too late there.
    """
    code, args, full = textwrap.dedent(code), list(map(str, args)), environment(env)
    if not forks().takes(full):
        return run([sys.executable, "-c", code, *args], timeout=timeout, check_exit=check_exit,
                   env=env, cwd=cwd)  # fmt: skip
    done = forks().run(code, args, timeout=timeout, env=full, cwd=cwd and str(cwd))
    return checked(done) if check_exit else done


def copy_of_a_loader(folder, name="libanother.so"):
    """The path of another loader than clattn's, which does not look like one."""
    loader = clattn._core.loader() if clattn.devices() else None
    if loader is None:
        pytest.skip("the system does not say which loader is open")
    return shutil.copyfile(os.fsdecode(loader), f"{folder}/{name}")


@functools.cache
def forks():
    return Forks(environment(None))


def run_cli(*args, timeout=300, check_exit=True, env=None, cwd=None):
    """python -m clattn ..."""
    command = [sys.executable, "-m", "clattn", *map(str, args)]
    return run(command, timeout=timeout, check_exit=check_exit, env=env, cwd=cwd)


def environment(env):
    """The variables of a child process."""
    full = dict(os.environ)
    full["PYTHONPATH"] = os.pathsep.join(filter(None, [*IMPORTED_FROM, full.get("PYTHONPATH")]))
    for name, text in (env or {}).items():
        full.pop(name, None)
        if text is not None:
            full[name] = str(text)
    return full


def run(command, *, timeout, check_exit, env, cwd):
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout,
                          env=environment(env), cwd=cwd)  # fmt: skip
    return checked(done) if check_exit else done


def checked(done):
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def run_forked(child, seconds=60):
    """Runs a function in a forked process, which has to end in time and without an error."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(seconds)
        try:
            child()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def index_of(device):
    """A device's place in clattn.devices(), the same in every process."""
    return clattn.devices().index(device)


def no_opencl(folder):
    """Environment in which the ICD loader finds no driver: its folder of drivers is empty."""
    empty = Path(folder) / "no-vendors"
    empty.mkdir(exist_ok=True)
    return {"OCL_ICD_VENDORS": str(empty), "OCL_ICD_FILENAMES": None}


SETUP = """
import gc, os, sys
import clattn, numpy as np
from support.checks import check_attention
from support.data import draw, qkv, sdpa
from clattn._commands.timing import measure_memory, memory_field
device = clattn.devices()[int(sys.argv[1])]
MIB = 1 << 20
"""


def has_memory(device, mode):
    """Whether the device takes CLATTN_MEMORY=mode: its own mode, or a slower one."""
    modes = ("svm", "host", "copy")
    return modes.index(mode) >= modes.index(device.memory_mode)


def run_on(device, code, *args, **options):
    """Runs code after SETUP in a child process, in which no other test has left anything."""
    return run_python(SETUP + textwrap.dedent(code), index_of(device), *args, **options)


def png_size(path):
    """(width, height) from a PNG file's header."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])
