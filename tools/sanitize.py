# SPDX-License-Identifier: MIT
"""Runs tests with a sanitizer in the extension, or an analyzer over its C.

    python tools/sanitize.py address [pytest's arguments]    # AddressSanitizer and UBSan
    python tools/sanitize.py leaks [pytest's arguments]      # LeakSanitizer, blocks of C
    python tools/sanitize.py objects [pytest's arguments]    # LeakSanitizer, objects too; slow
    python tools/sanitize.py thread [pytest's arguments]     # ThreadSanitizer
    python tools/sanitize.py valgrind [pytest's arguments]   # memcheck, on PoCL
    python tools/sanitize.py guards [pytest's arguments]     # guard zones around memory
    python tools/sanitize.py analyzer | cppcheck | tidy

Every word needs gcc; valgrind, cppcheck and tidy (clang-tidy, of the extra `dev`) also need the
program of that name. The last three words look at the text of files: `analyzer` and `tidy` at the C
of clattn, `cppcheck` also at that of tests and tools, and at OpenCL C. The other words build clattn
into build/sanitize/<word>. Without arguments for pytest, they run some of the tests; `guards` runs
all of them. The exit status is not 0 after a finding or a failed test.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy
from machine_code.table import MACROS

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "sanitize"

WRONG = [
    "tests/attention/test_attention_errors.py", "tests/diagonal/test_diagonal_errors.py",
    "tests/doors/test_onnx_errors.py", "tests/doors/test_directml_errors.py",
    "tests/doors/test_openvino_errors.py", "tests/python/test_kv_cache_errors.py",
]  # fmt: skip
HOSTILE = [
    *WRONG, "tests/python/test_hostile_arrays.py", "tests/python/test_fuzz.py",
    "tests/python/test_fuzz_wrong.py", "tests/python/test_dlpack.py",
    "tests/python/test_foreign_arrays.py",
    "tests/python/test_kv_cache_properties.py", "tests/python/test_tensor_views.py",
    "tests/attention/test_flex_blocks.py", "tests/attention/test_attention_extremes.py",
    "tests/diagonal/test_diagonal_out.py",
]  # fmt: skip
THREADS = [
    "tests/python/test_hostile_arrays.py", "tests/opencl/test_devices.py",
    "tests/opencl/test_small_calls.py",
    "-k", "thread or at_once or hostile",
]  # fmt: skip
# With right calls too, whose memory has to come back.
LEAKS = [
    *HOSTILE, "tests/attention/test_attention.py", "tests/diagonal/test_diagonal.py",
    "tests/doors", "tests/opencl/test_devices.py", "tests/opencl/test_late_errors.py",
    "tests/python/test_kv_cache.py", "tests/python/test_tensor.py",
    "tests/python/test_tensor_chains.py", "tests/python/test_tensor_operators.py",
]  # fmt: skip

# Each operator once, with arrays and with Tensors, then wrong arguments.
EACH_OPERATOR = """
import clattn
from support.sweep import operations
device, = (device for device in clattn.devices() if device.platform.startswith("Portable"))
for title, run in operations(device).items():
    if "cpu, " not in title:  # which would build two more kernels, for a minute each
        print(title, flush=True)
        run()
"""
# Writes down that the tests have come to their end: a process that a sanitizer ends may have any
# exit status.
RUN_TESTS = """
import pathlib, sys, pytest
status = int(pytest.main(sys.argv[2:]))
pathlib.Path(sys.argv[1]).write_text("the end")
sys.exit(status)
"""

MALLOC = {"PYTHONMALLOC": "malloc"}  # Python's own allocator hides blocks
# AddressSanitizer gives threads no stack for signals. It ends the process if another library has
# replaced that stack.
ADDRESS = "allocator_may_return_null=1:use_sigaltstack=0:log_path={reports}/report"
# OpenVINO's threads (TBB) load a library with RTLD_DEEPBIND, for which sanitizers end the process,
# unless this is set.
OPENVINO = {"TBB_ENABLE_SANITIZERS": "1"}
REPORTS = {"LSAN_OPTIONS": "exitcode=0"}  # drivers leak too: the reports decide, not the exit


class Tool(NamedTuple):
    """How a word builds and runs. `{reports}` in a text is the folder of its reports."""

    tests: list  # those that run by themselves; none: the whole suite
    flags: str = ""
    options: str = ""  # of CMake
    # Of gcc, to preload. AddressSanitizer looks for the C++ library's throw at the start, and ends
    # the process at the first throw if the library was loaded later.
    libraries: tuple = ()
    env: Mapping = MappingProxyType({})
    runner: tuple = ()  # in front of the interpreter
    code: str = RUN_TESTS
    leaves_out: str = ""  # reports with such a frame, if no frame of clattn is above it


# Libraries that allocate for themselves: drivers, their compilers, NumPy.
OTHERS = r"libOpenCL|intel|libocl|libpocl|pocl/lib|libLLVM|libclang|libtbb|libhwloc|numpy|ml_dtypes"
# A frame of clattn: a source file, the extension without symbols, a kernel of PoCL.
OURS = r"/csrc/\w+/\w+\.c|/clattn/_core\.|/valgrind-kernels/"

TOOLS = {
    "address": Tool(
        HOSTILE,
        "-fsanitize=address,undefined -fno-sanitize-recover=undefined",
        libraries=("libasan.so", "libubsan.so", "libstdc++.so"),
        env={"ASAN_OPTIONS": f"detect_leaks=0:{ADDRESS}", **MALLOC, **OPENVINO,
             "UBSAN_OPTIONS": "print_stacktrace=1:log_path={reports}/report"},
    ),
    # Who called malloc is in every stack, and so clattn for each block of its C. But the stack ends
    # where the interpreter, which keeps no frame pointers, has allocated an object for clattn.
    "leaks": Tool(
        LEAKS,
        "-fsanitize=address",
        libraries=("libasan.so", "libstdc++.so"),
        env={"ASAN_OPTIONS": f"detect_leaks=1:{ADDRESS}", **MALLOC, **OPENVINO, **REPORTS},
        leaves_out=OTHERS,
    ),
    # Stacks come from the tables for exceptions, for which `leaks` would run seven times as long.
    "objects": Tool(
        WRONG,
        "-fsanitize=address",
        libraries=("libasan.so", "libstdc++.so"),
        env={"ASAN_OPTIONS": f"detect_leaks=1:fast_unwind_on_malloc=0:malloc_context_size=12:"
                             f"{ADDRESS}", **MALLOC, **OPENVINO, **REPORTS},
        leaves_out=OTHERS,
    ),
    "thread": Tool(
        THREADS,
        "-fsanitize=thread",
        libraries=("libtsan.so",),
        env={"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:report_signal_unsafe=0:"
                             "allocator_may_return_null=1", **OPENVINO},
    ),
    "valgrind": Tool(
        [*WRONG, "-k", "not before_opencl"],  # valgrind lacks the call that waits for children
        "-O1",
        env={"POCL_CACHE_DIR": f"{BUILD}/valgrind-kernels", "POCL_MAX_PTHREAD_COUNT": "1",
             "CLATTN_TEST_DEVICES": "portable", **MALLOC},
        runner=("valgrind", "--quiet", "--num-callers=40", "--fullpath-after=",
                "--log-file={reports}/report.%p"),
        code=EACH_OPERATOR + RUN_TESTS,
        leaves_out=OTHERS,
    ),
    # Every operand has a storage there, and so zones.
    "guards": Tool([], options="CLATTN_GUARDS=ON", env={"CLATTN_MEMORY": "copy",
                                                        "CLATTN_KERNEL": ""}),
}  # fmt: skip


SLOW = ("objects", "valgrind")  # a test may take longer than it may elsewhere
SEPARATE_FILES = "CMAKE_INTERPROCEDURAL_OPTIMIZATION=OFF"


def build(name, flags, options=""):
    """Installs clattn with flags of the compiler and options of CMake, and returns where.

    The compiler sees each file by itself. gcc's analyzer takes three minutes for the whole program.
    """
    target = BUILD / name
    env = os.environ | {
        "CFLAGS": f"{flags} -g -fno-omit-frame-pointer",
        "SKBUILD_BUILD_DIR": str(BUILD / f"{name}-objects"),
        "SKBUILD_CMAKE_BUILD_TYPE": "RelWithDebInfo",
        "SKBUILD_CMAKE_DEFINE": ";".join(filter(None, (options, SEPARATE_FILES))),
    }
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade",
               "--target", target, ROOT]  # fmt: skip
    subprocess.run(command, env=env, check=True)
    return target


def library(name):
    """The path of one of gcc's libraries."""
    command = ["gcc", f"-print-file-name={name}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def is_finding(report, leaves_out):
    """Whether a paragraph of a report tells of a fault of clattn.

    An access or a leak is clattn's if a frame of its stack is, and the frames above it, which
    clattn has called, are not of a library that is left out. So what the interpreter and drivers do
    by themselves does not count.
    """
    if not leaves_out or "ERROR: AddressSanitizer" in report:
        return re.search("ERROR: AddressSanitizer|runtime error", report) is not None
    stack = re.split(r"\n *(?:Address 0x|Uninitialised value was created)", report)[0]
    for frame in re.findall(r"^ *(?:#\d+|at|by) .*", stack, re.MULTILINE):
        if re.search(OURS, frame):
            return True
        if re.search(leaves_out, frame):
            return False
    return False


def findings(folder, leaves_out):
    """The paragraphs of all reports that are findings, once each."""
    found = {}
    for file in sorted(folder.iterdir()):
        text = re.sub(r"^==\d+== ?", "", file.read_text(errors="replace"), flags=re.MULTILINE)
        for report in re.split(r"\n\s*\n", text):
            if is_finding(report, leaves_out):
                found.setdefault(re.sub("0x[0-9A-Fa-f]+", "0x", report), f"{file.name}: {report}")
    return list(found.values())


def run_tests(name, arguments):
    """The exit status of pytest under the tool, with the reference kernel; 1 after a finding."""
    tool = TOOLS[name]
    target = build(name, tool.flags, tool.options)
    reports = BUILD / f"{name}-reports"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir()
    end = BUILD / f"{name}-end"
    end.unlink(missing_ok=True)
    paths = os.pathsep.join([str(target), str(ROOT / "tests")])
    env = os.environ | {"CLATTN_KERNEL": "reference", "PYTHONPATH": paths}
    env |= {key: value.format(reports=reports) for key, value in tool.env.items()}
    env["LD_PRELOAD"] = " ".join(map(library, tool.libraries))
    slow = name in SLOW or "CLATTN_FUZZ" in os.environ
    runner = [word.format(reports=reports) for word in tool.runner]
    command = [*runner, sys.executable, "-c", tool.code, end, "-q", "-p", "no:cacheprovider",
               *(["-o", "faulthandler_timeout=0"] if slow else []),
               *(arguments or tool.tests)]  # fmt: skip
    status = subprocess.run(command, env=env, cwd=ROOT).returncode
    found = findings(reports, tool.leaves_out)
    print(*found, f"{name}: {len(found)} findings", sep="\n\n")
    if not end.exists():
        print(f"{name}: the process ended before the tests, with status {status}; see {reports}")
    return status or bool(found) or not end.exists()


def analyze():
    """gcc's analyzer over each file: its warnings are the findings.

    Three kinds are left out. The analyzer does not see that ca_error_set returns the status it is
    given, so that CA_TRY leaves the function; and it does not follow counters that are atomic.
    """
    flags = "-fanalyzer -Wno-analyzer-null-dereference -Wno-analyzer-null-argument"
    flags += " -Wno-analyzer-double-free"
    try:
        build("analyzer", flags, "CLATTN_WERROR=ON")
    except subprocess.CalledProcessError as failure:
        return failure.returncode  # pip has shown the warnings
    print("analyzer: 0 findings")
    return 0


def tidy():
    """The checks of .clang-tidy, over each file by itself."""
    files = [file for file in sorted(ROOT.glob("csrc/**/*.c")) if "windows" not in file.name]
    found = program("clang-tidy")
    flags = [
        "-std=c11", "-Wall", "-Wextra", "-DCLATTN_ANALYZER", '-DCLATTN_VERSION=""',
        "-I", ROOT / "csrc", "-I", ROOT, "-isystem", ROOT / "third_party/opencl-headers",
        "-isystem", sysconfig.get_path("include"), "-isystem", numpy.get_include(),
    ]  # fmt: skip

    def check(file):
        command = [found, "--quiet", file, "--", *flags]
        done = subprocess.run(command, capture_output=True, text=True)
        print(done.stdout, end="", flush=True)
        return done.returncode

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return any(list(threads.map(check, files)))


def program(name):
    """The path of a program beside this Python, or else on PATH. None if there is none."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return shutil.which(name, path=path)


COMMON = ["--quiet", "--std=c11", "--enable=warning,portability,performance", "--inline-suppr",
          "--error-exitcode=1", "-I", ROOT]  # fmt: skip
OF_C = [
    "-I", ROOT / "csrc", "-I", ROOT / "third_party/opencl-headers", "--library=posix",
    "--library=python", "-D__x86_64__", "-D__linux__", '-DCLATTN_VERSION=""',
    "--suppress=*:*/third_party/*",
    "--suppress=readdirCalled",  # a folder that no other thread has
    "--suppress=invalidFunctionArg:*/platform.c",  # mmap of no file takes -1
    "--suppress=memleak:*/platform.c",  # reserved addresses are returned
]  # fmt: skip
# cppcheck knows no vectors, and no types of a kernel's parameters.
OF_KERNELS = [
    "--language=c", "-D__OPENCL_VERSION__=120", "-D__constant=const",
    *(f"-D{word}=" for word in ("__kernel", "kernel", "__global", "__local", "__private")),
    *(f"--suppress={kind}" for kind in ("uninitvar", "legacyUninitvar", "ctuuninitvar",
      "selfAssignment", "nullPointerRedundantCheck", "shiftTooManyBitsSigned")),
]  # fmt: skip


def cppcheck():
    """Cppcheck's errors and warnings: all C at once, then each program with a plan's macros."""
    c = [ROOT / "csrc", *sorted(ROOT.glob("tests/**/*.c")), *sorted(ROOT.glob("tools/**/*.c"))]
    runs = [[*OF_C, *c]]
    for kernel in sorted([*ROOT.glob("kernels/**/*.cl"), *ROOT.glob("tools/**/*.cl")]):
        name = kernel.relative_to(ROOT).as_posix().removeprefix("kernels/")
        runs.append([*OF_KERNELS, *(f"-D{word}" for word in MACROS.get(name, "").split()), kernel])
    return any([subprocess.run(["cppcheck", *COMMON, *run]).returncode for run in runs])


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    analyzers = {"analyzer": analyze, "cppcheck": cppcheck, "tidy": tidy}
    parser.add_argument("tool", choices=[*TOOLS, *analyzers])
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="for pytest")
    given = parser.parse_args()
    needed = {"cppcheck": "cppcheck", "tidy": "clang-tidy", "valgrind": "valgrind"}
    needed = needed.get(given.tool, "gcc")
    if program(needed) is None:
        parser.error(f"{needed} is not installed")
    if given.tool in analyzers:
        sys.exit(analyzers[given.tool]())
    sys.exit(run_tests(given.tool, given.arguments))


if __name__ == "__main__":
    main()
