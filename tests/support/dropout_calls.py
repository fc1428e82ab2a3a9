# SPDX-License-Identifier: MIT
"""Calls with dropout, compared with the oracle."""

import numpy as np
import references.dropout as oracle
from references.attention import compute_dtype
from support.checks import assert_close
from support.data import sdpa
from support.forced import weights_are_rounded

P, SEED = 0.3, 0x0123_4567_89AB_CDEF


def check_dropout(query, key, value, *, device, **options):
    """With and without the lse, against the oracle; inputs unchanged. Returns the result."""
    options = {"dropout_p": P, "seed": SEED} | options
    arrays, known = oracle.translated(query, key, value, options)
    inputs = [a for a in (query, key, value, options.get("attn_mask")) if a is not None]
    before = [a.tobytes() for a in inputs]
    result = sdpa(query, key, value, device=device, **options)
    both = sdpa(query, key, value, device=device, **options, return_lse=True)
    if options.get("out") is None:
        assert before == [a.tobytes() for a in inputs], "an input was modified"
    again = options | {"out": None}
    rounds = weights_are_rounded(result, lambda: sdpa(query, key, value, device=device, **again))
    right, right_lse = oracle.judged(*arrays, rounds_weights=rounds, **known)
    for got in (result, both[0]):
        assert type(got) is np.ndarray
        assert got.dtype == query.dtype.newbyteorder("=")
        assert_close(got, *right)
    assert both[1].dtype == compute_dtype(arrays[0].dtype)
    assert_close(both[1], *right_lse, "lse")
    assert not result[np.isneginf(both[1])].any(), "rows without a key have to be zero"
    return result
