# SPDX-License-Identifier: MIT
"""Calls of clattn.openvino.scaled_dot_product_attention, compared with the oracle."""

import clattn
import numpy as np
import references.openvino as oracle
from support.checks import assert_close
from support.data import draw
from support.forced import weights_are_rounded


def call(*args, device, **options):
    return clattn.openvino.scaled_dot_product_attention(*args, device=device, **options)


def check_openvino(query, key, value, attention_mask=None, *, device, **options):
    """Call clattn, compare with the oracle, see that no input changed. Returns the result."""
    arrays = [a for a in (query, key, value, attention_mask) if isinstance(a, np.ndarray)]
    before = [a.tobytes() for a in arrays]
    args = (query, key, value) if attention_mask is None else (query, key, value, attention_mask)
    result = call(*args, device=device, **options)
    assert before == [a.tobytes() for a in arrays], "an input was modified"
    assert type(result) is np.ndarray
    assert result.dtype == query.dtype.newbyteorder("=")
    rounds = weights_are_rounded(result, lambda: call(*args, device=device, **options))
    right = oracle.judged(*args, rounds_weights=rounds, **options)
    assert_close(result, right.result, right.allowed)
    assert not result[np.isneginf(right.lse)].any(), "empty rows have to be zero"
    return result


def arrays(leads, L=3, S=5, E=8, Ev=5, dtype=np.float32):
    """Query, key and value with leading dimensions of their own."""
    q, k, v = leads
    return draw((*q, L, E), dtype, 1), draw((*k, S, E), dtype, 2), draw((*v, S, Ev), dtype, 3)
