# SPDX-License-Identifier: MIT
"""Compiles clattn's C for Windows and macOS, on Linux, and links that for Windows.

    python tools/check_platforms.py [FOLDER]

All rooms but csrc/python, and the kernels, compile into FOLDER (build/platforms) without a warning.
For Windows they become a library without an undefined symbol; zig's linker for macOS crashes on
them. csrc/python needs the headers of those systems' Python. Nothing is run. It takes
x86_64-w64-mingw32-gcc (apt-get install gcc-mingw-w64-x86-64) for Windows, and ziglang (pip install
ziglang) for Windows and macOS; the exit status is 2 where neither is there.
"""

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from shutil import which

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ["-std=c11", "-O1", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wshadow", "-Wconversion",
         "-Wstrict-prototypes", "-Werror", "-I", ROOT / "csrc", "-I", ROOT,
         "-isystem", ROOT / "third_party/opencl-headers"]  # fmt: skip
ZIG = [sys.executable, "-m", "ziglang", "cc", "-target"]


def compilers():
    """[(name, command, the flags of linking)]"""
    found = []
    for mingw in ("x86_64-w64-mingw32-gcc", "x86_64-w64-mingw32-gcc-win32"):
        if which(mingw):
            # Its <math.h> converts double to float.
            command = [mingw, *FLAGS, "-D__USE_MINGW_ANSI_STDIO=1", "-Wno-float-conversion"]
            found.append(("windows-x86_64-gcc", command, ["-shared", "-Wl,--no-undefined"]))
            break
    if find_spec("ziglang"):
        found += [
            (f"{system}-{processor}-clang", [*ZIG, f"{processor}-{target}", *FLAGS], linking)
            for system, target, linking in (
                ("windows", "windows-gnu", ["-shared"]),
                ("macos", "macos", None),
            )
            for processor in ("x86_64", "aarch64")
        ]
    return found


def sources(name):
    platform = "windows" if name.startswith("windows") else "posix"
    other = {"windows": "platform.c", "posix": "platform_windows.c"}[platform]
    rooms = [path for path in (ROOT / "csrc").iterdir() if path.name != "python"]
    return sorted(c for room in rooms for c in room.glob("*.c") if c.name != other)


def check_platform(folder, name, command, linking):
    """Compile the C, link it, and return what the compiler says."""
    embedded = folder / "embedded_kernels.c"
    objects = folder / name
    objects.mkdir(exist_ok=True)
    files = [*sources(name), embedded]

    def compile_one(file):
        output = objects / f"{file.parent.name}_{file.stem}.o"
        return run([*command, "-c", file, "-o", output]), output

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(compile_one, files))
    said = "".join(text for text, _ in results)
    if not said and linking is not None:
        library = folder / f"{name}.dll"
        said = run([*command, *linking, "-o", library, *(out for _, out in results)])
    done = "no warning" if linking is None else "no warning, linked"
    print(f"{name}: {len(files)} files, {'failed' if said else done}", flush=True)
    return said


def run(command):
    """What a compiler says: nothing, if all is well."""
    done = subprocess.run(command, capture_output=True, text=True)
    said = done.stdout + done.stderr
    return said or (f"exit status {done.returncode}: {command}\n" if done.returncode else "")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("build/platforms"))
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    embed = [sys.executable, ROOT / "cmake/embed_kernels.py", ROOT, folder / "embedded_kernels.c"]
    subprocess.run(embed, check=True)
    checked = [check_platform(folder, *compiler) for compiler in compilers()]
    if not checked:
        print("neither x86_64-w64-mingw32-gcc nor ziglang is installed", file=sys.stderr)
        return 2
    sys.stderr.write("".join(checked))
    return 1 if any(checked) else 0


if __name__ == "__main__":
    sys.exit(main())
