# SPDX-License-Identifier: MIT
"""Calls of each variant of attention, each compared with the reference kernel and with NumPy.

python -m gpu_check.smoke --device WORDS FILE CALL... writes lines of JSON to the file: items.py
"""

import argparse
import os

from gpu_check import items

CASES = ("causal", "mask", "groups")
ON_GPUS = {
    "tiled": ("float32", "float16"),
    "mma": ("float16", "bfloat16"),
    "decode_gpu": ("float32", "bfloat16"),
    "decode_mma": ("float16", "bfloat16"),
}
ON_CPUS = {
    "cpu": ("float32", "float16"),
    "decode_cpu": ("float32", "bfloat16"),
    "pairs": ("bfloat16",),
    "tiled": ("float32",),
    "decode_gpu": ("float32",),
    "mma": ("float16",),
}
# By dtype: the error of weights and sums, as a share of the largest value. It is coarse, since a
# wrong kernel is wrong by much; the suite knows how far rounding goes.
ALLOWED = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
TURNS = 3  # a race may give the right numbers at times


def calls(kind):
    """Return the names of 24 calls for a type of device: variant, dtype, case."""
    table = ON_CPUS if kind == "cpu" else ON_GPUS
    return [
        f"{word} {dtype} {case}" for word, dtypes in table.items() for dtype in dtypes
        for case in CASES
    ]  # fmt: skip


def problem(word, dtype, case):
    """Return arrays and options of a call: odd lengths, several blocks of keys or splits."""
    import numpy as np

    if dtype == "bfloat16":
        import ml_dtypes

        number_type = np.dtype(ml_dtypes.bfloat16)
    else:
        number_type = np.dtype(dtype)
    few = word.startswith("decode")
    heads, L, S = (8, 3 if case == "causal" else 1, 2500) if few else (4, 150, 333)
    E = 64 if word in ("tiled", "cpu") else 128
    rng = np.random.default_rng(len(word + dtype + case))

    def draw(*shape):
        return rng.standard_normal(shape, np.float32).astype(number_type)

    keys = heads // 4 if case == "groups" else heads
    arrays = draw(2, heads, L, E), draw(2, keys, S, E), draw(2, keys, S, E)
    options = {"enable_gqa": True}
    if case == "causal":
        options["is_causal"] = "lower_right"
    if case == "mask":
        mask = draw(L, S)
        mask[draw(L, S) > 1] = -np.inf
        options["attn_mask"] = mask
    return arrays, options


def exact(arrays, options):
    """Return the result in float64."""
    import numpy as np

    query, key, value = (array.astype(np.float64) for array in arrays)
    groups = query.shape[1] // key.shape[1]
    key, value = (np.repeat(array, groups, axis=1) for array in (key, value))
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    L, S = scores.shape[-2:]
    if "attn_mask" in options:
        scores = scores + options["attn_mask"].astype(np.float64)
    if "is_causal" in options:
        scores = np.where(np.tri(L, S, S - L, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights @ value / weights.sum(-1, keepdims=True)


def check_call(name, device):
    """Run one call; raise if its numbers are wrong."""
    import clattn
    import numpy as np

    word, dtype, case = name.split()
    arrays, options = problem(word, dtype, case)

    def attend(kernel):
        clattn._core.force(kernel)
        result = clattn.scaled_dot_product_attention(*arrays, device=device, **options)
        return result.astype(np.float64)

    right = exact(arrays, options)
    allowed = ALLOWED[dtype] * float(np.abs(arrays[2].astype(np.float64)).max())

    def compare(words, got, other):
        error = float(np.nan_to_num(np.abs(got - other), nan=np.inf).max())
        if error > allowed:
            count = int((~(np.abs(got - other) <= allowed)).sum())
            raise ValueError(f"{words} by {error:.2g}, {count} of {got.size} numbers; "
                             f"allowed is {allowed:.2g}")  # fmt: skip
        return error

    reference = attend("reference")
    try:
        results = [attend(word) for _ in range(TURNS)]
    except ValueError as refusal:
        raise items.Skipped(str(refusal)) from refusal
    compare("the reference kernel is wrong", reference, right)
    error = max(compare("wrong", result, reference) for result in results)
    if any(result.tobytes() != results[0].tobytes() for result in results):
        raise ValueError(f"{TURNS} calls give different numbers")
    return "passed", f"error {error:.1e} of {allowed:.1e}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", required=True)
    parser.add_argument("file")
    parser.add_argument("names", nargs="+", metavar="CALL")
    arguments = parser.parse_args()
    os.environ.pop("CLATTN_KERNEL", None)  # what earlier calls left out is called here by name
    items.work("smoke", arguments.file, arguments.names,
               lambda name: check_call(name, arguments.device))  # fmt: skip


if __name__ == "__main__":
    main()
