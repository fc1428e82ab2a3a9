# SPDX-License-Identifier: MIT
"""Experiments: attention of float32 by three products of halves, see experiments/halves.cl."""

import ctypes as c
from dataclasses import dataclass

import numpy as np

from gpu_check.experiment import Case, Experiment, shortest
from gpu_check.float32 import LIFT, allowed_error, scale_of
from gpu_check.opencl import Error

ROWS = 64  # of a group
THREADS = 128
SPLIT_THREADS = 256
SMALL = 2.0**-20  # half of the columns of values: they need the lift


def draw(case, seed=0):
    """Return query, key and value of a case as float32: (batch * heads, L or S, E)."""
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal(1 << 20, np.float32)
    heads = case.batch * case.heads
    shapes = [(heads, length, case.E) for length in (case.L, case.S, case.S)]
    starts = 0, 3 << 10, 5 << 10
    return [
        np.resize(np.roll(numbers, -at), np.prod(shape)).reshape(shape)
        for at, shape in zip(starts, shapes, strict=True)
    ]


@dataclass
class Halves:
    """The buffers of a case, and the launches that compute it."""

    context: object
    program: object
    case: Case
    arrays: list

    def __post_init__(self):
        self.output = self.context.buffer(b"\xff" * self.arrays[0].nbytes)  # NaN
        self.scales = [scale_of(x) for x in self.arrays]
        self.inputs = [self.context.buffer(x.tobytes()) for x in self.arrays]
        self.tiles = [
            self.context.buffer(bytes(len(x) * self.blocks(x) * ROWS * self.case.E * 4))
            for x in self.arrays
        ]

    @staticmethod
    def blocks(array):
        return -(-array.shape[1] // ROWS)

    def launches(self):
        """Return what `Context.run` takes: three that split, one that attends."""
        split, attend = (self.program.kernel(n) for n in ("split_halves", "attend_halves"))
        for n, (array, scale) in enumerate(zip(self.arrays, self.scales, strict=True)):
            heads, rows, E = array.shape
            items = heads * self.blocks(array) * ROWS * E // 8
            numbers = c.c_float(scale), c.c_float(LIFT if n == 2 else 1), c.c_int(rows)
            yield (split, items, SPLIT_THREADS, self.inputs[n], self.tiles[n], *numbers,
                   c.c_int(heads))  # fmt: skip
        case = self.case
        groups = case.batch * case.heads * -(-case.L // ROWS)
        of_query, of_key, of_value = self.scales
        factor = 1 / np.sqrt(case.E) / np.log(2) / of_query / of_key
        yield (attend, groups * THREADS, THREADS, *self.tiles, self.output, c.c_int(case.L),
               c.c_int(case.S), c.c_float(factor), c.c_float(1 / of_value),
               c.c_int(case.causal))  # fmt: skip

    def result(self):
        data = self.context.read(self.output, self.arrays[0].nbytes)
        return np.frombuffer(data, np.float32).reshape(self.arrays[0].shape)

    def release(self):
        self.context.release(self.output, *self.inputs, *self.tiles)


def compare(context, program, case):
    """Run a small case. Return the error's share of what is allowed; raise Error above that."""
    arrays = draw(case, seed=case.L)
    arrays[2][..., case.E // 2 :] *= np.float32(SMALL)
    halves = Halves(context, program, case, arrays)
    for launch in halves.launches():
        context.run(*launch)
    right, allowed = allowed_error(arrays, case.causal)
    got = halves.result()
    halves.release()
    shares = np.abs(got - right) / allowed
    wrong = ~(shares <= 1)
    if wrong.any():
        at = tuple(int(n) for n in np.argwhere(wrong)[0])
        raise Error(f"{case}: {int(wrong.sum())} of {wrong.size} numbers are wrong, the first at "
                    f"{at} is {got[at]}, not {right[at]:.8g} ± {allowed[at]:.1g}")  # fmt: skip
    return float(shares.max())


def values(head):
    """Return a function for `values`: small cases, whose rows and keys fill no block."""
    cases = [Case(1, 2, 65, 100, head), Case(1, 1, 100, 130, head, causal=True)]

    def check(context, program):
        shares = [compare(context, program, case) for case in cases]
        return f"{len(cases)} cases right, with {max(shares):.0%} of the allowed error"

    return check


def measure(case):
    """Return a function for `measure`: TFLOP/s of a case, with the launches that split."""

    def figure(context, program):
        halves = Halves(context, program, case, draw(case))
        seconds = sum(shortest(context, launch, 0.3) for launch in halves.launches())
        halves.release()
        return case.operations / seconds / 1e12

    return figure


def experiment(case, predicted, fma, efficient):
    name = f"float32 by halves, E = {case.E}" + (", causal" if case.causal else "")
    return Experiment(
        name, f"three products of halves in place of fma: {case}", predicted, "TFLOP/s",
        "halves.cl", (f"HEAD={case.E}",), values(case.E), measure(case),
        lambda context: f"fma: {fma:g} TFLOP/s on an H200, torch's efficient: {efficient:g}",
    )  # fmt: skip


EXPERIMENTS = [
    experiment(Case(1, 16, 4096, 4096, 128), 205, 25, 45),
    experiment(Case(2, 16, 4096, 4096, 64), 165, 29, 34.5),
]
