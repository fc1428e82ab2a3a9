# SPDX-License-Identifier: MIT
"""clattn.openvino.scaled_dot_product_attention: values on every device, against float64."""

import itertools

import numpy as np
import pytest
import references.openvino as oracle
from references.attention import DTYPES, bfloat16, float16, float32
from support.checks import assert_close
from support.data import draw, qkv
from support.layouts import LAYOUTS, ODD
from support.loops import looped, looped_dtypes
from support.openvino_calls import arrays, call, check_openvino

pytestmark = pytest.mark.tensors

FULL = (2, 3, 17, 13)  # leading dimensions, L and S of most masks here


def bool_mask(shape, seed=0):
    return draw(shape, seed=seed) > -0.3


def float_mask(shape, dtype=np.float32, seed=0):
    """Added to the scores; every fifth entry or so is -inf."""
    added = draw(shape, seed=seed)
    return np.where(added > 0.85, -np.inf, added).astype(dtype)


def test_the_oracle_by_hand():
    """Examples computed by hand: how batches repeat, and the weights."""
    assert oracle.common_lead((1, 6, 5), (2, 2, 2), (4, 3, 10)) == (4, 6, 10)
    assert oracle.common_lead((4,), (6,), (12,)) == (12,)
    assert oracle.common_lead((3,), (2, 1)) == (2, 3)
    assert oracle.common_lead((0,), (1,)) == (0,)
    for leads in [((4,), (6,)), ((2,), (3,)), ((5, 1), (3, 1), (2, 1))]:
        with pytest.raises(ValueError, match="shape"):
            oracle.common_lead(*leads)
    rows = np.arange(4).reshape(4, 1, 1)
    assert oracle.repeated(rows, (12,)).ravel().tolist() == [0, 1, 2, 3] * 3
    # Scores 0 and log 3, so weights 1/4 and 3/4.
    q, k = np.ones((1, 1, 1)), np.array([[[0.0], [np.log(3)]]])
    v = np.array([[[4.0], [8.0]]])
    assert oracle.attention(q, k, v).ravel() == pytest.approx([7])
    assert oracle.attention(q, k, v, np.array([[True, False]])).ravel() == pytest.approx([4])
    assert oracle.attention(q, k, v, np.array([[np.log(3), 0]])).ravel() == pytest.approx([6])
    assert oracle.attention(q, k, v, causal=True).ravel() == pytest.approx([4])
    assert oracle.attention(q, k, v, scale=np.zeros(1)).ravel() == pytest.approx([6])
    assert oracle.attention(q, k, v, np.zeros((1, 2), bool)).ravel().tolist() == [0]


@pytest.mark.usefixtures("reference_kernel")
@looped_dtypes("dtype", DTYPES)
def test_dtypes(device, dtype):
    tensors = qkv((2, 3), 17, 13, 8, dtype=dtype)
    check_openvino(*tensors, device=device)
    check_openvino(*tensors, device=device, causal=True)


@looped_dtypes("dtype", [float32, float16])
def test_dtypes_with_the_chosen_kernel(device, dtype):
    check_openvino(*qkv((2, 3), 17, 13, 8, dtype=dtype), device=device)


SHAPES = [
    (1, 1, 8, 5),
    (1, 200, 8, 8),
    (16, 13, 8, 5),
    (17, 1, 1, 1),
    (33, 40, 8, 5),
    (40, 33, 3, 7),
]


@pytest.mark.usefixtures("reference_kernel")
@looped("causal", [False, True], ids=["all", "causal"])
@looped("shape", SHAPES, ids=str)
def test_shapes(device, shape, causal):
    check_openvino(*qkv((1, 2), *shape), device=device, causal=causal)


@looped("shape", [(1, 200), (17, 13), (33, 40), (40, 13)], ids=str)
def test_causal_is_aligned_to_the_top_left(device, kernel, shape):
    L, S = shape
    q, k, v = qkv((1, 2), L, S, 8)
    result = check_openvino(q, k, v, device=device, causal=True)
    np.testing.assert_array_equal(result[..., 0, :], v[..., 0, :])


LEADS = {  # of query, key, value
    "3-D": ((3,), (3,), (3,)),
    "4-D": ((2, 3), (2, 3), (2, 3)),
    "5-D": ((2, 1, 3), (2, 1, 3), (2, 1, 3)),
    "6-D": ((2, 1, 3, 2), (2, 1, 3, 2), (2, 1, 3, 2)),
    "one key": ((3, 2), (1, 2), (1, 2)),
    "one query": ((1, 2), (3, 2), (3, 2)),
    "value alone has batches": ((1,), (1,), (3,)),
    "all three differ": ((2, 1, 1), (1, 3, 1), (1, 1, 4)),
    "ranks differ": ((2, 3), (3,), (2, 1)),
    "6-D against 3-D": ((2, 1, 2, 1), (1,), (3, 1, 2)),
    "the specification's third example": ((1, 6, 5), (2, 2, 2), (4, 3, 10)),
    "4 and 6 in 12": ((4,), (6,), (12,)),
    "12 and 6 and 4": ((12,), (6,), (4,)),
    "6 and 12 and 4": ((6,), (12,), (4,)),
    "a query of 12": ((12,), (4,), (6,)),
    "twice": ((2,), (4,), (4,)),
    "a repeated query": ((3,), (6,), (6,)),
    "a repeated value": ((6,), (6,), (2,)),
    "repeated and broadcast": ((4, 1), (1, 6), (2, 3)),
    "repeated within rows": ((6, 4), (3, 4), (2, 4)),
    "repeated in two dimensions": ((4, 6), (6, 4), (12, 12)),
    "repeated and missing": ((4,), (2, 6), (12,)),
    "6-D, repeated": ((1, 2, 1, 4), (3, 1, 2, 6), (6, 2, 1, 12)),
    "largest in the mask's place": ((2, 1), (4, 1), (4, 3)),
}


@pytest.mark.usefixtures("reference_kernel")
@looped("leads", LEADS.values(), ids=LEADS)
def test_batch_dimensions(device, leads):
    check_openvino(*arrays(leads), device=device)


@looped("name", ["4-D", "ranks differ", "the specification's third example",
                                  "4 and 6 in 12", "repeated in two dimensions"])  # fmt: skip
def test_batch_dimensions_with_the_chosen_kernel(device, name):
    check_openvino(*arrays(LEADS[name], L=17, S=13, Ev=8), device=device)


def test_repeating_is_that_of_tile(device):
    """Entry i of the result reads entry i modulo the size; the oracle's function is not used."""
    q, k, v = arrays(((4,), (6,), (12,)), Ev=8)
    whole = check_openvino(q, k, v, device=device)
    allowed = 2 * oracle.tolerance(q, k, v)
    for i in range(12):
        one = call(q[i % 4 :][:1], k[i % 6 :][:1], v[i : i + 1], device=device)
        assert_close(whole[i], one[0], allowed[i])


MASK_LEADS = [(), (1,), (2,), (3,), (6,), (1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (4, 3), (2, 6),
              (4, 1), (4, 6), (2, 3)]  # fmt: skip


@pytest.mark.usefixtures("reference_kernel")
@looped("kind", ["bool", "float"])
def test_repeated_masks(device, kind):
    """Masks are repeated too, into leading dimensions (4, 6) of the result and in every form."""
    q, k, v = arrays(((4, 2), (1, 6), (2, 3)))
    for lead in MASK_LEADS:
        shape = (*lead, 3, 5)
        mask = bool_mask(shape) if kind == "bool" else float_mask(shape)
        check_openvino(q, k, v, mask, device=device)


@looped("kind", ["bool", "float"])
def test_the_third_example_with_its_mask(device, kernel, kind):
    q, k, v = arrays(LEADS["the specification's third example"], L=17, S=13, Ev=8)
    shape = (1, 2, 1, 17, 13)
    mask = bool_mask(shape) if kind == "bool" else float_mask(shape)
    assert check_openvino(q, k, v, mask, device=device).shape == (4, 6, 10, 17, 8)


def broadcastable_shapes():
    """Every shape of two dimensions or more that NumPy broadcasts to FULL."""
    for rank in (2, 3, 4):
        yield from itertools.product(*((1, n) for n in FULL[4 - rank :]))


@pytest.mark.usefixtures("reference_kernel")
@looped_dtypes("dtype", [*DTYPES, np.dtype(bool)])
def test_mask_shapes(device, dtype):
    """bool with float32 tensors, else the tensors' own type; all 28 shapes."""
    is_bool = dtype.kind == "b"
    tensors = qkv((2, 3), *FULL[2:], 8, 5, np.float32 if is_bool else dtype)
    for shape in dict.fromkeys(broadcastable_shapes()):
        mask = bool_mask(shape) if is_bool else float_mask(shape, dtype)
        check_openvino(*tensors, mask, device=device)


@pytest.mark.usefixtures("reference_kernel")
@looped_dtypes("dtype", DTYPES)
def test_bool_masks_with_every_dtype(device, dtype):
    check_openvino(*qkv((2, 3), *FULL[2:], 8, dtype=dtype), bool_mask(FULL), device=device)


@looped("kind", ["bool", "float", "keys"])
def test_masks_with_the_chosen_kernel(device, kind):
    mask = {"bool": bool_mask, "float": float_mask, "keys": bool_mask}[kind](
        (1, 200) if kind == "keys" else (2, 1, 33, 200)
    )
    check_openvino(*qkv((2, 3), 33, 200, 8), mask, device=device)


IGNORED = {
    "bool of the right shape": np.zeros((17, 13), bool),
    "minus infinity": np.full((17, 13), -np.inf, np.float32),
    "NaN": np.full((2, 3, 17, 13), np.nan, np.float32),
    "wrong shape": np.ones((4, 99), bool),
    "one dimension": np.zeros(5, np.float32),
    "seven dimensions": np.zeros((2,) * 7, np.float32),
    "another float type": np.zeros((17, 13), np.float64),
    "int": np.ones((17, 13), np.int64),
    "complex": np.ones((17, 13), complex),
    "object": np.full((17, 13), None),
    "scalar 0": np.array(0, np.float32),
    "scalar 7": np.float32(7),
    "a list": [[True, False]],
    "text": "mask",
    "a number": 7,
    "an object": object(),
}


@pytest.mark.arrays_only
@looped("mask", IGNORED.values(), ids=IGNORED)
def test_causal_ignores_the_mask(device, mask):
    """With any mask the result has the bits of a call without one."""
    q, k, v = qkv((2, 3), 17, 13, 8)
    right = check_openvino(q, k, v, device=device, causal=True)
    got = call(q, k, v, mask, device=device, causal=True)
    np.testing.assert_array_equal(got, right)
    got = call(q, k, v, attention_mask=mask, device=device, causal=True)
    np.testing.assert_array_equal(got, right)


@pytest.mark.usefixtures("reference_kernel")
@looped_dtypes("dtype", DTYPES)
def test_a_scalar_zero_is_no_mask(device, dtype):
    """A 0-d array or a NumPy scalar of the tensors' type, of either sign; None too."""
    q, k, v = qkv((2, 3), 17, 13, 8, dtype=dtype)
    right = check_openvino(q, k, v, device=device)
    for zero in (np.zeros((), dtype), dtype.type(0), -np.zeros((), dtype), None):
        np.testing.assert_array_equal(call(q, k, v, zero, device=device), right)


@looped("scale", [0.3, 0, -0.7, 2, 5.0, None], ids=repr)
def test_scale_as_a_number(device, kernel, scale):
    check_openvino(*qkv((2, 3), 17, 13, 8), device=device, scale=scale)


@pytest.mark.usefixtures("reference_kernel")
@looped_dtypes("dtype", DTYPES)
def test_scale_as_an_array(device, dtype):
    """0-d, one element, a NumPy scalar; of the tensors' type, so 0.3 is what that type holds."""
    tensors = qkv((2, 3), 17, 13, 8, dtype=dtype)
    number = dtype.type(0.3)
    forms = (np.array(number), np.array([number]), number, np.array([-number]), np.array(0, dtype))
    for scale in forms:
        check_openvino(*tensors, device=device, scale=scale)
        check_openvino(*tensors, bool_mask(FULL[2:]), device=device, scale=scale)
        check_openvino(*tensors, device=device, scale=scale, causal=True)
    same = call(*tensors, device=device, scale=float(number))
    np.testing.assert_array_equal(call(*tensors, device=device, scale=forms[0]), same)
    np.testing.assert_array_equal(call(*tensors, None, forms[1], device=device), same)


def test_a_scale_read_through_strides(device):
    """One element out of a larger array, backwards, in the other byte order."""
    tensors = qkv((2, 3), 17, 13, 8)
    right = call(*tensors, device=device, scale=0.25)
    for scale in (np.array([9, 9, 0.25], np.float32)[:1:-1], np.array([9, 0.25, 9], "f4")[1::2]):
        np.testing.assert_array_equal(call(*tensors, device=device, scale=scale), right)


@pytest.mark.usefixtures("reference_kernel")
@looped_dtypes("dtype", DTYPES)
def test_empty_rows_are_zero(device, dtype):
    """clattn gives zeros where OpenVINO's runtime gives NaN."""
    q, k, v = qkv((2, 3), 17, 13, 8, dtype=dtype)
    for mask in (np.zeros((17, 13), bool), np.full((1, 13), -np.inf, dtype)):
        assert not check_openvino(q, k, v, mask, device=device).any()
    some = np.ones((2, 1, 17, 13), bool)
    some[1, 0, 4] = some[0, 0, 16] = False
    result = check_openvino(q, k, v, some, device=device)
    assert not result[1, :, 4].any() and result[1, :, 5].all()


EMPTIES = {  # leading dimensions of query, key and value; L, S, E, Ev
    "N": (((0,), (0,), (0,)), 3, 5, 8, 8),
    "N of one": (((2, 0), (2, 1), (1, 1)), 3, 5, 8, 8),
    "L": (((2,), (2,), (2,)), 0, 5, 8, 8),
    "S": (((2,), (2,), (2,)), 3, 0, 8, 8),
    "Ev": (((2,), (2,), (2,)), 3, 5, 8, 0),
    "E": (((2,), (2,), (2,)), 3, 5, 0, 8),
    "L and S": (((2,), (2,), (2,)), 0, 0, 8, 8),
    "S, repeated": (((2,), (3,), (6,)), 3, 0, 8, 8),
    "everything": (((0, 0), (0, 0), (0, 0)), 0, 0, 0, 0),
}


@pytest.mark.usefixtures("reference_kernel")
@looped("shape", EMPTIES.values(), ids=EMPTIES)
def test_empty_dimensions(device, shape):
    """Results are empty, zeros without keys, or the mean of the values without a head size."""
    leads, L, S, E, Ev = shape
    q, k, v = arrays(leads, L, S, E, Ev)
    check_openvino(q, k, v, device=device)
    check_openvino(q, k, v, device=device, causal=True)
    check_openvino(q, k, v, np.ones((L, S), bool), device=device)
    check_openvino(q, k, v, np.zeros((L, S), np.float32), device=device, scale=0.5)


@looped("garbage", [np.nan, np.inf], ids=str)
@looped("kind", ["bool", "float", "causal"])
def test_an_excluded_key_does_not_matter(device, kernel, kind, garbage):
    q, k, v = qkv((2, 3), 17, 200, 8)
    seen = np.tri(17, 200, dtype=bool) if kind == "causal" else bool_mask((1, 200))
    unseen = ~seen.any(axis=0)
    mask = {"bool": seen, "causal": None}.get(kind, np.where(seen, 0, -np.inf).astype(float32))
    args, options = (q, k, v, mask), {"causal": kind == "causal"}
    right, allowed = oracle.attention(*args, **options), oracle.tolerance(*args, **options)
    k[..., unseen, :], v[..., unseen, :] = garbage, garbage
    assert_close(call(*args, device=device, **options), right, allowed)
    v[0, 0, np.flatnonzero(~unseen)[0], 2] = np.nan  # attended, so its column shows it
    assert np.isnan(call(*args, device=device, **options)).sum() == 17


@pytest.mark.usefixtures("reference_kernel")
@looped("layout", [*LAYOUTS, *ODD], ids=lambda f: f.__name__)
def test_layouts(device, layout):
    q, k, v = (layout(a) for a in qkv((2, 3), 17, 13, 8))
    check_openvino(q, k, v, device=device)
    check_openvino(q, k, v, layout(float_mask(FULL)), device=device)
    q, k, v = (layout(a) for a in arrays(((2, 2), (4, 6), (2, 3))))  # repeated as well
    check_openvino(q, k, v, device=device)


def test_zero_strides_and_shared_memory(device):
    """One array three times, and heads that are one head's memory."""
    a = draw((2, 1, 13, 8))
    check_openvino(a, a, a[..., ::-1, :], device=device)
    wide = np.broadcast_to(a, (2, 6, 13, 8))
    check_openvino(wide, a, np.broadcast_to(a[:1], (2, 3, 13, 8)), device=device, causal=True)


def test_arguments_by_position_and_by_name(device):
    q, k, v = qkv((2, 3), 17, 13, 8)
    mask = bool_mask((17, 13))
    right = check_openvino(q, k, v, mask, device=device, scale=0.5)
    np.testing.assert_array_equal(call(q, k, v, mask, 0.5, device=device), right)
    named = {"query": q, "key": k, "value": v, "attention_mask": mask, "scale": 0.5}
    np.testing.assert_array_equal(call(**named, device=device), right)


@pytest.mark.usefixtures("reference_kernel")
def test_large_repeats_in_half_precision(device):
    """Both half types, sizes that do not divide one another, tiles and rests."""
    for dtype in (float16, bfloat16):
        check_openvino(*arrays(((4, 1), (6, 2), (12, 1)), 33, 40, 8, 8, dtype), device=device)
