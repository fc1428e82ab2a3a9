# SPDX-License-Identifier: MIT
"""Attention beside its two matrix products alone, by torch and NumPy, in one run.

python benchmarks/compare_products.py [--device WORDS] [--rounds N]

The products are query times key and weights times value. The libraries compute no scale and no
softmax, read contiguous arrays, and write to arrays that exist. A share is the rate of a product's
multiply-adds divided by the device's rate, which `clattn bench` measures too. The last row is one
product of two square matrices, the case that such libraries are best at.
"""

import argparse
import functools
import time

import clattn
import numpy as np
import torch
from clattn._commands.bench.contest import clattn_call
from clattn._commands.bench.limits import Limits
from clattn._commands.bench.rows import MODEL_ROWS, Row, draw
from clattn._commands.timing import THREADS, take_turns

SQUARE = 4096


def find_rows():
    """Rows of the bench without masks, grouped heads and half types, but of many queries."""
    return [
        row for row in MODEL_ROWS
        if not (row.mask or row.is_causal or row.is_grouped)
        and row.dtype == "float32" and row.limit == "fma" and row.door != "directml"
    ]  # fmt: skip


def products(library, row):
    """Return a function with which "torch" or "NumPy" computes both products."""
    B, H, _, L, S, E = row.shape
    shapes = ((B * H, L, E), (B * H, E, S), (B * H, S, E), (B * H, L, S), (B * H, L, E))
    query, key, value, weights, result = (np.ones(shape, np.float32) for shape in shapes)
    if library == "NumPy":
        multiply = np.matmul
    else:
        multiply = torch.bmm
        query, key, value, weights, result = map(
            torch.from_numpy, (query, key, value, weights, result)
        )

    def run():
        multiply(query, key, out=weights)
        multiply(weights, value, out=result)

    return run


def square(library):
    """Return a function that multiplies two square matrices."""
    arrays = [np.ones((SQUARE, SQUARE), np.float32) for _ in range(3)]
    if library == "NumPy":
        return functools.partial(np.matmul, *arrays[:2], out=arrays[2])
    left, right, result = map(torch.from_numpy, arrays)
    return functools.partial(torch.mm, left, right, out=result)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", metavar="WORDS")
    parser.add_argument("--rounds", type=int, default=8)
    given = parser.parse_args()
    device = clattn._core.find_device(given.device)
    torch.set_num_threads(THREADS)
    limits = Limits(device)
    measured = []
    for row in [*find_rows(), None]:
        calls = {library: square(library) if row is None else products(library, row)
                 for library in ("torch", "NumPy")}  # fmt: skip
        if row is not None:
            calls["clattn"] = clattn_call(draw(row), device).run
        best = dict.fromkeys(calls, float("inf"))
        for _ in range(given.rounds):
            limits.measure(Row("", (1, 1, 1, 1, 1, 64)))
            for library, run in calls.items():
                time.sleep(0.2)  # until the threads of the library before have stopped spinning
                take_turns({library: run}, best)
        measured.append((row, best))
    rate = limits.fma["float32"]
    print(f"{device.name} ({device.platform}): {rate / 1e9:.0f} GFLOP/s; ms, and share of that")
    for row, best in measured:
        flop = 2 * SQUARE**3 if row is None else row.flop
        name = f"{SQUARE} x {SQUARE}" if row is None else row.name
        cells = [f"{library} {1e3 * seconds:8.2f} ({flop / seconds / rate:4.0%})"
                 for library, seconds in best.items()]  # fmt: skip
        print(f"{name:<16} " + "   ".join(cells))


if __name__ == "__main__":
    main()
