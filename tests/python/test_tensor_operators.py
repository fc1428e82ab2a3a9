# SPDX-License-Identifier: MIT
"""Every operator with Tensors: values, the kind of each result, mixtures, out.

Their values in depth are those of the operators' own tests, which run with Tensors as well; see
docs/contributing.md. Calls that follow each other without waiting are in test_tensor_chains.py.
"""

import clattn
import numpy as np
import pytest
from references.diagonal import numbers
from support.checks import native
from support.data import draw, qkv, sdpa
from support.loops import looped
from support.tensors import CALLS, DECIDES, same_bits, strided

each_call = looped("call", CALLS.values(), ids=CALLS)


def kinds(call, results):
    """{name of a result: whether it is a Tensor}"""
    assert all(type(r) in (np.ndarray, clattn.Tensor) for r in results.values())
    return {name: type(r) is clattn.Tensor for name, r in results.items()}


def expected_kinds(call, results, tensors):
    deciding = DECIDES.get(call.name, {})
    return {name: deciding.get(name, call.query) in tensors for name in results}


@each_call
def test_tensors_in_tensors_out(device, call):
    """Results are contiguous Tensors of the device with NumPy's bits; inputs are unchanged."""
    right = call.run(device=device)
    tensors = {name: clattn.tensor(a, device) for name, a in call.arrays.items()}
    for options in ({}, {"device": device}):
        got = call.run(lambda name, _: tensors[name], **options)
        assert got.keys() == right.keys()
        for name, result in got.items():
            assert type(result) is clattn.Tensor
            assert result.device == device
            assert result.strides == native(right[name]).strides
            same_bits(result, right[name], name)
        for name, a in call.arrays.items():
            same_bits(tensors[name], a, name)


@each_call
def test_mixtures(device, call):
    """One Tensor among arrays, one array among Tensors: results are of the query's kind."""
    right = call.run(device=device)
    names = set(call.arrays)
    for tensors in [{n} for n in call.read_by_device] + [
        names - {n} for n in names if len(names) > 1
    ]:
        got = call.run(lambda n, a: clattn.tensor(a, device) if n in tensors else a)  # noqa: B023
        assert kinds(call, got) == expected_kinds(call, got, tensors), tensors
        for name, result in got.items():
            same_bits(result, right[name], f"{name} with {tensors}")


@each_call
def test_views(device, call):
    """Backwards, transposed, with gaps: Tensors' strides and offsets reach the kernels.

    The array that lies the same way says which bits are right.
    """

    def backwards(name, a):
        return a[(slice(None, None, -1),) * a.ndim].copy()[(slice(None, None, -1),) * a.ndim]

    def gaps(name, a):
        wide = np.zeros([2 * n + 1 for n in a.shape], a.dtype)
        wide[(slice(1, None, 2),) * a.ndim] = a
        return wide[(slice(1, None, 2),) * a.ndim]

    for layout in (backwards, gaps, lambda name, a: np.asfortranarray(a)):
        right = call.run(layout, device=device)
        got = call.run(lambda n, a: strided(layout(n, a), device))  # noqa: B023
        for name, result in got.items():
            assert type(result) is clattn.Tensor
            same_bits(result, right[name], name)


def test_without_an_array(device):
    """A shape, or nothing but numbers: NumPy."""
    assert type(clattn.eye(3, device=device)) is np.ndarray
    assert type(clattn.diagonal_matrix((3, 4), 1, 0, 1, device=device)) is np.ndarray
    sizes = {"sizes": (3, 4), "value": 1, "dtype": "f4", "device": device}
    assert type(clattn.directml.diagonal_matrix(**sizes, offset=0)) is np.ndarray


# out=


def outs(shape, device):
    """Tensors to write to, each with the Tensor that it is a view of."""
    whole = clattn.tensor(np.full(shape, 7.5, np.float32), device)
    wide = clattn.tensor(np.full([3 * n + 1 for n in shape], 7.5, np.float32), device)
    reverse = clattn.tensor(np.full(shape[::-1], 7.5, np.float32), device)
    return [(whole, whole), (reverse.T[::-1], reverse),
            (wide[tuple(slice(1, None, 3) for _ in shape)], wide)]  # fmt: skip


def test_out(device):
    """out may have any strides; nothing around it is written; the lse may come too."""
    arrays = qkv((2, 3), 17, 33, 8)
    tensors = [clattn.tensor(a, device) for a in arrays]
    right, lse = sdpa(*arrays, device=device, return_lse=True)
    for place in range(3):
        out, whole = outs(right.shape, device)[place]
        assert sdpa(*tensors, out=out, device=None) is out
        same_bits(out, right, f"place {place}")
        assert (whole.numpy() == 7.5).sum() == whole.size - out.size
        again, _ = outs(right.shape, device)[place]
        got, got_lse = sdpa(*tensors, out=again, device=device, return_lse=True)
        assert got is again and type(got_lse) is clattn.Tensor
        same_bits(again, right)
        same_bits(got_lse, lse)


def test_out_of_diagonal_matrices(device):
    a = numbers((17, 21), np.dtype("f4"))
    t = clattn.tensor(a, device)
    zeros = clattn.diagonal_matrix((17, 21), 3, -2, 4, device=device)
    for source, right in ((t, clattn.diagonal_matrix(a, 3, -2, 4, device=device)),
                          ((17, 21), zeros)):  # fmt: skip
        for out, whole in outs(a.shape, device):
            assert clattn.diagonal_matrix(source, 3, -2, 4, out=out) is out
            same_bits(out, right)
            assert (whole.numpy() == 7.5).sum() == whole.size - out.size
    for view, flat in ((t, a), (t[:, ::-1], a[:, ::-1])):
        right = clattn.diagonal_matrix(flat.copy(), 3, -2, 4, device=device)
        assert clattn.diagonal_matrix(view, 3, -2, 4, out=view) is view
        same_bits(view, right)
        a[...] = t.numpy()


def test_out_of_the_other_kind(device):
    """out is returned as it is; the log-sum-exp is of the query's kind."""
    q, k, v = qkv((2, 3), 17, 33, 8)
    right, lse = sdpa(q, k, v, device=device, return_lse=True)
    tensors = [clattn.tensor(a, device) for a in (q, k, v)]
    out = np.zeros((2, 17, 3, 8), np.float32).transpose(0, 2, 1, 3)
    got, got_lse = sdpa(*tensors, out=out, device=None, return_lse=True)
    assert got is out and type(got_lse) is clattn.Tensor
    same_bits(out, right)
    same_bits(got_lse, lse)
    out = clattn.tensor(np.zeros_like(right), device)
    got, got_lse = sdpa(q, k, v, out=out, device=None, return_lse=True)
    assert got is out and type(got_lse) is np.ndarray
    same_bits(out, right)
    same_bits(got_lse, lse)
    a = numbers((5, 7), np.dtype("i2"))
    right = clattn.diagonal_matrix(a, 0, 1, 9, device=device)
    out, wide = np.zeros_like(a), clattn.tensor(np.zeros_like(a), device)
    assert clattn.diagonal_matrix(clattn.tensor(a, device), 0, 1, 9, out=out) is out
    assert clattn.diagonal_matrix(a, 0, 1, 9, out=wide) is wide
    same_bits(out, right)
    same_bits(wide, right)


@looped("which", ["query", "key", "value", "attn_mask"])
def test_out_may_be_an_input(device, which):
    """The result is as if the inputs had been read first."""
    arrays = dict(zip(("query", "key", "value"), qkv((2, 3), 8, 8, 8), strict=True))
    arrays["attn_mask"] = draw((2, 3, 8, 8), seed=6)
    right = clattn.scaled_dot_product_attention(**arrays, device=device)
    for view in (lambda t: t, lambda t: t[:, :, ::-1][:, :, ::-1]):
        tensors = {name: clattn.tensor(a, device) for name, a in arrays.items()}
        out = view(tensors[which])
        assert clattn.scaled_dot_product_attention(**tensors, out=out) is out
        np.testing.assert_allclose(tensors[which].numpy(), right, rtol=0, atol=1e-6)


@looped("shift", [1, 8, -8, 43], ids=str)
def test_out_may_overlap_an_input_in_part(device, shift):
    q, k, _ = qkv((1,), 33, 33, 8)
    flat = draw((4 * 33 * 8,), seed=7)
    right = sdpa(q, k, flat[264:528].reshape(1, 33, 8), device=device)
    tensor = clattn.tensor(flat, device)
    value = tensor[264:528].reshape(1, 33, 8)
    out = tensor[264 + shift : 528 + shift].reshape(1, 33, 8)
    sdpa(clattn.tensor(q, device), clattn.tensor(k, device), value, out=out, device=None)
    np.testing.assert_allclose(out.numpy(), right, rtol=0, atol=1e-6)
    outside = np.r_[0 : 264 + shift, 528 + shift : len(flat)]
    same_bits(tensor.numpy()[outside], flat[outside])


def test_diagonal_matrices_refuse_an_overlap_in_part(device):
    """out may be the input itself, but no other part of the input's memory."""
    t = clattn.tensor(numbers((9, 9), np.dtype("f4")), device)
    before = t.numpy().copy()
    for out in (t[::-1], t.T, t[:, ::-1]):
        with pytest.raises(ValueError, match="out"):
            clattn.diagonal_matrix(t, 1, 0, 2, out=out)
    with pytest.raises(ValueError, match="out"):
        clattn.diagonal_matrix(t[1:], 1, 0, 2, out=t[:-1])
    same_bits(t, before)


def test_a_wrong_out(device):
    tensors = [clattn.tensor(a, device) for a in qkv((2, 3), 5, 7, 8)]
    shape = (2, 3, 5, 8)

    def out_of(shape, dtype=np.float32):
        return clattn.tensor(np.zeros(shape, dtype), device)

    for wrong in (out_of((2, 3, 5, 9)), out_of(shape[::-1]), out_of((3, 2, 5, 8)), out_of(())):
        with pytest.raises(ValueError, match=r"out.*shape"):
            sdpa(*tensors, out=wrong, device=None)
    for wrong in (out_of(shape, np.float64), out_of(shape, np.int32), out_of(shape, bool), [], 1):
        with pytest.raises(TypeError, match="out"):
            sdpa(*tensors, out=wrong, device=None)
    with pytest.raises(ValueError, match=r"out.*shape"):
        clattn.diagonal_matrix(out_of((3, 4)), 1, 0, 1, out=out_of((4, 3)))
    read_only = np.zeros(shape, np.float32)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="out"):
        sdpa(*tensors, out=read_only, device=None)


# Wrong Tensors


def message(call, change, error):
    with pytest.raises(error) as caught:
        call.run(change)
    return str(caught.value)


@each_call
def test_a_wrong_dtype(device, call):
    """TypeError that names the argument, as for an array."""
    for wrong in call.arrays:
        if wrong in ("attn_mask", "input", "input_or_shape"):
            continue  # most dtypes are right

        def change(name, a, wrong=wrong):
            other = a.astype(np.float64 if a.dtype.kind == "i" else np.uint16)
            return clattn.tensor(other if name == wrong else a, device)

        assert wrong in message(call, change, TypeError)


@each_call
def test_a_wrong_shape(device, call):
    """ValueError that names the argument: one more leading dimension, or none at all."""
    for wrong in call.arrays:

        def change(name, a, wrong=wrong):
            t = clattn.tensor(a, device)
            return t.reshape(-1)[0] if name == wrong else t

        if call.name.startswith("openvino") and wrong == "scale":
            continue  # a number is right
        if wrong == "attn_mask" or wrong == "attention_mask":
            continue  # so is a mask of one element
        assert wrong in message(call, change, ValueError)


@each_call
def test_what_is_no_array_beside_tensors(device, call):
    for wrong in call.arrays:
        if wrong in ("scale", "input_or_shape"):
            continue  # numbers and shapes are right

        def change(name, a, wrong=wrong):
            return [1.0] if name == wrong else clattn.tensor(a, device)

        assert wrong in message(call, change, TypeError)
