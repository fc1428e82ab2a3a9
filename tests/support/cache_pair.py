# SPDX-License-Identifier: MIT
"""A KVCache and the model of it, side by side: each call goes to both."""

import copy

import clattn
import numpy as np
from references.attention import float32
from references.cache import CacheModel
from references.codes import WORDS, exact, kept
from support.checks import assert_close
from support.data import draw
from support.forced import weights_are_rounded
from support.sizes import REST, WIDE

B, HQ, HK, E, EV, CAPACITY = 2, 4, 2, WIDE, REST, 40


def host(tensor):
    """A copy on the host: it does not hand the Tensor's own memory out."""
    return np.array(tensor)


def bits(array):
    """A NaN has one of many bit patterns; which one does not matter for a scale."""
    array = np.ascontiguousarray(array)
    is_scale = array.dtype == np.float32
    return np.where(np.isnan(array), np.float32(np.nan), array) if is_scale else array


class Pair:
    """A cache and its model, which get the same calls; every answer is compared.

    A cache of codes has a second model, `given`, of the floats that it gets; `model` has the
    numbers that their codes stand for.
    """

    def __init__(self, device, B=B, HQ=HQ, HK=HK, capacity=CAPACITY, E=E, EV=EV, dtype=float32,
                 given=float32, **scales):  # fmt: skip
        self.word = dtype if isinstance(dtype, str) and dtype in WORDS else None
        self.device, self.dtype, self.seed = device, np.dtype(given if self.word else dtype), 0
        self.B, self.HQ, self.HK, self.E, self.EV = B, HQ, HK, E, EV
        sizes = (B, HK, capacity, E, EV)
        self.cache = clattn.KVCache(*sizes, dtype=dtype, device=device, **scales)
        self.model = CacheModel(*sizes, dtype=np.float64 if self.word else dtype)
        self.given = CacheModel(*sizes, dtype=self.dtype) if self.word else self.model
        self.scales = [np.broadcast_to(np.float32(scales.get(name, 1)), (HK,))[:, None, None]
                       for name in ("key_scale", "value_scale")]  # fmt: skip

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
        return self.take(*self.tokens(n), counts, of)

    def take(self, key, value, counts=None, of=lambda array: array):
        given = of(key), of(value)
        options = {} if counts is None else {"counts": counts}
        assert self.cache.append(*given, **options) is None
        self.given.append(key, value, counts)
        if self.word:
            codes = [exact(array, self.word, scale)
                     for array, scale in zip((key, value), self.scales, strict=True)]  # fmt: skip
            self.model.append(*codes, counts)
        return self.lengths_agree()

    def both_models(self, method, *arguments):
        assert getattr(self.cache, method)(*arguments) is None
        for model in {id(each): each for each in (self.model, self.given)}.values():
            getattr(model, method)(*arguments)
        return self.lengths_agree()

    def truncate(self, n):
        return self.both_models("truncate", n)

    def reset(self):
        return self.both_models("reset")

    def reorder(self, indices):
        return self.both_models("reorder", indices)

    def copy(self):
        """A pair of its own whose cache is a copy."""
        other = copy.copy(self)
        other.cache = self.cache.copy()
        other.model = copy.deepcopy(self.model)
        other.given = copy.deepcopy(self.given) if self.word else other.model
        return other.lengths_agree()

    def lengths_agree(self):
        lengths = self.cache.lengths
        assert type(lengths) is np.ndarray and lengths.dtype == np.int64
        assert lengths.tolist() == self.model.lengths
        assert type(self.cache.length) is int and self.cache.length == self.model.length
        return self

    def expected(self, which, b):
        """What is kept of the keys, 0, or the values, 1, of a sequence: elements or codes, …"""
        rows = (self.given.keys, self.given.values)[which][b]
        if self.word is None:
            return [rows]
        found = kept(rows, self.word, self.scales[which])
        return [part for part in found if part is not None]

    def contents_agree(self):
        """Keys and values, or their codes, bit for bit, of what each sequence holds."""
        self.lengths_agree()
        cache = self.cache
        held = [(cache.key, cache.key_scale, cache.key_offset),
                (cache.value, cache.value_scale, cache.value_offset)]  # fmt: skip
        for which, tensors in enumerate(held):
            parts = [tensor for tensor in tensors if tensor is not None and tensor.ndim > 1]
            got = [host(part) for part in parts]
            for part in parts:
                assert type(part) is clattn.Tensor and part.device == self.device
                assert part.shape[:3] == (self.B, self.HK, self.model.length)
            for b, length in enumerate(self.model.lengths):
                for found, right in zip(got, self.expected(which, b), strict=True):
                    assert found.dtype == right.dtype
                    found = found[b, :, :length]
                    assert found.shape == right.shape
                    if self.word:
                        found, right = bits(found), bits(right)
                    assert found.tobytes() == right.tobytes(), f"sequence {b}"
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


def check_cache(device, dtype):
    """Prompts of unequal lengths, sequences that change places, a few queries."""
    both = pair(device, (3, 1), capacity=6, E=9, EV=9, dtype=dtype)
    both.reorder([1, 0]).append(2, (2, 1)).contents_agree().attend(2)
