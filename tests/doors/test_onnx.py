# SPDX-License-Identifier: MIT
"""clattn.onnx.attention: Y, for every kind of input, against the oracle in references/onnx.py.

What else comes out, and the operator as first published: test_onnx_outputs.py; special numbers
and random calls: test_onnx_properties.py. Cross products of types and options run with the
reference kernel alone, whose head sizes are data: each combination is a program to build.
"""

import itertools

import clattn
import numpy as np
import pytest
from references.attention import DTYPES, bfloat16, float16, float32, float64
from references.onnx import attention, tolerances
from support.checks import assert_close
from support.layouts import LAYOUTS, ODD
from support.loops import looped, looped_dtypes
from support.onnx_calls import HK, HQ, B, E, L, P, S, cache, check_onnx, flat, inputs, mask_of

pytestmark = pytest.mark.tensors

LENGTHS = list(itertools.product((1, 16, 17, 33, 40), (0, 1, 13, 200)))
INT_TYPES = [np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
MASK_TYPES = [np.dtype(bool), *DTYPES, *INT_TYPES]


@looped("rank", [3, 4])
@looped("heads", [(4, 4), (6, 2), (5, 1), (1, 1)], ids=str)
def test_head_counts_and_ranks(device, kernel, heads, rank):
    """MHA, GQA and MQA: query head h reads head h // g. With rank 4 counts are optional."""
    arrays, options = inputs(heads=heads), {}
    if rank == 3:
        arrays, options = flat(arrays, heads)
    got = check_onnx(*arrays, device=device, **options)
    if rank == 4:
        again = check_onnx(*arrays, device=device, q_num_heads=heads[0], kv_num_heads=heads[1])
        assert again.Y.tobytes() == got.Y.tobytes()
        assert (
            check_onnx(*arrays, device=device, q_num_heads=heads[0]).Y.tobytes() == got.Y.tobytes()
        )


@looped("rank", [3, 4])
def test_values_of_another_size(device, kernel, rank):
    arrays, options = flat(inputs(Ev=5)) if rank == 3 else (inputs(Ev=5), {})
    got = check_onnx(*arrays, device=device, **options)
    assert got.Y.shape == ((B, L, HQ * 5) if rank == 3 else (B, HQ, L, 5))
    check_onnx(*arrays, None, *cache(Ev=5), device=device, **options)


@looped("is_causal", [0, 1], ids=["all", "causal"])
@looped("lengths", LENGTHS, ids=str)
def test_lengths(device, kernel, lengths, is_causal):
    """Tiles and rests; causality without a past starts at the top left, whatever the lengths."""
    check_onnx(*inputs(*lengths), device=device, is_causal=is_causal)


@pytest.mark.full
@pytest.mark.parametrize("v_dtype", DTYPES, ids=lambda d: f"V-{d}")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: f"QK-{d}")
def test_every_pair_of_types(device, reference_kernel, dtype, v_dtype):
    """Q, K and Y have one type, V another. With a past, test_onnx_outputs shares the programs."""
    types = {"dtype": dtype, "v_dtype": v_dtype}
    check_onnx(*inputs(**types), None, *cache(**types), device=device)


@looped_dtypes("types", [(float16, float16), (bfloat16, float32)])
def test_pairs_of_types_with_the_kernel_that_clattn_chooses(device, types):
    dtype, v_dtype = types
    check_onnx(*inputs(dtype=dtype, v_dtype=v_dtype), device=device)
    check_onnx(*inputs(dtype=dtype, v_dtype=v_dtype, L=1, S=200), device=device)


@looped_dtypes("dtype", MASK_TYPES)
def test_masks_of_every_type(device, reference_kernel, dtype):
    """A bool mask says who attends; masks of the other 12 types are converted and added."""
    check_onnx(*inputs(), mask_of(dtype, (HQ, L, S)), device=device)
    check_onnx(*inputs(), mask_of(dtype, (B, 1, 1, S - 3)), device=device)  # short


@looped_dtypes("types", [(float16, np.dtype(np.int8)), (float16, float64), (bfloat16, float16),
                         (bfloat16, bool), (float64, np.dtype(np.int64)),
                         (float64, float64)])  # fmt: skip
def test_masks_beside_other_types(device, reference_kernel, types):
    dtype, mask_dtype = types
    check_onnx(*inputs(dtype=dtype), mask_of(np.dtype(mask_dtype), (L, S)), device=device)


def test_masks_of_64_bits_are_not_cut_to_32(device, reference_kernel):
    """In 32 bits -2**40 or 2**40 + 3 would turn into almost nothing.

    The query is zero, so nothing is lost by adding it to a large number.
    """
    values = [(-(2**40), "i8"), (2**40 + 3, "i8"), (-(2**63), "i8"), (2**63, "u8"), (2**31, "u4")]
    Q, K, V = inputs()
    for value, dtype in values:
        mask = np.zeros((L, S), dtype)
        mask[:, ::2] = value
        check_onnx(0 * Q, K, V, mask, device=device)


BROADCASTS = [  # with T for the last; it may be 1 in opset 23 alone
    shape[dropped:]
    for dropped in range(4)
    for shape in itertools.product((B, 1), (HQ, 1), (L, 1), (S, 1))
    if all(n == (B, HQ, L, S)[i] for i, n in enumerate(shape) if i < dropped)
]


@looped_dtypes("dtype", [bool, np.float32])
def test_every_broadcast_shape_of_every_rank(device, reference_kernel, dtype):
    """Opset 23 broadcasts as NumPy does, so the first of three dimensions is that of heads."""
    assert len(BROADCASTS) == 16 + 8 + 4 + 2
    for shape in BROADCASTS:
        check_onnx(*inputs(), mask_of(np.dtype(dtype), shape), device=device, opset=23)


@looped("opset", [24, 25])
@looped_dtypes("dtype", [bool, np.float32])
def test_short_masks(device, kernel, dtype, opset):
    """From opset 24 on missing columns are -inf: one column is the mask of the first key."""
    for lead, last in itertools.product([(), (1,), (L,), (HQ, 1), (B, 1, L)], (0, 1, 16, S - 1)):
        mask = mask_of(np.dtype(dtype), (*lead, last))
        got = check_onnx(*inputs(), mask, device=device, opset=opset)
        assert last or not got.Y.any()
        past = cache()
        check_onnx(*inputs(), mask_of(np.dtype(dtype), (*lead, last + P)), *past, device=device)


@looped("opset", [23, 24, 25])
def test_every_opset_is_the_corrected_one(device, reference_kernel, opset):
    """Opset 23 too has softcap before the mask, mask with causality, and the past's offset."""
    mask = mask_of(float32, (HQ, L, S + P))
    options = {"is_causal": 1, "softcap": 0.7, "opset": opset}
    got = check_onnx(*inputs(), mask, *cache(), device=device, **options)
    del options["opset"]
    default = check_onnx(*inputs(), mask, *cache(), device=device, **options)
    assert default.Y.tobytes() == got.Y.tobytes()


@looped("is_causal", [0, 1], ids=["all", "causal"])
@looped("P", [0, 1, P])
def test_past(device, kernel, P, is_causal):
    """Causality is offset by P, also without new keys. Inputs of rank 3 have a past of rank 4."""
    for lengths in ((1, 1), (17, 33), (5, 0), (3, 200)):
        arrays = (*inputs(*lengths), None, *cache(P))
        got = check_onnx(*arrays, device=device, is_causal=is_causal)
        assert got.present_key.shape == (B, HK, P + lengths[1], E)
        arrays, counts = flat(arrays)
        check_onnx(*arrays, device=device, is_causal=is_causal, **counts)


NONPAD = [(33, 20), (17, 33), (5, 16), (0, 33), (1, 0), (0, 0)]


@looped("is_causal", [0, 1], ids=["all", "causal"])
@looped("lengths", NONPAD, ids=str)
def test_nonpad_kv_seqlen(device, kernel, lengths, is_causal):
    """Causality is offset by n - L in each batch; a negative offset leaves the first rows empty."""
    for rows, opset in ((17, 24), (1, 25), (40, 25)):
        arrays = (*inputs(rows), None, None, None, np.array(lengths))
        got = check_onnx(*arrays, device=device, is_causal=is_causal, opset=opset)
        for b, length in enumerate(lengths):
            empty = max(0, rows - length) if is_causal else rows * (length == 0)
            assert not got.Y[b, :, :empty].any() and got.Y[b, :, empty:].all()


def test_long_caches(device, kernel):
    """The keys fill many blocks; every batch and every row needs another number of blocks."""
    for rows in (1, 33):
        args = (*inputs(rows, 1000), None, None, None, np.array([700, 97]))
        check_onnx(*args, device=device)
        check_onnx(*args, device=device, is_causal=1)


@looped("kind", ["bool", "float"])
def test_nonpad_kv_seqlen_and_masks(device, reference_kernel, kind):
    """Short masks that reach the longest length; a row that both together leave empty."""
    lengths = np.array([20, 7])
    for shape in ((20,), (L, 21), (B, HQ, L, S), (HQ, 1, 30)):
        mask = mask_of(np.dtype(bool if kind == "bool" else np.float32), shape)
        for is_causal in (0, 1):
            check_onnx(*inputs(), mask, None, None, lengths, device=device, is_causal=is_causal)
    late = np.arange(S) >= 7
    late = late if kind == "bool" else np.where(late, 0, -np.inf).astype(np.float32)
    assert not check_onnx(*inputs(), late, None, None, lengths, device=device).Y[1].any()


WINDOWS = [(0, 0), (3, 0), (0, 3), (5, 7), (-1, 2), (2, -1), (-1, -1), (200, 200), (40, 0)]


@looped("is_causal", [0, 1], ids=["both ways", "causal"])
@looped("window", WINDOWS, ids=str)
def test_windows(device, reference_kernel, window, is_causal):
    """Row i sees the keys i + offset - left to i + offset + right, with and without an offset."""
    options = {"left_window_size": window[0], "right_window_size": window[1]}
    options |= {"is_causal": is_causal, "device": device}
    for lengths in ((33, 33), (17, 50), (50, 17)):
        check_onnx(*inputs(*lengths), **options)
    check_onnx(*inputs(), None, *cache(), **options)
    check_onnx(*inputs(), None, None, None, np.array([33, 9]), **options)


@looped("window", [(3, 0), (5, 7), (2, -1)], ids=str)
def test_windows_with_the_kernel_that_clattn_chooses(device, window):
    options = {"left_window_size": window[0], "right_window_size": window[1]}
    for lengths in ((40, 40), (17, 200), (40, 13)):
        check_onnx(*inputs(*lengths), device=device, **options)
    check_onnx(*inputs(), None, *cache(), device=device, **options)


def test_window_bounds_near_the_end_of_64_bits(device, reference_kernel):
    """p + right must not wrap around, from a past or a negative offset either."""
    for args in ((), (None, *cache()), (None, None, None, np.array([3, 33]))):
        right, allowed = attention(*inputs(), *args), tolerances(*inputs(), *args)
        for huge in (2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1):
            options = {"left_window_size": huge, "right_window_size": huge, "device": device}
            got = clattn.onnx.attention(*inputs(), *args, **options)
            assert_close(got.Y, right.Y, allowed.Y)


@looped("scale", [None, 0.3, 0.0, 2, 5.0, 1e-30, np.float32(0.5)], ids=repr)
def test_scale(device, scale):
    """Any finite number that has a square root."""
    check_onnx(*inputs(), device=device, scale=scale)


@looped("softcap", [0, 0.5, 5.0, 50.0, np.float32(3)], ids=repr)
def test_softcap(device, softcap):
    """The scaled score is capped, also where it is far beyond the cap."""
    check_onnx(*inputs(), device=device, softcap=softcap)
    check_onnx(*inputs(), device=device, softcap=softcap, scale=4.0)


@looped("precision", [1, 10, 11, 16])  # float32, float16, float64, bfloat16
@looped_dtypes("dtype", DTYPES)
def test_softmax_precision(device, reference_kernel, dtype, precision):
    """More precision than asked for is allowed: float32 at least, float64 for float64."""
    if precision == 11 and not device.float64:
        return
    check_onnx(*inputs(dtype=dtype), device=device, softmax_precision=precision)
    check_onnx(*inputs(1, 200, dtype=dtype), device=device, softmax_precision=precision)


def test_half_types_do_not_overflow_on_the_way(device, reference_kernel):
    """A product of 8 * 300 * 300 exceeds float16; after the scale it is small again."""
    Q, K, V = inputs(dtype=float16)
    check_onnx(Q * 300, K * 300, V, device=device, scale=1e-5)


EMPTIES = {  # L, S, heads, Ev, E, B
    "B": (5, 7, (4, 2), 8, 8, 0),
    "L": (0, 7, (4, 2), 8, 8, 2),
    "S": (5, 0, (4, 2), 8, 8, 2),
    "L and S": (0, 0, (4, 2), 8, 8, 2),
    "Ev": (5, 7, (4, 2), 0, 8, 2),
    "E": (5, 7, (4, 2), 8, 0, 2),
    "E and S": (5, 0, (4, 2), 8, 0, 2),
}


@looped("rank", [3, 4])
@looped("sizes", EMPTIES.values(), ids=EMPTIES)
def test_empty_dimensions(device, reference_kernel, sizes, rank):
    """Empty results; zeros without keys; without E every score is 0, so the mean of the values."""
    L, S, _, Ev, E, B = sizes
    for past in ((), (None, *cache(0, B=B, E=E, Ev=Ev)), (None, *cache(3, B=B, E=E, Ev=Ev))):
        arrays, options = (*inputs(*sizes), *past), {}
        if rank == 3:
            arrays, options = flat(arrays)
        check_onnx(*arrays, device=device, **options)
    lengths = np.full(B, S)
    check_onnx(*inputs(*sizes), np.ones((L, S), bool), None, None, lengths, device=device)


layouts = looped("layout", LAYOUTS, ids=lambda f: f.__name__)


@layouts
def test_strides(device, kernel, layout):
    """Transposed, reversed, cut out of something larger: inputs and past, in either rank."""
    check_onnx(*(layout(a) for a in inputs()), device=device)
    check_onnx(*(layout(a) for a in inputs()), None, *(layout(a) for a in cache()), device=device)
    flat_inputs, counts = flat(inputs())
    check_onnx(*(layout(a) for a in flat_inputs), device=device, **counts)


@layouts
def test_strides_of_masks(device, kernel, layout):
    check_onnx(*inputs(), layout(mask_of(float32, (B, HQ, L, S))), device=device)
    check_onnx(*inputs(), layout(mask_of(np.dtype(bool), (B, HQ, L, S))), device=device)


def test_zero_strides(device, kernel):
    """broadcast_to: one head for all, one row for all."""
    Q, K, V = inputs()
    check_onnx(
        Q, np.broadcast_to(K[:, :1], K.shape), np.broadcast_to(V[:1], V.shape), device=device
    )
    check_onnx(np.broadcast_to(Q[:, :, :1], Q.shape), K, V, device=device)
    mask = np.broadcast_to(mask_of(float32, (S,)), (B, HQ, L, S))
    check_onnx(Q, K, V, mask, device=device)
    for lengths in (np.broadcast_to(np.int64(9), B), np.array([33, 0, 9])[::-2]):
        check_onnx(Q, K, V, None, None, None, lengths, device=device)


@looped("layout", ODD, ids=lambda f: f.__name__)
def test_odd_layouts(device, reference_kernel, layout):
    """Misaligned and byte-swapped, one argument at a time."""
    arguments = [*inputs(), mask_of(float32, (L, S + P)), *cache()]
    for n, argument in enumerate(arguments):
        changed = [layout(argument) if n == m else a for m, a in enumerate(arguments)]
        check_onnx(*changed, device=device)


def test_arguments_by_position_and_by_name(device, reference_kernel):
    """The seven inputs in ONNX's order; attributes have names only."""
    Q, K, V = inputs()
    lengths = np.array([33, 9])
    mask = mask_of(float32, (L, S))
    by_name = {"V": V, "nonpad_kv_seqlen": lengths, "K": K, "attn_mask": mask, "Q": Q}
    got = clattn.onnx.attention(**by_name, device=device)
    assert_close(got.Y, attention(Q, K, V, mask, None, None, lengths).Y,
                 tolerances(Q, K, V, mask, None, None, lengths).Y)  # fmt: skip
    again = clattn.onnx.attention(Q, K, V, mask, None, None, lengths, device=device)
    assert got.Y.tobytes() == again.Y.tobytes()
    with pytest.raises(TypeError):
        clattn.onnx.attention(Q, K, V, mask, None, None, lengths, 1, device=device)
