"""Trials of drivers in another process, which some of them end: csrc/opencl/apart.h.

The core calls `run` in the process of the user. `main` is what the other process does.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys

SECONDS = 20  # that a driver may take for a step: to be opened, to build and run a kernel

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from clattn import _apart; _apart.main()"
_LIVED = "lived"


def run(request: str) -> str | None:
    """Do in another process what `request` says: device, memory mode, what to do.

    Returns
    -------
    reason : str or None
        None: the process has lived. Else why it has not; empty if none could be started.
    """
    from clattn import _core

    index, memory, *words = request.split(" ")
    device = _core.all_devices()[int(index)]
    known = [device.platform, device.name, device.driver_version]
    environment = os.environ | {
        "CLATTN_TRIALS": "here",
        "CLATTN_MEMORY": memory,
        "CLATTN_KERNEL": "",
    }
    if not os.path.basename(sys.executable or "").lower().startswith("python"):
        return ""  # a program that has Python in it, and would start itself
    command = [sys.executable, "-c", _START, json.dumps(sys.path), index, json.dumps(known), *words]
    try:
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, errors="replace",
                              timeout=5 * SECONDS, check=False)  # fmt: skip
    except OSError:
        return ""
    except subprocess.TimeoutExpired:
        return f"does not end within {5 * SECONDS} seconds in another process"
    said = done.stdout.split()
    if _LIVED in said:
        return None
    return f"{_ending(done)} in another process: {' '.join(words)}" if "started" in said else ""


def _ending(done: subprocess.CompletedProcess[str]) -> str:
    """Say how the process has ended, and its last words."""
    if "Timeout (" in done.stderr:
        return f"hangs for {SECONDS} seconds"
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
    words = [line for line in done.stderr.splitlines() if line.strip()]
    return f"ends the process ({how}{'; ' + words[-1].strip()[:200] if words else ''})"


def main() -> None:
    """Do what the arguments say, and leave without the exit handlers of the driver."""
    from clattn import _core

    _, _, index, known, *words = sys.argv
    device = _core.all_devices()[int(index)]
    if [device.platform, device.name, device.driver_version] != json.loads(known):
        os._exit(1)
    print("started", flush=True)
    _step()
    if device.usable and words[0] == "attention":
        word, dtype, value_dtype, head_size, v_head_size = words[1:]
        _step()
        _core.try_variant(device, word, dtype, value_dtype, int(head_size), int(v_head_size), True)
    elif device.usable and words[0] == "diagonal":
        _step()
        _try_diagonal(device, int(words[1]))
    print(_LIVED, flush=True)
    os._exit(0)


def _step() -> None:
    """Let the process end if the next step takes too long."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)


def _try_diagonal(device: object, width: int) -> None:
    """Copy and fill matrices whose elements have `width` bytes."""
    import numpy as np

    import clattn

    matrices = np.ones((2, 33, 70), f"u{width}")
    for array in (matrices, matrices.mT):
        clattn.tril(clattn.tensor(array, device), 1).numpy()
