"""The listing of devices that ``python -m clattn`` prints."""

import argparse
import itertools
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress

import clattn
from clattn import Device, _core
from clattn._host import tuning
from clattn._host.facts import dtypes_of, format_bytes

_HOST_MEMORY = {
    "svm": "in place: any pointer (fine-grained system SVM)",
    "host": "in place: buffers over the host's memory",
    "copy": "copied to the device and back",
}
_MATRIX_UNITS = 80  # the least capability whose matrix units the kernels use
# The kernels for matrix units need all of these.
_ALL_MATRICES = {"votes of a warp", "loads of matrices", "asynchronous copies"}


def run(arguments: argparse.Namespace) -> int:
    """Print every device; return 0 when there is a default device, else 1."""
    del arguments
    devices = _core.all_devices()
    default: Device | None = None
    problem = ""
    try:
        default = clattn.get_default_device()
    except (clattn.DeviceError, ValueError) as error:  # no usable device, or a wrong CLATTN_DEVICE
        problem = str(error)

    plural = "" if len(devices) == 1 else "s"
    print(f"clattn {clattn.__version__}, {len(devices)} OpenCL device{plural}")
    indices = itertools.count()  # of the usable devices, as in clattn.devices()
    for device, word in zip(devices, words_of(devices), strict=True):
        chosen = default is not None and device == default
        index = next(indices) if device.usable else "-"
        print(f"\n{'*' if chosen else ' '} {index}  {device.name}")
        for label, text in facts(device, word):
            print(f"     {label:<14} {text}")
        if chosen:
            print(f"     {'default':<14} {why_default(device)}")
    if problem:
        print(f"\nNo default device: {problem}", file=sys.stderr)
        return 1
    print(
        "\n* the default; CLATTN_DEVICE=WORDS or clattn.set_default_device(WORDS) chooses another."
    )
    return 0


def why_default(device: Device) -> str:
    """Say what has chosen the default device, and how to get to the CPU."""
    if _core.device_override.get(None) is not None:
        return "by clattn.use_device"
    words = os.environ.get("CLATTN_DEVICE", "")
    if words and _is_named(words, device):
        return f"by CLATTN_DEVICE={words}"
    if device != clattn.devices()[0]:
        return "by clattn.set_default_device"
    if device.type == "cpu":
        return "by itself: there is no usable GPU or accelerator"
    return f"by itself: the first {device.type.upper()}; CLATTN_DEVICE=cpu chooses the CPU"


def _is_named(words: str, device: Device) -> bool:
    try:
        return _core.find_device(words) == device
    except ValueError:
        return False


def words_of(devices: Sequence[Device]) -> list[str]:
    """Return the shortest word that names each device: "cpu", "cpu:1", "gpu" ….

    A type without a number means the first usable device of this type; numbers count all
    devices of the type.
    """
    seen: Counter[str] = Counter()
    usable: set[str] = set()
    words = []
    for device in devices:
        first = device.usable and device.type not in usable
        words.append(device.type if first else f"{device.type}:{seen[device.type]}")
        seen[device.type] += 1
        if device.usable:
            usable.add(device.type)
    return words


def facts(device: Device, word: str) -> Iterator[tuple[str, str]]:
    """Yield labels and texts about a device, which `word` names."""
    if device.usable:
        yield "select with", f'"{word}", its place in clattn.devices(), or a part of its name'
    else:
        yield "passed over", " ".join((device.reason or "no reason given").split())
    yield "platform", device.platform
    yield "version", f"{device.version.strip()}, driver {device.driver_version}"
    yield "compute units", str(device.compute_units)
    yield "memory", format_bytes(device.memory)
    if device.usable:
        yield "dtypes", dtypes_of(device)
        yield "host memory", _HOST_MEMORY[device.memory_mode]
        lacks = _core.lacks(device)
        if device.nvidia_capability >= _MATRIX_UNITS and not _ALL_MATRICES & lacks.keys():
            major, minor = divmod(device.nvidia_capability, 10)
            yield "matrix units", f"NVIDIA's, of capability {major}.{minor}"
        if tuning.is_tunable(device):
            yield "tuned", _tuned(device)
        if not _core.is_known(device):
            yield from _kernels(device)
        for capability, reason in lacks.items():
            first, *log = reason.splitlines()
            yield "not used", f"{capability}: {first}"
            for line in itertools.takewhile(_is_of_log, log):
                yield "", line


def _kernels_for(device: Device, what: str, dtype: str) -> Iterator[tuple[str, str | None]]:
    """Yield the kernels that calls of a dtype choose from, and why one is not used, or None."""
    for word in _core.fast_variants(device, dtype):
        with suppress(ValueError):  # the device lacks what the kernel needs, or there is none
            yield word, _core.try_variant(device, what, word, dtype, dtype, 64, 64, False)


def _kernels(device: Device) -> Iterator[tuple[str, str]]:
    """Yield which kernels a driver that is not known is used with: each is tried."""
    refused: dict[str, str] = {}
    for label, what, dtype in (
        ("float32", "attention", "float32"),
        ("float16", "attention", "float16"),
        ("gradients", "gradients", "float32"),
    ):
        found = dict(_kernels_for(device, what, dtype))
        yield f"for {label}", ", ".join(word for word, why in found.items() if why is None)
        of = " for gradients" if what == "gradients" else ""
        refused |= {word + of: why for word, why in found.items() if why is not None}
    for word, why in refused.items():
        yield "not used", f"{word}: {why.splitlines()[0]}"


def _tuned(device: Device) -> str:
    if tuning.is_off():
        return "off, by CLATTN_TUNING"
    count = tuning.count_in_use(device)
    return f"{count} class{'' if count == 1 else 'es'} of problems" if count else "no"


def _is_of_log(line: str) -> bool:
    """Tell the compiler's log from the source that follows it."""
    return re.fullmatch(r"kernels/\S+\.clh?:", line) is None
