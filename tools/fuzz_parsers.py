# SPDX-License-Identifier: MIT
"""Fuzzes what reads other people's bytes, guided by coverage, with AddressSanitizer and UBSan.

    python tools/fuzz_parsers.py TARGET [--seconds 60] [--seed N]

The target `files` fuzzes C (tools/fuzz/files.c, libFuzzer): files of the kernel cache, words for
devices, and limits. The other targets fuzz Python calls (tools/fuzz/inputs.py, atheris):
`arguments` of every operator, `cache` the methods of KVCache, `pages` those of PagedKVCache,
`capsules` those of DLPack, `words` for devices and in variables, and `winners` the tuner's files.

The target `files` needs clang with libFuzzer. The others need atheris and pytest too.
The tool builds into build/fuzz, and keeps there the inputs that reach new code. A finding ends the
run. The last lines name the file with the input, and `--input FILE` runs that input alone.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "fuzz"
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined"
SOURCES = ("opencl/cache.c", "opencl/words.c", "opencl/forced.c", "base/platform.c",
           "base/strbuf.c", "base/status.c")  # fmt: skip
TARGETS = ("files", "arguments", "cache", "pages", "capsules", "words", "winners")


def find_compiler():
    """Clang's path."""
    names = ("clang", *(f"clang-{n}" for n in range(21, 13, -1)))
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise SystemExit("clang is not installed")
    return found


def build_files(compiler):
    """The command of the target in C."""
    program = BUILD / "files"
    BUILD.mkdir(parents=True, exist_ok=True)
    flags = f"{SANITIZERS} -fsanitize=fuzzer -g -O1 -std=c11 -D_GNU_SOURCE".split()
    sources = [ROOT / "tools" / "fuzz" / "files.c", *(ROOT / "csrc" / name for name in SOURCES)]
    subprocess.run([compiler, *flags, "-DCL_TARGET_OPENCL_VERSION=300", "-I", ROOT / "csrc",
                    "-o", program, *sources], check=True)  # fmt: skip
    folder = BUILD / "folder"
    folder.mkdir(exist_ok=True)
    return [program], {"FUZZ_FOLDER": str(folder)}


def build_extension(compiler, target):
    """The command of a target in Python, and its environment."""
    import atheris

    place = BUILD / "package"
    env = os.environ | {
        "CC": compiler,
        "CFLAGS": f"{SANITIZERS} -fsanitize=fuzzer-no-link -g -fno-omit-frame-pointer",
        "SKBUILD_BUILD_DIR": str(BUILD / "objects"),
        "SKBUILD_CMAKE_BUILD_TYPE": "RelWithDebInfo",
    }
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade",
               "--target", place, ROOT]  # fmt: skip
    subprocess.run(command, env=env, check=True)
    changes = {
        "LD_PRELOAD": str(Path(atheris.path()) / "asan_with_fuzzer.so"),
        "PYTHONPATH": os.pathsep.join([str(place), str(ROOT / "tests")]),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:handle_segv=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "CLATTN_TUNING": "off",
    }
    return [sys.executable, ROOT / "tools" / "fuzz" / "inputs.py", target], changes


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="0: another one in each run")
    parser.add_argument("--input", help="a file that a run has named: only this one is tried")
    given = parser.parse_args()
    compiler = find_compiler()
    command, changes = (
        build_files(compiler)
        if given.target == "files"
        else build_extension(compiler, given.target)
    )
    inputs = BUILD / "inputs" / given.target
    inputs.mkdir(parents=True, exist_ok=True)
    options = [f"-max_total_time={given.seconds}", f"-seed={given.seed}", "-max_len=2048",
               "-print_final_stats=1", "-rss_limit_mb=8192", f"-artifact_prefix={BUILD}/",
               "-timeout=60", inputs]  # fmt: skip
    if given.input:
        options = [given.input]
    return subprocess.run([*command, *options], env=os.environ | changes, cwd=BUILD).returncode


if __name__ == "__main__":
    sys.exit(main())
