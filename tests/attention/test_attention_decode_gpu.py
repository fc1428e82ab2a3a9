# SPDX-License-Identifier: MIT
"""attention_decode_gpu, the kernel for few rows on GPUs, forced on whatever device there is.

Each combination of dtype, head size, count of rows (1, 2, 4 or 8 in a work-group) and options is
a program to build, so most calls share a head size and a count; lengths are data. On devices with
sub-groups the kernel's work-items exchange numbers by these, on others by local memory.

With 32 columns in float32 a block is 64 keys, which 16 slices share, and a part at least 256 keys:
SPLIT is a shape of one head whose keys are split, SHORT one whose keys are not. Which keys a row
sees and special numbers are in test_attention_decode_gpu_masks.py.
"""

import clattn
import numpy as np
import pytest
import support.directml_calls as directml
from references.attention import bfloat16, float16, float32, float64, tolerance
from references.directml import make
from references.onnx import check as check_onnx
from support.decode_cases import bits
from support.helpers import assert_close, check, draw, index_of, qkv, run_python, sdpa
from support.layouts import (
    columns_first,
    far_rows,
    fortran,
    negative_everywhere,
    negative_rows,
    sliced,
    transposed,
)
from support.onnx_calls import cache, inputs
from support.sizes import WIDE

E = 32
SHORT, SPLIT = ((2, 4), 2, 77, E), ((1, 1), 2, 2500, E)


@pytest.fixture(autouse=True)
def decode_gpu(monkeypatch):
    """attention_decode_gpu, and no other kernel in its place."""
    monkeypatch.setenv("CLATTN_KERNEL", "decode-gpu")


# ---- sizes ----


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 17])
def test_rows(device, rows):
    """Those of a work-group, which are repeated to a power of 2, and of several."""
    for S in (1, 64, 65, 131):
        q, k, v = qkv((1, 2), rows, S + 1, E)
        k[..., S, :] = v[..., S, :] = np.nan
        check(q, k[..., :S, :], v[..., :S, :], device=device)


@pytest.mark.parametrize("heads", [(2, 1), (3, 1), (8, 2), (12, 1)], ids=str)
def test_groups(device, heads):
    """Query heads with the same keys, by enable_gqa and by broadcasting; 12 are two tiles."""
    hq, hk = heads
    for S in (1, 129, 3001):
        q = draw((2, hq, 1, E))
        k, v = draw((2, hk, S, E), seed=1), draw((2, hk, S, E), seed=2)
        grouped = check(q, k, v, device=device, enable_gqa=True)
        apart = q.reshape(2, hk, hq // hk, 1, E)
        spread = check(apart, k[:, :, None], v[:, :, None], device=device)
        np.testing.assert_array_equal(spread.reshape(grouped.shape), grouped)
    q = draw((2, 2 * hk, 2, E))
    check(q, k, v, device=device, enable_gqa=True, is_causal="lower_right")


HEAD_SIZES = [  # E, Ev, dtype: one lane or 32 for a key, lanes and columns without work
    (1, 1, float32), (7, 129, float32), (80, 96, float16), (512, 300, float64),
]  # fmt: skip


@pytest.mark.parametrize("sizes", HEAD_SIZES, ids=lambda s: f"E{s[0]}-Ev{s[1]}-{s[2]}")
def test_head_sizes(device, sizes):
    e, ev, dtype = sizes
    for S in (1, 40, 333):
        check(*qkv((1, 2), 1, S, e, ev, dtype=dtype), device=device)


@pytest.mark.parametrize("dtype", [float16, bfloat16], ids=str)
def test_dtypes(device, dtype):
    """Of float64 test_head_sizes has a program, whose keys are split too."""
    L = 2 if dtype == float16 else 1
    for lead, S in (((2, 4), 77), ((1, 1), 5000)):
        check(*qkv(lead, L, S, E, dtype=dtype), device=device)


def test_leading_dimensions(device):
    """None, many, and keys that are the same along some of them."""
    leads = [
        ((), (), ()),
        ((2, 1, 3, 2), (2, 1, 3, 2), (2, 1, 3, 2)),
        ((2, 3), (1, 3), (2, 3)),
        ((1, 1), (2, 3), (2, 3)),
        ((5, 7), (5, 7), (5, 7)),
    ]
    for q, k, v in leads:
        arrays = draw((*q, 2, E)), draw((*k, 50, E), seed=1), draw((*v, 50, E), seed=2)
        check(*arrays, device=device)


def test_scale_and_softcap(device):
    for shape in (SHORT, SPLIT):
        for scale in (0.0, -0.7, 1e-30, 3.0):
            check(*qkv(*shape), device=device, scale=scale)
        for softcap in (0.5, 30.0):
            check(*qkv(*shape), device=device, softcap=softcap, scale=2.0)


# ---- parts of the keys ----


@pytest.mark.parametrize("lead", [(), (1, 2), (3, 3)], ids=str)
def test_parts(device, lead):
    """Sixteen, eight and two of them on two compute units, and their rests."""
    for S in (511, 512, 1023, 4097):
        arrays = qkv(lead, 2, S, E)
        for options in ({}, {"is_causal": "lower_right"}, {"window": (S - 100, 10)}):
            check(*arrays, device=device, **options)


def test_parts_of_the_same_call_have_the_same_bits(device):
    first, first_lse = sdpa(*qkv(*SPLIT), device=device, return_lse=True)
    for _ in range(5):
        again, lse = sdpa(*qkv(*SPLIT), device=device, return_lse=True)
        assert again.tobytes() == first.tobytes() and lse.tobytes() == first_lse.tobytes()


def test_parts_do_not_show(device):
    """The same result as without parts, to the rounding of both."""
    q, k, v = qkv((1,), 2, 2049, E)
    allowed, allowed_lse = tolerance(q, k, v)
    result, lse = sdpa(q, k, v, device=device, return_lse=True)
    copies = np.broadcast_to(q, (8 * device.compute_units, *q.shape))
    many = [np.repeat(a[None], len(copies), axis=0) for a in (k, v)]
    whole, whole_lse = sdpa(copies, *many, device=device, return_lse=True)
    for n in range(len(whole)):
        assert_close(result, whole[n], 2 * allowed)
        assert_close(lse, whole_lse[n], 2 * allowed_lse, "lse")


@pytest.mark.parametrize("order", [1, -1], ids=["rising", "falling"])
def test_parts_and_slices_of_very_different_weight(device, order):
    """The heaviest last, first; those that weigh nothing have values that matter if misjudged."""
    q, k, v = qkv((1, 1), 2, 4097, E)
    q[:] = 1
    steps = np.repeat(np.arange(17, dtype=np.float32), 256)[:4097]
    for step in (steps, np.arange(4097) % 64 / 4):
        k[:] = step[::order, None]
        for scale in (0.01, 0.3, 2.0):
            weighted = v * np.float32(10) ** (9 - step[::order, None] / 2)
            check(q, k, weighted.astype(np.float32), device=device, scale=scale)


# ---- where the numbers lie ----


@pytest.mark.parametrize("which", ["key", "value"])
def test_layouts_of_keys_and_values(device, which):
    """Rows of which each starts at 16 bytes, and any others.

    Each is read in a way of its own. Both by elements: test_past_and_present_elsewhere.
    """
    aligned = [negative_rows, transposed, far_rows]
    other = [sliced, columns_first, negative_everywhere]
    for layout in (*aligned, *other):
        for shape in (SHORT, SPLIT):
            q, k, v = qkv(*shape)
            k, v = (layout(k), v) if which == "key" else (k, layout(v))
            check(q, k, v, device=device)


@pytest.mark.parametrize("layout", [negative_everywhere, columns_first, fortran, sliced])
def test_layouts_of_queries_and_results(device, layout):
    for shape in (SHORT, SPLIT):
        q, k, v = qkv(*shape)
        out = layout(np.full(q.shape, -1, np.float32))
        assert check(layout(q), k, v, device=device, out=out) is out


def test_keys_that_are_all_the_same(device):
    """Row strides of 0, alone and together."""
    q, k, v = qkv(*SPLIT)
    one_key = np.broadcast_to(k[..., :1, :], k.shape)
    one_value = np.broadcast_to(v[..., :1, :], v.shape)
    for arrays in ((one_key, v), (k, one_value), (one_key, one_value)):
        check(q, *arrays, device=device)


def test_where_memory_is_copied(device):
    """Two kernels run, one after the other. Inputs that overlap share a copy, which may start
    where keys and values, aligned in the host's memory, no longer are."""
    run_python(
        """
        import sys
        import clattn, numpy as np
        from support.helpers import check, draw, qkv
        from references.onnx import check as check_onnx
        from support.onnx_calls import cache, inputs
        device = clattn.devices()[int(sys.argv[1])]
        assert device.memory_mode == "copy"
        out = np.full((1, 1, 2, 66), 7, np.float32)
        check(*qkv((1, 1), 2, 2500, 32), device=device, out=out[..., 1:-1:2])
        assert (out[..., ::2] == 7).all()
        args = inputs(2, 2, (1, 1), B=1, E=32, Ev=32), cache(2500, 1, B=1, E=32, Ev=32)
        check_onnx(*args[0], None, *args[1], device=device)
        for S in (77, 2500):
            packed = draw((S, 100))
            assert packed.ctypes.data % 16 == 0
            check(packed[:2, 1:33], packed[:, 36:68], packed[:, 68:], device=device)
        """,
        index_of(device),
        env={"CLATTN_MEMORY": "copy"},
    )


# ---- past and present, the other front doors ----


def with_past(L, P, S=None, heads=(2, 1), B=2, **options):
    """Q, K, V, no mask, past_key, past_value."""
    arrays = inputs(L, L if S is None else S, heads, B=B, E=E, Ev=E, **options)
    return [*arrays, None, *cache(P, heads[1], B=B, E=E, Ev=E, **options)]


def test_past_and_present(device):
    """They meet within a block and a part; present is their concatenation, whatever is seen."""
    for P in (0, 1, 63, 64, 130):
        check_onnx(*with_past(1, P), device=device)
    check_onnx(*with_past(1, 13, S=40), device=device)
    check_onnx(*with_past(1, 13, S=0), device=device)
    for lengths in ((4096, 1), (1, 4096), (1500, 1500), (0, 3000)):
        args = with_past(1, *lengths, B=1)
        check_onnx(*args, device=device)
        check_onnx(*args, device=device, is_causal=1, left_window_size=700)
    for args in (with_past(0, 130, S=5), with_past(2, 130, heads=(4, 4))):
        check_onnx(*args, device=device)


def test_past_and_present_elsewhere(device):
    """Rows of keys that are pieces of longer ones, unaligned; values of another type."""
    args = with_past(1, 1500, heads=(1, 1), B=1)
    args[2], args[4], args[5] = (sliced(args[n]) for n in (2, 4, 5))
    check_onnx(*args, device=device)
    for P in (33, 5000):
        args = with_past(1, P, heads=(1, 1), B=1, dtype=float32, v_dtype=float16)
        check_onnx(*args, device=device)


def test_directml(device):
    """A bias beside a mask that adds its own number, and a past."""
    B, H, L = 1, 2, 2
    for P in (50, 2500):
        T = P + L
        mask = np.array([T // 3], np.int32)
        bias = draw((B, H, L, T), seed=7)
        bias[..., 11:20] = -np.inf
        call = make(B=B, H=H, L=L, S=L, P=P, E=E, Ev=E, mask=mask,
                    mask_type="key_sequence_length")  # fmt: skip
        call["relative_position_bias"] = bias
        directml.compare(call, directml.run(call, device=device).output)


# ---- which kernel runs ----


def test_the_kernel_for_the_device(device, monkeypatch):
    """ "decode" means that of the device's type, which takes few rows of its own accord."""
    arrays = qkv((2, 4), 2, 1000, E)
    chosen, decode, on_gpu = (bits(device, arrays, monkeypatch, name)
                              for name in (None, "decode", "decode-gpu"))  # fmt: skip
    assert chosen == decode
    assert (decode == on_gpu) == (device.type != "cpu")


def torchlike(q, k, v, **options):
    return lambda device: sdpa(q, k, v, device=device, **options)


q, k, v = qkv((1, 2), 3, 50, WIDE)  # other kernels take them, whose programs tests share
REFUSED = {
    "E above 512": torchlike(*qkv((1, 2), 3, 5, 513, E)),
    "Ev above 512": torchlike(*qkv((1, 2), 3, 5, E, 513)),
    "dropout": torchlike(q, k, v, dropout_p=0.3, seed=1),
    "scores": lambda device: clattn.onnx.attention(q, k, v, return_qk=True, device=device).Y,
    "softcap after the mask": lambda device: clattn.onnx.attention(
        q, k, v, softcap=2.0, opset=24, pre_errata=True, device=device).Y,
    "input bias": lambda device: clattn.directml.multihead_attention(
        **make(L=3, S=50, E=WIDE, Ev=WIDE, bias=True), device=device).output,
}  # fmt: skip


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_what_it_refuses_when_forced(device, monkeypatch, call):
    """A ValueError that names the variable, what it says and what the kernel takes."""
    with pytest.raises(ValueError, match=r'CLATTN_KERNEL is "decode-gpu".*head sizes of 1 to 512'):
        call(device)
    monkeypatch.delenv("CLATTN_KERNEL")
    assert np.isfinite(call(device)).all()
