# SPDX-License-Identifier: MIT
"""Builds clattn for each of several Pythons, runs its tests there, and prints a table.

    python tools/try_pythons.py python3.13 python3.14 /opt/python3.13t/bin/python3
    python tools/try_pythons.py python3.13t --stress 60 -- tests/python/test_free_threads.py

Each interpreter gets an environment in build/pythons with NumPy, a driver for CPUs, and what the
tests cannot do without. Other libraries are left out, and so are the tests that need them. A
warning of the C compiler is an error. The words behind -- go to pytest; without any, the tests of
the library run, not those of tools. The tool needs what building clattn needs, and runs with
Python 3.11 or later. The exit status is not 0 if a build or a test failed, or if a free-threaded
Python has its lock back.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "pythons"
PACKAGES = ["pytest>=9.0", "pytest-xdist>=3.6", "hypothesis>=6.100", "ml_dtypes>=0.5"]

TESTS = [f"tests/{room}" for room in ("attention", "diagonal", "doors", "opencl", "python")]

# Runs in the interpreter: what it is.
ABOUT = """
import json, platform, sysconfig
free = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
print(json.dumps([platform.python_version() + "t" * free, free]))
"""
# Runs in the environment: NumPy, and whether the lock is there after the import.
INSTALLED = """
import json, sys, numpy, clattn
print(json.dumps([numpy.__version__, getattr(sys, "_is_gil_enabled", lambda: True)()]))
"""


class Failed(Exception):
    """A step of an interpreter failed; the text says which."""


def ask(python, code):
    """What the code prints."""
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    if done.returncode != 0:
        raise Failed(f"{python}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout)


def make_environment(python, name):
    """Installs clattn and the packages, and returns the environment's interpreter and seconds."""
    folder = FOLDER / name
    own, wheels = folder / "bin" / "python", folder / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    # An older NumPy that is built for this Python is better than a newer one to build.
    env = os.environ | {"PIP_PREFER_BINARY": "1", "SKBUILD_CMAKE_DEFINE": "CLATTN_WERROR=ON"}
    if not own.exists():
        run([python, "-m", "venv", folder], "no environment", env)
    pip = [own, "-m", "pip", "--quiet"]
    start = time.monotonic()
    run([*pip, "wheel", "--no-deps", "--wheel-dir", wheels, ROOT], "does not build", env)
    seconds = time.monotonic() - start
    (wheel,) = wheels.glob("*.whl")
    run([*pip, "install", f"{wheel}[cpu]", *PACKAGES], "no packages", env)
    run([*pip, "install", "--force-reinstall", "--no-deps", wheel], "not installed", env)
    return own, seconds


def run(command, failure, env):
    if subprocess.run(command, env=env, cwd=FOLDER).returncode != 0:
        raise Failed(failure)


def run_tests(python, arguments, stress):
    """Pytest's last line."""
    env = dict(os.environ)
    if stress:
        env["CLATTN_STRESS"] = str(stress)
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(arguments or TESTS)]
    lines = []
    with subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True) as tests:
        for line in tests.stdout:
            print(line, end="", flush=True)
            lines += [line] if line.strip() else []
    last = [line for line in lines if re.search(r"\d+ \w+.* in [\d.]+s", line)]
    said = last[-1].strip().strip("= ") if last else f"pytest ended with {tests.returncode}"
    return said, tests.returncode == 0


def try_python(python, arguments, stress):
    """A row of the table, and whether all went well."""
    row = [python, "", "", "", ""]
    try:
        row[0], free = ask(python, ABOUT)
        own, seconds = make_environment(python, row[0])
        row[1] = f"{seconds:.0f} s"
        row[2], gil = ask(own, INSTALLED)
        row[3] = "on" if gil else "off"
        row[4], passed = run_tests(own, arguments, stress)
        return row, passed and not (free and gil)
    except Failed as failure:
        row[4] = str(failure)
        return row, False


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pythons", nargs="+", metavar="python", help="interpreters")
    parser.add_argument("--stress", type=float, metavar="SECONDS", help="of tests of free threads")
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    given = parser.parse_args(words[:split])
    FOLDER.mkdir(parents=True, exist_ok=True)
    tried = [try_python(python, words[split + 1 :], given.stress) for python in given.pythons]
    print("\n| Python | build | NumPy | GIL | tests |\n|---|---|---|---|---|")
    for row, _ in tried:
        print(f"| {' | '.join(row)} |")
    sys.exit(not all(passed for _, passed in tried))


if __name__ == "__main__":
    main()
