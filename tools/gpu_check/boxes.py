# SPDX-License-Identifier: MIT
"""Experiments: the unit that copies boxes of tensors, see experiments/tensor_copies.clh."""

import ctypes as c
from dataclasses import dataclass

import numpy as np

from gpu_check.experiment import Experiment, Launch, shortest
from gpu_check.opencl import Error

THREADS = 128
BOX = (1, 64, 64)
BOX_BYTES = 2 * 64 * 64
COUNT = 2048
SHAPE = (2, 100, 72)  # no multiple of a box
# Corners of boxes (x, y, z): inside; beyond the last columns and rows; before the first; outside.
CORNERS = [(0, 0, 0), (64, 70, 1), (8, 36, 1), (-8, -3, 0), (0, 0, 2)]


class OfTensors(Experiment):
    """An experiment whose PTX has fences of maps."""

    def finish(self, ptx):
        return super().finish(ptx).replace(".version 8.0", ".version 8.3")


@dataclass(frozen=True)
class MappedLaunch(Launch):
    """A launch whose last argument is maps of query, key and value. Boxes have 64 columns."""

    keys: int = 64  # rows of a box of keys or values

    def arguments(self, context, program, case, arrays, output):
        given = super().arguments(context, program, case, arrays, output)
        told = context.buffer(bytes(24))
        context.run(program.kernel("addresses_of"), self.threads, self.threads, *given[3:6], told)
        addresses = np.frombuffer(context.read(told, 24), np.uint64)
        maps = b"".join(
            context.tensor_map(int(at), x.shape, (1, rows, 64))[0]
            for at, x, rows in zip(
                addresses, arrays, (self.rows, self.keys, self.keys), strict=True
            )
        )
        return *given, context.buffer(maps)


def address_of(context, program, array):
    """Return the device's address of an array, as a kernel says it."""
    told = context.buffer(bytes(8))
    context.run(program.kernel("address_of"), 1, 1, array, told)
    return int.from_bytes(context.read(told, 8), "little")


def expected_box(array, corner):
    box = np.zeros(BOX, array.dtype)
    x, y, z = corner
    for n in np.ndindex(BOX):
        at = z + n[0], y + n[1], x + n[2]
        if all(0 <= i < size for i, size in zip(at, array.shape, strict=True)):
            box[n] = array[at]
    return box[0]


def check_boxes(context, program):
    array = np.arange(1, np.prod(SHAPE) + 1).astype(np.uint16).reshape(SHAPE)
    given = context.buffer(array.tobytes())
    data, needed = context.tensor_map(address_of(context, program, given), SHAPE, BOX)
    tensor, output = context.buffer(data), context.buffer(bytes(BOX_BYTES))
    for count, corner in enumerate(CORNERS, start=1):
        numbers = map(c.c_int, (*corner, count))
        kernel = program.kernel("copy_boxes")
        context.run(kernel, THREADS, THREADS, given, tensor, output, *numbers)
        got = np.frombuffer(context.read(output, BOX_BYTES), np.uint16).reshape(BOX[1:])
        wrong = got != expected_box(array, corner)
        if wrong.any():
            raise Error(
                f"the box at {corner}: {int(wrong.sum())} of {wrong.size} numbers are wrong"
            )
    needed = " and ".join(needed) or "nothing else"
    return f"{len(CORNERS)} boxes exact; for the map libcuda needed {needed}"


def measure_boxes(context, program):
    """Return the rate of copies from one array, which the second cache holds."""
    groups = context.facts["compute units"] * 4
    given = context.buffer(bytes(BOX_BYTES))
    shape = BOX
    data, _ = context.tensor_map(address_of(context, program, given), shape, BOX)
    tensor, output = context.buffer(data), context.buffer(groups * BOX_BYTES)
    numbers = map(c.c_int, (0, 0, 0, COUNT))
    launch = program.kernel("copy_boxes"), groups * THREADS, THREADS, given, tensor, output
    return groups * COUNT * BOX_BYTES / shortest(context, (*launch, *numbers)) / 1e9


EXPERIMENTS = [
    OfTensors(
        "boxes of tensors", "the host makes the map, one work-item copies as fast as all", 8000,
        "GB/s", "boxes.cl", (), check_boxes, measure_boxes,
        lambda context: "cp.async of f16-E128: 8,000 GB/s, beside products",
    ),
]  # fmt: skip
