# SPDX-License-Identifier: MIT
"""attention_decode_mma, a group of query heads as a tile of matrix units, forced on every device:
on CPUs its matrix units are emulated.

Each dtype, pair of head sizes, type of mask and softcap is a program, which takes PoCL many seconds
to build, so most tests share one: float16, head size 64; rows, lengths and the lse are data. A tile
has 16 rows, four warps take 16 keys each in turn, and a part of the keys has 256 of them at least.
Which keys a row sees and special numbers are in test_attention_decode_mma_masks.py.
"""

import itertools

import clattn
import numpy as np
import pytest
from references.attention import bfloat16, float16
from support.decode_cases import bits
from support.helpers import check, draw, index_of, run_python, sdpa
from support.layouts import (
    columns_first,
    far_rows,
    negative_everywhere,
    negative_rows,
    sliced,
    transposed,
)
from test_attention_mma import builds_quickly  # noqa: F401


@pytest.fixture(autouse=True)
def decode_mma(monkeypatch):
    """attention_decode_mma, and no other kernel in its place."""
    monkeypatch.setenv("CLATTN_KERNEL", "decode-mma")


def group(heads, L, S, E=64, Ev=None, dtype=float16, lead=(1,)):
    """Query, key and value of query heads that share one key head."""
    shapes = ((*lead, heads, L, E), (*lead, 1, S, E), (*lead, 1, S, Ev or E))
    return tuple(draw(shape, dtype, n) for n, shape in enumerate(shapes))


def run(*arrays, device, **options):
    return check(*arrays, device=device, enable_gqa=True, **options)


SHORT, SPLIT = (5, 2, 77), (4, 2, 3000)


# --- rows and keys --------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(1, 1), (3, 5), (8, 1), (8, 2), (17, 1), (11, 3)], ids=str)
def test_rows(device, heads):
    """Of a tile and of several, the last one filled up; of one head and of many."""
    for S in (1, 15, 16, 17, 64, 65, 130):
        q, k, v = group(*heads, S + 1)
        k[..., S, :] = v[..., S, :] = np.nan
        run(q, k[..., :S, :], v[..., :S, :], device=device)
    run(*group(*heads, 70), device=device, is_causal="lower_right")


@pytest.mark.parametrize("heads", [(2, 1), (6, 2), (24, 3)], ids=str)
def test_groups(device, heads):
    """By enable_gqa and by broadcasting, with batches."""
    hq, hk = heads
    for S in (40, 3001):
        q = draw((2, hq, 1, 64), float16)
        k, v = (draw((2, hk, S, 64), float16, n) for n in (1, 2))
        grouped = run(q, k, v, device=device)
        apart = q.reshape(2, hk, hq // hk, 1, 64)
        spread = check(apart, k[:, :, None], v[:, :, None], device=device)
        np.testing.assert_array_equal(spread.reshape(grouped.shape), grouped)


SIZES = {  # E, Ev, dtype: columns of keys and values without work
    "8": (8, 8, bfloat16),
    "80, 40": (80, 40, float16),
    "128": (128, 128, bfloat16),
    "192, 128": (192, 128, float16),
}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.usefixtures("builds_quickly")
def test_head_sizes(device, size):
    """What lies behind a row is not read: it would have rows computed again, to other bits."""
    E, Ev, dtype = size
    for heads, L, S in ((3, 1, 9), (8, 2, 100), (2, 1, 2500)):
        q, k, v = group(heads, L, S, E, Ev, dtype)
        right = run(q, k, v, device=device)
        again = run(q, far_rows(k), far_rows(v), device=device)
        assert again.tobytes() == right.tobytes()


def test_bfloat16(device):
    for shape in (SHORT, SPLIT):
        run(*group(*shape, dtype=bfloat16), device=device, is_causal="lower_right")


def test_leading_dimensions(device):
    """None, many, and keys that are the same along some of them."""
    for q, k in [((), ()), ((2, 1, 3, 2), (2, 1, 3, 2)), ((2, 3), (1, 1)), ((1, 1), (2, 3))]:
        arrays = draw((*q, 2, 64), float16), *(draw((*k, 50, 64), float16, n) for n in (1, 2))
        check(*arrays, device=device)


def test_no_keys(device):
    assert not run(*group(4, 2, 0), device=device).any()


# --- parts of the keys ----------------------------------------------------------------


@pytest.mark.parametrize("batches", [1, 3])
def test_parts(device, batches):
    """Many and few, and their rests; some have no key that a row sees."""
    for S in (511, 512, 1023, 4097):
        arrays = group(4, 2, S, lead=(batches,))
        for options in ({}, {"is_causal": "lower_right"}, {"window": (S - 100, 10)}):
            run(*arrays, device=device, **options)


def test_parts_of_the_same_call_have_the_same_bits(device):
    first, first_lse = sdpa(*group(*SPLIT), device=device, enable_gqa=True, return_lse=True)
    for _ in range(5):
        again, lse = sdpa(*group(*SPLIT), device=device, enable_gqa=True, return_lse=True)
        assert again.tobytes() == first.tobytes() and lse.tobytes() == first_lse.tobytes()


@pytest.mark.parametrize("order", [1, -1], ids=["rising", "falling"])
def test_parts_and_warps_of_very_different_weight(device, order):
    """The heaviest last, first; those that weigh nothing have values that matter if misjudged."""
    q, k, v = group(4, 2, 4097)
    q[:] = 1
    # steps of whole parts and of single chunks, which go to other warps
    for step in (np.arange(4097) // 256, np.arange(4097) // 16 % 64 / 4):
        k[:] = step.astype(float16)[::order, None]
        weighted = v * 2.0 ** (8 - step[::order, None])
        for scale in (0.001, 0.01, 0.3):
            run(q, k, weighted.astype(float16), device=device, scale=scale)


# --- where the numbers lie ------------------------------------------------------------


@pytest.mark.parametrize("which", ["key", "value", "both"])
def test_layouts_of_keys_and_values(device, which):
    """Rows of which each starts at 16 bytes."""
    for layout, shape in itertools.product((negative_rows, transposed, far_rows), (SHORT, SPLIT)):
        q, k, v = group(*shape)
        k = k if which == "value" else layout(k)
        run(q, k, v if which == "key" else layout(v), device=device)


@pytest.mark.parametrize("layout", [negative_everywhere, columns_first, sliced])
def test_layouts_of_queries_and_results(device, layout):
    for shape in (SHORT, SPLIT):
        q, k, v = group(*shape)
        out = layout(np.full(q.shape, -1, float16))
        assert run(layout(q), k, v, device=device, out=out) is out


def test_keys_that_are_all_the_same(device):
    q, k, v = group(*SPLIT)
    one_key = np.broadcast_to(k[..., :1, :], k.shape)
    one_value = np.broadcast_to(v[..., :1, :], v.shape)
    for arrays in ((one_key, v), (k, one_value), (one_key, one_value)):
        run(q, *arrays, device=device)


def test_where_memory_is_copied(device):
    """Inputs that overlap share a copy, where keys and values, aligned in the host's memory, no
    longer are: rows are computed again, by other arithmetic.
    """
    run_python(
        """
        import sys
        import clattn, numpy as np
        from support.helpers import check, draw
        device = clattn.devices()[int(sys.argv[1])]
        assert device.memory_mode == "copy"
        for S in (77, 2500):
            packed = draw((S, 136 + 72), np.dtype(np.float16))
            assert packed.ctypes.data % 16 == 0
            arrays = packed[:2, 1:65], packed[:, 72:136], packed[:, 144:]
            again = check(*arrays, device=device)
            assert (again != check(*(a.copy() for a in arrays), device=device)).any()
        """,
        index_of(device),
        env={"CLATTN_MEMORY": "copy"},
    )


# --- which kernel runs ----------------------------------------------------------------


def test_the_kernel_for_the_device(device, monkeypatch):
    """Where matrix units are emulated, others are used."""
    arrays = draw((1, 8, 1, 64), float16), *(draw((1, 8, 900, 64), float16, n) for n in (1, 2))
    forced, decode = (bits(device, arrays, monkeypatch, n) for n in ("decode-mma", "decode"))
    chosen = bits(device, arrays, monkeypatch, None)
    assert (chosen == decode) or device.type != "cpu"
    assert forced != decode


REFUSED = {
    "float32": [a.astype(np.float32) for a in group(*SHORT)],
    "E above 192": group(*SHORT, 200, 64),
    "Ev above 128": group(*SHORT, 64, 136),
    "rows of 14 bytes": group(*SHORT, 64, 7),
    "keys elsewhere": [
        n if a else sliced(n) for a, n in zip((1, 0, 1), group(*SHORT), strict=True)
    ],
}


@pytest.mark.parametrize("arrays", REFUSED.values(), ids=REFUSED)
def test_what_it_refuses_when_forced(device, monkeypatch, arrays):
    """A ValueError that names the variable, what it says and what the kernel takes."""
    wanted = r'CLATTN_KERNEL is "decode-mma".*one half type, head sizes of 1 to 192'
    with pytest.raises(ValueError, match=wanted):
        sdpa(*arrays, device=device, enable_gqa=True)
    with pytest.raises(ValueError, match="no past keys, input bias, dropout"):
        sdpa(*group(*SHORT), device=device, enable_gqa=True, dropout_p=0.5)
    monkeypatch.delenv("CLATTN_KERNEL")
    assert np.isfinite(clattn.scaled_dot_product_attention(
        *arrays, device=device, enable_gqa=True)).all()  # fmt: skip
