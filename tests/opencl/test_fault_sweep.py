# SPDX-License-Identifier: MIT
"""Faults, swept (support/sweep.py), and what the sweeps have found.

tools/sweep_faults.py tries more.
"""

import importlib.util
import os
import shutil
import signal

import clattn
import pytest
from support import faults
from support.gpu_check import POCL
from support.processes import index_of, run_python

WARM = """
device = clattn._core.all_devices()[index]
assert device.usable
print(sweep.sweep_loader(sweep.Loader(library, device), everything=False))
"""
COLD = "print(sweep.sweep_cold(library, index, everything=False))"
OUT_OF_MEMORY = """
import sys
import clattn
from support import sweep
print(sweep.{sweep}(clattn.devices()[int(sys.argv[1])], everything=False))
"""
# A call that is waited for by its event, while another kernel may write to the same memory next.
ONE_FAULT = """
device = clattn._core.all_devices()[index]
assert device.usable
loader = sweep.Loader(library, device)
run = sweep.operations(device)["cpu, a chain"]
expected = run()
run()
before = loader.state()
counts = dict.fromkeys(("raised", "right"), 0)
for n in range(1, 4):
    for code in sweep.errors_of("{function}").values():
        sweep.one_case(loader, run, expected, before, "{function}", n, code, "{function}", counts)
assert sum(counts.values()) > 0
"""


@pytest.fixture
def sweep(device, sweep_library):
    """Runs code with the loader of the sweeps."""
    return lambda code, **env: faults.sweep_with(sweep_library, device, code, **env)


@pytest.mark.cpus
def test_every_operator(sweep):
    """Each call of each function fails once, with one of its errors."""
    sweep(WARM)


@pytest.mark.cpus
def test_every_operator_that_copies(sweep_library, first_device):
    """On one device: how memory is copied does not depend on it."""
    faults.sweep_with(sweep_library, first_device, WARM, CLATTN_MEMORY="copy")


def test_opening(sweep):
    """The first call of each function fails while a process opens OpenCL."""
    sweep(COLD)


def test_opening_with_one_driver(sweep_library, tmp_path):
    """The failure of clGetDeviceIDs then leaves no device: the message names the call."""
    if not POCL.exists():
        pytest.skip(f"{POCL} is not installed")
    shutil.copy(POCL, tmp_path)
    faults.sweep_with(sweep_library, None, COLD, OCL_ICD_VENDORS=tmp_path)


@pytest.mark.by_turns
@pytest.mark.cpus
def test_memory_runs_out(device, tmp_path):
    """Each allocation of the extension fails once."""
    preload = faults.build(tmp_path, "failing_memory")
    code = OUT_OF_MEMORY.format(sweep="sweep_memory")
    run_python(code, index_of(device), env={"LD_PRELOAD": preload}, timeout=600)


@pytest.mark.by_turns
@pytest.mark.cpus
def test_memory_of_the_interpreter_runs_out(device):
    """Each allocation of the interpreter fails once."""
    if importlib.util.find_spec("_testcapi") is None:
        pytest.skip("this interpreter has no _testcapi")
    run_python(OUT_OF_MEMORY.format(sweep="sweep_python"), index_of(device), timeout=600)


# ---- what the sweeps have found ----


@pytest.mark.cpus
@pytest.mark.parametrize("function", ["clRetainEvent", "clWaitForEvents", "clGetEventInfo"])
def test_a_pending_call_whose_event_fails(sweep_library, function):
    """Its memory stays, and its result is not read, before it is done.

    An event that could not be kept was released all the same. A call that could not be waited for,
    or asked about, was taken for done.
    """
    device = clattn.get_default_device()
    faults.sweep_with(sweep_library, device, ONE_FAULT.format(function=function),
                      CLATTN_MEMORY="copy")  # fmt: skip


def test_a_device_that_does_not_say_its_limits(sweep_library):
    """It is passed over, with the question as the reason. It was taken for one of no work-items."""
    code = """
    import os
    loader = ctypes.CDLL(library)
    for n in range(1, 40):
        child = os.fork()
        if child == 0:
            loader.sweep_fail(b"clGetDeviceInfo", n, -33)
            reasons = [device.reason or "" for device in clattn._core.all_devices()]
            said = "clGetDeviceInfo does not say its CL_DEVICE_"
            os._exit(any(said in reason for reason in reasons))
        if os.waitpid(child, 0)[1] != 0:
            break
    else:
        raise SystemExit("no device was passed over")
    """
    faults.sweep_with(sweep_library, clattn.get_default_device(), code)


# ---- the cache of programs ----


@pytest.fixture
def run_cached(sweep_library, tmp_path):
    """Runs code on the default device, with the cache in tmp_path or in another folder."""

    def run(code, cache=tmp_path):
        return faults.sweep_with(sweep_library, clattn.get_default_device(), code,
                                 XDG_CACHE_HOME=cache)  # fmt: skip

    return run


CALL = """
device = clattn._core.all_devices()[index]
assert device.usable, device.reason
matrix = np.arange(12, dtype="f4").reshape(3, 4)
assert (clattn.diagonal_matrix(matrix, 0.0, 1, 4, device=device) == np.tril(matrix)).all()
"""
FULL_DISK = """
import os, pathlib, resource, signal
import numpy as np
clattn.scaled_dot_product_attention(*np.ones((3, 2, 4), np.float32))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the driver has set a handler that ends the process
for path in pathlib.Path(os.environ["XDG_CACHE_HOME"], "clattn").glob("*.bin"):
    path.unlink()
resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))
"""


def test_a_driver_that_dies(run_cached):
    """The process dies with it. It leaves nothing behind that a later process would trust."""
    for function in ("clBuildProgram", "clEnqueueNDRangeKernel"):
        dying = f"""
loader = ctypes.CDLL(library)
loader.sweep_abort(1)
loader.sweep_fail(b"{function}", 1, -5)
"""
        with pytest.raises(AssertionError, match=f"exit {-signal.SIGABRT}"):
            run_cached(dying + CALL)
    run_cached(CALL)


@pytest.mark.cpus
def test_a_folder_that_cannot_be_written(run_cached, tmp_path):
    """A full disk, or a file in the folder's place: nothing is kept, and nothing is left."""
    run_cached(FULL_DISK + CALL)
    kept = [path for path in tmp_path.rglob("*.bin*") if path.is_file()]
    assert kept == []
    (tmp_path / "file").write_text("")
    run_cached(CALL, tmp_path / "file")


@pytest.mark.cpus
def test_files_that_are_no_programs(run_cached, tmp_path):
    """Cut, swapped, endless, a link to nowhere, a pipe: each is built again, and replaced."""
    run_cached(CALL)
    files = sorted((tmp_path / "clattn").glob("*-*.bin"))
    good = {path: path.read_bytes() for path in files}
    first = next(iter(good.values()))

    def cut(path):
        path.write_bytes(good[path][:-1])

    def swap(path):
        path.write_bytes(first[::-1] if good[path] is first else first)

    def endless(path):
        path.touch()
        with path.open("r+b") as file:
            file.truncate(2**42)

    def link(path):
        path.symlink_to(tmp_path / "nowhere" / "file")

    def pipe(path):
        os.mkfifo(path)

    assert len(files) == 2  # a verdict and a program
    for damages in ((cut, swap), (endless, link), (pipe, cut)):
        for path, damage in zip(files, damages, strict=True):
            path.unlink()
            damage(path)
        run_cached(CALL)
        assert not (tmp_path / "nowhere").exists()
        for path in files:
            assert path.is_file() and not path.is_symlink(), damages
            assert len(path.read_bytes()) == len(good[path]), damages
