# SPDX-License-Identifier: MIT
"""What variants do for the other doors: past and present keys, counts of keys, biases, dropout.

Each test runs for the variants whose row in support/variants.py has the option. Variants without
it refuse the call.
"""

import clattn
import numpy as np
import pytest
import references.directml as oracle
import support.directml_calls as directml
import support.openvino_calls as openvino
from references.attention import bfloat16, float16, float32, float64
from references.directml import make
from support.data import draw, qkv
from support.dropout_calls import check_dropout
from support.layouts import columns_first, negative_rows, sliced, transposed
from support.masks import INF, NAN
from support.onnx_calls import cache, check_onnx, flat, inputs, mask_of
from support.sizes import WIDE
from support.variants import each, force, with_door, with_kernels

pytestmark = [pytest.mark.full, pytest.mark.options]

DECODE = ("decode_cpu", "decode_gpu")


def with_past(variant, L, P, S=None, heads=(4, 2), B=2, **types):
    """Q, K, V, no mask, past_key, past_value."""
    sizes = {"B": B, "E": variant.E, "Ev": variant.E, "dtype": variant.dtype} | types
    return [*inputs(L, L if S is None else S, heads, **sizes), None, *cache(P, heads[1], **sizes)]


# ---- past and present keys ----


PASTS = {  # (heads, L)
    "decode_cpu": [(heads, L) for heads in ((4, 4), (8, 1)) for L in (1, 2, 4, 7, 8)],
    "decode_gpu": [((2, 1), 1), ((4, 4), 2)],
}


@each(PASTS)
def test_past_and_present(device, variant, case):
    """Past and new keys meet within a vector or block, where nobody asks for the present ones."""
    heads, L = case
    sizes = {"B": 2, "H": heads[0], "L": L, "S": L, "E": variant.E, "Ev": variant.E}
    for P in (0, 1, 15, 16, 63, 64, 130):
        check_onnx(*with_past(variant, L, P, heads=heads), device=device, is_causal=1)
        directml.check_alone(make(**sizes, P=P), device=device)
    for rows, S in ((L, 40), (L, 0), (0, 5)):
        check_onnx(*with_past(variant, rows, 13, S=S, heads=heads), device=device)


@pytest.mark.parametrize("lengths", [(4096, 1), (1, 4096), (1500, 1500), (0, 3000)], ids=str)
@each({"decode_cpu": [(1, 1), (8, 1)], "decode_gpu": [(2, 1)]}, "heads")
def test_past_and_present_in_splits(device, variant, heads, lengths):
    """Each split knows its own share of what is past and what is new."""
    args = with_past(variant, 1, *lengths, heads=heads, B=1)
    check_onnx(*args, device=device)
    check_onnx(*args, device=device, is_causal=1, left_window_size=700)
    P, S = lengths
    sizes = {"B": 1, "H": heads[0], "L": 1, "S": S, "E": variant.E, "Ev": variant.E}
    directml.check_alone(make(**sizes, P=P), device=device)


@pytest.mark.parametrize("window", [(3, 0), (40, -1), (-1, 2), (0, 0)], ids=str)
@with_door("past", ["decode_cpu"])
def test_present_is_whole_outside_a_window(device, variant, window):
    left, right = window
    options = {"left_window_size": left, "right_window_size": right}
    for args in (with_past(variant, 2, 200), with_past(variant, 1, 3000, heads=(1, 1), B=1)):
        check_onnx(*args, device=device, **options)
        check_onnx(*args, device=device, is_causal=1, **options)


@pytest.mark.parametrize("heads", [(4, 2), (8, 1)], ids=str)
@with_door("past", ["decode_cpu"])
def test_present_is_whole_without_rows(device, variant, heads):
    """And where a mask excludes every key."""
    check_onnx(*with_past(variant, 0, 130, S=5, heads=heads), device=device)
    args = with_past(variant, 2, 130, S=5, heads=heads)
    args[3] = np.zeros((2, 135), bool)
    assert not check_onnx(*args, device=device).Y.any()


@with_door("past", ["decode_cpu"])
def test_three_dimensions(device, variant):
    """Heads side by side: a row is a slice of a longer one."""
    args, options = flat(with_past(variant, 2, 77))
    check_onnx(*args, device=device, is_causal=1, **options)
    arrays, options = flat(with_past(variant, 2, 0, S=77)[:3])
    check_onnx(*arrays, device=device, **options)
    args, options = flat(with_past(variant, 2, 3000, heads=(2, 1), B=1), (2, 1))
    check_onnx(*args, device=device, **options)


@with_door("past", DECODE)
def test_layouts_of_past_keys(device, variant):
    args = with_past(variant, 1, 1500, heads=(2, 1), B=1)
    check_onnx(*args[:4], negative_rows(args[4]), transposed(args[5]), device=device)
    if sliced in variant.key_layouts:  # unaligned rows of longer ones
        args[2], args[4], args[5] = (sliced(args[n]) for n in (2, 4, 5))
        check_onnx(*args, device=device)


TYPES = {  # of queries and keys, of values
    "decode_cpu": [(float32, float16), (float16, float32), (bfloat16, float16),
                   (float32, float64)],
    "decode_gpu": [(float32, float16)],
}  # fmt: skip


@each(TYPES, "types")
def test_values_of_another_type(device, variant, types):
    """With a past, whose values have that type too."""
    dtype, v_dtype = types
    for P in (33, 5000):
        args = with_past(variant, 1, P, heads=(2, 1), B=1, dtype=dtype, v_dtype=v_dtype)
        check_onnx(*args, device=device)


@with_door("past", ["decode_cpu"])
def test_a_float64_softmax_of_float32(device, variant):
    for P in (33, 5000):
        args = with_past(variant, 1, P, heads=(2, 1), B=1)
        check_onnx(*args, device=device, softmax_precision=11)


# ---- masks that end early, counts of keys ----


@each({"decode_cpu": ["bool", "f4", "i2"], "decode_gpu": ["i2"]}, "dtype")
def test_short_masks(device, variant, dtype):
    """What lies behind the last column of a mask is not seen."""
    for P, heads, B in ((130, (4, 2), 2), (3000, (2, 1), 1)):
        args = with_past(variant, 2, P, heads=heads, B=B)
        for keys in (1, 17, P // 2, P + 2):
            args[3] = mask_of(np.dtype(dtype), (2, keys))
            check_onnx(*args, device=device)


@pytest.mark.parametrize("is_causal", [0, 1])
@each({"tiled": [20], "mma": [40], "decode_cpu": [1, 8], "decode_gpu": [2], "decode_mma": [2]},
      "L")  # fmt: skip
def test_counts(device, variant, L, is_causal):
    """Keys at and behind a count do not matter, whatever they hold. A count may be 0."""
    sizes = {"E": variant.E, "Ev": variant.E, "dtype": variant.dtype}
    Q, K, V = inputs(L, 130, B=5, **sizes)
    counts = np.array([0, 1, 16, 90, 130])
    for b, n in enumerate(counts):
        K[b, :, n:], V[b, :, n:] = NAN, INF
    check_onnx(Q, K, V, None, None, None, counts, device=device, is_causal=is_causal)
    if variant.kernel == "decode_cpu":
        mask = mask_of(np.dtype(bool), (L, 130))
        check_onnx(Q, K, V, mask, None, None, counts, device=device, is_causal=is_causal)


@pytest.mark.parametrize("length", [0, 1, 16, 511, 700, 2048, 3000])
@with_door("counts", DECODE)
def test_counts_in_splits(device, variant, length):
    Q, K, V = inputs(2, 3000, (2, 1), B=1, E=variant.E, Ev=variant.E)
    K[:, :, length:], V[:, :, length:] = INF, NAN
    for options in ({}, {"is_causal": 1}, {"is_causal": 1, "left_window_size": 900}):
        check_onnx(Q, K, V, None, None, None, np.array([length]), device=device, **options)


# ---- DirectML and OpenVINO ----


@with_door("past", ["decode_cpu"])
def test_directml(device, variant):
    """Sources, a past, and the present keys and values that `check_onnx` asks for."""
    sizes = {"L": 2, "S": 2, "H": 3, "E": variant.E, "Ev": variant.E}
    directml.check_directml(make(**sizes), device=device)
    for P in (1, 130):
        directml.check_directml(make(**sizes, P=P), device=device)
    directml.check_directml(make("stacked_query_key_value", **sizes, P=40), device=device)
    directml.check_directml(make("stacked_key_value", **sizes | {"S": 50}, P=40), device=device)


KINDS = ["boolean", "key_sequence_length", "key_sequence_end_start"]


@each({"decode_cpu": KINDS, "decode_gpu": KINDS[1:2]}, "kind")
@pytest.mark.parametrize("sizes", [(2, 3, 2, 50), (1, 1, 2, 2500)], ids=["short", "split"])
def test_directml_masks(device, variant, sizes, kind):
    """Padding adds a number, beside a bias that adds others."""
    B, H, L, P = sizes
    T = P + L
    mask = {
        "boolean": draw((B, L, T)) > -0.3,
        "key_sequence_length": np.array([T // 3, 5][:B]),
        "key_sequence_end_start": np.array([[T - 3, T // 2][:B], [17, 1][:B]]),
    }[kind].astype(np.int32)
    bias = draw((B, H, L, T), seed=7)
    bias[..., 11:20] = -INF
    sizes = {"B": B, "H": H, "L": L, "S": L, "P": P, "E": variant.E, "Ev": variant.E}
    calls = [make(**sizes, mask=mask, mask_type=kind, relative_position_bias=bias)]
    calls.append(calls[0] | {"mask_filter_value": -3.0})
    if variant.kernel == "decode_cpu" and kind == "key_sequence_length" and T < 100:
        calls.append(make(**sizes, mask=mask, mask_type=kind))
    if variant.kernel == "decode_cpu" and kind == "boolean" and T > 100:
        calls.append(make(**sizes, dtype=np.float16, mask=mask, mask_type=kind,
                          relative_position_bias=bias.astype(np.float16)))  # fmt: skip
    for call in calls:
        directml.compare(call, directml.run(call, device=device).output, device=device)


@with_door("filter", ("mma", "decode_mma"))
def test_bias_and_numbers_for_what_a_mask_leaves_out(device, variant):
    B, heads, _, L, _ = (2, 4, 4, 2, 90) if variant.kernel == "decode_mma" else (1, 2, 2, 20, 90)
    columns = heads * variant.E
    call = {
        "query": draw((B, L, columns), float16),
        "key": draw((B, 90, columns), float16),
        "value": draw((B, 90, columns), float16),
        "relative_position_bias": draw((B, heads, L, 90), float16),
        "mask": (draw((B, heads, L, 90)) > 0).astype(np.int32),
        "mask_type": "boolean",
        "mask_filter_value": -3.0,
        "head_count": heads,
        "scale": 0.1,
    }
    directml.compare(call, directml.run(call, device=device).output, device=device)


@with_door("input bias", ["tiled"])
def test_biases_and_a_filter(device, variant):
    """Biases of inputs and scores, key lengths, past and present keys, a number for a mask."""
    call = dict(
        query=draw((2, 20, 32)), key=draw((2, 30, 32)), value=draw((2, 30, 32)),
        bias=draw((96,)), relative_position_bias=draw((2, 2, 20, 35)), head_count=2, scale=0.3,
        past_key=draw((2, 2, 5, 16)), past_value=draw((2, 2, 5, 16)),
        mask=np.array([35, 17], np.int32), mask_type="key_sequence_length",
        mask_filter_value=-1.5,
    )  # fmt: skip
    answer = clattn.directml.multihead_attention(**call, device=device, return_present=True)
    directml.compare(call, answer.output, device=device)
    presents = (answer.present_key, answer.present_value)
    for got, right in zip(presents, oracle.present(call), strict=True):
        assert got.tobytes() == right.tobytes()


@with_door("past", ["decode_cpu"])
def test_openvino(device, variant):
    E = variant.E
    q, k, v = qkv((2, 3), 3, 77, E)
    for mask in (None, draw((3, 77)) > 0, draw((3, 1, 77))):
        openvino.check_openvino(q, k, v, mask, device=device)
    openvino.check_openvino(q, k, v, device=device, causal=True)
    openvino.check_openvino(*qkv((1, 1), 3, 2500, E), draw((1, 2500)), device=device)
    leads = (1, 6, 5), (2, 2, 2), (4, 3, 10)
    openvino.check_openvino(*openvino.arrays(leads, L=3, S=50, E=E, Ev=E), device=device)


# ---- dropout, scores ----


@with_door("dropout", ["tiled"])
def test_dropout(device, variant):
    check_dropout(*qkv((1, 2), 20, 70, 16), device=device)
    check_dropout(*qkv((1, 2), 40, 40, 16), device=device, is_causal=True)


@with_kernels("tiled", "decode_cpu")
def test_scores_with_a_past(device, variant):
    """Weights, present keys and values, a mask that ends before the keys, an empty row.

    The other stages are in test_oclgrind.py.
    """
    q, k, v = qkv((1, 2), 20, 30, 16)
    past = qkv((1, 2), 20, 37, 16, seed=1)[1:]
    v[..., 25, 3] = NAN
    mask = draw((20, 50)) > -1
    mask[7] = False
    check_onnx(q, k, v, mask, *past, device=device, is_causal=1,
               return_qk=True, qk_matmul_output_mode=3)  # fmt: skip


@with_kernels("tiled")
def test_another_dtype_of_values(device, variant):
    q, k, _ = qkv((1, 2), 20, 40, 16)
    check_onnx(q, k, draw((1, 2, 40, 24), float16), device=device)


# ---- what a variant does not take ----


def call_with(variant, option, device):
    """The result of a call that asks for an option of other doors."""
    q, k, v = variant.arrays((1, 2, 2, 3, 50), E=WIDE)
    onnx = clattn.onnx.attention
    if option == "softcap last":
        return onnx(q, k, v, softcap=2.0, opset=24, pre_errata=True, device=device).Y
    if option == "dropout":
        return clattn.scaled_dot_product_attention(q, k, v, dropout_p=0.3, seed=1, device=device)
    call = make(L=3, S=50, P=20, E=WIDE, Ev=WIDE, dtype=variant.dtype)
    if option == "past key columns apart":
        call["past_key"] = sliced(call["past_key"])
    if option == "past value columns apart":
        call["past_value"] = columns_first(call["past_value"])
    return directml.run(call, device=device).output


def refused(variant):
    """Options that the variant refuses; the reference kernel takes them all."""
    options = [] if variant.kernel == "reference" else ["past", "softcap last", "dropout"]
    if variant.kernel == "decode_cpu":
        options += ["past key columns apart", "past value columns apart"]
    return [option for option in options if option not in variant.doors]


@each(refused, "option")
def test_options_that_it_refuses(device, variant, monkeypatch, option):
    """A ValueError that names the variable; another variant takes the call, to the same numbers."""
    message = f'CLATTN_KERNEL is "{variant.kernel}".*{variant.takes}'
    with pytest.raises(ValueError, match=message):
        call_with(variant, option, device)
    force(monkeypatch, "reference")
    right = call_with(variant, option, device).astype(float64)
    if variant.kernel not in DECODE:
        return  # the chosen variant would need programs that no other test has
    force(monkeypatch)
    got = call_with(variant, option, device)
    np.testing.assert_allclose(got, right, rtol=0, atol=1e-5)


@with_door("past", ["decode_cpu"])
def test_calls_that_look_like_refused_ones(device, variant):
    """Rows apart or backwards, a query in any layout, a softcap without a mask before it."""
    q, k, v = variant.arrays((1, 2, 2, 3, 50))
    past = variant.arrays((1, 2, 2, 3, 20))[1:]
    check_onnx(sliced(q), negative_rows(k), transposed(v), device=device)
    check_onnx(q, k, v, device=device, opset=24, pre_errata=True)
    check_onnx(q, k, v, None, negative_rows(past[0]), transposed(past[1]), device=device)
    clattn.scaled_dot_product_attention(q, k, v, device=device, dropout_p=1e-12, seed=1)
