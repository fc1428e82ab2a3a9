# SPDX-License-Identifier: MIT
"""clattn.varlen_attn: packed sequences, keys in pages."""

import clattn
import numpy as np
import pytest
from references.attention import DTYPES, float32
from support.checks import assert_close
from support.data import draw
from support.layouts import at_the_end_of_memory
from support.ragged import check_sequences, in_pages, packed, run, seen
from support.variants import decode_for, force, takes_cpu_kernels

INF, NAN = np.inf, np.nan

pytestmark = pytest.mark.usefixtures("kernel")


def forced(word):
    return pytest.param(word, marks=pytest.mark.by_turns, id=word)


@pytest.fixture(params=[pytest.param("", id="fastest"), forced("reference"), forced("tiled"),
                        forced("rows"), forced("decode")])  # fmt: skip
def kernel(request):
    """The kernel that is forced: for many rows ("rows"), for few rows ("decode"), or any."""
    if "device" not in request.fixturenames:
        return
    device = request.getfixturevalue("device")
    meant = {"rows": "cpu" if takes_cpu_kernels(device) else "tiled", "decode": decode_for(device)}
    force(request.getfixturevalue("monkeypatch"), meant.get(request.param, request.param))


fastest = pytest.mark.parametrize("kernel", [pytest.param("", id="fastest")], indirect=True)

# (rows, keys) of sequences: empty ones, few rows, many rows, more rows than keys, several blocks.
MIXED = [5, 0, 1, 70, 0, 33, 1], [7, 4, 0, 130, 0, 20, 600]
DECODE = [1, 1, 0, 2, 1], [300, 1, 9, 0, 1000]
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "lower right": {"is_causal": "lower_right"},
    "window": {"window_size": (20, 3)},
    "left": {"window_size": (9, -1), "is_causal": True},
    "capped": {"softcap": 2.0, "scale": 0.7, "window_size": (-1, 0)},
}
PAGES = {"packed": {}, "HND": {"page_size": 16}, "NHD": {"page_size": 7, "page_layout": "NHD"}}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("pages", PAGES)
@pytest.mark.parametrize("lengths", [MIXED, DECODE], ids=["mixed", "decode"])
def test_each_sequence_attends_to_its_own_keys(device, lengths, pages, options):
    check_sequences(packed(*lengths), device, **PAGES[pages], **OPTIONS[options])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("E", "Ev"), [(16, 24), (72, 40)])
def test_dtypes_and_head_sizes(device, dtype, E, Ev):
    given = packed([1, 40, 3], [50, 70, 9], E=E, Ev=Ev, dtype=dtype)
    check_sequences(given, device, is_causal="lower_right")
    check_sequences(given, device, page_size=5, is_causal="lower_right")


@fastest
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (6, 6), (8, 2)], ids=str)
def test_heads(device, heads):
    given = packed([3, 1, 40], [50, 70, 90], *heads)
    check_sequences(given, device)
    check_sequences(given, device, page_size=32, page_layout="NHD")


@fastest
@pytest.mark.parametrize("page_size", [1, 3, 100, 256, 512])
def test_page_sizes(device, page_size):
    check_sequences(
        packed([1, 20], [700, 65]), device, page_size=page_size, is_causal="lower_right"
    )


@fastest
@pytest.mark.by_turns
@pytest.mark.parametrize("heads", [(6, 6), (16, 4)], ids=str)
@pytest.mark.parametrize(("layout", "page_size"), [("HND", 20), ("HND", 300), ("NHD", 70)])
def test_heads_of_a_page_are_read_together(device, layout, page_size, heads):
    """Keys and values take more than 16 MiB: a work-item has several heads (tests of decoding)."""
    check_sequences(packed([1, 2], [5000, 3300], *heads, E=80 * 6 // heads[1]), device,
                    page_size=page_size, page_layout=layout, window_size=(4900, -1))  # fmt: skip


@fastest
@pytest.mark.parametrize("count", [1, 1000])
def test_sequences_of_one_row(device, count):
    """Behind their offsets ends the memory that may be read."""
    given = packed([1] * count, [n % 7 for n in range(count)], E=8)
    ends = [at_the_end_of_memory(array) for array in given[3:]]
    check_sequences(given._replace(cu_seq_q=ends[0], cu_seq_k=ends[1]), device)


@fastest
def test_long_sequences_are_split_among_short_ones(device):
    """Their keys are more than 256 KiB, and the other sequences have a few."""
    check_sequences(
        packed([1, 1, 2, 1], [6000, 3, 5000, 90], Hq=2, Hk=1, E=64), device, page_size=64
    )


def test_sinks(device):
    sinks = draw((4,), float32, 9)
    given = packed([2, 1, 40], [9, 0, 30])
    output, lse = run(given, device, sinks=sinks)
    right = [clattn.scaled_dot_product_attention(*given.of(b), sinks=sinks, enable_gqa=True,
                                                 return_lse=True, device=device)
             for b in range(3)]  # fmt: skip
    for b, (out, of_rows) in enumerate(right):
        rows = slice(*given.cu_seq_q[b : b + 2])
        assert_close(output[rows].swapaxes(0, 1), out, 1e-6)
        assert_close(lse[:, rows], of_rows, 1e-6)
    assert (lse[:, given.cu_seq_q[-1] :] == -INF).all()
    assert (output[given.cu_seq_q[-1] :] == 0).all()


@fastest
@pytest.mark.parametrize("rows", [[], [2], [2, 0]], ids=str)
def test_sinks_where_no_sequence_has_a_key(device, rows):
    """The rows of sequences have them, those behind have none."""
    sinks = draw((4,), float32, 9)
    lse = run(packed(rows, [0] * len(rows)), device, sinks=sinks)[1]
    assert (lse[:, : sum(rows)] == sinks[:, None]).all()
    assert (lse[:, sum(rows) :] == -INF).all()


@fastest
def test_mods_count_positions_within_a_sequence(device):
    given = packed([20, 3, 1], [30, 9, 50])
    slopes = draw((4,), float32, 5)

    def alibi(score, b, h, q_idx, kv_idx):
        return score + clattn.lookup(slopes, h) * (kv_idx - q_idx) + 0.25 * b

    def odd(b, h, q_idx, kv_idx):
        return (kv_idx + q_idx + b) % 3 != 0

    for pages in (None, 16):
        output, lse = run(given, device, pages, score_mod=alibi, mask_mod=odd)
        for b in range(3):
            query, key, value = given.of(b)
            rows = slice(*given.cu_seq_q[b : b + 2])
            i, j = np.arange(query.shape[1])[:, None], np.arange(key.shape[1])[None]
            bias = slopes[:, None, None] * (j - i) + 0.25 * b
            bias = np.where((i + j + b) % 3 != 0, bias, -INF).astype(float32)
            right, of_rows = clattn.scaled_dot_product_attention(
                query, key, value, bias, enable_gqa=True, return_lse=True, device=device
            )
            assert_close(output[rows].swapaxes(0, 1), right, 1e-5)
            assert_close(lse[:, rows], of_rows, 1e-5)


# --- what went wrong elsewhere ----------------------------------------------------------


def numbers(*rows):
    """One head of size 1."""
    return np.array(rows, float32).reshape(-1, 1, 1)


@fastest
def test_one_row_beside_empty_sequences(device):
    check_sequences(packed([0, 1, 0, 1], [0, 3, 0, 5], Hq=9, Hk=3), device)
    check_sequences(packed([0, 0, 2, 0], [4, 0, 3, 1], Hq=1, Hk=1), device)


@fastest
def test_alignment(device):
    """Two rows and three keys: at the start, at the end, and both."""
    q, k, v = numbers(0, 0), numbers(0, 0, 0), numbers(1, 2, 6)

    def means(**options):
        return clattn.varlen_attn(
            q, k, v, [0, 2], [0, 3], device=device, scale=1, **options
        ).ravel()

    np.testing.assert_allclose(means(is_causal=True), [1, 1.5])
    np.testing.assert_allclose(means(window_size=(-1, 0)), [1.5, 3])
    np.testing.assert_allclose(means(is_causal="lower_right"), [1.5, 3])
    np.testing.assert_allclose(means(is_causal=True, window_size=(-1, 0)), [1, 1.5])


@fastest
@pytest.mark.parametrize("paged", [False, True])
def test_rows_above_the_first_key_have_no_log_sum_exp(device, paged):
    """Three rows and one key, causal at the end: two rows see nothing."""
    q, k, v = numbers(1, 1, 1), numbers(2), numbers(5)
    pages = {"block_table": [[0]], "seqused_k": [1]} if paged else {"cu_seq_k": [0, 1]}
    if paged:
        k, v = k[None], v[None]
    output, lse = clattn.varlen_attn(
        q, k, v, [0, 3], window_size=(-1, 0), return_lse=True, device=device, scale=1, **pages
    )
    np.testing.assert_array_equal(lse, [[-INF, -INF, 2]])
    np.testing.assert_array_equal(output.ravel(), [0, 0, 5])


@fastest
@pytest.mark.parametrize("paged", [False, True])
def test_a_score_far_below_zero(device, paged):
    """It is no key that is left out: no number stands for -inf."""
    q, k, v = numbers(1), numbers(-60000), numbers(3)
    pages = {"block_table": [[0]], "seqused_k": [1]} if paged else {"cu_seq_k": [0, 1]}
    if paged:
        k, v = k[None], v[None]
    output, lse = clattn.varlen_attn(q, k, v, [0, 1], return_lse=True, device=device, scale=1,
                                     **pages)  # fmt: skip
    assert (output.item(), lse.item()) == (3, -60000)


@fastest
@pytest.mark.parametrize("huge", [1e4, NAN, INF])
def test_other_sequences_change_no_bit(device, huge):
    """What lies before or behind a sequence."""
    given = packed([1, 20, 40], [30, 60, 20])
    before, lse = run(given, device, is_causal=True)
    given.query[:1], given.key[:30], given.value[:30] = huge, huge, huge
    after, after_lse = run(given, device, is_causal=True)
    np.testing.assert_array_equal(before[1:], after[1:])
    np.testing.assert_array_equal(lse[:, 1:], after_lse[:, 1:])


@fastest
def test_keys_that_are_not_used(device):
    """seqused_k ends a sequence early, for its window too; what lies behind may be NaN."""
    given = packed([2, 2], [5, 4])
    given.key[3:5], given.value[3:5] = NAN, NAN
    output, lse = clattn.varlen_attn(
        given.query, given.key, given.value, given.cu_seq_q, given.cu_seq_k, seqused_k=[3, 4],
        window_size=(-1, 0), enable_gqa=True, return_lse=True, device=device,
    )  # fmt: skip
    for b, used in enumerate((3, 4)):
        query, key, value = given.of(b)
        right, of_rows = clattn.scaled_dot_product_attention(
            query, key[:, :used], value[:, :used], seen(2, used, "lower_right"), enable_gqa=True,
            return_lse=True, device=device,
        )  # fmt: skip
        assert_close(output[2 * b : 2 * b + 2].swapaxes(0, 1), right, 1e-6)
        assert_close(lse[:, 2 * b : 2 * b + 2], of_rows, 1e-6)


@fastest
def test_results_are_written_over_what_memory_held(device):
    """Rows behind the last sequence and rows without a key, also in `out`."""
    given = packed([2, 1], [4, 0])
    out = np.full_like(given.query, NAN)
    got = clattn.varlen_attn(
        given.query, given.key, given.value, given.cu_seq_q, given.cu_seq_k, enable_gqa=True,
        out=out, device=device,
    )  # fmt: skip
    assert got is out
    assert np.isfinite(out).all() and (out[2:] == 0).all()


@fastest
def test_numbers_of_pages_have_more_than_16_bits(device):
    pages = np.zeros((65537, 1, 1, 1), float32)
    values = pages.copy()
    values[0], values[65536] = 1, 2
    q = np.zeros((1, 1, 1), float32)
    got = clattn.varlen_attn(q, pages, values, [0, 1], block_table=[[65536]], seqused_k=[1],
                             device=device)  # fmt: skip
    assert got.item() == 2


@fastest
def test_entries_that_no_key_needs_may_hold_anything(device):
    given = packed([1, 1], [9, 2])
    key, value, table = in_pages(given, 4)
    right = run(given, device, 4)[0]
    for filler in (-1, 2**31 - 1, 0):
        table[1, 1:] = filler
        got = clattn.varlen_attn(given.query, key, value, given.cu_seq_q, block_table=table,
                                 seqused_k=[9, 2], enable_gqa=True, page_layout="HND",
                                 device=device)  # fmt: skip
        np.testing.assert_array_equal(got, right)


@fastest
def test_pages_before_a_window_may_hold_anything(device):
    given = packed([1, 20], [70, 30])
    right = run(given, device, 4, window_size=(5, -1))
    for b, seen_from in enumerate((64, 5)):
        first = given.cu_seq_k[b]
        unseen = slice(first, first + seen_from)
        given.key[unseen], given.value[unseen] = NAN, NAN
    for got, expected in zip(run(given, device, 4, window_size=(5, -1)), right, strict=True):
        np.testing.assert_array_equal(got, expected)


@fastest
def test_lengths_of_pages_may_come_from_offsets(device):
    given = packed([1, 3], [9, 2])
    key, value, table = in_pages(given, 4, "NHD")
    got = clattn.varlen_attn(given.query, key, value, given.cu_seq_q, given.cu_seq_k,
                             block_table=table, enable_gqa=True, device=device)  # fmt: skip
    np.testing.assert_array_equal(got, run(given, device, 4, "NHD")[0])


@fastest
def test_pages_may_be_views_with_any_strides(device):
    """Every second page and head of an array, rows backwards."""
    given = packed([1, 20], [9, 40])
    key, value, table = in_pages(given, 4)
    wide = [
        np.full((2 * p.shape[0], 2 * p.shape[1], *p.shape[2:]), NAN, p.dtype) for p in (key, value)
    ]
    views = [array[::2, ::2, ::-1] for array in wide]
    for view, pages in zip(views, (key, value), strict=True):
        view[...] = pages
    got = clattn.varlen_attn(given.query, *views, given.cu_seq_q, block_table=table,
                             seqused_k=[9, 40], enable_gqa=True, page_layout="HND",
                             device=device)  # fmt: skip
    assert_close(got, run(given, device, 4)[0], 1e-6)


@fastest
def test_equal_sequences_have_equal_bits(device):
    given = packed([1, 1], [1, 1])
    given.query[1], given.key[1], given.value[1] = given.query[0], given.key[0], given.value[0]
    output, lse = run(given, device, 2)
    np.testing.assert_array_equal(output[0], output[1])
    np.testing.assert_array_equal(lse[:, 0], lse[:, 1])


def split(array, offsets):
    return np.split(array[: offsets[-1]], offsets[1:-1])


LIBRARIES = {
    "arrays": lambda array, _: array,
    "Tensors": clattn.tensor,
    "torch's": lambda array, _: pytest.importorskip("torch").from_numpy(array),
    "JAX's": lambda array, _: pytest.importorskip("jax").numpy.asarray(array),
}


@fastest
@pytest.mark.parametrize("library", LIBRARIES)
def test_lists_are_packed(device, library):
    """As arrays of the same library; results are lists, of views."""
    given = packed([3, 0, 20, 1], [30, 4, 9, 0])
    right, right_lse = run(given, device, is_causal=True)
    lists = [
        [LIBRARIES[library](part, device) for part in split(array, offsets)]
        for array, offsets in zip(given[:3], [given.cu_seq_q, *[given.cu_seq_k] * 2], strict=True)
    ]
    options = {"is_causal": True, "enable_gqa": True, "return_lse": True, "device": device}
    output, lse = clattn.varlen_attn(*lists, **options)
    for n, expected in enumerate(split(right, given.cu_seq_q)):
        rows = slice(*given.cu_seq_q[n : n + 2])
        assert type(output[n]) is type(lse[n]) is type(lists[0][n])
        np.testing.assert_array_equal(np.asarray(output[n]), expected)
        np.testing.assert_array_equal(np.asarray(lse[n]), right_lse[:, rows])
    alone = clattn.varlen_attn(*map(tuple, lists), **options | {"return_lse": False})
    np.testing.assert_array_equal(np.asarray(alone[2]), right[3:23])


@fastest
def test_lists_beside_packed_arrays_and_pages(device):
    given = packed([3, 20], [30, 9])
    right = run(given, device)[0]
    queries = split(given.query, given.cu_seq_q)
    keys, values = (split(array, given.cu_seq_k) for array in given[1:3])
    options = {"enable_gqa": True, "device": device}
    whole = clattn.varlen_attn(given.query, keys, values, given.cu_seq_q, **options)
    np.testing.assert_array_equal(whole, right)
    key, value, table = in_pages(given, 4, "NHD")
    for more in (
        {"key": given.key, "value": given.value, "cu_seq_k": given.cu_seq_k},
        {"key": key, "value": value, "block_table": table, "seqused_k": [30, 9]},
    ):
        output = clattn.varlen_attn(queries, **more, **options)
        assert_close(np.concatenate(output), right[:23], 1e-6)


@fastest
def test_tensors_and_offsets_of_any_library(device):
    torch = pytest.importorskip("torch")
    given = packed([3, 20], [30, 9])
    right = run(given, device, is_causal=True)
    arrays = [clattn.tensor(array, device=device) for array in given[:3]]
    for read in (list, np.int32, torch.tensor, lambda x: clattn.tensor(x, device=device)):
        offsets = [read(x) if read is not np.int32 else x.astype(read) for x in given[3:]]
        got = clattn.varlen_attn(
            *arrays, *offsets, is_causal=True, enable_gqa=True, return_lse=True
        )
        for one, other in zip(got, right, strict=True):
            np.testing.assert_array_equal(one.numpy(), other)
