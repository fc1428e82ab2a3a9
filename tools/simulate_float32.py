# SPDX-License-Identifier: MIT
"""Simulate float32 attention by three products on matrix units, and judge its errors.

    python tools/simulate_float32.py [--keys N] [--head N] [--rows N]

Each number is a sum of two numbers of 11 bits, TF32 or float16. The unit adds the products of an
instruction and the sum before as whole numbers: each is cut off at some bits below the largest
exponent, the result at the last bit of a float. An error is divided by what the tests allow
(docs/numerics.md): the table has the largest share. docs/lab/gpus.md has the results.
"""

import argparse
from dataclasses import dataclass

import numpy as np
from gpu_check.float32 import LIFT, allowed_error, scale_of

BLOCK = 64
HEADROOM, RAISED = 8, 7  # of bases and weights, as in experiments/halves.cl
ZERO_EXPONENT = -126
DROPPED = np.int64((1 << 29) - 1)  # bits of a double that a float lacks


@dataclass(frozen=True)
class Form:
    """How products are made."""

    name: str
    dtype: str  # float16 or tf32
    bits: int = 25  # that a sum keeps below its largest exponent
    step: int = 0  # products that are added at once; 0: those of an instruction of the H100
    by_blocks: bool = True  # sums of a block are added outside of the unit


FORMS = [
    Form("float16 by blocks", "float16"),
    Form("float16 by blocks, V100", "float16", 23, 4),
    Form("TF32 by blocks", "tf32"),
    Form("float16, all in the unit", "float16", by_blocks=False),
    Form("TF32, all in the unit", "tf32", by_blocks=False),
]


def exponents(x):
    return np.where(x == 0, ZERO_EXPONENT, np.frexp(x)[1] - 1)


def cut_to_float(x):
    return (np.ascontiguousarray(x).view(np.int64) & ~DROPPED).view(np.float64)


def add_products(sums, a, b, form):
    """Return sums + a @ b, as the unit adds."""
    step = form.step or (16 if form.dtype == "float16" else 8)
    for k in range(0, a.shape[1], step):
        left, right = a[:, k : k + step, None], b[None, k : k + step]
        top = (exponents(left) + exponents(right)).max(1)
        unit = np.ldexp(1.0, np.maximum(top, exponents(sums)) - form.bits)
        whole = np.trunc(left * right / unit[:, None]).sum(1) + np.trunc(sums / unit)
        sums = cut_to_float(whole * unit)
    return sums


def rounded(x, dtype):
    if dtype == "float16":
        return x.astype(np.float16).astype(np.float32)
    return ((x.view(np.uint32) + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)).view(np.float32)


def split(x, dtype, lift=1.0):
    """Return the high and the low parts of float32 numbers, the low ones `lift` times as large."""
    x = x.astype(np.float32)
    high = rounded(x, dtype)
    low = rounded((x - high) * np.float32(lift), dtype)
    return high.astype(np.float64), low.astype(np.float64)


def multiply(sums, a, b, form, lift=1.0):
    """Add a @ b of parts to sums, the small products first."""
    lowered = split(a[0] / lift, form.dtype)[0]
    for left, right in ((a[1], b[0]), (lowered, b[1]), (a[0], b[0])):
        sums = add_products(sums, left, right, form)
    return sums


def attend(query, key, value, form):
    """Return attention of (L, E), (S, E) and (S, E), as the kernel computes it."""
    halves = form.dtype == "float16"
    scales = [scale_of(x) if halves else 1.0 for x in (query, key, value)]
    lift = LIFT if halves and form.by_blocks else 1.0
    raised = RAISED if halves else 0
    rows = split(query * scales[0], form.dtype)
    keys = split(key * scales[1], form.dtype)
    values = split(value * scales[2], form.dtype, lift)
    factor = np.float32(1 / np.sqrt(query.shape[1]) / np.log(2) / scales[0] / scales[1])
    base = np.full((len(query), 1), np.finfo(np.float32).min, np.float32)
    total, result = np.zeros_like(base), np.zeros((len(query), value.shape[1]), np.float32)
    for block in (slice(j, j + BLOCK) for j in range(0, len(key), BLOCK)):
        zeros = np.zeros((len(query), len(key[block])))
        scores = multiply(zeros, rows, [x[block].T for x in keys], form).astype(np.float32)
        highest = scores.max(1, keepdims=True) * factor
        higher = np.where(highest > base + HEADROOM, highest, base)
        decay, base = np.exp2(base - higher), higher
        powers = (scores.astype(np.float64) * factor + (raised - base)).astype(np.float32)
        weights = np.exp2(powers)
        total = total * decay + weights.sum(1, keepdims=True)
        before = result * decay
        start = np.zeros(result.shape) if form.by_blocks else before.astype(np.float64)
        parts = split(weights, form.dtype), [x[block] for x in values]
        sums = multiply(start, *parts, form, lift).astype(np.float32)
        result = before + sums if form.by_blocks else sums
    return result / total / np.float32(scales[2])


def problems(rows, keys, head):
    """Yield names, and query, key and value."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((n, head)) for n in (rows, keys, keys))
    offset = 1 + value / 4
    wide = value * np.exp(3 * rng.standard_normal(value.shape))
    far = key * np.exp(rng.standard_normal((keys, 1)))
    yield "normal", query, key, value
    yield "peaky", 8 * query, key, value
    yield "offset", query, key, offset
    yield "flat, offset", query / 2**8, key, offset
    yield "wide", query, far, wide


def share(form, arrays):
    """Return the largest error's share of what is allowed."""
    arrays = [x.astype(np.float32) for x in arrays]
    right, allowed = allowed_error([x[None] for x in arrays], causal=False)
    with np.errstate(all="ignore"):
        got = attend(*arrays, form)
    return float(np.max(np.abs(got - right[0]) / allowed[0]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--keys", type=int, default=16384)
    parser.add_argument("--head", type=int, default=128)
    arguments = parser.parse_args()
    found = list(problems(arguments.rows, arguments.keys, arguments.head))
    print(f"| | {' | '.join(name for name, *_ in found)} |")
    print("|---" * (len(found) + 1) + "|")
    for form in FORMS:
        shares = [f"{share(form, arrays):.2g}" for _, *arrays in found]
        print(f"| {form.name} | {' | '.join(shares)} |", flush=True)


if __name__ == "__main__":
    main()
