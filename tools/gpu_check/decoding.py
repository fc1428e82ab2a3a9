# SPDX-License-Identifier: MIT
"""Experiments: decoding in one launch, in which the last work-group of a row merges its splits."""

import ctypes as c
import time

import numpy as np

from gpu_check.experiment import HALF_ERROR, Case, Experiment, draw, exact
from gpu_check.opencl import Error

THREADS, PARTIAL = 128, 132
SMALL = [(3, 40, 5), (2, 300, 9), (1, 20, 1)]  # rows, keys, splits
ROWS, KEYS, SPLITS = 32, 4096, 33  # 64 MiB of keys and values; four groups for each unit of an H200
CALLS = 200


class Calls:
    """Calls of one size: their memory, and the launches of each."""

    def __init__(self, context, program, rows, keys, splits, *, merges):
        self.context, self.case = context, Case(1, rows, 1, keys, 128)
        self.arrays = draw(self.case, seed=keys)
        self.size = self.arrays[0].nbytes
        self.output = context.buffer(b"\xff" * self.size)  # NaN
        partial = context.buffer(4 * rows * splits * PARTIAL)
        self.memory = [context.buffer(x.tobytes()) for x in self.arrays]
        self.memory += [self.output, partial, context.buffer(bytes(4 * rows))]
        scale = c.c_float(1 / np.sqrt(128) / np.log(2))
        numbers = c.c_int(keys), c.c_int(splits), scale
        self.launches = [(program.kernel("attend"), rows * splits * THREADS, THREADS,
                          *self.memory, *numbers)]  # fmt: skip
        if not merges:
            self.launches.append((program.kernel("merge_splits"), rows * THREADS, THREADS,
                                  self.output, partial, c.c_int(splits)))  # fmt: skip

    def compare(self):
        """Compare two calls with NumPy: the first one has to leave the counters at 0."""
        for call in "the first call", "the second call":
            self.context.write(self.output, b"\xff" * self.size)
            for launch in self.launches:
                self.context.run(*launch)
            got = np.frombuffer(self.context.read(self.output, self.size), np.float16)
            wanted = exact(self.case, self.arrays)
            allowed = HALF_ERROR * np.abs(self.arrays[2].astype(np.float64)).max()
            wrong = ~(np.abs(got.reshape(wanted.shape) - wanted) <= allowed)
            if wrong.any():
                raise Error(f"{self.case}: {call}: {int(wrong.sum())} of {wrong.size} numbers are "
                            "wrong")  # fmt: skip

    def microseconds(self, queue):
        """Return the time of a call, of many that nobody waits for."""
        best = np.inf
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(CALLS):
                for launch in self.launches:
                    self.context.launch(*launch[:3], queue=queue)
            self.context.finish(queue)
            best = min(best, time.perf_counter() - start)
        return best / CALLS * 1e6


def values(merges):
    def check(context, program):
        for sizes in SMALL:
            Calls(context, program, *sizes, merges=merges).compare()
        return f"{len(SMALL)} cases right, twice"

    return check


def measure(merges):
    def figure(context, program):
        calls = Calls(context, program, ROWS, KEYS, SPLITS, merges=merges)
        for launch in calls.launches:
            context.run(*launch)  # sets the arguments
        microseconds = calls.microseconds(context.make_queue())
        context.release(*calls.memory)
        return microseconds

    return figure


EXPERIMENTS = [
    Experiment(
        "splits merged by a second launch", "64 MiB at 3.5 TB/s, and two launches",
        25, "us", "merging.cl", ("MERGES=0",), values(False), measure(False),
    ),
    Experiment(
        "splits merged by the last group", "the same without the second launch",
        22, "us", "merging.cl", ("MERGES=1",), values(True), measure(True),
    ),
]  # fmt: skip
