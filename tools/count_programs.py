# SPDX-License-Identifier: MIT
"""Counts the programs that a sweep of attention calls builds, and times the first call.

python tools/count_programs.py [--device WORDS] [--beside SKETCH.cl] [--rounds N]

The sweep is 202 calls of 12 head sizes, 4 dtypes and 10 options, on many rows and on few, with an
empty cache of kernels. A first call is timed in a process of its own, on a device that is open:
its time is that of the build. `--beside` names another program, and its build and first launch on
the same device are timed in the same rounds, by pyopencl. Its kernel `fa` takes query, key, value
and output of float32, two lengths of 32, a scale and a flag. Each row has the shortest time of all
rounds, and two ratios: this time divided by the other program's shortest, and the median of the
ratios of each round.

The last line has the time from the first import, which is NumPy's, to a first result: with an empty
cache, and with a full one. A process loads every driver of the machine in this time. The variable
OCL_ICD_VENDORS can name a folder that lists fewer drivers.
"""

import argparse
import json
import operator
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["CLATTN_TUNING"] = "off"  # winners differ from class to class

import clattn
import ml_dtypes
import numpy as np

HEAD_SIZES = 16, 24, 32, 40, 48, 64, 72, 80, 96, 112, 128, 256
DTYPES = [np.dtype(name) for name in ("f4", "f8", "f2", ml_dtypes.bfloat16)]
OPTIONS = ("causal", "window", "bool mask", "float mask", "mask of one row", "softcap", "lse",
           "dropout", "groups", "past")  # fmt: skip
MANY, KEYS, FEW_KEYS = 256, 256, 1024


def numbers(*shape, dtype):
    return np.random.default_rng(0).standard_normal(shape, np.float32).astype(dtype)


def attend(device, dtype, E, rows=MANY, keys=KEYS, *, heads=(4, 4), option="", Ev=None):
    """One call of the sweep."""
    q = numbers(1, heads[0], rows, E, dtype=dtype)
    k = numbers(1, heads[1], keys, E, dtype=dtype)
    v = numbers(1, heads[1], keys, Ev or E, dtype=dtype)
    mask = numbers(rows, keys, dtype=dtype)
    if option == "past":
        half = keys // 2
        clattn.onnx.attention(q, k[:, :, half:], v[:, :, half:], past_key=k[:, :, :half],
                              past_value=v[:, :, :half], device=device)  # fmt: skip
        return
    given = {
        "": {},
        "causal": {"is_causal": True},
        "window": {"is_causal": True, "window": (64, 0)},
        "bool mask": {"attn_mask": mask > 0},
        "float mask": {"attn_mask": mask},
        "mask of one row": {"attn_mask": mask[:1] > 0},
        "softcap": {"softcap": 20.0},
        "lse": {"return_lse": True},
        "dropout": {"dropout_p": 0.1, "seed": 1},
        "groups": {},
    }[option]
    clattn.scaled_dot_product_attention(q, k, v, enable_gqa=True, device=device, **given)


def kinds():
    """The sweep: for each kind of call a list of arguments and options of `attend`."""
    few = {"rows": 1, "keys": FEW_KEYS}
    made = {"head sizes": [((dtype, E), {}) for dtype in DTYPES for E in HEAD_SIZES]}
    for option in OPTIONS:
        given = {"option": option, "heads": (4, 2) if option == "groups" else (4, 4)}
        made[option] = [((dtype, E), given) for dtype in DTYPES for E in (64, 80, 128)]
    for name, heads in ("few rows", (4, 4)), ("few rows of groups", (8, 2)):
        given = few | {"heads": heads}
        made[name] = [((dtype, E), given) for dtype in DTYPES for E in (64, 80, 128)]
    for option in "bool mask", "softcap":
        made[f"few rows, {option}"] = [((dtype, 64), few | {"option": option}) for dtype in DTYPES]
    made["few rows, wide values"] = [((dtype, 64), few | {"Ev": 128}) for dtype in DTYPES[:2]]
    return made


def count(words):
    """(calls, programs, seconds) of the sweep, in this process."""
    device = clattn._core.find_device(words)  # opens the device
    calls = [call for of_kind in kinds().values() for call in of_kind]
    before, start = clattn._core.built_programs()[0], time.perf_counter()
    for arguments, options in calls:
        attend(device, *arguments, **options)
    return len(calls), clattn._core.built_programs()[0] - before, time.perf_counter() - start


def first_call(words, arguments, options):
    """Seconds of a first call, in this process, less those of a second one."""
    device = clattn._core.find_device(words)  # opens the device
    times = []
    for _ in range(2):
        start = time.perf_counter()
        attend(device, *arguments, **options)
        times.append(time.perf_counter() - start)
    return times[0] - times[1]


def build_beside(words, path):
    """Seconds of building and launching another program, in this process."""
    import pyopencl as cl
    from clattn._commands.bench.limits import Kernels

    limits = Kernels(clattn._core.find_device(words))  # opens the device
    arrays = [cl.Buffer(limits._context, cl.mem_flags.READ_WRITE, 32 * 64 * 4) for _ in range(4)]
    start = time.perf_counter()
    program = cl.Program(limits._context, Path(path).read_text(encoding="utf-8"))
    kernel = cl.Kernel(program.build(["-cl-std=CL1.2"], cache_dir=False), "fa")
    kernel(
        limits._queue, (1,), (1,), *arrays, np.int32(32), np.int32(32), np.float32(1), np.int32(0)
    )
    limits._queue.finish()
    return time.perf_counter() - start


FIRST = {
    "many rows": ((DTYPES[0], 64), {}),
    "bool mask": ((DTYPES[0], 64), {"option": "bool mask"}),
    "float16": ((DTYPES[2], 64), {}),
    "one row": ((DTYPES[0], 64, 1, FEW_KEYS), {}),
    "one row of groups": ((DTYPES[0], 64, 1, FEW_KEYS), {"heads": (8, 2)}),
}


RESULT = """
import time; start = time.perf_counter()
import numpy as np, clattn
ones = np.ones((1, 2, 64, 64), np.float32)
clattn.scaled_dot_product_attention(ones, ones, ones)
print(time.perf_counter() - start)
"""


def import_to_result(words, rounds):
    """Seconds in which new processes import clattn and make a call. The first fills the cache."""
    with tempfile.TemporaryDirectory() as folder:
        env = dict(os.environ, XDG_CACHE_HOME=folder, POCL_CACHE_DIR=folder)
        env |= {"CLATTN_DEVICE": words} if words else {}
        command = [sys.executable, "-c", RESULT]
        return [
            float(subprocess.run(command, env=env, capture_output=True, check=True).stdout)
            for _ in range(rounds)
        ]


def in_new_process(*arguments):
    """What this tool prints in a process whose caches are empty."""
    with tempfile.TemporaryDirectory() as folder:
        env = dict(os.environ, XDG_CACHE_HOME=folder, POCL_CACHE_DIR=folder)
        command = [sys.executable, "-W", "ignore", __file__, *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", metavar="WORDS")
    parser.add_argument("--beside", metavar="SKETCH.cl")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only == "sweep":
        print(json.dumps(count(args.device)))
    elif args.only == "sketch":
        print(json.dumps(build_beside(args.device, args.beside)))
    elif args.only:
        print(json.dumps(first_call(args.device, *FIRST[args.only])))
    if args.only:
        return
    given = ["--device", args.device] if args.device else []
    rows = [*(["sketch"] if args.beside else []), *FIRST]
    times = {row: [] for row in rows}
    for _ in range(args.rounds):
        for row in rows:
            extra = ["--beside", args.beside] if row == "sketch" else []
            times[row].append(in_new_process(*given, *extra, "--only", row))
    for row, seconds in times.items():
        ratios = ""
        if args.beside:
            median = statistics.median(map(operator.truediv, seconds, times["sketch"]))
            ratios = f"{min(seconds) / min(times['sketch']):6.2f} {median:6.2f}"
        name = args.beside if row == "sketch" else f"first call, {row}"
        print(f"{name:40} {min(seconds):6.2f} s {ratios}")
    calls, programs, seconds = in_new_process(*given, "--only", "sweep")
    print(f"{calls} calls build {programs} programs in {seconds:.0f} s")
    empty, *full = import_to_result(args.device, 1 + 5 * args.rounds)
    print(f"import to result: {1e3 * empty:.0f} ms, with a full cache {1e3 * min(full):.0f} ms")


if __name__ == "__main__":
    main()
