# SPDX-License-Identifier: MIT
"""Time and error of clattn beside torch, in one run: the figures of docs/performance.md.

python tools/compare_torch.py [--rounds N] [--rows WORDS]
"""

import argparse
import os
import time

import clattn
import ml_dtypes
import numpy as np
import torch

# name: (B, H, L, S, E), dtype, options of both functions
ROWS = {
    "plain": ((1, 8, 2048, 2048, 64), "float32", {}),
    "causal": ((1, 8, 2048, 2048, 64), "float32", {"is_causal": True}),
    "float mask": ((1, 8, 2048, 2048, 64), "float32", {"attn_mask": "float32"}),
    "bool mask": ((1, 8, 2048, 2048, 64), "float32", {"attn_mask": "bool"}),
    "E = 128": ((1, 8, 2048, 2048, 128), "float32", {}),
    "batch": ((4, 12, 512, 512, 64), "float32", {}),
    "short": ((1, 12, 128, 128, 64), "float32", {}),
    "odd": ((3, 5, 77, 77, 80), "float32", {}),
    "tiny": ((1, 8, 16, 16, 64), "float32", {}),
    "float16": ((1, 8, 2048, 2048, 64), "float16", {}),
    "bfloat16": ((1, 8, 2048, 2048, 64), "bfloat16", {}),
    "float64": ((1, 8, 2048, 2048, 64), "float64", {}),
}
SAMPLE = 64  # query rows whose error is taken


def draw(shape, dtype, seed):
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.random(shape) < 0.7
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return rng.standard_normal(shape).astype(kind)


def to_torch(array):
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def exact(query, key, value, attn_mask=None, is_causal=False):
    """The last SAMPLE rows in float64 NumPy, computed from the definition."""
    first = max(0, query.shape[-2] - SAMPLE)
    q, k, v = (a.astype(np.float64) for a in (query[..., first:, :], key, value))
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if attn_mask is not None:
        mask = attn_mask[first:]
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    if is_causal:
        i, j = np.arange(first, query.shape[-2])[:, None], np.arange(k.shape[-2])
        scores = np.where(j <= i, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return first, weights @ v / weights.sum(axis=-1, keepdims=True)


def calls_of(row):
    """What is compared, by name, and the function that says how wrong a result is."""
    (B, H, L, S, E), dtype, options = ROWS[row]
    arrays = [draw((B, H, n, E), dtype, seed) for seed, n in enumerate((L, S, S))]
    options = dict(options)
    torch_options = dict(options)
    if "attn_mask" in options:
        options["attn_mask"] = draw((L, S), options["attn_mask"], 3)
        torch_options["attn_mask"] = to_torch(options["attn_mask"])
    tensors = [to_torch(a) for a in arrays]
    first, right = exact(*arrays, **options)

    def error(result):
        tail = result[..., first:, :]
        wide = tail.double().numpy() if torch.is_tensor(tail) else tail.astype(np.float64)
        return np.abs(wide - right).max()

    calls = {
        device.platform.split("(")[0].split()[0]: lambda device=device: (
            clattn.scaled_dot_product_attention(*arrays, **options, device=device)
        )
        for device in clattn.devices()
    }
    calls["torch"] = lambda: torch.nn.functional.scaled_dot_product_attention(
        *tensors, **torch_options
    )
    return calls, error


def shortest_times(calls, rounds):
    """Seconds of the shortest call of each, over rounds of all in turn.

    The first call of a turn does not count: the threads of the one before may still be spinning.
    """
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            end = time.perf_counter() + 0.02
            while True:
                start = time.perf_counter()
                call()
                now = time.perf_counter()
                best[name] = min(best[name], now - start)
                if now > end:
                    break
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count())
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; clattn on:")
    for device in clattn.devices():
        print(f"  {device.platform}: {device.name}")
    print("times in ms (ratio: torch's time / this one), largest error against float64\n")
    with torch.inference_mode():
        for row in arguments.rows:
            calls, error = calls_of(row)
            best = shortest_times(calls, arguments.rounds)
            cells = [
                f"{name} {best[name] * 1e3:8.3f} ({best['torch'] / best[name]:4.2f}) "
                f"{error(call()):.1e}"
                for name, call in calls.items()
            ]
            print(f"{row:<11} " + "   ".join(cells), flush=True)


if __name__ == "__main__":
    main()
