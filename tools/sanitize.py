# SPDX-License-Identifier: MIT
"""Runs tests with a sanitizer in the extension, or an analyzer over its C.

    python tools/sanitize.py address [pytest's arguments]    # AddressSanitizer and UBSan
    python tools/sanitize.py thread [pytest's arguments]     # ThreadSanitizer
    python tools/sanitize.py analyzer | cppcheck

It needs gcc, and cppcheck for that word. A sanitizer builds clattn into
build/sanitize/<name>. Without arguments for pytest, a subset of the tests runs. The exit status is
not 0 after a finding or a failed test.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "sanitize"

ARGUMENTS = [
    "tests/python/test_hostile_arrays.py", "tests/python/test_fuzz.py",
    "tests/python/test_dlpack.py", "tests/python/test_foreign_arrays.py",
    "tests/python/test_kv_cache_errors.py", "tests/python/test_kv_cache_properties.py",
    "tests/python/test_tensor_views.py", "tests/attention/test_flex_blocks.py",
    "tests/attention/test_attention_errors.py", "tests/attention/test_attention_extremes.py",
    "tests/diagonal/test_diagonal_errors.py", "tests/diagonal/test_diagonal_out.py",
    "tests/doors/test_onnx_errors.py", "tests/doors/test_directml_errors.py",
    "tests/doors/test_openvino_errors.py",
]  # fmt: skip
THREADS = [
    "tests/python/test_hostile_arrays.py", "tests/opencl/test_devices.py",
    "tests/opencl/test_small_calls.py",
    "-k", "thread or at_once or hostile",
]  # fmt: skip

# Name: compiler flags, libraries to preload, environment, the tests that run by themselves.
SANITIZERS = {
    "address": (
        "-fsanitize=address,undefined -fno-sanitize-recover=undefined",
        ("libasan.so", "libubsan.so"),
        {"ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
         "UBSAN_OPTIONS": "print_stacktrace=1", "PYTHONMALLOC": "malloc"},
        ARGUMENTS,
    ),
    "thread": (
        "-fsanitize=thread",
        ("libtsan.so",),
        {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:report_signal_unsafe=0:"
                         "allocator_may_return_null=1"},
        THREADS,
    ),
}  # fmt: skip


def build(name, flags):
    """Installs clattn, built with these flags, and returns where."""
    target = BUILD / name
    env = os.environ | {
        "CFLAGS": f"{flags} -g -fno-omit-frame-pointer",
        "SKBUILD_BUILD_DIR": str(BUILD / f"{name}-objects"),
        "SKBUILD_CMAKE_BUILD_TYPE": "RelWithDebInfo",
    }
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade",
               "--target", target, ROOT]  # fmt: skip
    subprocess.run(command, env=env, check=True)
    return target


def library(name):
    """The path of one of gcc's libraries."""
    command = ["gcc", f"-print-file-name={name}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def run_tests(name, arguments):
    """The exit status of pytest with the sanitizer, and with the reference kernel."""
    flags, libraries, options, default = SANITIZERS[name]
    target = build(name, flags)
    paths = os.pathsep.join([str(target), str(ROOT / "tests")])
    env = os.environ | {"CLATTN_KERNEL": "reference", "PYTHONPATH": paths} | options
    env["LD_PRELOAD"] = " ".join(map(library, libraries))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
               *(arguments or default)]  # fmt: skip
    return subprocess.run(command, env=env, cwd=ROOT).returncode


def analyze():
    """gcc's analyzer over each file: its warnings are the findings.

    Three kinds are left out. The analyzer does not see that ca_error_set returns the status it is
    given, so that CA_TRY leaves the function; and it does not follow counters that are atomic.
    """
    flags = "-fanalyzer -Wno-analyzer-null-dereference -Wno-analyzer-null-argument"
    flags += " -Wno-analyzer-double-free"
    env = os.environ | {"CFLAGS": flags}
    folder = BUILD / "analyzer"
    configure = ["cmake", "-S", ROOT, "-B", folder, f"-DPython_EXECUTABLE={sys.executable}",
                 "-DCLATTN_WERROR=ON"]  # fmt: skip
    subprocess.run(configure, env=env, check=True, stdout=subprocess.DEVNULL)
    command = ["cmake", "--build", folder, "--clean-first", "--", "--keep-going"]
    return subprocess.run(command).returncode


def cppcheck():
    """Cppcheck's errors and warnings."""
    return subprocess.run(
        ["cppcheck", ROOT / "csrc", "-I", ROOT / "csrc", "-I", ROOT, "--std=c11", "--quiet",
         "--enable=warning,portability,performance", "--inline-suppr", "--library=posix",
         "--library=python", "-D__x86_64__", "-D__linux__", '-DCLATTN_VERSION=""',
         "--suppress=invalidFunctionArg:*/platform.c",  # mmap of no file takes -1
         "--suppress=memleak:*/platform.c",  # reserved addresses are returned
         "--error-exitcode=1"]).returncode  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    analyzers = {"analyzer": analyze, "cppcheck": cppcheck}
    parser.add_argument("tool", choices=[*SANITIZERS, *analyzers])
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="for pytest")
    given = parser.parse_args()
    needed = "cppcheck" if given.tool == "cppcheck" else "gcc"
    if shutil.which(needed) is None:
        parser.error(f"{needed} is not installed")
    if given.tool in analyzers:
        sys.exit(analyzers[given.tool]())
    sys.exit(run_tests(given.tool, given.arguments))


if __name__ == "__main__":
    main()
