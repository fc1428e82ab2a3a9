# SPDX-License-Identifier: MIT
"""Attention of one query row beside a kernel that only reads the keys and values, in one run.

python benchmarks/compare_reading.py [--device WORDS] [--rounds N]

The tool takes the rows of the bench whose limit is reading. Each row runs on views of projections,
then on contiguous copies. The kernel reads the same arrays in two orders. "By heads", a work-group
reads one head, or a part of it: 256 keys, then their values. "As rows lie", it reads whole rows of
memory, which have all heads. The host waits for each launch. The tool tries several numbers of
work-groups, and prints the shortest time of each order in milliseconds.
"""

import argparse

import clattn
import numpy as np
import pyopencl as cl
from clattn._commands.bench.contest import clattn_call
from clattn._commands.bench.limits import Kernels
from clattn._commands.bench.rows import MODEL_ROWS, contiguous, draw
from clattn._commands.timing import take_turns

VECTOR = 64  # bytes of a float16 vector; the kernel reads four of them at a time
PARTS = 1, 2, 4, 8  # work-groups that share a head
SOURCE = """
/* Adds up keys and values. Four sums take turns, so that no addition waits for the last one. */
__kernel __attribute__((reqd_work_group_size(1, 1, 1), vec_type_hint(float16))) void
read_keys(__global const float *key, __global const float *value, __global float *sums, int rows,
          int vectors, long row_stride, long head_stride, int parts)
{
    const long group = get_group_id(0);
    const long first = rows * (group % parts) / parts;
    const long end = rows * (group % parts + 1) / parts;
    float16 a = 0, b = 0, c = 0, d = 0;
    for (long j0 = first; j0 < end; j0 += 256) {
        for (int n = 0; n < 2; n++) {
            __global const float *row = n == 0 ? key : value;
            row += group / parts * head_stride + j0 * row_stride;
            for (long j = j0; j < min(j0 + 256, end); j++) {
                for (int e = 0; e < vectors; e += 4) {
                    a += vload16(e, row);
                    b += vload16(e + 1, row);
                    c += vload16(e + 2, row);
                    d += vload16(e + 3, row);
                }
                row += row_stride;
            }
        }
    }
    vstore16(a + b + c + d, group, sums);
}
"""


class Reader:
    """Launches the kernel on one device, for the keys and values of one batch."""

    def __init__(self, device):
        opened = Kernels(device)
        self.context, self.queue = opened._context, opened._queue
        self.program = cl.Program(self.context, SOURCE).build(["-cl-std=CL1.2"], cache_dir=False)

    def calls(self, problem):
        """Return functions that read all keys and values; the names are (order, parts)."""
        _, heads, rows, E = problem.key.shape
        vectors = E * problem.key.itemsize // VECTOR
        head_stride, row_stride = (stride // 4 for stride in problem.key.strides[1:3])
        orders = {"by heads": (heads, vectors)}
        if row_stride > vectors * VECTOR // 4:
            orders["as rows lie"] = (1, vectors * heads)
        flags = cl.mem_flags.READ_ONLY | cl.mem_flags.USE_HOST_PTR
        arrays = [x if x.base is None else x.base for x in (problem.key, problem.value)]
        buffers = [cl.Buffer(self.context, flags, hostbuf=x) for x in arrays]
        calls = {}
        for order, (count, width) in orders.items():
            for parts in (n * heads // count for n in PARTS):
                sizes = (np.int32(rows), np.int32(width), np.int64(row_stride),
                         np.int64(head_stride), np.int32(parts))  # fmt: skip
                calls[order, parts] = self.call(buffers, count * parts, sizes)
        return calls

    def call(self, buffers, groups, sizes):
        """Return a function that launches the kernel and waits for it."""
        sums = cl.Buffer(self.context, cl.mem_flags.WRITE_ONLY, groups * VECTOR)
        kernel = cl.Kernel(self.program, "read_keys")
        kernel.set_args(*buffers, sums, *sizes)

        def run(arguments=(buffers, sums)):  # the kernel does not keep them alive
            cl.enqueue_nd_range_kernel(self.queue, kernel, (groups,), (1,)).wait()

        return run


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", metavar="WORDS")
    parser.add_argument("--rounds", type=int, default=8)
    given = parser.parse_args()
    device = clattn._core.find_device(given.device)
    reader = Reader(device)
    print(f"{device.name} ({device.platform}); milliseconds")
    for row in MODEL_ROWS:
        if row.limit != "read":
            continue
        problem = draw(row)
        for name, seen in ((row.name, problem), ("  contiguous", contiguous(problem))):
            calls = {"clattn": clattn_call(seen, device).run, **reader.calls(seen)}
            best = dict.fromkeys(calls, float("inf"))
            for _ in range(given.rounds):
                take_turns(calls, best)
            cells = [f"clattn {1e3 * best.pop('clattn'):.4f}"]
            for order in dict.fromkeys(order for order, _ in best):
                shortest = min(best[key] for key in best if key[0] == order)
                cells.append(f"reading {order} {1e3 * shortest:.4f}")
            print(f"{name:<18} " + "   ".join(cells))


if __name__ == "__main__":
    main()
