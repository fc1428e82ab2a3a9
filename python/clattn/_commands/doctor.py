"""What clattn finds on a machine: ``clattn.show_config`` and ``python -m clattn doctor``."""

import argparse
import functools
import importlib.metadata
import itertools
import json
import os
import platform
import stat
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

import clattn
from clattn import Device, _core
from clattn._commands import listing
from clattn._commands.softmax import weigh
from clattn._host import apart, drivers, facts, files
from clattn._host.extras import how_to_install

_PACKAGES = ("numpy", "ml_dtypes", "intel-opencl-rt", "torch", "jax", "dask", "mpi4py", "onnx",
             "transformers", "pyopencl")  # fmt: skip
_VARIABLES = ("CLATTN_", "OCL_", "OPENCL_", "POCL_", "XDG_CACHE_HOME", "CUDA_VISIBLE_DEVICES",
              "OMP_WAIT_POLICY", "LD_LIBRARY_PATH")  # fmt: skip
_GRAPHICS = Path("/dev/dri")  # where Linux shows GPUs
_MOST_ERROR = 1e-5  # of the call that the doctor tries, whose values are about 1

# Two programs for other processes, which end without the exit handlers of drivers. _OPEN makes the
# first call that a loader makes to a driver; _LIST lists all devices.
_OPEN = """
import ctypes, os, sys
driver = ctypes.CDLL(sys.argv[1])
find = getattr(driver, "clGetExtensionFunctionAddress", None)
if find is None:
    sys.exit("it is no driver of OpenCL")
find.restype = ctypes.c_void_p
address = find(b"clIcdGetPlatformIDsKHR")
types = ctypes.c_int, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p
if address:
    ctypes.CFUNCTYPE(*types)(address)(0, None, ctypes.byref(ctypes.c_uint()))
os._exit(0)
"""
_LIST = """
import contextlib, json, os, sys
sys.path[:] = json.loads(sys.argv[1])
from clattn import _core
with contextlib.suppress(Exception):
    _core.all_devices()
os._exit(0)
"""

# The end of a message of the core. The doctor removes it: the user is reading the doctor's page.
_SEE_DOCTOR = "; python -m clattn doctor says where drivers were looked for"

Line = tuple[str, str]  # a label and a text
Section = tuple[str, list[Line], list[str]]  # a title, its lines, and what to do about them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to `parser`: there are none."""
    parser.set_defaults(run=run)


def show() -> None:
    """Print what `clattn.show_config` shows."""
    _print(_examine())


def run(arguments: argparse.Namespace) -> int:
    """Print what there is, what fails and what to do; return 0 if the default device computes."""
    del arguments
    advice = _print(_examine())
    devices, default, _ = _find()
    usable = [device for device in devices if device.usable]
    works = False
    if usable:
        calls = {device: _try_call(device) for device in usable}
        lines = [(device.name, said) for device, (said, _) in calls.items()]
        wrong = [text for _, text in calls.values() if text]
        advice += _print([("A call on each device", lines, wrong)])
        advice += _print([("Each kernel, in another process", *_try_kernels(usable))])
        works = default is not None and not calls[default][1]
    _print([("To do", [("", text) for text in advice] or [("", "nothing")], [])])
    return 0 if works else 1


def _print(sections: Iterable[Section]) -> list[str]:
    """Print sections, each as soon as it is there; return what to do about them."""
    advice: list[str] = []
    for title, lines, wrong in sections:
        width = max([24, *(len(label) for label, text in lines if text)])
        texts = (f"{label:<{width}} {text}" if label else text for label, text in lines)
        text = "".join(f"  {line.rstrip()}\n" for line in texts)
        # Paths and variables need not be text.
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        print(f"\n{title}\n{text}".encode(encoding, "backslashreplace").decode(encoding), end="")
        advice += wrong
    return advice


def _find() -> tuple[list[Device], Device | None, str]:
    """Return all devices, the default one, and why there is no default."""
    devices: list[Device] = []
    failure = _list_apart()
    if failure:
        return devices, None, f"the devices cannot be listed ({failure}): a driver does that"
    try:
        devices = _core.all_devices()
        return devices, clattn.get_default_device(), ""
    except (clattn.DeviceError, ValueError) as error:
        return devices, None, str(error).removesuffix(_SEE_DOCTOR)


@functools.cache
def _list_apart() -> str:
    """List the devices in another process; return how a driver has ended it, or nothing.

    So a driver that ends the process, or hangs, does not end this page.
    """
    if _core.loader() is not None:  # this process has listed them
        return ""
    return _run_apart(_LIST, json.dumps(sys.path))


def _examine() -> Iterator[Section]:
    """Yield what there is."""
    yield "Versions", list(_versions()), []
    given = {name: text for name, text in os.environ.items() if name.startswith(_VARIABLES)}
    yield "Environment", sorted(given.items()) or [("", "no variable of clattn or OpenCL")], []
    devices, default, problem = _find()
    found, wrong = _drivers_found()
    yield "Drivers", found, wrong
    if any("pip install" in text for text in wrong):  # what to install is said once
        problem = problem.partition("; install a driver: ")[0]
    lines: list[Line] = []
    for device, word in zip(devices, listing.words_of(devices), strict=True):
        lines += [(device.name, ""), *((f"  {a}", b) for a, b in listing.facts(device, word))]
        if device == default:
            lines.append(("  default", listing.why_default(device)))
    advice = [problem] if problem else []
    yield "Devices", lines or [("", "none")], [*advice, *_find_gpus(devices)]
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
    lines += [("another loader" if ours else "a loader that is open", path) for path in others]
    if ours and others:
        advice.append("several loaders are open, and handles of OpenCL belong to one: import "
                      "pyopencl, or the package that has opened the other, before clattn's first "
                      "call, or call clattn.devices() before that package looks for "
                      "drivers")  # fmt: skip
    named = [name for name in os.environ.get("OCL_ICD_FILENAMES", "").split(os.pathsep) if name]
    for library in named:
        lines.append(("named by a variable", f"{library}: {_open_apart(library) or 'opens'}"))
    if not drivers.HAS_ICD_FILES:
        return lines, advice
    place = Path(os.environ.get("OCL_ICD_VENDORS", drivers.SYSTEM_VENDORS))
    lines.append(("drivers listed in", str(place)))
    listed = [place] if place.is_file() else sorted(place.glob("*.icd"))
    for file in listed:
        try:
            if not stat.S_ISREG(file.stat().st_mode):
                raise OSError(0, "it is no file")
            library = os.fsdecode(file.read_bytes()).strip()
        except OSError as error:  # also a link to a file that is gone
            lines.append((f"  {file.name}", f"cannot be read: {error.strerror}"))
            advice.append(f"remove {file}, which cannot be read: {error.strerror}")
            continue
        failure = _open_apart(library)
        lines.append((f"  {file.name}", f"{library}: {failure or 'opens'}".removeprefix(": ")))
        if failure:
            again = f"install the driver {library} again, or remove" if library else "remove"
            advice.append(f"{again} {file}")
    if not listed and not named:
        unset = ", which OCL_ICD_VENDORS names: unset it" * ("OCL_ICD_VENDORS" in os.environ)
        advice.append(f"no driver is listed in {place}{unset}; {how_to_install('cpu')}, or the "
                      "driver of your device's vendor; a container needs its own")  # fmt: skip
    return lines, advice


def _find_gpus(devices: Iterable[Device]) -> list[str]:
    """Return what to do about a GPU that Linux shows and OpenCL does not."""
    nodes = sorted(_GRAPHICS.glob("renderD*"))
    if not nodes or any(device.type == "gpu" for device in devices):
        return []
    node = nodes[0]
    if not os.access(node, os.R_OK | os.W_OK):
        return [f"a GPU may be behind {node}, which you may not open: join the group "
                f"{node.group()}, and log in anew"]  # fmt: skip
    return [f"a GPU may be behind {node}, and no driver of OpenCL shows it: install its vendor's "
            "(docs/install.md)"]  # fmt: skip


def _open_apart(library: str) -> str:
    """Open a driver in another process; return why that fails, or nothing."""
    return _run_apart(_OPEN, library) if library else "names no library"


def _run_apart(code: str, *arguments: str) -> str:
    """Run code in another process; return how it fails, or nothing."""
    try:
        command = [apart.find_python(), "-c", code, *arguments]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              errors="replace", timeout=apart.SECONDS)  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"hangs for {apart.SECONDS} seconds"
    except (OSError, apart.NoProcessError):
        return ""
    *_, last = "", *done.stderr.strip().splitlines()
    if done.returncode < 0:
        return f"ends the process with signal {-done.returncode}" + (f": {last}" if last else "")
    return (last or f"ends the process with status {done.returncode}") if done.returncode else ""


def _cache() -> tuple[list[Line], list[str]]:
    """Return what the kernel cache holds, and what to do."""
    path = files.cache_path()
    if path is None:
        return [("", "none")], ["set XDG_CACHE_HOME, or each process builds its kernels anew"]
    if files.cache_folder() is None:
        return [("folder", f"{path}: not used, as others may write there")], [
            f"let only yourself write to the folder {path} (chmod go-w), or set XDG_CACHE_HOME: "
            "each process builds its kernels anew"
        ]
    programs = list(Path(path).glob("*.bin"))
    size = sum(file.stat().st_size for file in programs)
    lines = [("folder", path), ("files", f"{len(programs)}, {facts.format_bytes(size)}")]
    place = Path(path)
    while not place.exists():
        place = place.parent
    if os.access(place, os.W_OK):
        return lines, []
    return lines, [f"make {place} writable, or set XDG_CACHE_HOME: each process builds its kernels"]


def _try_kernels(devices: Iterable[Device]) -> tuple[list[Line], list[str]]:
    """Try each kernel that float32 calls choose from in another process, on each device."""
    lines: list[Line] = []
    advice: list[str] = []
    for device in devices:
        words = _core.fast_variants(device, "float32")
        for what, word in itertools.product(("attention", "gradients"), words):
            try:
                found = apart.ask(device, what, word, "float32", "float32", "64", "64")
            except apart.NoProcessError:
                return [("", "no process can be started")], advice
            problem = found.get("ended") or found.get("reason")
            kernel = f"{word} for gradients" if what == "gradients" else word
            if "refused" not in found:
                lines.append((device.name, f"{kernel}: {problem or 'right'}"))
            if problem is not None:
                advice.append(f"{device.name} ({device.platform}) does without the kernel "
                              f"{kernel}: please report this page")  # fmt: skip
    return lines, advice


def _try_call(device: Device) -> tuple[str, str]:
    """Attend on a device; return a line about the call, and what to do, nothing if it is right."""
    query, key, value = np.random.default_rng(0).standard_normal((3, 2, 40, 16), np.float32)
    right = weigh(query @ key.mT / 4, value)
    start = time.perf_counter()
    where = f"{device.name} ({device.platform})"
    report = "please report this page, and choose another device by CLATTN_DEVICE"
    try:
        result = clattn.scaled_dot_product_attention(query, key, value, device=device)
    except ValueError as error:  # a variable forces a kernel that does not take the call
        return f"refused: {error}", f"{where} refuses a plain call: {error}"
    except (clattn.DeviceError, MemoryError) as error:
        return f"FAILED: {error}", f"{where} fails: {report}"
    seconds, most = time.perf_counter() - start, float(np.abs(result - right).max())
    said = f"error {most:.0e}, {seconds * 1e3:.0f} ms with the build"
    if most <= _MOST_ERROR:
        return f"right, {said}", ""
    return f"WRONG, {said}", f"{where} computes wrongly: {report}"
