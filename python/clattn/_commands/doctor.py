"""What clattn finds on a machine: ``clattn.show_config`` and ``python -m clattn doctor``."""

import argparse
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

import clattn
from clattn import Device, _core
from clattn._commands import listing
from clattn._host import apart, drivers, facts

_PACKAGES = ("numpy", "ml_dtypes", "intel-opencl-rt", "torch", "jax", "dask", "mpi4py", "onnx",
             "transformers", "pyopencl")  # fmt: skip
_VARIABLES = ("CLATTN_", "OCL_", "OPENCL_", "POCL_", "XDG_CACHE_HOME", "CUDA_VISIBLE_DEVICES",
              "OMP_WAIT_POLICY", "LD_LIBRARY_PATH")  # fmt: skip
_MOST_ERROR = 1e-5  # of the call that the doctor tries, whose values are about 1

Line = tuple[str, str]  # a label and a text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to `parser`: there are none."""
    parser.set_defaults(run=run)


def show() -> None:
    """Print what `clattn.show_config` shows."""
    for title, lines, _ in _examine():
        _print(title, lines)


def run(arguments: argparse.Namespace) -> int:
    """Print what there is, what fails and what to do; return 0 if the default device computes."""
    del arguments
    advice: list[str] = []
    for title, lines, wrong in _examine():
        _print(title, lines)
        advice += wrong
    works = False
    with suppress(clattn.DeviceError, ValueError):
        default = clattn.get_default_device()
        lines = []
        for device in clattn.devices():
            word, is_right = _try_call(device)
            lines.append((device.name, word))
            works |= is_right and device == default
            if not is_right:
                advice.append(f"{device.name} ({device.platform}) computes wrongly: please report "
                              "this page, and choose another device by CLATTN_DEVICE")  # fmt: skip
        _print("A call on each device", lines)
        lines, wrong = _try_kernels()
        advice += wrong
        _print("Each kernel, in another process", lines)
    _print("To do", [("", text) for text in advice] or [("", "nothing")])
    return 0 if works else 1


def _print(title: str, lines: list[Line]) -> None:
    print(f"\n{title}")
    for label, text in lines:
        print(f"  {label:<24} {text}" if label else f"  {text}")


def _examine() -> Iterator[tuple[str, list[Line], list[str]]]:
    """Yield a title, its lines, and what to do about them."""
    yield "Versions", list(_versions()), []
    given = {name: text for name, text in os.environ.items() if name.startswith(_VARIABLES)}
    yield "Environment", sorted(given.items()) or [("", "no variable of clattn or OpenCL")], []
    problem = ""
    devices: list[Device] = []
    try:
        devices = _core.all_devices()
        clattn.get_default_device()
    except (clattn.DeviceError, ValueError) as error:
        problem = str(error)
    yield "Drivers", *_drivers_found()
    lines: list[Line] = []
    for device, word in zip(devices, listing.words_of(devices), strict=True):
        lines += [(device.name, ""), *((f"  {a}", b) for a, b in listing.facts(device, word))]
    yield "Devices", lines or [("", "none")], [problem] if problem else []
    yield "Kernel cache", *_cache()


def _versions() -> Iterator[Line]:
    yield "clattn", f"{clattn.__version__} in {Path(clattn.__file__).parent}"
    yield "Python", f"{platform.python_version()} {sys.executable}"
    yield "system", platform.platform()
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)


def _drivers_found() -> tuple[list[Line], list[str]]:
    """Return the loaders, the drivers that they are told of, and what to do."""
    advice = []
    ours = _core.loader()
    lines = [("loader", os.fsdecode(ours) if ours else "none is open, or the system does not say")]
    others = [os.fsdecode(path) for path in drivers.loaders_in_use() if path != ours]
    lines += [("another loader", path) for path in others]
    if ours and others:
        advice.append("several loaders are open, and handles of OpenCL belong to one: import "
                      "pyopencl, or the package that has opened the other, before clattn's first "
                      "call, or call clattn.devices() before that package looks for "
                      "drivers")  # fmt: skip
    place = Path(os.environ.get("OCL_ICD_VENDORS", drivers.SYSTEM_VENDORS))
    lines.append(("drivers listed in", str(place)))
    files = [place] if place.is_file() else sorted(place.glob("*.icd"))
    for file in files:
        library = file.read_text(errors="replace").strip()
        failure = _open_apart(library)
        lines.append((f"  {file.name}", f"{library}: {failure or 'opens'}"))
        if failure:
            advice.append(f"install the driver {library} again, or remove {file}")
    if not files:
        advice.append(f"no driver is listed in {place}: pip install \"clattn[cpu]\", or the driver "
                      "of your device's vendor; a container needs its own")  # fmt: skip
    return lines, advice


def _open_apart(library: str) -> str:
    """Open a library in another process; return why that fails, or nothing."""
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, library], capture_output=True, text=True)
    if done.returncode < 0:
        return f"ends the process with signal {-done.returncode}"
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def _cache() -> tuple[list[Line], list[str]]:
    """Return what the kernel cache holds, and what to do."""
    folder = drivers.cache_folder()
    if folder is None:
        return [("", "none")], ["set XDG_CACHE_HOME, or each process builds its kernels anew"]
    files = list(Path(folder).glob("*.bin"))
    size = sum(file.stat().st_size for file in files)
    lines = [("folder", folder), ("files", f"{len(files)}, {facts.format_bytes(size)}")]
    place = Path(folder)
    while not place.exists():
        place = place.parent
    if os.access(place, os.W_OK):
        return lines, []
    return lines, [f"make {place} writable, or set XDG_CACHE_HOME: each process builds its kernels"]


def _try_kernels() -> tuple[list[Line], list[str]]:
    """Try each kernel that float32 calls choose from in another process, on each usable device."""
    lines: list[Line] = []
    advice: list[str] = []
    for device in clattn.devices():
        for word in _core.fast_variants(device, "float32"):
            try:
                found = apart.ask(device, "attention", word, "float32", "float32", "64", "64")
            except apart.NoProcessError:
                return [("", "no process can be started")], advice
            problem = found.get("ended") or found.get("reason")
            if "refused" not in found:
                lines.append((device.name, f"{word}: {problem or 'right'}"))
            if problem is not None:
                advice.append(f"{device.name} ({device.platform}) does without the kernel {word}: "
                              "please report this page")  # fmt: skip
    return lines, advice


def _try_call(device: Device) -> tuple[str, bool]:
    """Attend on a device; return a line about the call, and whether it is right."""
    query, key, value = np.random.default_rng(0).standard_normal((3, 2, 40, 16), np.float32)
    scores = query @ key.mT / 4
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    right = weights / weights.sum(axis=-1, keepdims=True) @ value
    start = time.perf_counter()
    try:
        result = clattn.scaled_dot_product_attention(query, key, value, device=device)
    except (clattn.DeviceError, MemoryError) as failure:
        return str(failure), False
    seconds, error = time.perf_counter() - start, float(np.abs(result - right).max())
    is_right = error <= _MOST_ERROR
    word = "right" if is_right else "WRONG"
    return f"{word}, error {error:.0e}, {seconds * 1e3:.0f} ms with the build", is_right
