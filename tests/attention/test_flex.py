# SPDX-License-Identifier: MIT
"""flex_attention against NumPy's evaluation of the same mods: kernels, shapes, dtypes, arrays."""

from functools import partial

import clattn
import numpy as np
import pytest
from references.attention import bfloat16, float16, float64
from support.data import draw, qkv
from support.foreign import JAX, TORCH
from support.layouts import columns_first, negative_rows, sliced, transposed
from support.mods import (
    COMPOSITE,
    GALLERY,
    PLACES,
    SLOPES,
    alibi,
    alibi_of,
    call,
    check_flex,
    check_mods,
    excluding,
    lookup,
    window,
)
from support.sizes import SMALL, WIDE
from support.tensors import same_bits, strided
from support.threads import run_together
from support.variants import force, takes_cpu_kernels

# ---- kernels ----


SHAPES = [(2, 4, 2, 9, 135)]
MORE_SHAPES = [(1, 6, 2, 41, 300), (3, 8, 8, 1, 16), (2, 8, 1, 3, 77)]


@pytest.mark.full
@pytest.mark.options
@pytest.mark.parametrize("shape", ["rows and groups"])
def test_variants(device, variant, shape):
    """Every type and kind of operation where vectors are rows or keys. Kernels for GPUs have
    single numbers, as the reference kernel: there the places matter.
    """
    mods = COMPOSITE if variant.cpu_only else PLACES
    for size in SHAPES + (MORE_SHAPES if variant.kernel in ("cpu", "decode_cpu") else []):
        check_mods(*variant.arrays(size), mods=mods, blocks=mods is PLACES, device=device)


def test_reference_kernel(device, monkeypatch):
    force(monkeypatch, "reference")
    for B, Hq, Hk, L, S in SHAPES + MORE_SHAPES:
        arrays = draw((B, Hq, L, SMALL)), *qkv((B, Hk), L, S, SMALL)[1:]
        check_mods(*arrays, mods=COMPOSITE, device=device)


@pytest.mark.full
@pytest.mark.parametrize("name", GALLERY)
def test_gallery(device, name):
    """On the kernel that is chosen. A softcap comes after the score_mod, and excludes no more."""
    score_mod, mask_mod = GALLERY[name]
    softcap = 0.5 if score_mod is excluding else 0.0
    check_flex(*qkv((2, 8), 43, 130, SMALL), device=device, score_mod=score_mod,
               mask_mod=mask_mod, softcap=softcap)  # fmt: skip


# ---- shapes and layouts: data, which no program depends on ----

ALIBI = {"score_mod": alibi, "mask_mod": window}


@pytest.fixture
def reference_check(device, monkeypatch):
    """The check of a call with mods by the reference kernel, of which all make one program.

    Every kernel has a row's place from the same function.
    """
    force(monkeypatch, "reference")
    return partial(check_flex, device=device, **COMPOSITE)


@pytest.mark.by_turns
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (3, 1), (2, 2, 3), (2, 3, 2, 2)], ids=str)
def test_dimensions(reference_check, lead):
    reference_check(*qkv(lead, 9, 37, SMALL))


@pytest.mark.by_turns
@pytest.mark.parametrize("sizes", [(1, 1), (1, 300), (3, 37), (37, 3), (130, 1), (300, 130)])
def test_lengths(reference_check, sizes):
    reference_check(*qkv((2, 3), *sizes, SMALL))


@pytest.mark.parametrize("shape", [(0, 2, 3, 5), (2, 0, 3, 5), (2, 2, 0, 5), (2, 2, 3, 0)])
def test_empty_dimensions(reference_check, shape):
    B, H, L, S = shape
    reference_check(*qkv((B, H), L, S, SMALL))
    reference_check(draw((B, H, L, 0)), draw((B, H, S, 0)), draw((B, H, S, 3)))


@pytest.mark.parametrize("heads", [(6, 2), (4, 1), (3, 3)], ids=str)
def test_grouped_heads(reference_check, heads):
    """h is the query's head."""
    Hq, Hk = heads
    k, v = qkv((2, Hk), 5, 33, SMALL)[1:]
    reference_check(draw((2, Hq, 5, SMALL)), k, v, enable_gqa=True)
    reference_check(draw((3, 2, Hq, 5, SMALL)), k, v, enable_gqa=True)


SHARED = [(1, 1), (2, 1), (1, 3), (2, 3)]


@pytest.mark.by_turns
@pytest.mark.parametrize(("kernel_name", "L"), [("reference", 3), ("cpu", 9), ("decode_cpu", 3)])
@pytest.mark.parametrize("lead", SHARED, ids=str)
def test_keys_that_batches_and_heads_share(device, monkeypatch, kernel_name, L, lead):
    """Rows that are computed together still belong to one batch and head each."""
    if takes_cpu_kernels(device):
        force(monkeypatch, kernel_name)
    q, (k, v) = draw((2, 3, L, WIDE)), qkv(lead, 5, 33, WIDE)[1:]
    k, v = (np.broadcast_to(a, (2, 3, 33, WIDE)) for a in (k, v))
    check_flex(q, k, v, device=device, **COMPOSITE)


@pytest.mark.parametrize("layout", [sliced, negative_rows, columns_first, transposed])
def test_layouts(reference_check, layout):
    arrays = qkv((2, 3), 9, 37, SMALL)
    out = layout(np.full((2, 3, 9, SMALL), -1, np.float32))
    assert reference_check(*map(layout, arrays), out=out) is out
    reference_check(*qkv((2, 1), 9, 37, SMALL), out=out[:, :1])


def test_float64(device, monkeypatch):
    """Numbers and functions of such calls are double, of others float: see the variants."""
    force(monkeypatch, "reference")
    check_flex(*qkv((2, 8), 9, 37, SMALL, dtype=float64), device=device, **COMPOSITE)


# ---- tables ----

# Besides int32 and float32, which the tests above have.
TABLE_DTYPES = [bool, "int8", "int16", "int64", "uint8", "uint16", "uint32", "uint64", float16,
                bfloat16, float64]  # fmt: skip


def table_of(dtype):
    """Numbers of a dtype, and the ends of its range."""
    numbers = draw((5, 7), seed=4)
    table = (numbers > 0 if dtype is bool else np.abs(numbers) * 40).astype(dtype)
    if table.dtype.kind in "iu":
        ends = np.iinfo(table.dtype)
        table[1, :2] = max(ends.min, -(2**50)), min(ends.max, 2**50 + 1)
    return table


LAYOUTS = {
    "dense": lambda a: a,
    "backwards": lambda a: a[::-1, ::-1].copy()[::-1, ::-1],
    "columns first": np.asfortranarray,
    "apart": sliced,
    "one row": lambda a: np.broadcast_to(a[:1], a.shape),
    "one element": lambda a: np.broadcast_to(a[:1, :1], a.shape),
}


def scores_of(tables, weigh):
    """The mod that adds some of each table's numbers, weighed, to a score."""

    def mod(score, b, h, q_idx, kv_idx):
        for n, table in enumerate(tables):
            score = score + weigh(lookup(table, q_idx % 5, (kv_idx + n) % 7))
        return score

    return mod


@pytest.mark.by_turns
@pytest.mark.parametrize("dtypes", [TABLE_DTYPES[n::3] for n in range(3)], ids=str)
def test_dtypes_and_layouts_of_tables(device, monkeypatch, dtypes):
    """Four tables in a program."""
    force(monkeypatch, "reference")

    def weigh(x):
        return x.astype(np.int64) % 1001 * 0.0009765625

    dense = [table_of(dtype) for dtype in dtypes]
    for layout in LAYOUTS.values():
        tables = [layout(table) for table in dense]
        assert [table.dtype for table in tables] == [np.dtype(dtype) for dtype in dtypes]
        check_flex(*qkv((1, 2), 9, 20, SMALL), device=device, score_mod=scores_of(tables, weigh))


@pytest.mark.by_turns
def test_dimensions_of_tables(device, monkeypatch):
    """One of each dimension that the tests above lack, and elements far apart."""
    force(monkeypatch, "reference")
    five = draw((2, 3, 2, 3, 4)).swapaxes(1, 4).copy().swapaxes(1, 4)
    three = np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1)
    ones = np.ones((1, 1, 1, 1))
    far = np.zeros((1 << 20, 16), np.float32)[::-30000, ::7]
    far[...] = draw(far.shape)

    def mod(score, b, h, q_idx, kv_idx):
        x = lookup(five, b, h, q_idx % 2, kv_idx % 3, (q_idx + kv_idx) % 4)
        y = lookup(three, kv_idx % 4, b, h) / 8 + lookup(ones, 0, 0, 0, -1)
        return score + x + y + lookup(far, kv_idx, h)

    check_flex(*qkv((2, 3), 9, 20, SMALL), device=device, score_mod=mod)


# ---- libraries and results: the programs of one mod and mask ----

ALL_ARRAYS = qkv((2, 8), 9, 37, SMALL)


def call_alibi(*arrays, slopes=SLOPES, device, **options):
    return call(*arrays, score_mod=alibi_of(slopes), mask_mod=window, device=device, **options)


def test_tensors(device):
    """Inputs, tables and results, in any mixture."""
    right, lse = call_alibi(*ALL_ARRAYS, device=device, return_lse=True)
    tensors = [strided(a, device) for a in ALL_ARRAYS]
    dense, backwards = clattn.tensor(SLOPES, device), strided(SLOPES[::-1].copy()[::-1], device)
    for slopes in (SLOPES, dense, backwards):
        got = call_alibi(*tensors, slopes=slopes, device=device, return_lse=True)
        assert type(got[0]) is type(got[1]) is clattn.Tensor
        same_bits(got[0], right)
        same_bits(got[1], lse)
        out = clattn.tensor(np.zeros_like(right), device)
        assert call_alibi(*ALL_ARRAYS, slopes=slopes, out=out, device=device) is out
        same_bits(out, right)
        assert type(call_alibi(*ALL_ARRAYS, slopes=slopes, device=device)) is np.ndarray


def test_brackets_of_a_tensor_are_a_lookup(device):
    slopes = clattn.tensor(SLOPES, device)
    got = call(*ALL_ARRAYS, score_mod=lambda s, b, h, q, k: s + slopes[h] * (k - q),
               mask_mod=window, device=device)  # fmt: skip
    same_bits(got, call_alibi(*ALL_ARRAYS, device=device))


def test_a_table_that_another_call_computes(device):
    """It is read when it is there."""
    q, k, v = (clattn.tensor(a, device) for a in ALL_ARRAYS)
    right = clattn.scaled_dot_product_attention(*ALL_ARRAYS, device=device)
    first = clattn.scaled_dot_product_attention(q, k, v)
    same_bits(call_alibi(q, k, v, slopes=first[0, :, 3, 2], device=device),
              call_alibi(*ALL_ARRAYS, slopes=right[0, :, 3, 2], device=device))  # fmt: skip


def test_the_device_of_tensors(device):
    """Without `device=`: that of inputs and tables."""
    arrays = [clattn.tensor(a, device) for a in ALL_ARRAYS]
    assert call_alibi(*arrays, device=None).device == device
    slopes = clattn.tensor(SLOPES, device)
    right = call_alibi(*ALL_ARRAYS, device=device)
    same_bits(call_alibi(*ALL_ARRAYS, slopes=slopes, device=None), right)


def test_torch(device):
    """Tensors in and out, and mods that are written for torch."""
    torch = pytest.importorskip("torch")
    slopes = torch.from_numpy(SLOPES)

    def mod(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    def mask(b, h, q_idx, kv_idx):
        return torch.abs(q_idx - kv_idx) <= 16

    right, lse = call_alibi(*ALL_ARRAYS, device=device, return_lse=True)
    got = call(*map(TORCH.of, ALL_ARRAYS), mod, mask_mod=mask, return_lse=True, device=device)
    TORCH.check(got[0], right)
    TORCH.check(got[1], lse)
    TORCH.check(call_alibi(*map(TORCH.of, ALL_ARRAYS), device=device), right)
    same_bits(call(*ALL_ARRAYS, mod, mask_mod=mask, device=device), right)


def test_jax(device):
    right, lse = call_alibi(*ALL_ARRAYS, device=device, return_lse=True)
    got = call_alibi(*map(JAX.of, ALL_ARRAYS), slopes=JAX.of(SLOPES), device=device,
                     return_lse=True)  # fmt: skip
    JAX.check(got[0], right)
    JAX.check(got[1], lse)


def test_results_have_the_same_bits_in_all_ways(device):
    right, lse = call_alibi(*ALL_ARRAYS, device=device, return_lse=True)
    same_bits(call_alibi(*ALL_ARRAYS, device=device), right)
    out = np.empty_like(right)
    got = call_alibi(*ALL_ARRAYS, device=device, return_lse=True, out=out)
    assert got[0] is out
    same_bits(out, right)
    same_bits(got[1], lse)


def test_out_may_be_an_input_or_a_table(device):
    q, k, v = (a.copy() for a in ALL_ARRAYS)
    right = call_alibi(q, k, v, slopes=q[0, :, 3, 2], device=device)
    table = q.copy()
    assert call_alibi(q, k, v, slopes=table[0, :, 3, 2], device=device, out=table) is table
    same_bits(table, right)
    for make in (np.copy, lambda a: clattn.tensor(a, device)):
        out = make(q)
        assert call_alibi(out, make(k), make(v), slopes=out[0, :, 3, 2], device=device,
                          out=out) is out  # fmt: skip
        same_bits(out, right)


def test_without_mods(device):
    """As scaled_dot_product_attention, to the bit."""
    right = clattn.scaled_dot_product_attention(*ALL_ARRAYS, device=device, scale=0.3)
    same_bits(call(*ALL_ARRAYS, device=device, scale=0.3), right)


@pytest.mark.by_turns
def test_threads(device):
    """Calls with different mods at once, each of which traces and runs."""

    def calls(name):
        score_mod, mask_mod = GALLERY[name]

        def run():
            for _ in range(10):
                check_flex(*ALL_ARRAYS, device=device, score_mod=score_mod, mask_mod=mask_mod)

        return run

    run_together(*map(calls, list(GALLERY)[:3]))
