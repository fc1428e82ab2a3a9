# SPDX-License-Identifier: MIT
"""Kernels for Intel's GPUs: ocloc, the driver's compiler without the driver.

A row gives bytes of scratch memory of a hardware thread, which hold spilled registers and arrays of
work-items, and how many work-items a thread has (SIMD8, SIMD16 or SIMD32).
"""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from machine_code.common import ROOT, CheckError, run
from machine_code.table import with_macros

PACKAGE = "intel-opencl-icd"  # Debian's, of the driver: ocloc and the compiler are in it
DEVICES = "skl", "icllp", "tgllp", "dg2", "pvc"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "clattn-compilers"

# Tokens of a binary: bytes of scratch memory, two slots and that of arrays; SIMD. The number of the
# word in each.
SCRATCH = {"18": 1, "55": 1, "38": 3}
LANES = {"23": 3}


def prepare():
    """Bring ocloc into the cache folder: the driver's packages are unpacked, not installed."""
    wanted = subprocess.run(
        ["apt-cache", "depends", "--recurse", "--no-recommends", "--no-suggests", "--no-conflicts",
         "--no-breaks", "--no-replaces", "--no-enhances", PACKAGE],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    names = sorted({line for line in wanted.splitlines() if re.match(r"\w", line)})
    missing = [
        n for n in names if subprocess.run(["dpkg", "-s", n], capture_output=True).returncode
    ]
    CACHE.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", "-qq", *missing], cwd=CACHE, check=True)
    for package in CACHE.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, CACHE / "root"], check=True)
        package.unlink()


def find_programs():
    """ocloc and the folders of its libraries; what is missing, in words."""
    root = CACHE / "root" / "usr"
    unpacked = root / "bin" / "ocloc"
    ocloc = str(unpacked) if unpacked.exists() else shutil.which("ocloc")
    folders = ":".join(map(str, (root / "lib").glob("*-linux-gnu")))
    missing = [] if ocloc else ["ocloc (python tools/machine_code prepare)"]
    return (ocloc, folders), missing


def compile_row(programs, kernel, options, devices):
    return [numbers_of(programs, kernel, with_macros(kernel, options), d) for d in devices]


def numbers_of(programs, kernel, options, device):
    ocloc, folders = programs
    text = " ".join(["-cl-std=CL1.2", "-I", str(ROOT), *options])
    paths = {"LD_LIBRARY_PATH": folders} if folders else {}
    with tempfile.TemporaryDirectory() as folder:
        said = run(ocloc, "compile", "-file", kernel, "-device", device, "-options", text,
                   "-out_dir", folder, **paths)  # fmt: skip
        binary = next(Path(folder).glob("*.bin"), None)
        if binary is None:
            raise CheckError(f"ocloc for {device}:\n{said[-2000:]}")
        dump = Path(folder) / "dump"
        run(ocloc, "disasm", "-file", binary, "-device", device, "-dump", dump, **paths)
        return read((dump / "PTM.txt").read_text())


def read(text):
    """The numbers of the tokens of a binary."""
    numbers = {"scratch": 0, "lanes": 0}
    for token, bytes_of in re.findall(r"4 Token (\d+)\n\t4 Size \d+\n\tHex ([0-9a-f ]*)", text):
        words = bytes(int(x, 16) for x in bytes_of.split())
        for name, places in (("scratch", SCRATCH), ("lanes", LANES)):
            if token in places:
                at = 4 * places[token]
                numbers[name] += int.from_bytes(words[at : at + 4], "little")
    return numbers
