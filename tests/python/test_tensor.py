# SPDX-License-Identifier: MIT
"""clattn.Tensor: what tensor() takes and refuses, attributes, the way back to NumPy, repr.

Views are in test_tensor_views.py, exports in test_tensor_dlpack.py, calls of operators in
test_tensor_operators.py. test_tensor_devices.py runs all of them in each mode of memory.
"""

import contextlib
import copy
import gc
import operator
import pickle
import re
import weakref

import clattn
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from references.diagonal import DTYPES, LAYOUTS, ODD, WIDTHS, bfloat16, numbers
from support.data import sdpa
from support.layouts import read_only
from support.loops import looped
from support.refusals import NUMBERS, cases, refuse, wrong_arrays
from support.tensors import in_host_memory, same_bits

with contextlib.suppress(ImportError):  # before conftest.py says what garbage collection sees
    pass

dtypes = looped("dtype", DTYPES, ids=str)
ATTRIBUTES = ("shape", "strides", "dtype", "device", "ndim", "size", "itemsize", "nbytes", "T")


@dtypes
def test_every_dtype(device, dtype):
    """Attributes are NumPy's, and the bits come back."""
    a = numbers((3, 4, 5), dtype)
    t = clattn.tensor(a, device)
    assert type(t) is clattn.Tensor
    for name in ("shape", "strides", "dtype", "ndim", "size", "itemsize", "nbytes"):
        assert getattr(t, name) == getattr(a, name), name
        assert type(getattr(t, name)) is type(getattr(a, name)), name
    assert t.device == device and isinstance(t.device, clattn.Device)
    back = t.numpy()
    assert type(back) is np.ndarray and back.flags.c_contiguous and back.flags.writeable
    same_bits(back, a)


@looped("layout", [*LAYOUTS, *ODD, read_only], ids=lambda f: f.__name__)
@looped("dtype", [*WIDTHS, bfloat16], ids=str)
def test_every_layout(device, dtype, layout):
    """The copy is contiguous, native and aligned."""
    a = numbers((3, 4, 5), dtype)
    t = clattn.tensor(layout(a), device)
    assert t.strides == a.strides
    assert t.dtype == dtype and t.dtype.isnative
    same_bits(t, a)


def test_zero_strides(device):
    wide = np.broadcast_to(numbers((3, 1), np.dtype("f4")), (2, 3, 50))
    same_bits(clattn.tensor(wide, device), wide)
    rows = as_strided(np.arange(9.0), (4, 6), (8, 8))
    same_bits(clattn.tensor(rows, device), rows)


SHAPES = ((), (1,), (0,), (3, 0, 5), (0, 2**40), (2**40, 0, 3), (1,) * 64, (2, *(1,) * 62, 3),
          (7, 1, 3), (5,) * 5)  # fmt: skip


@looped("shape", SHAPES, ids=lambda s: f"{len(s)}d-{'x'.join(map(str, s[:3]))}")
def test_every_shape(device, shape):
    """Shapes of 0 to 64 dimensions, empty ones among them."""
    a = numbers(shape, np.dtype("i4"))
    t = clattn.tensor(a, device)
    assert (t.shape, t.ndim, t.size, t.nbytes) == (a.shape, a.ndim, a.size, a.nbytes)
    same_bits(t, a)
    assert t.T.shape == shape[::-1]


def test_nothing_is_shared_with_what_was_given(device):
    a = numbers((64, 64), np.dtype("f8"))
    right = a.copy()
    t = clattn.tensor(a, device)
    a[...] = 0
    same_bits(t, right)
    t.numpy()[...] = 1
    assert not a.any()


def test_a_tensor_of_a_tensor_is_a_copy(device):
    a = numbers((4, 6), np.dtype("f4"))
    t = clattn.tensor(a, device)
    again, of_view = clattn.tensor(t, device), clattn.tensor(t[::-1, 1::2], device)
    if in_host_memory(device):
        t.numpy()[...] = 0
    same_bits(again, a)
    same_bits(of_view, a[::-1, 1::2])
    assert of_view.strides == (12, 4), "contiguous"


WRONG = wrong_arrays("array", (3,), NUMBERS, none=None, true=True, scalar=np.float32(1))


@cases(WRONG)
def test_what_is_no_array(device, row):
    refuse(clattn.tensor, row, {"device": device})


def test_wrong_arguments(device):
    a = np.ones(3)
    for args in ((), (a, device, 1)):
        with pytest.raises(TypeError):
            clattn.tensor(*args)
    with pytest.raises(TypeError):
        clattn.tensor(a, dtype="f4")
    for wrong in (7.5, [device], b"cpu"):
        with pytest.raises(TypeError, match="device"):
            clattn.tensor(a, wrong)
    with pytest.raises(ValueError, match="names no"):
        clattn.tensor(a, "no such device")


def test_words_and_defaults_name_the_device(device):
    a = np.ones(3)
    assert clattn.tensor(array=a, device=device).device == device
    with clattn.use_device(device):
        assert clattn.tensor(a).device == device
        assert clattn.tensor(a, device=None).device == device
    assert clattn.tensor(a).device == clattn.get_default_device()
    assert clattn.tensor(a, device.type).device.type == device.type


def test_the_class_cannot_be_called(device):
    for args in ((), (np.ones(3),), ((3, 4),)):
        with pytest.raises(TypeError, match=r"clattn\.tensor"):
            clattn.Tensor(*args)
    for make in (clattn.Tensor.__new__, object.__new__):
        with pytest.raises(TypeError):
            make(clattn.Tensor)


@looped("name", ATTRIBUTES)
def test_attributes_are_read_only(device, name):
    t = clattn.tensor(np.ones((2, 3)), device)
    for change in (lambda: setattr(t, name, getattr(t, name)), lambda: delattr(t, name)):
        with pytest.raises(AttributeError):
            change()
    with pytest.raises(AttributeError):
        t.another = 1


def test_numpy_shares_where_it_can(device):
    """numpy() shares memory in both directions, or copies where the device has its own memory."""
    t = clattn.tensor(np.zeros((4, 6), np.float32), device)
    first, second = t.numpy(), t.numpy()
    assert first is not second
    first[1, 2] = 5
    shared = in_host_memory(device)
    assert np.shares_memory(first, second) == shared
    assert t.numpy()[1, 2] == (5 if shared else 0)
    with pytest.raises(TypeError):
        t.numpy(1)


def test_numpy_keeps_the_memory(device):
    """Arrays stay valid when the Tensor is gone; new Tensors get other memory."""
    a = numbers((50, 60), np.dtype("i4"))
    t = clattn.tensor(a, device)
    whole, part = t.numpy(), t[3:, ::-2].numpy()
    del t
    others = [clattn.tensor(np.zeros((50, 60), np.int32), device) for _ in range(5)]
    same_bits(whole, a)
    del whole
    others += [clattn.tensor(np.zeros((50, 60), np.int32), device) for _ in range(5)]
    same_bits(part, a[3:, ::-2])
    del others
    part += 1
    same_bits(part, a[3:, ::-2] + 1)


def test_the_host_sees_whole_results(device):
    """Once memory is shared, calls that write it are complete when they return."""
    if not in_host_memory(device):
        pytest.skip("the host has a copy")
    q, k = (numbers((1, 8, 512, 64), np.dtype("i1"), n).astype("f4") / 128 for n in range(2))
    right = sdpa(q, k, k, device=device)
    tq, tk = (clattn.tensor(a, device) for a in (q, k))
    out = clattn.tensor(np.zeros_like(q), device)
    for seen in (out.numpy(), np.from_dlpack(out)):
        for _ in range(5):
            seen[...] = np.nan
            sdpa(tq, tk, tk, out=out, device=None)
            got = seen.copy()
            np.testing.assert_array_equal(got, right)


def test_the_device_sees_what_the_host_wrote(device):
    """The host may write to shared memory between calls."""
    q, k, v = (numbers((2, 9, 8), np.dtype("i1"), n).astype("f4") / 128 for n in range(3))
    tensors = [clattn.tensor(a, device) for a in (q, k, v)]
    views = [t.numpy() for t in tensors]
    shared = in_host_memory(device)
    for scale in (1, 2, 3):
        for view in views:
            view *= scale
        now = views if shared else (q, k, v)
        same_bits(sdpa(*tensors, device=None), sdpa(*now, device=device))


@dtypes
def test_array_protocol(device, dtype):
    a = numbers((3, 4), dtype)
    t = clattn.tensor(a, device)
    shared = in_host_memory(device)
    for made in (np.asarray(t), np.array(t), t.__array__(), np.asarray(t, dtype=dtype)):
        assert type(made) is np.ndarray
        same_bits(made, a)
    assert np.shares_memory(np.asarray(t), t.numpy()) == shared
    for copied in (np.array(t), t.__array__(copy=True), np.array(t, copy=True)):
        assert not np.shares_memory(copied, t.numpy())
        same_bits(copied, a)
        copied[...] = 0
    same_bits(t, a)


def test_array_protocol_without_a_copy(device):
    t = clattn.tensor(np.arange(12, dtype=np.float32).reshape(3, 4), device)
    for ask in (lambda: t.__array__(copy=False), lambda: np.array(t, copy=False)):
        if in_host_memory(device):
            assert np.shares_memory(ask(), t.numpy())
        else:
            with pytest.raises(ValueError, match="copy"):
                ask()
    with pytest.raises(ValueError, match="copy"):
        t.__array__(np.float64, copy=False)
    with pytest.raises(ValueError, match="copy"):
        np.array(t, dtype=np.float64, copy=False)


def test_array_protocol_with_another_dtype(device):
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    t = clattn.tensor(a, device)
    for made in (np.asarray(t, dtype=np.int16), t.__array__(np.int16), t.__array__(dtype="i2")):
        same_bits(made, a.astype(np.int16))
    assert np.add(t, 1).tolist() == (a + 1).tolist()
    with pytest.raises(TypeError):
        t.__array__(dtype=3.5)
    for wrong in (1, "no", np.True_, np.False_):
        with pytest.raises(TypeError, match="copy must be True, False or None"):
            t.__array__(np.float64, copy=wrong)


def squeezed(text):
    return re.sub(r"\s+", " ", text)


def test_repr(device):
    """Values as NumPy shows them, then dtype and device."""
    rows = squeezed(repr(clattn.tensor(np.array([[1, 2], [3, 4.5]], np.float32), device)))
    assert rows.startswith("clattn.Tensor([[1. , 2. ], [3. , 4.5]], ")
    assert "dtype=float32, device=" in rows and rows.endswith(")") and device.type in rows
    assert device.name in rows or device.platform in rows
    assert "Tensor(7, " in repr(clattn.tensor(np.array(7, np.int8), device))
    assert "[ True, False]" in repr(clattn.tensor(np.array([True, False]), device))
    assert "dtype=bool" in repr(clattn.tensor(np.array([True, False]), device))
    half = repr(clattn.tensor(np.array([0.5, 2], bfloat16), device))
    assert "[0.5, 2" in half and "dtype=bfloat16" in half
    empty = repr(clattn.tensor(np.zeros((0, 3)), device))
    assert "[]" in empty and "dtype=float64" in empty


def test_repr_of_large_ones_is_short(device):
    a = np.arange(10**6, dtype=np.int32).reshape(1000, 1000)
    text = repr(clattn.tensor(a, device))
    assert "..." in text and len(text) < 1000 and "999999" in text
    flipped = squeezed(repr(clattn.tensor(a, device)[::-1, :3]))
    assert "[[999000, 999001, 999002]," in flipped


def test_identity(device):
    """Tensors compare by identity, as torch's, and can be keys of a dict."""
    a = np.ones(3)
    t, other = clattn.tensor(a, device), clattn.tensor(a, device)
    assert t == t and (t == other) is False and (t != other) is True and (t == a.tolist()) is False
    assert {t: 1, other: 2}[t] == 1
    assert t[:] != t
    with pytest.raises(TypeError):
        operator.lt(t, other)


def test_no_pickle(device):
    with pytest.raises(TypeError, match="Tensor"):
        pickle.dumps(clattn.tensor(np.ones(3), device))


def test_copies(device):
    """They are contiguous, on the same device, in memory of their own."""
    a = numbers((3, 4), np.dtype("f4"))
    t = clattn.tensor(a, device)[::-1]
    for made in (copy.copy(t), copy.deepcopy(t), copy.deepcopy({"kept": t})["kept"]):
        clattn.tril(made, out=made)
        same_bits(made, np.tril(a[::-1]))
        assert made.device == device
        same_bits(t, a[::-1])


def test_weak_references(device):
    t = clattn.tensor(np.ones(3), device)
    ended = []
    reference = weakref.ref(t, ended.append)
    assert reference() is t and not ended
    del t
    gc.collect()
    assert reference() is None and ended == [reference]


def test_synchronize(device):
    """All calls of the device are complete; of every device in use without one."""
    q = clattn.tensor(np.ones((1, 4, 64, 16), np.float32), device)
    for wait in (lambda: clattn.synchronize(device), lambda: clattn.synchronize(),
                 lambda: clattn.synchronize(device=None)):  # fmt: skip
        results = [sdpa(q, q, q, device=None) for _ in range(3)]
        assert wait() is None
        assert all((r.numpy() == 1).all() for r in results)
    with pytest.raises(ValueError, match="names no"):
        clattn.synchronize("no such device")
    with pytest.raises(TypeError, match="device"):
        clattn.synchronize(7.5)
