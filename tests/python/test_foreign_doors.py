# SPDX-License-Identifier: MIT
"""Every operator with arrays of other libraries, in all arguments and in each alone."""

import clattn
import numpy as np
import pytest
import references.directml as reference_directml
from support.foreign import LIBRARIES, TORCH, same
from support.helpers import draw, qkv, sdpa
from support.sizes import SMALL

q, k, v = qkv((2, 4), 5, 7, SMALL)
PAST = {"past_key": draw((2, 4, 3, SMALL), seed=7), "past_value": draw((2, 4, 3, SMALL), seed=8)}
ONNX = {"Q": q, "K": k, "V": v}
OPENVINO = {"query": q, "key": k, "value": v}
TORCH_LIKE = {"query": q, "key": k, "value": v, "attn_mask": draw((7,))}
SQUARE = draw((3, 6, 6))


def stacked(source):
    call = reference_directml.make(source, P=3, bias=True)
    if source == "separate":
        call["relative_position_bias"] = draw((2, 2, 5, 10))
    return clattn.directml.multihead_attention, call, {"return_present": True}


def band(input, *, device):
    return clattn.diagonal_matrix(input, 7, -1, 2, device=device)


def triangles(input, *, device):
    with clattn.use_device(device):
        return clattn.tril(input, -1), clattn.triu(input, 1)


def attend(key, value, counts, query, attn_mask, *, device):
    cache = clattn.KVCache(2, 4, 20, SMALL, device=device)
    cache.append(key, value, counts)
    return cache.attend(query, attn_mask)


DOORS = {  # function, its arrays (numbers among them), options
    "sdpa": (clattn.scaled_dot_product_attention, TORCH_LIKE, {"return_lse": True}),
    "dropout": (clattn.scaled_dot_product_attention, TORCH_LIKE, {"dropout_p": 0.5, "seed": 3}),
    "onnx": (clattn.onnx.attention, ONNX | PAST | {"attn_mask": draw((5, 10))},
             {"is_causal": 1, "return_qk": True, "qk_matmul_output_mode": 2}),
    "onnx lengths": (clattn.onnx.attention, ONNX | {"nonpad_kv_seqlen": np.array([5, 7])}, {}),
    "openvino": (clattn.openvino.scaled_dot_product_attention,
                 OPENVINO | {"attention_mask": draw((5, 7)), "scale": np.array([0.3], "f4")}, {}),
    "openvino scalars": (clattn.openvino.scaled_dot_product_attention,
                         OPENVINO | {"attention_mask": np.array(0, "f4"),
                                     "scale": np.array(0.3, "f4")}, {}),
    **{f"directml {source}": stacked(source) for source in reference_directml.SOURCES},
    "directml mask": (clattn.directml.multihead_attention,
                      reference_directml.make(mask=np.array([3, 7], np.int32)),
                      {"mask_type": "key_sequence_length"}),
    "diagonal_matrix": (band, {"input": SQUARE}, {}),
    "tril, triu": (triangles, {"input": SQUARE}, {}),
    "directml diagonal": (clattn.directml.diagonal_matrix, {"input": SQUARE},
                          {"value": 3, "offset": 1}),
    "directml band": (clattn.directml.diagonal_matrix1, {"input": SQUARE},
                      {"value": 3, "diagonal_fill_begin": -1, "diagonal_fill_end": 1}),
    "cache": (attend, TORCH_LIKE | {"counts": np.array([7, 4])}, {}),
}  # fmt: skip
FIRST = ("query", "Q", "input", "stacked_query_key", "stacked_query_key_value")
EACH = pytest.mark.parametrize("library", LIBRARIES, ids=str)
EVERY_DOOR = pytest.mark.parametrize("door", DOORS)


def call(door, of, device, only=None):
    """Results as a tuple; arrays are made by `of`, all of them or only one."""
    function, arguments, options = DOORS[door]
    given = {
        name: of(a) if isinstance(a, np.ndarray) and only in (None, name) else a
        for name, a in arguments.items()
    }
    results = function(**given, **options, device=device)
    return results if isinstance(results, tuple) else (results,)


def arrays_of(door):
    return {name: a for name, a in DOORS[door][1].items() if isinstance(a, np.ndarray)}


def has(library, door):
    """Whether the library has such arrays."""
    arrays = arrays_of(door).values()
    flat = library.name in ("ctypes", "memoryview") and any(a.ndim == 0 for a in arrays)
    return not flat and all(a.dtype in library.dtypes for a in arrays)


@EACH
@EVERY_DOOR
def test_every_door(device, library, door):
    """All results of a call are the query's library's."""
    if not has(library, door):
        pytest.skip("the library has no such arrays")
    right = call(door, lambda a: a, device)
    got = call(door, library.of, device)
    assert len(got) == len(right)
    for ours, theirs in zip(got, right, strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            library.check(ours, theirs)


@EVERY_DOOR
def test_every_argument_alone(device, door):
    """The query, under whatever name, settles what results are; the others do not."""
    right = call(door, lambda a: a, device)
    for name in arrays_of(door):
        got = call(door, TORCH.of, device, only=name)
        library_is_torch = [type(a) is TORCH.kind() for a in got if a is not None]
        if door.startswith("onnx") and name in ("Q", "V") and got[2] is not None:
            assert (type(got[2]) is TORCH.kind()) == (name == "V"), "present_value is V's"
            assert (type(got[0]) is TORCH.kind()) == (name == "Q")
            assert (type(got[1]) is TORCH.kind()) == (name == "Q")
        else:
            assert set(library_is_torch) == {name in FIRST}, name
        for ours, theirs in zip(got, right, strict=True):
            if theirs is not None:
                same(ours, theirs)


# ---- tensors that need gradients ----


@EVERY_DOOR
def test_gradients_are_refused(device, door):
    """In every argument: by name, with the advice; detached it is taken."""
    torch = pytest.importorskip("torch")
    for name, array in arrays_of(door).items():
        if array.dtype.kind != "f":
            continue
        for mode in (torch.enable_grad, torch.no_grad):
            with mode(), pytest.raises(ValueError, match=rf"\b{name}") as caught:
                call(door, lambda a: TORCH.of(a.copy()).requires_grad_(), device, only=name)
            assert ".detach()" in str(caught.value), f"{name}: {caught.value}"
        call(door, lambda a: TORCH.of(a.copy()).requires_grad_().detach(), device, only=name)


def test_gradients_of_other_tensors(device):
    """Results of calculations, parameters, out; and where an array is copied."""
    torch = pytest.importorskip("torch")
    plain = torch.ones(3, 4)
    product = torch.ones(3, 4, requires_grad=True) * 2
    for needs in (product, torch.nn.Parameter(torch.ones(3, 4))):
        for name, arguments in (("query", (needs, plain, plain)), ("value", (plain, plain, needs))):
            with pytest.raises(ValueError, match=rf"\b{name}\b.*\.detach\(\)"):
                sdpa(*arguments, device=device)
        with pytest.raises(ValueError, match=r"\barray\b.*\.detach\(\)"):
            clattn.tensor(needs, device=device)
        with pytest.raises(ValueError, match=r"\bout\b.*\.detach\(\)"):
            sdpa(plain, plain, plain, device=device, out=needs)
    assert (product == 2).all()
