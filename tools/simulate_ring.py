#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Simulates `clattn.mpi.ring_attention` on 2 to 1024 ranks of given rates, and prints a table.

python tools/simulate_ring.py                                  # CPUs, 10 Gb/s
python tools/simulate_ring.py --rate 2e14 --network 100 --bytes 2 --length 1048576

The schedule is clattn's own. A step lasts as long as the slowest rank computes, or as long as a
part of the keys and values is on its way, whichever is longer: ranks meet after each step. Every
link carries its part at the full rate, and a step adds the latency.
"""

import argparse
import sys

import numpy as np
from clattn._parts.ring import LAYOUTS, Schedule, part_lengths, pieces

RANKS = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--length", type=int, default=262144, help="rows, and keys, of all ranks")
    parser.add_argument("--per-rank", type=int, help="rows of one rank, in the place of --length")
    parser.add_argument("--heads", type=int, default=32, help="of queries")
    parser.add_argument("--kv-heads", type=int, default=8, help="of keys and values")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--bytes", type=int, default=4, help="of one number of the keys")
    parser.add_argument("--rate", type=float, default=192e9, help="operations a second of a rank")
    parser.add_argument("--network", type=float, default=10, help="Gb/s of a link, each way")
    parser.add_argument("--latency", type=float, default=50e-6, help="seconds that a step adds")
    parser.add_argument("--all", action="store_true", help="rows see all keys: not causal")
    return parser.parse_args(arguments)


def pairs(schedule, step, is_causal):
    """How many keys the rows of each rank see in a step: (ranks,)."""
    row, length = (part[:, :, None].astype(float) for part in schedule.rows)
    key, width = (np.roll(part, step, 0)[:, None, :].astype(float) for part in schedule.keys)
    if not is_causal:
        return (length * width).sum((1, 2))

    def up_to(end):
        """Of the rows before `end`: each sees one key more than the row before it."""
        rows = np.maximum(end - key, 0)
        some = np.minimum(rows, width)
        return some * (some + 1) / 2 + (rows - some) * width

    return (up_to(row + length) - up_to(row)).sum((1, 2))


def simulate(ranks, layout, options):
    """One row of the table, as a dict of numbers."""
    length = options.per_rank * ranks if options.per_rank else options.length
    where = pieces(part_lengths(length, ranks, layout), layout)
    schedule = Schedule(where, where, not options.all)
    part = int(where.lengths.sum(1).max())
    moved = 2 * part * options.kv_heads * options.head_size * options.bytes
    transfer = moved * 8 / (options.network * 1e9)
    operations = 4 * options.heads * options.head_size
    work = np.zeros(ranks)
    total = waited = 0.0
    for step in range(schedule.steps):
        seen = pairs(schedule, step, not options.all) * operations
        work += seen
        computing = seen.max() / options.rate
        sending = transfer if step + 1 < schedule.steps else 0.0
        waited += max(sending - computing, 0.0)
        total += max(computing, sending) + options.latency
    rows = part * options.heads * options.head_size
    wide = max(options.bytes, 4)
    # Queries and results; results of a step and of all steps; the caller's part of the keys and
    # values, and two that go round.
    memory = rows * 2 * options.bytes + rows * 2 * wide + 3 * moved
    if options.bytes < 4:  # queries and a part that go to the kernel
        memory += (rows + moved / options.bytes) * wide
    return {
        "seconds": total,
        "efficiency": work.sum() / (ranks * options.rate * total),
        "waits": waited / total,
        "least": work.min(),
        "most": work.max(),
        "moved": moved * (schedule.steps - 1),
        "memory": memory,
    }


def main(arguments=None):
    options = parse(arguments)
    print(
        f"{'all keys' if options.all else 'causal'}, {options.heads} heads, {options.kv_heads} of "
        f"keys, head size {options.head_size}, {options.bytes} bytes a number, "
        f"{options.rate / 1e9:g} Gflop/s, {options.network:g} Gb/s"
    )
    print("ranks  layout      seconds  efficiency  waits  Tflop of a rank   GB sent  GB held")
    for ranks in options.ranks:
        for layout in LAYOUTS:
            row = simulate(ranks, layout, options)
            print(
                f"{ranks:5d}  {layout:10s} {row['seconds']:8.3g} {row['efficiency']:10.0%} "
                f"{row['waits']:7.0%} {row['least'] / 1e12:7.3g}, {row['most'] / 1e12:7.3g} "
                f"{row['moved'] / 1e9:9.3g} {row['memory'] / 1e9:8.3g}"
            )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
