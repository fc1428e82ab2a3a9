# SPDX-License-Identifier: MIT
"""Plans with numbers of the tuner: right results, for the problems of their class alone."""

import numpy as np
import pytest
import support.tuning as tuning
from clattn import _core
from references.attention import float32
from support.data import draw, sdpa
from support.launches import launched_once
from support.variants import each, with_kernels


@pytest.fixture(autouse=True)
def untuned(device):
    """Nothing is tuned before a test, nor after it."""
    tuning.clear(device)
    yield
    tuning.clear(device)


# Values that are macros of a kernel, and others.
SETTINGS = {
    "tiled": ["TILING=3 EC=32 KC=8", "TILING=7", "TILING=9 EC=16"],
    "mma": ["MT=1 BN=32 STRIP=16 STAGES=2 WARPS=8", "MT=2 BN=64 STRIP=64 STAGES=2 QUERIES=2",
                    "TOGETHER=4 WARPS=4 BN=64 STAGES=2"],
    "decode_gpu": ["SPLITS=400", "SPLITS=25"],
    "decode_mma": ["SPLITS=200"],
}  # fmt: skip


def parse(text):
    return {name: int(value) for name, value in (word.split("=") for word in text.split())}


@pytest.mark.full
@each(SETTINGS, "setting")
def test_right_results(device, variant, setting):
    """Both shapes of a variant; the same bits again."""
    tuning.tune_all(device, np.dtype(variant.dtype).name, variant.kernel, parse(setting))
    for shape in variant.shapes:
        arrays = variant.arrays(shape)
        variant.check(*arrays, device=device)
        first, again = (variant.call(*arrays, device=device)[0] for _ in range(2))
        assert first.tobytes() == again.tobytes()


def groups(device, E=64, Ev=None, L=129, dtype=float32):
    """The work-groups of a call whose keys and values have so many bytes that they are split."""
    Ev = Ev or E
    S = (17 << 16) // ((E + Ev) * np.dtype(dtype).itemsize)
    arrays = draw((L, E), dtype), draw((S, E), dtype, 1), draw((S, Ev), dtype, 2)
    return launched_once(sdpa, *arrays, device=device)[0].groups


# Problems by the class that they are of.
PROBLEMS = [
    ("float32-64-many", {}),
    ("float32-64-many", {"E": 50}),
    ("float32-80-many", {"E": 50, "Ev": 65}),
    ("float32-64-few", {"L": 20}),
    ("float32-64-decode", {"L": 3}),
    ("float16-64-many", {"dtype": np.float16}),
    ("none", {"E": 257, "L": 3}),
]


@pytest.mark.by_turns  # a plan depends on no driver, and so many rows take seconds without vectors
@with_kernels("decode_gpu")
def test_a_class_is_a_dtype_a_head_size_and_a_range_of_rows(device, variant):
    """More splits of the keys are more work-groups; problems of other classes keep theirs."""
    before = [groups(device, **options) for _, options in PROBLEMS]

    def more():
        found = [groups(device, **options) for _, options in PROBLEMS]
        return [now > old for now, old in zip(found, before, strict=True)]

    for one, _ in PROBLEMS[2:-1]:
        _core.tune(device, one, "decode_gpu", {"SPLITS": 200})
    assert more() == [False, False, True, True, True, True, False]
    tuning.clear(device)
    _core.tune(device, "float32-64-many", "decode_gpu", {"SPLITS": 200})
    assert more() == [True, True, False, False, False, False, False]


def test_what_is_set_is_what_is_listed(device):
    _core.tune(device, "bfloat16-96-few", "mma", {"MT": 2, "BN": 32})
    _core.tune(device, "bfloat16-96-few", "tiled", {"EC": 16})
    _core.tune(device, "float64-256-decode", "decode_gpu", {"SPLITS": 25})
    assert sorted(_core.tuned(device), key=str) == [
        ("bfloat16-96-few", "mma", {"MT": 2, "BN": 32}),
        ("bfloat16-96-few", "tiled", {"EC": 16}),
        ("float64-256-decode", "decode_gpu", {"SPLITS": 25}),
    ]
    _core.tune(device, "bfloat16-96-few", "mma", {"MT": 1})
    assert ("bfloat16-96-few", "mma", {"MT": 1}) in _core.tuned(device)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"class": "int8-64-many"}, "no class 'int8-64-many'"),
        ({"class": "float32-65-many"}, "no class 'float32-65-many'"),
        ({"class": "float32-64"}, "no class 'float32-64'"),
        ({"variant": "fast"}, "no variant 'fast' with knobs"),
        ({"variant": "cpu"}, "no variant 'cpu' with knobs"),
        ({"knobs": {"XX": 1}}, "tiled has no knob XX with the value 1"),
        ({"knobs": {"EC": 5}}, "tiled has no knob EC with the value 5"),
        ({"knobs": {"EC": 0}}, "tiled has no knob EC with the value 0"),
    ],
    ids=str,
)
def test_what_is_refused(device, change, message):
    good = {"class": "float32-64-many", "variant": "tiled", "knobs": {}}
    with pytest.raises(ValueError, match=message):
        _core.tune(device, *(good | change).values())
    assert _core.tuned(device) == []
    for knobs in ({"EC": 1.5}, {1: 1}, None):
        with pytest.raises(TypeError):
            _core.tune(device, *(good | {"knobs": knobs}).values())
    with pytest.raises(TypeError, match=r"clattn\.Device"):
        _core.tuned("cpu")
