"""Trials of drivers in another process, which some drivers end: csrc/opencl/apart.h.

The core calls `run` in the user's process. `main` is what the other process does.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np

from clattn import _core
from clattn._arguments.dtypes import float_dtype

if TYPE_CHECKING:
    from typing import Any

    from clattn._core import Device

SECONDS = 20  # that a driver may take for a step: opening, building and running a kernel

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    "from clattn._host import apart; apart.main(*sys.argv[2:])"
)

_KERNELS = ("attention", "gradients")  # requests that try one

_TOLD = "clattn tells: "  # before what the other process prints; drivers print too


class NoProcessError(Exception):
    """No other process can be started here, or it did not get as far as the driver."""


def find_python() -> str:
    """Return what starts another Python.

    Raises
    ------
    NoProcessError
        This process is a program that has Python in it, and would start itself.
    """
    if not os.path.basename(sys.executable or "").lower().startswith("python"):
        raise NoProcessError
    return sys.executable


def run(request: str) -> str | None:
    """Do what `request` says in another process: a device, its memory mode, what to do.

    Returns
    -------
    reason : str or None
        None: the process has lived. Else why it has not; empty if there was none.
    """
    index, memory, *words = request.split(" ")
    device = _core.all_devices()[int(index)]
    try:
        found = ask(device, *words, environment={"CLATTN_MEMORY": memory})
    except NoProcessError:
        return ""
    return found.get("ended")


def ask(device: Device, *words: str, environment: dict[str, str] | None = None) -> dict[str, str]:
    """Do what the words say with a device in another process.

    Returns
    -------
    found : dict
        "ended": how the driver has ended the process; "reason": why the device or the variant is
        not used; "refused": what the variant takes, which such a call is not. Empty: all is well.

    Raises
    ------
    NoProcessError
    """
    python = find_python()
    index = _core.all_devices().index(device)
    command = [python, "-c", _START, json.dumps(sys.path), str(SECONDS),
               json.dumps(_identity(device)), str(index), *words]  # fmt: skip
    variables = os.environ | {"CLATTN_TRIALS": "here", "CLATTN_KERNEL": ""} | (environment or {})
    try:
        done = subprocess.run(command, env=variables, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, errors="replace",
                              timeout=5 * SECONDS, check=False)  # fmt: skip
    except OSError as error:
        raise NoProcessError from error
    except subprocess.TimeoutExpired:
        return {"ended": f"{_what(words)} in another process hung for {5 * SECONDS} seconds"}
    lines: list[dict[str, str]] = [
        json.loads(line.removeprefix(_TOLD))
        for line in done.stdout.splitlines()
        if line.startswith(_TOLD)
    ]
    if not lines:
        raise NoProcessError
    if "lived" in lines[-1]:
        return {name: text for name, text in lines[-1].items() if name != "lived"}
    return {"ended": f"{_what(words)} in another process {_ending(done)}"}


def _identity(device: Device) -> list[str]:
    return [device.platform, device.name, device.driver_version]


def _what(words: tuple[str, ...]) -> str:
    trial = dict.fromkeys(_KERNELS, "its trial")
    return ({"open": "opening the device"} | trial).get(words[0], "a small call")


def _ending(done: subprocess.CompletedProcess[str]) -> str:
    """Say how the process has ended, and its last words."""
    if "Timeout (" in done.stderr:
        return f"hung for {SECONDS} seconds"
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
    words = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    last = f": {words[-1][:200]}" if words else ""
    return f"ended that process ({how}{last})"


def main(seconds: str, known: str, index: str, *words: str) -> None:
    """Do what the words say, and leave without the driver's exit handlers."""
    device = _core.all_devices()[int(index)]
    if _identity(device) != json.loads(known):
        os._exit(1)
    _tell({})
    found = {"lived": "yes"}
    _begin_step(seconds)
    reason = device.reason
    _begin_step(seconds)
    try:
        if reason is None and words[0] in _KERNELS:
            what, word, dtype, value_dtype, size, value_size = words
            reason = _core.try_variant(
                device, what, word, dtype, value_dtype, int(size), int(value_size), True
            )
        elif reason is None and words[0] == "diagonal":
            _fill_and_copy(device, int(words[1]))
        elif reason is None and words[0] == "pages":
            _write_rows(device, int(words[1]), words[2])
    except ValueError as error:
        found["refused"] = str(error)
    except Exception as error:  # any that an operator raises: the process lives
        reason = str(error)
    if reason is not None:
        found["reason"] = reason
    _tell(found)
    os._exit(0)


def _tell(found: dict[str, str]) -> None:
    print(_TOLD + json.dumps(found), flush=True)


def _begin_step(seconds: str) -> None:
    """End the process if what comes next takes longer."""
    faulthandler.dump_traceback_later(float(seconds), exit=True)


def _fill_and_copy(device: Device, width: int) -> None:
    """Fill and copy matrices whose elements have `width` bytes."""
    matrices = np.ones((2, 33, 70), f"u{width}")
    for array in (matrices, matrices.mT):
        _core.tril(_core.tensor(array, device), 1, None).numpy()


def _write_rows(device: Device, codes: int, dtype: str) -> None:
    """Write rows of that dtype to pages, and copy one."""
    for size in (39, 40):
        width = -(-size // 2) if codes == 4 else size
        kept = dtype if codes == 0 else "int8" if codes == 1 else "uint8"
        pages = _core.tensor(np.ones((2, 2, 4, width), _dtype(kept)), device)
        scales = [np.ones(shape, "f4") for shape in ((2,), (2, 2, 4), (2, 2, 4, 2))]
        scale = None if codes == 0 else _core.tensor(scales[{1: 1, 4: 2}.get(codes, 0)], device)
        offset = _core.tensor(scales[2], device) if codes == 4 else None
        cache = _core.Cache(codes, size, size, pages, pages, scale, scale, offset, offset)
        if _dtype(dtype).kind not in "iu":
            rows = np.ones((3, 2, size), _dtype(dtype))
            cache.write_rows(rows, rows, np.arange(3))
        cache.copy_rows(np.array([1, 0]))
        pages.numpy()


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(float_dtype(name) if name == "bfloat16" else name)
