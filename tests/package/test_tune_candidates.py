# SPDX-License-Identifier: MIT
"""python -m clattn tune: which classes come first, and what is tried for each."""

import itertools
from types import SimpleNamespace

import pytest
from clattn import _core
from clattn._host import tuning

pytest.importorskip("rich")
from clattn._commands.tune import candidates, command

GPUS = [SimpleNamespace(type="gpu", nvidia_capability=n, float_width=1) for n in (90, 0)]


@pytest.mark.parametrize("gpu", [None, *GPUS], ids=["cpu", "matrix-units", "gpu"])
def test_every_class_has_candidates(device, gpu):
    """Legal ones, of the variant for its problems, whose rows are of the class."""
    if device.type != "cpu":
        pytest.skip("the candidates are those of CPUs, and of two made-up GPUs")
    legal = _core.tunables()[3]
    some = gpu or device
    found = [one for one in tuning.classes() if candidates.has_candidates(one, some)]
    assert len(found) == (60 if gpu else 80)
    for one, special in itertools.product(found, (("amx", "pairs"), ("pairs",), ())):
        variant = candidates.variant_of(one, some, special)
        stages = list(candidates.stages(one, variant, some))
        assert sum(map(len, stages)) == candidates.count(one, variant, some) > 3
        for knobs in (knobs for stage in stages for knobs in stage):
            assert all(value in legal[variant][name] for name, value in knobs.items())
            assert knobs.get("NV", 1) * knobs.get("MR", 1) <= 24  # sums that registers hold
        timed, guard, *checked = candidates.problems_of(one, some)
        for row in (*timed, *guard, *checked):
            _, Hq, Hk, L, _, E = row.shape
            rows = Hq // Hk * L
            assert one.head_size == E and row.dtype == one.dtype
            kind = "decode" if rows < 16 else "few" if rows <= 128 else "many"
            assert kind == one.rows or one.rows == "threshold", row
        if one.rows == "threshold":  # each candidate changes something
            counts = [row.shape[1] // row.shape[2] * row.shape[3] for row in timed]
            values = legal[variant]["ROWS"]
            assert len({tuple(n < v for n in counts) for v in (16, *values)}) == len(values) + 1


def test_common_problems_come_first():
    def names(kind):
        return list(map(str, command._by_value(set(tuning.classes()), SimpleNamespace(type=kind))))

    cpu, gpu = names("cpu"), names("gpu")
    assert sorted(cpu) == sorted(gpu) == sorted(map(str, tuning.classes()))
    assert cpu[:2] == ["float32-64-many", "float32-128-many"]
    assert gpu[:2] == ["float16-64-many", "float16-128-many"]
    assert all("float64" in name for name in cpu[-20:])
