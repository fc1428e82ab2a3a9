# SPDX-License-Identifier: MIT
"""Collects the packages and files that a bare machine needs to build, test and time clattn.

FOLDER/lib           a loader of OpenCL
FOLDER/wheels        packages, pip's own among them
FOLDER/machine_code.txt the output of tools/machine_code
FOLDER/programs.json the programs that tests execute as PTX. The check brings back their PTX by the
                     driver's compiler
FOLDER/cuda          the loader and the PTX of tools/cuda_machine.py for smoke calls and key rows of
                     the benchmark, where NVIDIA's driver has no OpenCL and the machine no clang
FOLDER/experiments   clang's PTX of the experiments
FOLDER/commit.txt    of the checkout
"""

import os
import re
import shutil
import subprocess
import sys

from gpu_check import drivers, smoke
from gpu_check.running import PATHS, ROOT

OLDEST_PYTHON = "3.11"
# Least versions, as in pyproject.toml (tests/package/test_gpu_check.py compares).
BUILD = {"scikit-build-core": "0.10", "setuptools-scm": "8.0", "numpy": "2.0"}
PROGRAMS = {"cmake": "3.20", "ninja": "1.5"}  # packages, for a machine without these programs
TEST = {"pytest": "9.0", "pytest-xdist": "3.6", "hypothesis": "6.100", "ml_dtypes": "0.5"}
BENCH = {"rich": "13"}
LIMITS = {"pyopencl": "2024.1"}  # bench measures the limits of a device with it
EVERYTHING = BUILD | PROGRAMS | TEST | BENCH | LIMITS
OPTIONAL = ("a check of PTX", "PTX for CUDA", "PTX of experiments")  # what may be missing
PLATFORMS = ("2_28", "2_27", "2_17", "2_5", "2_24", "2_26")

VERSION_CODE = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


SMOKE_CODE = """
import sys
from gpu_check import smoke
for name in sys.argv[1:]:
    try:
        smoke.check_call(name, "gpu")
    except ValueError:  # zeros
        pass
"""


def is_new_enough(version, least):
    """Compare versions by their leading numbers."""

    def numbers(text):
        return [int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3]]

    return numbers(version) >= numbers(least)


def find_python(words):
    """Return a Python that clattn runs on and its version: this one, else one on the PATH."""
    minors = range(19, int(OLDEST_PYTHON.partition(".")[2]) - 1, -1)
    for word in [words] if words else [sys.executable, *(f"python3.{n}" for n in minors)]:
        path = shutil.which(word)
        if path is None:
            continue
        code = "import sys; print('%d.%d.%d' % sys.version_info[:3])"
        done = subprocess.run([path, "-c", code], capture_output=True, text=True)
        version = done.stdout.strip()
        if done.returncode == 0 and is_new_enough(version, OLDEST_PYTHON):
            return path, version
    return None, f"no Python {OLDEST_PYTHON} or later"


def prepare(folder, python_version, packages, key_rows):
    """Fill the folder for a bare machine; return what is missing from it, and why.

    `key_rows` are rows of the benchmark, whose programs it will have.
    """
    folder.mkdir(parents=True, exist_ok=True)
    here = drivers.find(folder / "nothing")
    missing = []
    if here.loader is None:
        missing.append("a loader of OpenCL: apt-get install ocl-icd-libopencl1")
    else:
        (folder / "lib").mkdir(exist_ok=True)
        shutil.copy(here.loader.resolve(), folder / "lib" / drivers.LOADER)
    missing += download(folder / "wheels", python_version, packages)
    said, why = run_machine_code()
    (folder / "machine_code.txt").write_text(said or why)
    missing += [] if said else [f"a check of PTX: {why}"]
    said, why = list_programs()
    (folder / "programs.json").write_text(said or "[]")
    missing += [] if said else [f"programs that tests execute: {why}"]
    why = make_ptx(folder / "cuda", key_rows)
    missing += [f"PTX for CUDA: {why}"] if why else []
    why = make_experiments(folder)
    missing += [f"PTX of experiments: {why}"] if why else []
    (folder / "commit.txt").write_text(find_commit())
    return missing


def download(folder, python_version, packages):
    """Fetch wheels of packages and of their dependencies; return what is missing."""
    folder.mkdir(exist_ok=True)
    if not packages:
        return []
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"]
    command += ["--dest", str(folder), "--python-version", python_version]
    command += [f"--platform=manylinux_{p}_x86_64" for p in PLATFORMS]
    command += ["--platform=manylinux2014_x86_64", "--platform=linux_x86_64"]
    command += [f"{name}>={EVERYTHING[name]}" for name in packages] + ["pip"]
    done = subprocess.run(command, capture_output=True, text=True)
    last = (done.stderr.strip().splitlines() or ["pip download failed"])[-1]
    return [] if done.returncode == 0 else [f"wheels: {last}"]


def make_ptx(folder, key_rows, seconds=600):
    """Fill a folder for tools/cuda_machine.py; return "" or why that is impossible.

    It needs clattn in this Python. Results are zeros, so the calls fail after their programs are
    built, and nothing counts but the programs. Without trials, which would leave variants out.
    """
    for arguments in (
        ["-c", SMOKE_CODE, *smoke.calls("gpu")],
        ["-m", "clattn", "bench", "--gpu", "--rounds", "1", "--rows", *key_rows],
    ):
        command = [sys.executable, ROOT / "tools" / "cuda_machine.py", "--without-gpu"]
        command += ["--folder", folder, "--", sys.executable, *arguments]
        try:
            done = subprocess.run(
                [str(word) for word in command], capture_output=True, text=True, timeout=seconds,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(PATHS), "CLATTN_TRIALS": "off"},
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if done.returncode == 2:  # a program is missing
            return done.stderr.strip()
    made = [file.read_text() for file in (folder / "programs").glob("*.ptx")]
    if not any(".entry attention_mma" in text for text in made):
        return (done.stderr.strip().splitlines() or ["no kernel was built"])[-1]
    return ""


def make_experiments(folder):
    """Keep clang's PTX of the experiments; return "" or why that is impossible."""
    command = [sys.executable, "-m", "gpu_check.experiments", "--prepare", "--carried", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join(PATHS)})  # fmt: skip
    return done.stderr.strip() if done.returncode else ""


def find_commit():
    """Return the commit of the checkout, with a mark where files are changed."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip()


def list_programs():
    """Return the programs that tests execute from PTX, as JSON, and "", or "" and why not."""
    script = ROOT / "tests" / "ptx" / "list_programs.py"
    paths = os.pathsep.join(str(ROOT / name) for name in ("tests", "tools"))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=ROOT,
                          env=os.environ | {"PYTHONPATH": paths})  # fmt: skip
    if done.returncode:
        return "", (done.stderr.strip().splitlines() or ["it failed"])[-1]
    return done.stdout, ""


def run_machine_code(seconds=300):
    """Return the output of tools/machine_code and "", or "" and why there is none."""
    script = ROOT / "tools" / "machine_code"
    if not script.exists():
        return "", "there is no tools/machine_code"
    try:
        done = subprocess.run(
            [sys.executable, str(script), "--for", "nvidia"],
            capture_output=True,
            text=True,
            timeout=seconds,
            cwd=ROOT,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    if done.returncode == 2:  # a program is missing
        return "", done.stderr.strip()
    return f"exit status {done.returncode}\n{done.stdout}{done.stderr}", ""
