# SPDX-License-Identifier: MIT
"""Time of diagonal matrices beside NumPy and torch, in one run.

python benchmarks/compare_diagonal.py [--rounds N] [--rows WORDS]

The table is that of docs/lab/diagonal_matrices.md.
"""

import argparse
import functools
import os

import clattn
import numpy as np
import torch
from clattn._commands.timing import take_turns

N = 4096
BATCH = (10_000, 8, 8)

rng = np.random.default_rng(0)
LARGE = rng.random((N, N), np.float32)
SMALL = rng.random(BATCH, np.float32)
OUT = np.zeros_like(LARGE)
LARGE_T, SMALL_T, OUT_T = (torch.from_numpy(a) for a in (LARGE, SMALL, OUT))


def identities():
    return np.broadcast_to(np.eye(BATCH[-1], dtype=np.float32), BATCH).copy()


def identities_torch():
    return torch.eye(BATCH[-1]).expand(BATCH).contiguous()


# name: the calls of clattn, NumPy and torch; None: the library has no such call
ROWS = {
    "eye 4096": (
        lambda: clattn.eye(N),
        lambda: np.eye(N, dtype=np.float32),
        lambda: torch.eye(N),
    ),
    "tril 4096": (
        lambda: clattn.tril(LARGE),
        lambda: np.tril(LARGE),
        lambda: torch.tril(LARGE_T),
    ),
    "triu 4096": (
        lambda: clattn.triu(LARGE),
        lambda: np.triu(LARGE),
        lambda: torch.triu(LARGE_T),
    ),
    "tril 4096, out": (
        lambda: clattn.diagonal_matrix(LARGE, 0, 1, N, out=OUT),
        None,
        lambda: torch.tril(LARGE_T, out=OUT_T),
    ),
    "tril 4096, in place": (
        lambda: clattn.diagonal_matrix(OUT, 0, 1, N, out=OUT),
        None,
        lambda: OUT_T.tril_(),
    ),
    "tril 4096, transposed": (
        lambda: clattn.tril(LARGE.T),
        lambda: np.tril(LARGE.T),
        lambda: torch.tril(LARGE_T.T),
    ),
    "tril 10000 x 8 x 8": (
        lambda: clattn.tril(SMALL),
        lambda: np.tril(SMALL),
        lambda: torch.tril(SMALL_T),
    ),
    "triu 10000 x 8 x 8": (
        lambda: clattn.triu(SMALL),
        lambda: np.triu(SMALL),
        lambda: torch.triu(SMALL_T),
    ),
    "eye 10000 x 8 x 8": (
        lambda: clattn.diagonal_matrix(BATCH, 1, 0, 1),
        identities,
        identities_torch,
    ),
}


def on_device(call, device):
    with clattn.use_device(device):
        return call()


def calls_of(row):
    ours, numpy_call, torch_call = ROWS[row]
    calls = {
        device.platform.split("(")[0].split()[0]: functools.partial(on_device, ours, device)
        for device in clattn.devices()
    }
    calls["NumPy"] = numpy_call
    calls["torch"] = torch_call
    return {name: call for name, call in calls.items() if call is not None}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count())
    print(f"NumPy {np.__version__}, torch {torch.__version__}, "
          f"{torch.get_num_threads()} threads; clattn on:")  # fmt: skip
    for device in clattn.devices():
        print(f"  {device.platform}: {device.name}")
    print("float32, times in ms (ratio: the faster of NumPy and torch / this one)\n")
    for row in arguments.rows:
        calls = calls_of(row)
        results = [np.asarray(call()) for call in calls.values()]
        assert all(np.array_equal(results[0], other) for other in results), row
        del results
        best = dict.fromkeys(calls, float("inf"))
        for _ in range(arguments.rounds):
            take_turns(calls, best)
        peer = min(seconds for name, seconds in best.items() if name in ("NumPy", "torch"))
        cells = [
            f"{name} {seconds * 1e3:8.3f} ({peer / seconds:5.2f})" for name, seconds in best.items()
        ]
        print(f"{row:<22} " + "   ".join(cells), flush=True)


if __name__ == "__main__":
    main()
