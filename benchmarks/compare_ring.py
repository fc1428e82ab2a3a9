#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Times ring attention of two processes with one thread each beside one process with two threads.

python benchmarks/compare_ring.py [--length 16384] [--causal] [--rounds 3]

A process is bound to its cores before it opens OpenCL, so Intel's runtime starts as many threads. A
variable tells PoCL to.
Needs mpirun of Open MPI, mpi4py and two cores. Each round starts all processes anew, one way after
the other. The shortest time counts. Processor time is that of all threads of all processes, from
the same call: other programs on the machine lengthen it less. A process that waits for another one
sleeps.
"""

import argparse
import os
import subprocess
import sys
import time

# The name, the processes, the cores of each.
WAYS = [
    ("one process, one thread", 1, 1),
    ("one process, two threads", 1, 2),
    ("two processes, one thread each", 2, 1),
]


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--length", type=int, default=16384, help="rows, and keys, of all")
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--layout", default="zigzag", choices=["contiguous", "zigzag"])
    parser.add_argument("--calls", type=int, default=3, help="of a process")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, help=argparse.SUPPRESS)  # of a child process
    return parser.parse_args()


def measure(options):
    """In a process that mpirun has started: the first rank prints the times of the fastest call."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[comm.rank * options.cores :][: options.cores])
    os.environ["POCL_MAX_PTHREAD_COUNT"] = str(options.cores)
    import clattn.mpi
    import numpy as np

    rng = np.random.default_rng(0)
    shape = (3, options.heads, options.length, options.head_size)
    whole = rng.standard_normal(shape, dtype=np.float32).astype(options.dtype)
    query, key, value = (clattn.mpi.split(array, comm, options.layout) for array in whole)
    times = []
    for _ in range(options.calls + 1):  # the first one builds programs
        comm.Barrier()
        start, busy = time.perf_counter(), time.process_time()
        if comm.size == 1:
            clattn.scaled_dot_product_attention(*whole, is_causal=options.causal)
        else:
            clattn.mpi.ring_attention(
                query, key, value, is_causal=options.causal, layout=options.layout
            )
        busy = comm.allreduce(time.process_time() - busy)
        times.append((comm.allreduce(time.perf_counter() - start, MPI.MAX), busy))
    if comm.rank == 0:
        print(*min(times[1:]), clattn.get_default_device().compute_units)


def main():
    options = parse()
    if options.cores:
        return measure(options)
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("needs two cores")
    seconds = {name: [] for name, *_ in WAYS}
    work = 4 * options.heads * options.head_size * options.length**2 / (1 + options.causal)
    for _ in range(options.rounds):
        for name, processes, cores in WAYS:
            command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
            command += ["-n", str(processes), sys.executable, *sys.argv, "--cores", str(cores)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            *took, units = map(float, done.stdout.split())
            seconds[name].append(took)
            print(
                f"{name:32s} {took[0]:7.3f} s, {took[1]:7.3f} s of processor time, "
                f"{work / took[0] / 1e9:5.0f} Gflop/s ({units:g} compute units each)",
                flush=True,
            )
    print("\n| keys | way | s | Gflop/s | processor time, s |\n|---|---|---|---|---|")
    best = {
        name: [min(column) for column in zip(*times, strict=True)]
        for name, times in seconds.items()
    }
    for name, (took, busy) in best.items():
        keys = f"causal, {options.layout}" if options.causal else "all"
        print(f"| {keys} | {name} | {took:.3f} | {work / took / 1e9:.0f} | {busy:.2f} |")
    one, two, ring = best.values()
    print("\nefficiency of the ring, by time and by processor time, beside")
    print(f"    one process, two threads: {two[0] / ring[0]:.2f}, {two[1] / ring[1]:.2f}")
    print(f"    one process, one thread:  {one[0] / ring[0] / 2:.2f}, {one[1] / ring[1]:.2f}")
    return None


if __name__ == "__main__":
    main()
