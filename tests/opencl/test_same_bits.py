# SPDX-License-Identifier: MIT
"""The same call gives the same bits in every process, by a new program and by one of the cache."""

import json

import pytest
from support.processes import run_on
from support.variants import POCL, forced

CALLS = """
import hashlib, json
import ml_dtypes

def attend(L, S, dtype="f4", **options):
    return sdpa(*qkv((1, 3), L, S, 64, dtype=np.dtype(dtype)), device=device, **options)

def cached(dtype="float32"):
    cache = clattn.KVCache(1, 3, 300, 64, dtype=dtype, device=device)
    q, k, v = qkv((1, 3), 257, 257, 64)
    cache.append(k, v)
    return cache.attend(q[:, :, -1:])

def paged(dtype):
    cache = clattn.PagedKVCache(1, 300, 3, 64, dtype=dtype, device=device)
    rows = [array[0].swapaxes(0, 1) for array in qkv((1, 3), 257, 257, 64)[:2]]
    (sequence,) = cache.open()
    cache.append(sequence, *rows)
    output = cache.attend(draw((14, 6, 64)), [sequence] * 2, [0, 1, 14])
    return cache.key.numpy()[:, :, :257].copy(), cache.value.numpy()[:, :, :257].copy(), output

calls = {
    "many rows": lambda: attend(130, 257, is_causal=True, return_lse=True),
    "one row, whose keys are split": lambda: attend(1, 3000, return_lse=True),
    "bfloat16": lambda: attend(40, 257, ml_dtypes.bfloat16),
    "dropout": lambda: attend(40, 257, dropout_p=0.4, seed=5),
    "a cache": cached,
    "a cache of codes": lambda: cached("int4"),
    "sequences": lambda: clattn.varlen_attn(*draw((3, 90, 2, 64)), [0, 1, 90], [0, 70, 90],
                                            return_lse=True, device=device),
    "pages": lambda: paged("float32"),
    "pages of codes": lambda: paged("int8"),
    "a matrix": lambda: clattn.diagonal_matrix(draw((70, 90)), 3, -2, 4, device=device),
}

def digest(answer):
    arrays = answer if isinstance(answer, tuple) else (answer,)
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()

found = {name: digest(call()) for name, call in calls.items()}
print(json.dumps([found, clattn._core.built_programs()[0]]))
"""


@pytest.fixture
def bits(device):
    """Runs the calls in a new process: (digests of results, programs built from source)."""

    def run(cache):
        env = {"XDG_CACHE_HOME": cache, "POCL_CACHE_DIR": cache / "pocl"}
        return json.loads(run_on(device, CALLS, env=env | forced()).stdout)

    return run


@pytest.mark.by_turns
def test_every_process_gives_the_same_bits(device, bits, tmp_path):
    """Two processes that build their programs, and one that finds those of the first."""
    first, built = bits(tmp_path / "first")
    assert len(set(first.values())) == len(first), "calls differ, and so do their bits"
    second, built_again = bits(tmp_path / "second")
    assert built == built_again > 0
    assert second == first
    third, found = bits(tmp_path / "first")
    assert found == 0 or device.platform == POCL, "the programs come from the cache"
    assert third == first
