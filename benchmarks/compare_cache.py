# SPDX-License-Identifier: MIT
"""Time of decoding with clattn.KVCache beside bare attention of the same length, in one run.

python benchmarks/compare_cache.py [--tokens N] [--rounds N] [--dtype NAME] [--batch B] [--host]

A step is append and attend of one token for Hq 32, Hk 8, E 128. The bare call is
scaled_dot_product_attention of the same query Tensor on views of as many keys. Both end with
clattn.synchronize. They take turns at each length, and each round goes through all lengths again,
so a disturbance affects both. The shortest time of all rounds counts. A row of the table stands for
a range of lengths. It has medians, the worst ratio of ten neighbouring lengths (of their medians),
and, as a measure of noise, the worst such ratio between the bare call and the same call again. If
the noise is far from 1, the machine was busy: run the tool again.
"""

import argparse
import gc
import itertools
import time

import clattn
import ml_dtypes
import numpy as np

HQ, HK, E = 32, 8, 128
RANGES = (1, 11, 31, 101, 201, 301, 401, 501, 601, 701, 801, 901)
NEIGHBOURS = 10
DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in
          ("float32", "float16", "bfloat16", "float64")}  # fmt: skip


class Decoding:
    """A cache, its tokens, and views of the cache at all lengths."""

    def __init__(self, device, tokens, batch, dtype, host):
        rng = np.random.default_rng(0)

        def numbers(*shape):
            return rng.standard_normal(shape, np.float32).astype(dtype)

        def given(array):
            return array if host else clattn.tensor(array, device=device)

        keys, values = numbers(batch, HK, tokens, E), numbers(batch, HK, tokens, E)
        self.device = device
        self.query = given(numbers(batch, HQ, 1, E))
        self.tokens = [
            tuple(given(np.ascontiguousarray(a[:, :, n : n + 1])) for a in (keys, values))
            for n in range(tokens)
        ]
        self.cache = clattn.KVCache(batch, HK, tokens, E, dtype=dtype, device=device)
        self.check([clattn.tensor(a, device=device) for a in (keys, values)])
        # The cache is full. Step and bare call read the same memory, so it is equally warm.
        whole = self.cache.key, self.cache.value
        self.lengths = [tuple(a[:, :, : n + 1] for a in whole) for n in range(tokens)]

    def check(self, whole):
        """Compares step and bare call on other Tensors bit by bit, at every length."""
        self.lengths = [tuple(a[:, :, : n + 1] for a in whole) for n in range(len(self.tokens))]
        for n in range(len(self.tokens)):
            step, bare = np.array(self.step(n)), np.array(self.bare(n))
            assert step.tobytes() == bare.tobytes(), f"length {n + 1}"

    def step(self, n):
        self.cache.append(*self.tokens[n])
        return self.cache.attend(self.query)

    def bare(self, n):
        return clattn.scaled_dot_product_attention(
            self.query, *self.lengths[n], is_causal="lower_right", enable_gqa=True
        )

    def seconds(self, call, n):
        """Returns the seconds of one call, without earlier work and without freeing the result.

        The token is read first: a model has just computed it, so the processor's cache has it.
        """
        for array in self.tokens[n]:
            np.array(array)
        clattn.synchronize(self.device)
        start = time.perf_counter()
        result = call(n)
        clattn.synchronize(self.device)
        taken = time.perf_counter() - start
        del result
        return taken

    def measure(self, rounds):
        """Returns the shortest seconds of step, bare call and bare call again by length."""
        calls = (self.step, self.bare, self.bare)
        best = np.full((len(calls), len(self.tokens)), np.inf)
        gc.disable()
        for turn in range(rounds):
            self.cache.reset()
            rows = np.roll(range(len(calls)), turn).tolist()
            for n, row in itertools.product(range(len(self.tokens)), rows):
                best[row, n] = min(best[row, n], self.seconds(calls[row], n))
        gc.enable()
        return best


def worst(times, others):
    """Returns the largest ratio of a few neighbouring lengths, by their medians."""
    starts = range(0, len(times), NEIGHBOURS)
    return max(
        np.median(times[n : n + NEIGHBOURS]) / np.median(others[n : n + NEIGHBOURS]) for n in starts
    )


def report(best):
    tokens = best.shape[1]
    print("       lengths  step, us  bare, us  ratio  worst  noise")
    edges = [n for n in RANGES if n <= tokens] + [tokens + 1]
    for first, end in itertools.pairwise(edges):
        step, bare, again = best[:, first - 1 : end - 1] * 1e6
        noise = max(worst(again, bare), worst(bare, again))
        print(f"  {first:>4} … {end - 1:>4} {np.median(step):9.1f} {np.median(bare):9.1f} "
              f"{np.median(step / bare):6.2f} {worst(step, bare):6.2f} {noise:6.2f}")  # fmt: skip
    step, bare, _ = best.sum(axis=1) * 1e3
    print(f"  sum, ms     {step:9.2f} {bare:9.2f} {step / bare:6.2f}\n", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--host", action="store_true", help="tokens and queries in NumPy arrays")
    parser.add_argument("--device", help="words as for clattn's device=; default: every device")
    arguments = parser.parse_args()
    devices = clattn.devices()
    if arguments.device is not None:
        with clattn.use_device(arguments.device):
            devices = [clattn.get_default_device()]
    for device in devices:
        print(f"{device.platform}: {device.name}; batch {arguments.batch}, {arguments.dtype}")
        decoding = Decoding(device, arguments.tokens, arguments.batch, DTYPES[arguments.dtype],
                            arguments.host)  # fmt: skip
        report(decoding.measure(arguments.rounds))


if __name__ == "__main__":
    main()
