# SPDX-License-Identifier: MIT
"""Experiments: rates of instructions, to which others are compared on the same day."""

import ctypes as c

import numpy as np

from gpu_check.experiment import Experiment, shortest
from gpu_check.opencl import Error

THREADS = 128
COLUMNS = 128
WORK = 2.0 * 64 * COLUMNS * 64  # operations of a group of warps in one turn
TURNS = 4096


def check_products(context, program):
    rng = np.random.default_rng(0)
    a = rng.integers(-8, 9, (64, 64)).astype(np.float16)
    b = rng.integers(-8, 9, (COLUMNS, 64)).astype(np.float16)
    output = context.buffer(4 * 64 * COLUMNS)
    given = [context.buffer(x.tobytes()) for x in (a, b)]
    context.run(program.kernel("products"), THREADS, THREADS, *given, output, c.c_int(1))
    got = np.frombuffer(context.read(output, 4 * 64 * COLUMNS), np.float32)
    wrong = got.reshape(64, COLUMNS) != a.astype(np.float64) @ b.astype(np.float64).T
    if wrong.any():
        raise Error(f"{int(wrong.sum())} of {wrong.size} sums are wrong")
    return "exact on whole numbers"


def measure_products(context, program):
    groups = context.facts["compute units"] * 4
    rng = np.random.default_rng(0)
    given = [
        context.buffer(rng.standard_normal((n, 64)).astype(np.float16).tobytes())
        for n in (64, COLUMNS)
    ]
    output = context.buffer(groups * 4 * 64 * COLUMNS)
    kernel = program.kernel("products")
    seconds = shortest(context, (kernel, groups * THREADS, THREADS, *given, output, c.c_int(TURNS)))
    return groups * TURNS * WORK / seconds / 1e12


EXPERIMENTS = [
    Experiment(
        "products of groups", "wgmma m64n128k16 of local memory, as the probe of 26 November",
        896, "TFLOP/s", "products.cl", (), check_products, measure_products,
    ),
]  # fmt: skip
