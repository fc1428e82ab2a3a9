# SPDX-License-Identifier: MIT
"""Describes the machine in rows of a table."""

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

GPU_FIELDS = "name,driver_version,memory.total,clocks.max.sm,clocks.max.memory,power.limit"
PROGRAMS = ("cc", "cmake", "ninja", "nvcc", "ptxas")


def describe(check):
    """Return (label, text) for each known fact."""
    rows = [("system", f"{_read_name()}, {platform.platform()}"), ("processor", _read_processor())]
    memory = _first_match("/proc/meminfo", r"MemTotal:\s+(\d+) kB")
    rows.append(("memory", f"{int(memory) / 2**20:.0f} GiB" if memory else "not known"))
    rows += [("GPU", line) for line in _ask_nvidia()]
    for driver in check.found.drivers:
        rows.append(("OpenCL driver", f"{driver.library}, {driver.icd or 'without an .icd file'}"))
    if not check.found.drivers:
        rows.append(("OpenCL driver", "none found"))
    if check.cuda_says:
        rows.append(("CUDA driver", check.cuda_says))
    brought = " (brought along)" if check.found.loader_is_carried else ""
    rows.append(("OpenCL loader", f"{check.found.loader or 'not found'}{brought}"))
    rows.append(("Python", f"{check.python_version} ({check.python or 'none'})"))
    rows += [(word, _version_of(word)) for word in PROGRAMS]
    names = ("numpy", "torch", "pytest")
    have = check.versions(names) if check.python else {}
    rows += [(name, have.get(name, "not there")) for name in names]
    return rows


def _read_name():
    return _first_match("/etc/os-release", r'^PRETTY_NAME="?([^"\n]*)') or platform.system()


def _read_processor():
    model = _first_match("/proc/cpuinfo", r"^model name\s*: (.*)$") or platform.machine()
    return f"{model}, {os.cpu_count()} cores"


def _first_match(file, pattern):
    try:
        text = Path(file).read_text(errors="replace")
    except OSError:
        return None
    found = re.search(pattern, text, re.MULTILINE)
    return found and found[1].strip()


def _ask_nvidia():
    """Return a line for each GPU that nvidia-smi lists: its fields with their names."""
    said = _say("nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader")
    fields = GPU_FIELDS.split(",")
    return [
        ", ".join(
            f"{name} {text.strip()}" if place else text
            for place, (name, text) in enumerate(zip(fields, line.split(","), strict=False))
        )
        for line in said.splitlines()
    ]


def _version_of(word):
    path = shutil.which(word) or shutil.which(f"/usr/local/cuda/bin/{word}")
    if path is None:
        return "not there"
    lines = [line for line in _say(path, "--version").splitlines() if re.search(r"\d\.\d", line)]
    return f"{lines[-1 if word in ('nvcc', 'ptxas') else 0].strip()} ({path})" if lines else path


def _say(*command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
