# SPDX-License-Identifier: MIT
"""Packed sequences, their keys in pages, and the comparison with a call for each sequence."""

from typing import NamedTuple

import clattn
import numpy as np
from references.attention import attention, tolerance
from support.checks import assert_close
from support.data import draw
from support.forced import weights_are_rounded

NAN = np.nan


class Packed(NamedTuple):
    """Rows of sequences, packed; NaN behind the last one."""

    query: np.ndarray  # (total_q, Hq, E)
    key: np.ndarray  # (total_k, Hk, E)
    value: np.ndarray
    cu_seq_q: np.ndarray
    cu_seq_k: np.ndarray

    def of(self, b):
        """Query, key and value of sequence b, heads first."""
        (q0, q1), (k0, k1) = self.cu_seq_q[b : b + 2], self.cu_seq_k[b : b + 2]
        parts = self.query[q0:q1], self.key[k0:k1], self.value[k0:k1]
        return tuple(part.swapaxes(0, 1) for part in parts)


def packed(rows, keys, Hq=4, Hk=2, E=16, Ev=None, dtype=np.float32, behind=2, seed=0):
    """Sequences of so many rows and keys, with `behind` rows of NaN behind the last one."""
    cu_seq_q, cu_seq_k = (
        np.concatenate([[0], np.cumsum(n)]).astype(np.int64) for n in (rows, keys)
    )
    shapes = (cu_seq_q[-1], Hq, E), (cu_seq_k[-1], Hk, E), (cu_seq_k[-1], Hk, Ev or E)
    arrays = [draw(shape, dtype, seed * 3 + n) for n, shape in enumerate(shapes)]
    nothing = [np.full((behind, *array.shape[1:]), NAN, dtype) for array in arrays]
    joined = (np.concatenate(pair) for pair in zip(arrays, nothing, strict=True))
    return Packed(*joined, cu_seq_q, cu_seq_k)


def in_pages(given, page_size, layout="HND", spare=2, seed=0, more=()):
    """Keys, values, and `more` arrays with a number for each key and head, in permuted pages.

    Unused rows hold NaN, or the largest integer. The last result is the table.
    """
    lengths = np.diff(given.cu_seq_k)
    counts = -(-lengths // page_size)
    order = np.random.default_rng(seed).permutation(counts.sum() + spare)
    table = np.full((len(lengths), counts.max(initial=0) + 1), -1, np.int32)
    for b, count in enumerate(counts):
        table[b, :count], order = order[:count], order[count:]
    arrays = (given.key, given.value, *more)
    return *(
        _page(array, given.cu_seq_k, table, page_size, layout, spare) for array in arrays
    ), table


def _page(array, offsets, table, page_size, layout, spare):
    filler = np.iinfo(array.dtype).max if array.dtype.kind in "iu" else NAN
    used = int((table >= 0).sum())
    pages = np.full((used + spare, page_size, *array.shape[1:]), filler, array.dtype)
    for b, row in enumerate(table):
        own = array[offsets[b] : offsets[b + 1]]
        for n, page in enumerate(row[row >= 0]):
            part = own[n * page_size : (n + 1) * page_size]
            pages[page, : len(part)] = part
    return np.ascontiguousarray(pages.swapaxes(1, 2)) if layout == "HND" else pages


def seen(rows, keys, is_causal=False, window_size=(-1, -1)):
    """Which keys a sequence's rows see: bool (rows, keys), by the words of the docstring."""
    i, j = np.arange(rows)[:, None], np.arange(keys)[None]
    p = i + keys - rows
    allowed = np.ones((rows, keys), bool)
    if is_causal is True:
        allowed &= j <= i
    elif is_causal:
        allowed &= j <= p
    left, right = window_size
    if left >= 0:
        allowed &= j >= p - left
    if right >= 0:
        allowed &= j <= p + right
    return allowed


def run(given, device, page_size=None, page_layout="HND", **options):
    """The output and log-sum-exp of a call, with keys packed or in pages."""
    if page_size is None:
        keys = {"cu_seq_k": given.cu_seq_k}
        key, value = given.key, given.value
    else:
        key, value, table = in_pages(given, page_size, page_layout)
        lengths = np.diff(given.cu_seq_k)
        keys = {"block_table": table, "seqused_k": lengths, "page_layout": page_layout}
    return clattn.varlen_attn(
        given.query, key, value, given.cu_seq_q,
        enable_gqa=True, return_lse=True, device=device, **keys, **options,
    )  # fmt: skip


def check_sequences(given, device, page_size=None, page_layout="HND", **options):
    """The call gives what a call for each sequence gives."""

    def call():
        return run(given, device, page_size, page_layout, **options)

    output, lse = call()
    rounds = weights_are_rounded(output, lambda: call()[0])
    check_results(given, output, lse, rounds, **options)


def check_results(
    given, output, lse, rounds, is_causal=False, window_size=(-1, -1), bias=None, **options
):
    """Results are those of each sequence, within what its own tolerances allow.

    `bias` is a function of (b, rows, keys) that returns what mods add to scores.
    """
    for b in range(len(given.cu_seq_q) - 1):
        query, key, value = given.of(b)
        rows = slice(*given.cu_seq_q[b : b + 2])
        mask = seen(query.shape[1], key.shape[1], is_causal, window_size)
        if bias is not None:
            mask = np.where(mask, bias(b, *mask.shape), np.float32(-np.inf))
        call = {"attn_mask": mask, "enable_gqa": True, **options}
        right, right_lse = attention(query, key, value, **call)
        allowed, allowed_lse = tolerance(query, key, value, rounds_weights=rounds, **call)
        assert_close(output[rows].swapaxes(0, 1), right, allowed, f"sequence {b}")
        assert_close(lse[:, rows], right_lse, allowed_lse, f"log-sum-exp of sequence {b}")
    behind = given.cu_seq_q[-1]
    assert (output[behind:] == 0).all()
    assert (lse[:, behind:] == -np.inf).all()
