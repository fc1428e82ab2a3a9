# SPDX-License-Identifier: MIT
"""A loader before the real one that counts commands and lets some fail: opencl_faults.c.

It is built by the system's C compiler, and child processes of tests are given it.
"""

import os
import shutil
import subprocess
import textwrap
from pathlib import Path

import clattn
import pytest
from support.processes import TESTS, index_of, run_python

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")

# `listed` has every device, none of which is open.
OPENING = """
import ctypes, gc, sys
import clattn, clattn._host.drivers as drivers, numpy as np

library, index = sys.argv[1], int(sys.argv[2])
discover = drivers.discover

def instead():
    preload, _, cache, memory = discover()
    return preload, (library.encode(),), cache, memory

drivers.discover = instead
listed = clattn._core.all_devices()
faults = ctypes.CDLL(library)
"""

CALLING = """
from support.tensors import CALLS, in_host_memory, same_bits, settled

device = clattn.devices()[index]
other = next((d for d in clattn.devices() if d != device), None)
LOST, OUT_OF_MEMORY = -5, -4
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((2, 8, 256, 64)).astype("f4") for _ in range(3))
attend = clattn.scaled_dot_product_attention
right = attend(q, k, v, device=device)
tq, tk, tv = (clattn.tensor(a, device) for a in (q, k, v))
same_bits(attend(tq, tk, tv), right)
assert faults.faults_kernels() >= 2, "the calls go past the faults"
start = settled(device)

def refusal(action, *words):
    "DeviceError whose message has all these words."
    try:
        action()
    except clattn.DeviceError as error:
        for word in words:
            assert word in str(error), (word, str(error))
        return str(error)
    raise SystemExit("no error")

def afterwards():
    "All is well again: nothing more is reported, calls work, memory comes back."
    assert faults.faults_to_come() == 0
    clattn.synchronize(device)
    same_bits(attend(tq, tk, tv), right)
    gc.collect()
    assert settled(device) == start, (settled(device), start)

WORDS = ("scaled_dot_product_attention", "CL_OUT_OF_RESOURCES", "attention_", device.name)
"""


def build(folder, source="opencl_faults"):
    """The loader with faults, or another library of these tests, made in that folder."""
    if COMPILER is None:
        pytest.skip("there is no C compiler")
    clattn.get_default_device()
    loader, made = Path(os.fsdecode(clattn._core.loader())), Path(folder) / f"lib{source}.so"
    command = [COMPILER, "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC",
               "-o", made, TESTS / "support" / f"{source}.c", "-Wl,--no-as-needed", loader,
               f"-Wl,-rpath,{loader.parent}", "-ldl"]  # fmt: skip
    subprocess.run(command, check=True)
    return made


def run_with(library, device, code, *, timeout=120, **env):
    """Run code after OPENING and CALLING in a child process whose loader is `library`."""
    text = OPENING + CALLING + textwrap.dedent(code)
    return run_python(text, library, index_of(device), env=env, timeout=timeout)


def sweep_with(library, device, code, *, timeout=600, **env):
    """Run code in a child process with the loader opencl_sweep.c and the module `sweep`.

    `index` is the device's place in clattn._core.all_devices(), 0 for None. OpenCL is not open yet.
    """
    index = clattn._core.all_devices().index(device) if device else 0
    text = OPENING.partition("listed =")[0] + "from support import sweep\n" + textwrap.dedent(code)
    return run_python(text, library, index, env=env, timeout=timeout)


def open_with(library, device, code, **env):
    """Run code after OPENING in a child process, in which `listed[index]` is the device.

    PoCL does not optimise: where the device says that it is a GPU, that would take seconds.
    """
    index = clattn._core.all_devices().index(device)
    env = {"POCL_EXTRA_BUILD_FLAGS": "-cl-opt-disable", **env}
    return run_python(OPENING + textwrap.dedent(code), library, index, env=env)
