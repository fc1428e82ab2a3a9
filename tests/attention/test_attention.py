# SPDX-License-Identifier: MIT
"""scaled_dot_product_attention with the kernel that clattn chooses: shapes, arguments, dtypes.

What a kernel does with its numbers is in test_kernel_contract.py, for every variant.
"""

import ml_dtypes
import numpy as np
import pytest
from references.attention import (
    DTYPES,
    attention,
    bfloat16,
    compute_dtype,
    eps,
    float16,
    float32,
    tolerance,
)
from support.checks import assert_close, check_attention
from support.data import draw, qkv, sdpa
from support.launches import chosen
from support.loops import looped, looped_dtypes
from support.variants import VARIANTS, force, skip_unless_used, takes_cpu_kernels

pytestmark = pytest.mark.tensors

SHAPES = {  # leading dimensions, L, S, E, Ev
    "one of everything": ((1, 1), 1, 1, 8, 8),
    "one query": ((2, 3), 1, 193, 64, 64),
    "one key": ((2, 3), 33, 1, 8, 8),
    "few queries": ((1, 2), 3, 100, 64, 64),
    "one lane short of a tile": ((1, 2), 31, 31, 64, 64),
    "odd": ((2, 3), 97, 113, 64, 64),
    "more queries than keys": ((1, 1), 193, 17, 64, 64),
    "many small heads": ((9, 33), 3, 3, 8, 8),
}


@looped("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(device, shape):
    check_attention(*qkv(*shape), device=device)


LEADS = {  # of query, key, value
    "2-D": ((), (), ()),
    "3-D": ((3,), (3,), (3,)),
    "5-D": ((2, 1, 2), (2, 1, 2), (2, 1, 2)),
    "6-D": ((2, 1, 3, 2), (2, 1, 3, 2), (2, 1, 3, 2)),
    "one key for every batch": ((3, 2), (1, 2), (1, 2)),
    "one query for every batch": ((1, 2), (3, 2), (3, 2)),
    "one key head": ((2, 4), (2, 1), (2, 1)),
    "one query head": ((2, 1), (2, 4), (2, 4)),
    "value alone has batches": ((2,), (2,), (3, 2)),
    "key without batches": ((2, 3), (3,), (2, 1)),
    "all three differ": ((2, 1, 1), (1, 3, 1), (1, 1, 4)),
    "6-D against 2-D": ((2, 1, 2, 1), (), (3, 1, 2)),
}


@looped("lead", LEADS.values(), ids=LEADS)
def test_ranks_and_broadcasting(device, lead):
    """Leading dimensions broadcast as NumPy's do, missing ones included."""
    q = draw((*lead[0], 17, 8))
    k = draw((*lead[1], 33, 8), seed=1)
    v = draw((*lead[2], 33, 8), seed=2)
    check_attention(q, k, v, device=device)


def test_grouped_heads_with_broadcast_batches(device):
    q, k, v = draw((2, 3, 4, 17, 8)), draw((3, 2, 33, 8)), draw((2, 1, 2, 33, 8))
    check_attention(q, k, v, device=device, enable_gqa=True)
    check_attention(
        draw((4, 3, 8)), draw((2, 5, 8)), draw((2, 5, 8), seed=1), device=device, enable_gqa=True
    )


SCALES = [None, 0.3, 0.0, -0.7, 2, np.float32(0.5), np.int64(1), 5.0]


def test_numbers_of_any_type(device):
    """Any finite scale, 1 / sqrt(E) when there is none; any softcap from 0 on."""
    arrays = qkv((1, 2), 17, 33, 8)
    for scale in SCALES:
        check_attention(*arrays, device=device, scale=scale)
    for softcap in (3, np.float32(0.5), np.int64(2), 0):
        check_attention(*arrays, device=device, softcap=softcap)
        check_attention(*arrays, device=device, softcap=softcap, scale=4.0, is_causal=True)


@looped_dtypes("dtype", DTYPES)
def test_return_lse(device, dtype):
    """Tuple (result, lse); lse has the compute type and belongs to the masked, capped scores."""
    q, k, v = qkv((2, 2), 17, 33, 8, dtype=dtype)
    answer = sdpa(q, k, v, device=device, is_causal=True, scale=0.5, return_lse=True)
    assert isinstance(answer, tuple) and len(answer) == 2
    result, lse = answer
    assert lse.shape == (2, 2, 17) and lse.dtype == compute_dtype(dtype)
    alone = sdpa(q, k, v, device=device, is_causal=True, scale=0.5)
    np.testing.assert_array_equal(result, alone)
    check_attention(q, k, v, device=device, is_causal=True, scale=0.5)


def test_result_is_contiguous_and_new(device):
    q, k, v = qkv()
    first, second = sdpa(q, k, v, device=device), sdpa(q, k, v, device=device)
    assert first.flags.c_contiguous and first.flags.writeable
    assert not np.shares_memory(first, second)


EMPTIES = {  # leading dimensions, L, S, E, Ev
    "B": ((0, 3), 5, 7, 8, 8),
    "heads": ((2, 0), 5, 7, 8, 8),
    "L": ((2, 3), 0, 7, 8, 8),
    "Ev": ((2, 3), 5, 7, 8, 0),
    "L and S": ((2, 3), 0, 0, 8, 8),
    "everything": ((0, 0), 0, 0, 0, 0),
}


@looped("shape", EMPTIES.values(), ids=EMPTIES)
def test_empty_dimensions(device, shape):
    """An empty dimension of the result gives an empty result."""
    result = check_attention(*qkv(*shape), device=device)
    assert result.size == 0


@looped_dtypes("dtype", DTYPES)
def test_no_head_size_gives_the_mean(device, dtype):
    """E = 0: every score is 0, so the mean of the values that are attended."""
    q, k, v = qkv((2, 3), 5, 7, 0, 8, dtype=dtype)
    check_attention(q, k, v, device=device)
    check_attention(q, k, v, device=device, is_causal=True)


def test_lse_without_value_columns(device):
    """Ev = 0 leaves the lse, which does not need values."""
    q, k, v = qkv((2, 3), 5, 7, 8)
    empty, lse = sdpa(q, k, v[..., :0], device=device, return_lse=True)
    assert empty.shape == (2, 3, 5, 0)
    assert_close(lse, attention(q, k, v)[1], tolerance(q, k, v)[1])


def test_large_scores(device):
    """Scores of 1e4 and 1e30: the maximum is subtracted before exp, nothing overflows."""
    for scale in (1e4, -1e4, 1e30):
        q, k, v = np.ones((1, 3, 8), np.float32), np.zeros((1, 5, 8), np.float32), draw((1, 5, 8))
        k[0, 2] = 1
        check_attention(q, k, v, device=device, scale=scale)


@looped_dtypes("dtype", [float16, bfloat16])
def test_one_key_gives_every_half_back(device, kernel, dtype):
    """S = 1: the result is the value, bit for bit, for every finite number of the type.

    bfloat16's subnormals are float32's, which a device may flush to zero.
    """
    every = np.arange(65536, dtype=np.uint16).view(dtype)
    finite = every[np.isfinite(every.astype(np.float32))]
    value = np.resize(finite, (1024, 1, 64))
    zeros = np.zeros((1024, 1, 64), dtype)
    result = sdpa(zeros, zeros, value, device=device).astype(np.float32)
    value = value.astype(np.float32)
    tiny = np.finfo(np.float32).tiny
    flushed = (np.abs(value) < tiny) & (result == 0)
    np.testing.assert_array_equal(result[~flushed], value[~flushed])


@looped_dtypes("dtype", [float32, bfloat16])
def test_long_rows(device, kernel, dtype):
    """Thousands of keys: the error of a long sum stays that of the plain computation."""
    check_attention(*qkv((1, 2), 33, 4099, 64, dtype=dtype), device=device)


def test_an_unknown_kernel_is_refused(device, monkeypatch):
    for words in ("no-such-kernel", "-tiled,-tile", "cpu,-mma", "-tiled,cpu", "-"):
        with pytest.raises(ValueError, match=f'CLATTN_KERNEL is "{words}"; expected .*"-mma'):
            force(monkeypatch, words)
    force(monkeypatch)
    check_attention(*qkv(), device=device)


@pytest.mark.arrays_only
def test_variants_are_left_out(device):
    """The next variant that takes the problem runs; the reference takes every problem."""
    first, second = ("decode_cpu", "cpu") if takes_cpu_kernels(device) else ("decode_gpu", "tiled")
    skip_unless_used(device, first, second)
    everything = ",".join(f"-{variant.kernel}" for variant in VARIANTS)
    arrays = qkv((1, 2), 1, 300, 64)
    for words, variant in (
        (None, first),
        (first, first),
        (second, second),
        (f"-{first}", second),
        ("reference", "reference"),
        (everything, "reference"),
    ):
        assert chosen(words, sdpa, *arrays, device=device) == variant, words


WRONG_WORDS = {
    "-": '"-"; expected',
    "-mma,no": '"-mma,no"; expected',
    "-mma,-tile": '"-mma,-tile"; expected',
    "-mma,tiled": '"-mma,tiled"; expected',
    "-reference": "cannot be left out",
    "cpu_emulated": '"cpu_emulated"; expected',
    "_emulated": '"_emulated"; expected',
}


@looped("words", WRONG_WORDS)
def test_variants_that_cannot_be_left_out(monkeypatch, words):
    with pytest.raises(ValueError, match=WRONG_WORDS[words]):
        force(monkeypatch, words)


def test_arguments_by_position_as_torch_has_them(device):
    """attn_mask, dropout_p, is_causal, scale and enable_gqa may be positional."""
    q, k, v = qkv((1, 4), 5, 7, 8)
    mask = draw((5, 7)) > 0
    right, _ = attention(q, k[:, :2], v[:, :2], attn_mask=mask, is_causal=True, scale=0.5,
                         enable_gqa=True)  # fmt: skip
    got = sdpa(q, k[:, :2], v[:, :2], mask, 0.0, True, 0.5, True, device=device)
    assert_close(got, right, 1e-6)


def test_a_seed_changes_nothing_without_dropout(device):
    q, k, v = qkv()
    plain = sdpa(q, k, v, device=device)
    np.testing.assert_array_equal(sdpa(q, k, v, device=device, seed=7), plain)


def test_ml_dtypes_bfloat16_comes_back(device):
    """The result has ml_dtypes' own dtype, and about its precision."""
    q, k, v = qkv(dtype=bfloat16)
    result = sdpa(q, k, v, device=device)
    assert result.dtype == ml_dtypes.bfloat16
    right, _ = attention(q, k, v)
    assert_close(result, right, 2 * eps(bfloat16))
