# SPDX-License-Identifier: MIT
"""Calls with dropout, compared with the oracle."""

import numpy as np
import references.attention as reference
import references.dropout as oracle
from references.attention import compute_dtype
from support.helpers import assert_close, sdpa

P, SEED = 0.3, 0x0123_4567_89AB_CDEF


def check(query, key, value, *, device, rounds_weights=False, **options):
    """With and without the lse, against the oracle; inputs unchanged. Returns the result.

    `rounds_weights`: see `references.attention.tolerance`.
    """
    options = {"dropout_p": P, "seed": SEED} | options
    arrays, known = oracle.translated(query, key, value, options)
    right = oracle.attention(*arrays, **known)
    allowed = oracle.tolerance(*arrays, rounds_weights=rounds_weights, **known)
    inputs = [a for a in (query, key, value, options.get("attn_mask")) if a is not None]
    before = [a.tobytes() for a in inputs]
    result = sdpa(query, key, value, device=device, **options)
    both = sdpa(query, key, value, device=device, **options, return_lse=True)
    if options.get("out") is None:
        assert before == [a.tobytes() for a in inputs], "an input was modified"
    for got in (result, both[0]):
        assert type(got) is np.ndarray
        assert got.dtype == query.dtype.newbyteorder("=")
        assert_close(got, right, allowed)
    without = {n: a for n, a in known.items() if n not in ("dropout_p", "seed")}
    right_lse = reference.attention(*arrays, **without)[1]
    allowed_lse = reference.tolerance(*arrays, **without)[1]
    assert both[1].dtype == compute_dtype(arrays[0].dtype)
    assert_close(both[1], right_lse, allowed_lse, "lse")
    assert not result[np.isneginf(both[1])].any(), "rows without a key have to be zero"
    return result
