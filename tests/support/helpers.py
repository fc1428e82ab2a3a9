# SPDX-License-Identifier: MIT
"""What several test files share: data, the check against the reference, child processes."""

import functools
import gc
import math
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
import numpy as np
import pytest
from references.attention import Allowed, compute_dtype, judged, rms, widened
from support.children import Forks
from support.forced import FORCED, weights_are_rounded

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
# What a child process imports from.
IMPORTED_FROM = [str(TESTS), str(ROOT / "tools")]
# Oclgrind as an OpenCL driver, where Debian puts it.
OCLGRIND = Path("/usr/lib/oclgrind/liboclgrind-rt-icd.so")
WHAT_TO_INSTALL = ("clattn[cpu]", "intel-opencl-rt", "pocl-opencl-icd")


# Which keys of a block a row sees, at the start, the end and both sides.
BANDS = [
    {"is_causal": True}, {"is_causal": "lower_right"}, {"window": (5, 2)}, {"window": (0, None)},
    {"window": (None, 0)}, {"window": (40, 0)}, {"is_causal": True, "window": (3, 9)},
]  # fmt: skip


def draw(shape, dtype=np.float32, seed=0):
    """Standard normal numbers; the shape is part of the seed, so no two arrays start alike."""
    is_large = math.prod(shape) >= 1 << 18  # the cache would take too much memory
    numbers = normal.__wrapped__ if is_large else normal
    return numbers(tuple(shape), seed).astype(dtype)


@functools.lru_cache(maxsize=64)
def normal(shape, seed):
    """The numbers of `draw` in float64. Neighbouring tests often draw the same numbers."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def qkv(lead=(2, 3), L=17, S=33, E=8, Ev=None, dtype=np.float32, seed=0):
    """Query, key and value with the same leading dimensions."""
    Ev = E if Ev is None else Ev
    shapes = ((*lead, L, E), (*lead, S, E), (*lead, S, Ev))
    return tuple(draw(shape, dtype, seed * 3 + n) for n, shape in enumerate(shapes))


def sdpa(*args, device, **options):
    return clattn.scaled_dot_product_attention(*args, device=device, **options)


def native(array):
    """The same values, contiguous, aligned, in the machine's byte order; None stays None."""
    if array is None:
        return None
    return np.array(array, dtype=array.dtype.newbyteorder("="), order="C")


def expected(query, key, value, options):
    """Options of the reference: those of the call, less the ones that only say where it goes."""
    known = {k: v for k, v in options.items() if k not in ("out", "return_lse", "seed")}
    for name in ("attn_mask", "sinks"):
        known[name] = native(known.get(name))
    arrays = tuple(native(a) for a in (query, key, value))
    return arrays, known


def assert_close(got, right, allowed, what="result"):
    """NaN where `right` is NaN, the same infinities, everything else within `allowed`.

    `allowed` is a number, one for each number of the result, or an `Allowed`.
    """
    allowed = allowed if isinstance(allowed, Allowed) else Allowed(allowed)
    assert got.shape == right.shape, f"{what}: shape {got.shape}, expected {right.shape}"
    wide = got.astype(right.dtype)
    np.testing.assert_array_equal(np.isnan(wide), np.isnan(right), err_msg=f"{what}: NaN")
    infinite = np.isinf(right)
    np.testing.assert_array_equal(wide[infinite], right[infinite], err_msg=f"{what}: inf")
    with np.errstate(invalid="ignore"):
        error = np.where(np.isfinite(right), np.abs(widened(got) - right), 0)
    each = np.broadcast_to(allowed.each, error.shape)
    if not (error <= each).all():
        with np.errstate(divide="ignore", invalid="ignore"):
            excess = np.where(error <= each, 0, error / each)
        worst = np.unravel_index(np.nan_to_num(excess, nan=np.inf).argmax(), error.shape)
        index = ", ".join(map(str, worst))
        raise AssertionError(
            f"{what}[{index}] is {got[worst]}, expected {right[worst]}: error {error[worst]:.3g}, "
            f"allowed {each[worst]:.3g}; {np.count_nonzero(excess)} of {error.size} numbers are "
            f"too far off{FORCED.kernel}"
        )
    mean = rms(error[np.isfinite(right)])
    assert mean <= allowed.rms, (
        f"{what}: root mean square of the error {mean:.3g}, allowed {allowed.rms:.3g}"
        f"{FORCED.kernel}"
    )


def check(query, key, value, *, device, rounds_weights=None, **options):
    """Call clattn, compare result and lse with the reference, see that inputs are unchanged.

    Without `return_lse` or `out` it calls twice, with and without the lse: kernels may take
    another path. `rounds_weights` says whether the kernel rounds weights to the dtype; None finds
    it out by another call. Returns the result.
    """
    both_ways = "return_lse" not in options and options.get("out") is None
    options.setdefault("return_lse", True)
    arrays, known = expected(query, key, value, options)
    others = options.get("attn_mask"), options.get("sinks")
    inputs = [a for a in (query, key, value, *others) if a is not None]
    before = [a.tobytes() for a in inputs]

    answer = sdpa(query, key, value, device=device, **options)

    if options.get("out") is None:
        assert before == [a.tobytes() for a in inputs], "an input was modified"
    result, *others = answer if isinstance(answer, tuple) else (answer,)
    if rounds_weights is None:
        again = functools.partial(sdpa, query, key, value, device=device, **options | {"out": None})
        rounds_weights = weights_are_rounded(result, again)
    right = judged(*arrays, rounds_weights=rounds_weights, **known)
    if known.get("return_weights"):
        weights = others.pop()
        assert weights.dtype == query.dtype.newbyteorder("=")
        assert_close(weights, right.weights, right.allowed_weights, "weights")
    assert type(result) is np.ndarray
    assert result.dtype == query.dtype.newbyteorder("=")
    assert_close(result, right.result, right.allowed)
    empty = np.isneginf(right.lse)
    assert not result[empty].any(), "rows without a key have to be zero"
    for lse in others:
        assert lse.dtype == compute_dtype(arrays[0].dtype)
        assert_close(lse, right.lse, right.allowed_lse, "lse")
    if both_ways:
        fewer = options | {"return_lse": False, "return_weights": False}
        alone = sdpa(query, key, value, device=device, **fewer)
        assert_close(alone, right.result, right.allowed, "result without lse")
    return result


def check_band(source, value, begin, end, *, device, **options):
    """Call diagonal_matrix on an array or a shape, compare with NumPy bit by bit."""
    if isinstance(source, np.ndarray):
        right = native(source).copy()
    else:
        right = np.zeros(source, options.get("dtype", np.float32))
    rows, columns = right.shape[-2:]
    filling = np.empty((), right.dtype)
    filling[...] = value
    if rows * columns < 1 << 20:
        t = np.arange(columns) - np.arange(rows)[:, None]
        filled = (begin <= t) & (t < end) if begin <= end else (t < end) | (t >= begin)
        np.copyto(right, filling, where=filled)
    else:  # numbers for each element would take longer than the call
        for row in range(rows):
            first, last = (min(max(0, bound + row), columns) for bound in (begin, end))
            inside = (slice(first, last),) if begin <= end else (slice(last), slice(first, None))
            for piece in inside:
                right[..., row, piece] = filling
    got = clattn.diagonal_matrix(source, value, begin, end, device=device, **options)
    assert got.dtype == right.dtype
    assert got.shape == right.shape
    same = native(got).view("u1") == right.view("u1") if got.size else np.array(True)
    assert same.all(), f"{got.shape} [{begin}, {end}): first at {np.argwhere(~same)[0]}"
    return got


def assert_references_return(calls, things):
    """Each of `things` has as many references after twenty rounds of `calls` as before."""

    def counted():
        gc.collect()
        return np.array([sys.getrefcount(thing) for thing in things])

    calls()
    for _ in range(3):  # caches of other libraries may give some back meanwhile, but not each time
        before = counted()
        for _ in range(20):
            calls()
        changed = counted() - before
        if np.abs(changed).max() < 5:
            return
    raise AssertionError(changed)


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


def status_field(name):
    """A field of /proc/self/status in bytes, such as VmRSS or VmHWM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def peak_of(action):
    """Run `action`; returns its result and how far resident memory rose above the start."""
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    start = status_field("VmRSS")
    result = action()
    return result, status_field("VmHWM") - start


SETUP = """
import gc, os, sys
import clattn, numpy as np
from support.helpers import check, draw, peak_of, qkv, sdpa, status_field
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
