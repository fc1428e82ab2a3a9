# SPDX-License-Identifier: MIT
"""attention_decode_cpu behind the other operators, and when it is the kernel that runs."""

import clattn
import numpy as np
import pytest
import support.directml_calls as directml
import support.openvino_calls as openvino
from references.attention import bfloat16, float16, float32, float64
from references.directml import make
from references.onnx import check
from support.decode_cases import bits
from support.helpers import draw, index_of, qkv, run_python, sdpa
from support.layouts import columns_first, negative_rows, sliced, transposed
from support.onnx_calls import cache, flat, inputs, mask_of

decode_only = pytest.mark.usefixtures("decode")
ROWS = pytest.mark.parametrize("L", [1, 8])
E = 64


def with_past(L, P, S=None, heads=(4, 2), B=2, **options):
    """Q, K, V, no mask, past_key, past_value."""
    arrays = inputs(L, L if S is None else S, heads, B=B, E=E, Ev=E, **options)
    return [*arrays, None, *cache(P, heads[1], B=B, E=E, Ev=E, **options)]


# ---- ONNX ----


@decode_only
@pytest.mark.parametrize("L", [1, 2, 4, 7, 8])
@pytest.mark.parametrize("heads", [(4, 4), (8, 1)], ids=str)
def test_past_and_present(device, heads, L):
    """Past and new keys meet within a vector, a block, a part; present is their concatenation."""
    for P in (0, 1, 15, 16, 130):
        check(*with_past(L, P, heads=heads), device=device, is_causal=1)
    check(*with_past(L, 13, S=40, heads=heads), device=device)
    check(*with_past(L, 13, S=0, heads=heads), device=device)


@decode_only
@pytest.mark.parametrize("lengths", [(4096, 1), (1, 4096), (1500, 1500), (0, 3000)], ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (8, 1)], ids=str)
def test_past_and_present_in_parts(device, heads, lengths):
    """Each part knows its own share of what is past and what is new."""
    args = with_past(1, *lengths, heads=heads, B=1)
    check(*args, device=device)
    check(*args, device=device, is_causal=1, left_window_size=700)


@decode_only
def test_parts_where_memory_is_copied(device):
    """Two kernels run, one after the other: neither takes back what the other has written."""
    run_python(
        """
        import sys
        import clattn, numpy as np
        from support.helpers import check, qkv
        from references.onnx import check as onnx
        from attention.test_attention_decode_doors import with_past
        device = clattn.devices()[int(sys.argv[1])]
        assert device.memory_mode == "copy"
        onnx(*with_past(1, 3000, heads=(1, 1), B=1), device=device)
        onnx(*with_past(1, 3000, heads=(1, 1), B=1), device=device, left_window_size=2000)
        q, k, v = qkv((1, 1), 3, 2500, 64)
        out = np.full((1, 1, 3, 130), 7, np.float32)
        check(q, k, v, device=device, out=out[..., 1:-1:2])
        assert (out[..., ::2] == 7).all()
        """,
        index_of(device),
        env={"CLATTN_MEMORY": "copy", "CLATTN_KERNEL": "decode"},
    )


@decode_only
@pytest.mark.parametrize("window", [(3, 0), (40, -1), (-1, 2), (0, 0)], ids=str)
def test_present_is_whole_outside_a_window(device, window):
    left, right = window
    options = {"left_window_size": left, "right_window_size": right}
    for args in (with_past(2, 200), with_past(1, 3000, heads=(1, 1), B=1)):
        check(*args, device=device, **options)
        check(*args, device=device, is_causal=1, **options)


@decode_only
@pytest.mark.parametrize("heads", [(4, 2), (8, 1)], ids=str)
def test_present_is_whole_without_rows(device, heads):
    """And where a mask excludes every key."""
    check(*with_past(0, 130, S=5, heads=heads), device=device)
    args = with_past(2, 130, S=5, heads=heads)
    args[3] = np.zeros((2, 135), bool)
    assert not check(*args, device=device).Y.any()


@decode_only
def test_three_dimensions(device):
    """Heads side by side: rows are pieces of a longer one."""
    L = 2
    args, options = flat(with_past(L, 77))
    check(*args, device=device, is_causal=1, **options)
    arrays, options = flat(inputs(L, 77, E=E, Ev=E))
    check(*arrays, device=device, **options)
    args, options = flat(with_past(L, 3000, heads=(2, 1), B=1), (2, 1))
    check(*args, device=device, **options)


@decode_only
@pytest.mark.parametrize("types", [(float32, float16), (float16, float32), (bfloat16, float16),
                                   (float32, float64)],
                         ids=lambda t: f"QK-{t[0]}-V-{t[1]}")  # fmt: skip
def test_values_of_another_type(device, types):
    """With a past, whose values have that type too."""
    dtype, v_dtype = types
    for P in (33, 5000) if dtype == float16 else (33,):
        heads = (2, 1) if P > 1000 else (4, 2)
        args = with_past(1, P, heads=heads, B=1, dtype=dtype, v_dtype=v_dtype)
        check(*args, device=device)


@decode_only
def test_a_float64_softmax_of_float32(device):
    check(*with_past(1, 33), device=device, softmax_precision=11)
    check(*with_past(1, 5000, heads=(2, 1), B=1), device=device, softmax_precision=11)


@decode_only
@pytest.mark.parametrize("dtype", [bool, np.float32, np.int16], ids=["bool", "float", "int16"])
def test_short_masks(device, dtype):
    """What lies behind a mask's last column is not seen."""
    shapes = ((2, 130, (4, 2), 2), (2, 3000, (2, 1), 1))
    for L, P, heads, B in shapes if dtype == np.float32 else shapes[:1]:
        args = with_past(L, P, heads=heads, B=B)
        for keys in (1, 17, P // 2, P + L):
            args[3] = mask_of(np.dtype(dtype), (L, keys))
            check(*args, device=device)


@decode_only
@pytest.mark.parametrize("is_causal", [0, 1])
@ROWS
def test_lengths(device, L, is_causal):
    """Keys at and behind a length do not matter, whatever they hold; a length may be 0."""
    Q, K, V = inputs(L, 77, B=5, E=E, Ev=E)
    lengths = np.array([0, 1, 16, 50, 77])
    for b, n in enumerate(lengths):
        K[b, :, n:], V[b, :, n:] = np.nan, np.inf
    check(Q, K, V, None, None, None, lengths, device=device, is_causal=is_causal)
    mask = mask_of(np.dtype(bool), (L, 77))
    check(Q, K, V, mask, None, None, lengths, device=device, is_causal=is_causal)


@decode_only
@pytest.mark.parametrize("length", [0, 1, 16, 511, 700, 2048, 3000])
def test_lengths_in_parts(device, length):
    Q, K, V = inputs(2, 3000, (2, 1), B=1, E=E, Ev=E)
    K[:, :, length:], V[:, :, length:] = np.inf, np.nan
    lengths = np.array([length])
    for options in ({}, {"is_causal": 1}, {"is_causal": 1, "left_window_size": 900}):
        check(Q, K, V, None, None, None, lengths, device=device, **options)


# ---- DirectML ----


@decode_only
def test_directml(device):
    """Sources, a past, and the present keys and values that `check` asks for."""
    sizes = {"L": 2, "S": 2, "H": 3, "E": E, "Ev": E}
    directml.check(make(**sizes), device=device)
    for P in (1, 130):
        directml.check(make(**sizes, P=P), device=device)
    directml.check(make("stacked_query_key_value", **sizes, P=40), device=device)
    directml.check(make("stacked_key_value", **sizes | {"S": 50}, P=40), device=device)


@decode_only
@pytest.mark.parametrize("kind", ["boolean", "key_sequence_length", "key_sequence_end_start"])
@pytest.mark.parametrize("sizes", [(2, 3, 2, 50), (1, 1, 2, 2500)], ids=["short", "split"])
def test_directml_masks(device, sizes, kind):
    """Padding adds a number, beside a bias that adds others; once without, and once in float16."""
    B, H, L, P = sizes
    T = P + L
    mask = {
        "boolean": draw((B, L, T)) > -0.3,
        "key_sequence_length": np.array([T // 3, 5][:B]),
        "key_sequence_end_start": np.array([[T - 3, T // 2][:B], [17, 1][:B]]),
    }[kind].astype(np.int32)
    bias = draw((B, H, L, T), seed=7)
    bias[..., 11:20] = -np.inf
    sizes = {"B": B, "H": H, "L": L, "S": L, "P": P, "E": E, "Ev": E}
    calls = [make(**sizes, mask=mask, mask_type=kind, relative_position_bias=bias)]
    calls.append(calls[0] | {"mask_filter_value": -3.0})
    if kind == "key_sequence_length" and T < 100:
        calls.append(make(**sizes, mask=mask, mask_type=kind))
    if kind == "boolean" and T > 100:
        calls.append(make(**sizes, dtype=np.float16, mask=mask, mask_type=kind,
                          relative_position_bias=bias.astype(np.float16)))  # fmt: skip
    for call in calls:
        directml.compare(call, directml.run(call, device=device).output)


# ---- OpenVINO ----


@decode_only
def test_openvino(device):
    q, k, v = qkv((2, 3), 3, 77, E)
    for mask in (None, draw((3, 77)) > 0, draw((3, 1, 77))):
        openvino.check(q, k, v, mask, device=device)
    openvino.check(q, k, v, device=device, causal=True)
    openvino.check(*qkv((1, 1), 3, 2500, E), draw((1, 2500)), device=device)
    leads = (1, 6, 5), (2, 2, 2), (4, 3, 10)
    openvino.check(*openvino.arrays(leads, L=3, S=50, E=E, Ev=E), device=device)


# ---- which kernel runs ----


@decode_only
@pytest.mark.parametrize("shape", [((2, 4), 1, 1000, E), ((2, 4), 8, 1000, E)], ids=str)
def test_few_rows_take_this_kernel(device, monkeypatch, shape):
    """Kernels differ in the last bits of such sums."""
    chosen, decode, cpu = (bits(device, qkv(*shape), monkeypatch, name)
                           for name in (None, "decode", "cpu"))  # fmt: skip
    assert chosen == decode != cpu


@decode_only
def test_more_rows_do_not(device, monkeypatch):
    chosen, decode, cpu = (bits(device, qkv((2, 4), 9, 1000, E), monkeypatch, name)
                           for name in (None, "decode", "cpu"))  # fmt: skip
    assert chosen == cpu != decode


def torchlike(q, k, v, **options):
    return lambda device: sdpa(q, k, v, device=device, **options)


def onnx(*args, **options):
    return lambda device: clattn.onnx.attention(*args, device=device, **options).Y


def dml(call):
    return lambda device: clattn.directml.multihead_attention(**call, device=device).output


q, k, v = qkv((1, 2), 3, 50, E)
past = cache(20, 2, B=1, E=E, Ev=E)
REFUSED = {
    "E below a vector": torchlike(*qkv((1, 2), 3, 50, 3, E)),
    "Ev below a vector": torchlike(*qkv((1, 2), 3, 50, E, 3)),
    "E above 512": torchlike(*qkv((1, 2), 3, 5, 513, E)),
    "Ev above 512": torchlike(*qkv((1, 2), 3, 5, E, 513)),
    "key columns apart": torchlike(q, sliced(k), v),
    "value columns apart": torchlike(q, k, sliced(v)),
    "key columns first": torchlike(q, columns_first(k), v),
    "value columns backwards": torchlike(q, k, v[..., ::-1]),
    "key columns all the same": torchlike(q, np.broadcast_to(k[..., :1], k.shape), v),
    "past key columns apart": onnx(q, k, v, None, sliced(past[0]), past[1]),
    "past value columns apart": onnx(q, k, v, None, past[0], columns_first(past[1])),
    "dropout": torchlike(q, k, v, dropout_p=0.3, seed=1),
    "scores": onnx(q, k, v, return_qk=True),
    "softcap after the mask": onnx(q, k, v, softcap=2.0, opset=24, pre_errata=True),
    "input bias": dml(make(L=3, S=50, E=E, Ev=E, bias=True)),
}


@decode_only
@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_what_it_refuses_when_forced(device, monkeypatch, call):
    """A ValueError that names the variable, what it says and what the kernel takes.

    Without it the call works, as the next test sees for some; here the reference kernel says so.
    """
    message = 'CLATTN_KERNEL is "decode".*contiguous rows of at least one vector'
    with pytest.raises(ValueError, match=message):
        call(device)
    monkeypatch.setenv("CLATTN_KERNEL", "reference")
    assert np.isfinite(call(device)).all()


@pytest.mark.parametrize("name", ["Ev below a vector", "key columns apart", "dropout", "scores"])
def test_another_kernel_takes_what_it_refuses(device, name):
    """For each reason of another kind; it gives the reference kernel's numbers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLATTN_KERNEL", "reference")
        right = REFUSED[name](device)
    np.testing.assert_allclose(REFUSED[name](device), right, rtol=0, atol=2e-6)


@decode_only
def test_what_it_takes_although_it_looks_alike(device):
    """Rows apart or backwards, a query in any layout, a softcap without a mask before it."""
    check(sliced(q), negative_rows(k), transposed(v), device=device)
    check(q, k, v, device=device, opset=24, pre_errata=True)
    check(q, k, v, None, negative_rows(past[0]), transposed(past[1]), device=device)
    sdpa(q, k, v, device=device, dropout_p=1e-12, seed=1)
