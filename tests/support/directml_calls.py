# SPDX-License-Identifier: MIT
"""Calls of clattn.directml.multihead_attention, compared with the oracle."""

import clattn
import numpy as np
import pytest
import references.directml as oracle
from references.attention import float16, float32
from support.checks import assert_close
from support.forced import weights_are_rounded

HALF_AND_SINGLE = pytest.mark.parametrize("dtype", [float32, float16], ids=str)


def run(call, *, device, **more):
    return clattn.directml.multihead_attention(**call, **more, device=device)


def compare(call, result, *, device):
    """The output against the oracle."""
    rounds = weights_are_rounded(result, lambda: run(call, device=device).output)
    right, allowed = oracle.judged(call, rounds_weights=rounds)
    assert type(result) is np.ndarray
    assert result.dtype == oracle.sources(call)[0].dtype
    assert_close(result, right, allowed)


def check_alone(call, *, device):
    """Without the present outputs: another program, so few tests run it beside `check_directml`."""
    alone = run(call, device=device)
    assert alone.present_key is None and alone.present_value is None
    compare(call, alone.output, device=device)


def check_directml(call, *, device):
    """With the present outputs; inputs unchanged. Returns the output."""
    arrays = [a for a in call.values() if isinstance(a, np.ndarray)]
    before = [a.tobytes() for a in arrays]
    answer = run(call, device=device, return_present=True)
    compare(call, answer.output, device=device)
    presents = (answer.present_key, answer.present_value)
    for got, right in zip(presents, oracle.present(call), strict=True):
        assert type(got) is np.ndarray
        assert got.dtype == right.dtype and got.shape == right.shape
        assert got.tobytes() == right.tobytes(), "present"
    assert before == [a.tobytes() for a in arrays], "an input was modified"
    return answer.output
