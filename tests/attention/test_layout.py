# SPDX-License-Identifier: MIT
"""layout="BLHE": heads after rows, in query, key, value, out and the result."""

import clattn
import numpy as np
import pytest
from support.data import draw, sdpa
from support.loops import looped

pytestmark = pytest.mark.tensors

OPTIONS = [
    {},
    {"is_causal": "lower_right", "window": (3, 0)},
    {"enable_gqa": True, "return_lse": True},
    {"enable_gqa": True, "return_weights": True, "sinks": np.arange(6, dtype="f4")},
]
SHAPES = {(): "no batch", (2,): "a batch", (2, 1): "two batch dimensions", (0,): "empty"}


def swap(array):
    """Heads and rows change places."""
    return np.ascontiguousarray(np.swapaxes(array, -3, -2))


def arrays(leading, groups):
    """Query, key and value (…, L, H, E)."""
    Hk = 2 if groups else 6
    return (draw((*leading, 5, 6, 16)), draw((*leading, 9, Hk, 16), seed=1),
            draw((*leading, 9, Hk, 13), seed=2))  # fmt: skip


@looped("leading", SHAPES, ids=SHAPES.values())
@looped("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_the_result_of_the_other_layout(device, options, leading):
    """Bit by bit; log-sum-exp, weights and mask have heads first all the same."""
    given = arrays(leading, options.get("enable_gqa", False))
    mask = draw((6, 5, 9), seed=3)
    right = sdpa(*map(swap, given), mask, device=device, **options)
    result = sdpa(*given, mask, device=device, layout="BLHE", **options)
    several = isinstance(right, tuple)
    np.testing.assert_array_equal(result[0] if several else result,
                                  swap(right[0] if several else right))  # fmt: skip
    for other, expected in zip(result[1:], right[1:], strict=True) if several else ():
        np.testing.assert_array_equal(other, expected)


def test_out(device):
    """Written in its own layout, however it is strided."""
    given = arrays((2,), False)
    right = sdpa(*given, device=device, layout="BLHE")
    for out in (np.empty((2, 5, 6, 13), "f4"), np.empty((13, 6, 5, 2), "f4").T,
                np.empty((2, 6, 5, 13), "f4").swapaxes(1, 2)):  # fmt: skip
        assert sdpa(*given, device=device, layout="BLHE", out=out) is out
        np.testing.assert_array_equal(out, right)
    with pytest.raises(ValueError, match=r"out.*\(2, 5, 6, 13\)"):
        sdpa(*given, device=device, layout="BLHE", out=np.empty((2, 6, 5, 13), "f4"))


@pytest.mark.arrays_only
@pytest.mark.parametrize("layout", ["bhle", "BSHD", "", None, 3, b"BHLE"])
def test_wrong_words(layout):
    error = ValueError if isinstance(layout, str) else TypeError
    with pytest.raises(error, match=r"layout .*\"BHLE\" or \"BLHE\""):
        clattn.scaled_dot_product_attention(*arrays((2,), False), layout=layout)


@pytest.mark.arrays_only
def test_the_message_names_the_layout_that_fits():
    given = arrays((2,), True)
    attend = clattn.scaled_dot_product_attention
    with pytest.raises(ValueError, match=r"\(B, L, H, E\) take layout=\"BLHE\"$"):
        attend(*given, enable_gqa=True)
    with pytest.raises(ValueError, match=r"\(B, H, L, E\) take layout=\"BHLE\"$"):
        attend(*map(swap, given), enable_gqa=True, layout="BLHE")
    with pytest.raises(ValueError, match=r"head size (?!.*layout)"):
        attend(given[0], given[2], given[1])
    with pytest.raises(ValueError, match=r"three dimensions or more with layout=\"BLHE\""):
        attend(*(array[0, 0] for array in given), layout="BLHE")
    with pytest.raises(ValueError, match=r"in this message rows come after heads"):
        attend(given[0], given[2], given[1], layout="BLHE")


@pytest.mark.arrays_only
def test_flex_attention_has_one_layout():
    with pytest.raises(TypeError, match="layout"):
        clattn.flex_attention(*arrays((2,), False), layout="BLHE")
