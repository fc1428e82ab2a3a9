# SPDX-License-Identifier: MIT
"""_core.launched, by which tests see which kernels a call has run."""

import clattn
from support.data import qkv, sdpa
from support.launches import launched_by
from support.threads import run_together

launched = clattn._core.launched


def matrix(device, columns=4):
    return clattn.diagonal_matrix((3, columns), 1.0, 0, 1, device=device)


def names():
    return [name for name, _, _ in launched()]


def test_kernels_in_their_order(device):
    """Each is told once, with what it was built with."""
    q, k, v = qkv((1, 2), 40, 70, 64)
    for _ in range(2):  # the first time kernels may be tried
        launched()
        matrix(device)
        sdpa(q, k, v, device=device)
        matrix(device)
        entries = launched()
    first, *others, last = [name for name, _, _ in entries]
    assert first == last == "diagonal_band"
    assert all(name.startswith("attention_") for name in others) and others
    macros = dict(entries[1][1])
    assert macros["DTYPE"] == macros["VALUE_DTYPE"] and macros["REAL64"] == 0
    assert launched() == []


def test_a_call_that_launches_nothing(device):
    q, k, v = qkv((1, 2), 0, 70, 64)
    assert launched_by(sdpa, q, k, v, device=device) == []


def test_work_groups(device):
    few, many = (launched_by(matrix, device, columns)[-1].groups for columns in (4, 1 << 20))
    assert 0 < few < many


def test_each_thread_sees_its_own(device):
    matrix(device)
    launched()
    found = {}

    def draws():
        matrix(device)
        found["other"] = names()

    run_together(draws)
    assert found["other"][-1:] == ["diagonal_band"]
    assert names() == []


def test_the_last_ones_are_remembered(device):
    launched()
    for _ in range(300):
        matrix(device)
    assert names() == ["diagonal_band"] * 256
