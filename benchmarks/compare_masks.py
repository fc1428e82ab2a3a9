# SPDX-License-Identifier: MIT
"""Times calls with masks, empty rows or grouped heads beside a call without, in one run.

python benchmarks/compare_masks.py [--device WORDS] [--rounds N] [--memory]

`--memory` measures how much memory a call of 32768 rows takes at most, in each layout of models.
"""

import argparse
import functools
import subprocess
import sys

import clattn
import numpy as np
from clattn._commands.timing import measure_memory, take_turns

HEADS, LENGTH, HEAD_SIZE = 8, 2048, 64
CACHE = (1, 8, 4096, 128)  # of 32 query heads
LONG = 32768
PLAIN = "no mask"

rng = np.random.default_rng(0)


def draw(*shape):
    return rng.standard_normal(shape, np.float32)


def make_masks():
    """Each mask by its name, with the share of the work of a call without a mask."""
    seen = np.ones((LENGTH, LENGTH), bool)
    padding = seen[0].copy()
    padding[-LENGTH // 8 :] = False
    second, half = seen.copy(), seen.copy()
    second[1::2] = False
    half[LENGTH // 2 :] = False
    return {
        "all True": (seen, 1),
        "all True, for keys": (seen[0], 1),
        "all True, for rows": (seen[:, :1], 1),
        "an eighth of the keys is padding": (padding, 1),
        "every second row is empty": (second, 1),
        "half of the rows are empty, together": (half, 0.5),
    }


def make_calls(device):
    """Each call by its name, with its share of the work of the call without a mask."""
    attend = functools.partial(clattn.scaled_dot_product_attention, device=device)
    arrays = [draw(1, HEADS, LENGTH, HEAD_SIZE) for _ in range(3)]
    calls = {PLAIN: (functools.partial(attend, *arrays), 1)}
    for name, (mask, share) in make_masks().items():
        calls[name] = functools.partial(attend, *arrays, mask), share
    key, value = draw(*CACHE), draw(*CACHE)
    for rows in (16, 32, 64):
        query = draw(1, 32, rows, CACHE[3])
        work = query.size * CACHE[2] / (HEADS * LENGTH * LENGTH * HEAD_SIZE)
        group = functools.partial(attend, query, key, value, enable_gqa=True)
        calls[f"{rows} rows, four heads to a key"] = group, work
    return calls


def compare_times(device, rounds):
    calls = make_calls(device)
    runs = {name: run for name, (run, _) in calls.items()}
    best = dict.fromkeys(runs, float("inf"))
    for run in runs.values():
        run()
    for _ in range(rounds):
        take_turns(runs, best)
    print(f"\n{device.platform}: {device.name}\n{'':38}      ms   beside no mask, for equal work")
    for name, (_, work) in calls.items():
        ratio = best[name] / (work * best[PLAIN])
        print(f"{name:<38} {1e3 * best[name]:7.2f}   {ratio:.2f}", flush=True)


def in_layout(layout):
    """Query, key and value of shape (1, 8, 32768, 64) in a layout."""
    shape = (1, LONG, HEADS, HEAD_SIZE)
    if layout == "packed":
        return list(draw(1, LONG, 3, HEADS, HEAD_SIZE).transpose(2, 0, 3, 1, 4))
    if layout == "projections":
        return [draw(*shape).swapaxes(1, 2) for _ in range(3)]
    return [draw(1, HEADS, LONG, HEAD_SIZE) for _ in range(3)]


def print_memory(words, layout):
    """Print the memory of one call in this process, whose first call opens the device."""
    with clattn.use_device(words):
        query, key, value = in_layout(layout)
        clattn.scaled_dot_product_attention(query[:, :, :512], key, value)
        _, memory = measure_memory(
            lambda: clattn.scaled_dot_product_attention(query, key, value, is_causal=True)
        )
    result = query.size * query.itemsize
    print(f"{words:<10} {layout:<12} {(memory - result) / 2**20:6.1f} MiB beyond the result, "
          f"{memory / 2**20:6.1f} MiB with it")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", metavar="WORDS", help="default: all devices")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--layout", help=argparse.SUPPRESS)  # of a process that --memory starts
    given = parser.parse_args()
    if given.layout:
        print_memory(given.device, given.layout)
        return
    devices = [clattn._core.find_device(given.device)] if given.device else clattn.devices()
    for device in devices:
        if not given.memory:
            compare_times(device, given.rounds)
            continue
        for layout in ("heads", "projections", "packed"):
            words = device.platform.split("(")[0].split()[0]
            command = [sys.executable, __file__, "--device", words, "--layout", layout]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
