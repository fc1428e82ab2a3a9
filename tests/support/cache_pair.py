# SPDX-License-Identifier: MIT
"""A KVCache and the model of it, side by side: each call goes to both."""

import clattn
import numpy as np
from references.attention import float32
from references.cache import CacheModel
from support.checks import assert_close
from support.data import draw
from support.forced import weights_are_rounded
from support.sizes import REST, WIDE

B, HQ, HK, E, EV, CAPACITY = 2, 4, 2, WIDE, REST, 40


def host(tensor):
    """A copy on the host: it does not hand the Tensor's own memory out."""
    return np.array(tensor)


class Pair:
    """A cache and its model, which get the same calls; every answer is compared."""

    def __init__(self, device, B=B, HQ=HQ, HK=HK, capacity=CAPACITY, E=E, EV=EV, dtype=float32):
        self.device, self.dtype, self.seed = device, np.dtype(dtype), 0
        self.B, self.HQ, self.HK, self.E, self.EV = B, HQ, HK, E, EV
        sizes = (B, HK, capacity, E, EV)
        self.cache = clattn.KVCache(*sizes, dtype=dtype, device=device)
        self.model = CacheModel(*sizes, dtype=dtype)

    def numbers(self, *shape):
        self.seed += 1
        return draw(shape, self.dtype, self.seed)

    def tokens(self, n):
        """Key and value of n new positions."""
        return self.numbers(self.B, self.HK, n, self.E), self.numbers(self.B, self.HK, n, self.EV)

    def queries(self, rows):
        return self.numbers(self.B, self.HQ, rows, self.E)

    def append(self, n, counts=None, of=lambda array: array):
        """n new positions, handed over as `of` makes them."""
        key, value = self.tokens(n)
        given = of(key), of(value)
        options = {} if counts is None else {"counts": counts}
        assert self.cache.append(*given, **options) is None
        self.model.append(key, value, counts)
        self.lengths_agree()
        return self

    def truncate(self, n):
        assert self.cache.truncate(n) is None
        self.model.truncate(n)
        self.lengths_agree()
        return self

    def reset(self):
        assert self.cache.reset() is None
        self.model.reset()
        self.lengths_agree()
        return self

    def reorder(self, indices):
        assert self.cache.reorder(indices) is None
        self.model.reorder(indices)
        self.lengths_agree()
        return self

    def lengths_agree(self):
        lengths = self.cache.lengths
        assert type(lengths) is np.ndarray and lengths.dtype == np.int64
        assert lengths.tolist() == self.model.lengths
        assert type(self.cache.length) is int and self.cache.length == self.model.length

    def contents_agree(self):
        """Keys and values, bit for bit, of what each sequence holds."""
        self.lengths_agree()
        held = [(self.cache.key, self.model.keys, self.E),
                (self.cache.value, self.model.values, self.EV)]  # fmt: skip
        for tensor, right, size in held:
            assert type(tensor) is clattn.Tensor
            assert tensor.shape == (self.B, self.HK, self.model.length, size)
            assert tensor.dtype == self.dtype and tensor.device == self.device
            got = host(tensor)
            for b, length in enumerate(self.model.lengths):
                assert got[b, :, :length].tobytes() == right[b].tobytes(), f"sequence {b}"
        return self

    def compare(self, got, query, **options):
        rounds = weights_are_rounded(got, lambda: self.cache.attend(query, **options))
        right, allowed, empty = self.model.attend(query, rounds_weights=rounds, **options)
        assert got.dtype == self.dtype
        assert got.shape == (self.B, self.HQ, query.shape[2], self.EV)
        for b in range(self.B):
            assert_close(got[b], right[b], allowed[b], f"sequence {b}")
        assert not got[empty].any(), "rows without a key have to be zero"

    def attend(self, query, **options):
        """With a NumPy query and with a Tensor: right, of the query's kind, of the same bits."""
        query = self.queries(query) if isinstance(query, int) else query
        given = [a for a in (query, options.get("attn_mask")) if a is not None]
        before = [a.tobytes() for a in given]
        got = self.cache.attend(query, **options)
        assert type(got) is np.ndarray
        self.compare(got, query, **options)
        on_device = self.cache.attend(clattn.tensor(query, device=self.device), **options)
        assert type(on_device) is clattn.Tensor and on_device.device == self.device
        assert host(on_device).tobytes() == got.tobytes(), "a Tensor gives other bits"
        assert before == [a.tobytes() for a in given], "an input was modified"
        self.lengths_agree()
        return got


def pair(device, lengths=None, **sizes):
    """A Pair; `lengths` are those of its sequences."""
    made = Pair(device, **sizes)
    return made if lengths is None else made.append(max(lengths), lengths)


def pair_of_one_size(device, lengths=None, **sizes):
    """A Pair whose values are as wide as its keys: its programs are those of other files."""
    return pair(device, lengths, **{"EV": E} | sizes)
