# SPDX-License-Identifier: MIT
"""Arrays of torch, JAX, the buffer protocol, __array__ and DLPack, in and out.

Other files test calls of NumPy arrays. Here the same call of other arrays gives the same bits, in
the query's library. Producers that break the rules are in test_dlpack.py, features of torch and JAX
alone in test_foreign_torch.py.
"""

import array
import mmap
import sys
import types

import clattn
import numpy as np
import pytest
from references.attention import DTYPES as FLOATS
from references.attention import judged
from references.diagonal import DTYPES, numbers
from support.checks import assert_close, assert_references_return
from support.data import draw, qkv, sdpa
from support.forced import weights_are_rounded
from support.foreign import LIBRARIES, TORCH, OnlyArray, OnlyDLPack, same
from support.layouts import (
    columns_first,
    misaligned,
    negative_everywhere,
    read_only,
    sliced,
    transposed,
)
from support.loops import looped
from support.sizes import REST, WIDE

EACH = pytest.mark.parametrize("library", LIBRARIES, ids=str)


def combinations(dtypes):
    """Each library with those of the dtypes that it has."""
    found = [(lib, t) for lib in LIBRARIES for t in dtypes if t in lib.dtypes]
    return pytest.mark.parametrize(("library", "dtype"), found, ids=str)


@combinations(FLOATS)
def test_attention(device, library, dtype):
    """Result and lse are the query's library's; inputs are as before."""
    arrays = qkv((2, 3), 2, 17, WIDE, REST, dtype=dtype)
    before = [a.tobytes() for a in arrays]
    right, right_lse = sdpa(*arrays, device=device, is_causal=True, return_lse=True)
    rounds = weights_are_rounded(right, lambda: sdpa(*arrays, device=device, is_causal=True))
    given = [library.of(a) for a in arrays]
    got, lse = sdpa(*given, device=device, is_causal=True, return_lse=True)
    library.check(got, right)
    library.check(lse, right_lse)
    library.check(sdpa(*given, device=device, is_causal=True), right)
    assert before == [a.tobytes() for a in arrays]
    wanted = judged(*arrays, rounds_weights=rounds, is_causal=True)
    assert_close(right, wanted.result, wanted.allowed)


@EACH
def test_sinks_offsets_and_weights(device, library):
    """Weights are the query's library's; sinks and integers may be of any."""
    arrays = qkv((2, 3), 2, 17, WIDE, REST)
    sinks, offsets = draw((3,)), np.array([4, 9])
    options = {"device": device, "is_causal": True, "return_weights": True}
    right = sdpa(*arrays, sinks=sinks, query_offset=offsets, **options)
    for query, others in ((library.of, np.asarray), (np.asarray, library.of)):
        got = sdpa(
            *map(query, arrays), sinks=others(sinks), query_offset=others(offsets), **options
        )
        for one, expected in zip(got, right, strict=True):
            if query is library.of:
                library.check(one, expected)
            else:
                np.testing.assert_array_equal(one, expected)


@EACH
@looped("dtype", DTYPES)
def test_diagonals(device, library, dtype):
    if dtype not in library.dtypes:
        return
    a = numbers((3, 7, 9), dtype)
    right = clattn.diagonal_matrix(a, 1, -2, 2, device=device)
    got = clattn.diagonal_matrix(library.of(a), 1, -2, 2, device=device)
    library.check(got, right)


@EACH
@looped("dtype", DTYPES)
def test_tensors(device, library, dtype):
    """clattn.tensor copies an array of any library and any number of dimensions."""
    if dtype not in library.dtypes:
        return
    for shape in ((3, 7), (5,), (), (2, 0, 3), (1, 2, 1, 2, 1, 2)):
        if not shape and library.name in ("ctypes", "memoryview"):
            continue  # a ctypes number is no array; NumPy's own memoryview of one is format alone
        if 0 in shape and library.name == "ctypes":
            continue
        a = numbers(shape, dtype)
        tensor = clattn.tensor(library.of(a), device=device)
        assert type(tensor) is clattn.Tensor and tensor.device == device
        right = a.copy()
        a[...] = 0
        same(tensor, right)


@EACH
def test_every_mix(device, library):
    """The result is of the query's library, whatever keys, values and mask are."""
    arrays = qkv((2, 3), 5, 17, WIDE)
    mask = draw((5, 17)) > -1
    right = sdpa(*arrays, mask, device=device)
    for which in range(1, 16):
        given = [library.of(a) if which >> n & 1 else a for n, a in enumerate((*arrays, mask))]
        got = sdpa(*given, device=device)
        if which & 1:
            library.check(got, right)
        else:
            assert type(got) is np.ndarray
            same(got, right)


@EACH
def test_with_tensors(device, library):
    """A Tensor among the arguments chooses the device; with a Tensor as query the result is one."""
    q, k, v = qkv((2, 3), 5, 17, WIDE)
    right = sdpa(q, k, v, device=device)
    key = clattn.tensor(k, device=device)
    library.check(clattn.scaled_dot_product_attention(library.of(q), key, library.of(v)), right)
    query = clattn.tensor(q, device=device)
    got = clattn.scaled_dot_product_attention(query, library.of(k), library.of(v))
    assert type(got) is clattn.Tensor
    same(got, right)


def test_flat_buffers(device):
    """Buffers of one dimension: array.array, bytearray, mmap."""
    arrays = qkv((2, 3), 5, 17, WIDE)
    bias = array.array("f", draw((17,)))
    same(sdpa(*arrays, bias, device=device), sdpa(*arrays, np.array(bias), device=device))
    for code in "bBhHiIlLqQfd":
        numbers_of = array.array(code, [1, 2, 3])
        same(clattn.tensor(numbers_of, device=device), np.array(numbers_of))
    for buffer in (bytearray(b"\x01\x02\xff"), memoryview(b"\x01\x02\xff")):
        same(clattn.tensor(buffer, device=device), np.array([1, 2, 255], np.uint8))
    with mmap.mmap(-1, 4096) as memory:
        memory[:3] = b"\x01\x02\xff"
        same(clattn.tensor(memory, device=device)[:4], np.array([1, 2, 255, 0], np.uint8))
    # Every export is given back: an exported bytearray cannot grow, an exported mmap not close.
    buffer = bytearray(12)
    clattn.tensor(buffer, device=device)
    with pytest.raises(TypeError):
        sdpa(memoryview(buffer).cast("B", (3, 4)), *arrays[1:], device=device)
    buffer.append(0)


def test_memoryviews_that_were_cast(device):
    """The shape and the format are those of the view, not of its buffer."""
    flat = array.array("f", draw((48,)))
    view = memoryview(flat).cast("B").cast("f", (2, 3, 8))
    wanted = np.array(flat).reshape(2, 3, 8)
    same(clattn.tensor(view, device=device), wanted)
    got = sdpa(view, view, view, device=device)
    assert type(got) is np.ndarray
    same(got, sdpa(wanted, wanted, wanted, device=device))
    for format_ in ("@f", "=f", "<f"):
        typed = np.dtype(format_.lstrip("@"))
        assert clattn.tensor(memoryview(np.ones(3, typed)), device=device).dtype == np.float32
    swapped = memoryview(np.arange(3, dtype=">i4"))
    same(clattn.tensor(swapped, device=device), np.arange(3, dtype="i4"))


VIEWS = {
    "negative": negative_everywhere,
    "sliced": sliced,
    "transposed": transposed,
    "columns first": columns_first,
    "broadcast": lambda a: np.broadcast_to(a[:, :1], a.shape),
    "one number": lambda a: np.broadcast_to(a[:1, :1, :1, :1], a.shape),
    "read-only": read_only,
    "misaligned": misaligned,
}
ANY_STRIDES = [lib for lib in LIBRARIES if lib.name not in ("jax", "ctypes")]  # these copy


@looped("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("library", ANY_STRIDES, ids=str)
def test_strides(device, library, view):
    """In queries, keys, values and masks. A broadcast array is read-only."""
    arrays = [view(a) for a in (*qkv((2, 3), 5, 17, WIDE), draw((2, 3, 5, 17)))]
    square = view(draw((2, 3, 8, 8)))
    if library.name in ("torch", "old __dlpack__") and not square.flags.writeable:
        return  # has no word for read-only
    if library is TORCH and view is negative_everywhere:
        return  # has no negative strides
    library.check(sdpa(*map(library.of, arrays), device=device), sdpa(*arrays, device=device))
    with clattn.use_device(device):
        library.check(clattn.tril(library.of(square)), clattn.tril(square))
    same(clattn.tensor(library.of(square), device=device), square.copy())


def test_byte_order(device):
    """Buffers and __array__ may be byte-swapped; DLPack has no byte order."""
    swapped = [a.astype(">f4") for a in qkv((2, 3), 5, 17, WIDE)]
    right = sdpa(*(a.astype("f4") for a in swapped), device=device)
    for of in (memoryview, OnlyArray):
        same(sdpa(*(of(a) for a in swapped), device=device), right)


@EACH
def test_nothing_in_it(device, library):
    if library.name == "ctypes":
        pytest.skip("has no empty arrays of more dimensions")
    for L, S in ((0, 17), (5, 0), (0, 0)):
        arrays = qkv((2, 3), L, S, WIDE)
        right = sdpa(*arrays, device=device)
        library.check(sdpa(*(library.of(a) for a in arrays), device=device), right)


WRONG = [((1.0, 2.0),), range(3), {1: 2}, OnlyArray, OnlyDLPack, iter([])]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: type(w).__name__)
def test_what_is_no_array(device, wrong):
    """The classes themselves have the protocols' methods, but are no arrays."""
    q, k, v = qkv((2, 3), 5, 17, WIDE)
    for arguments, name in (((wrong, k, v), "query"), ((q, k, wrong), "value")):
        with pytest.raises(TypeError, match=rf"\b{name}\b"):
            sdpa(*arguments, device=device)
    with pytest.raises(TypeError, match=r"\barray\b"):
        clattn.tensor(wrong, device=device)


@EACH
def test_wrong_dtypes_and_shapes(device, library):
    """The messages are those of NumPy arrays."""
    q, k, v = qkv((2, 3), 5, 17, WIDE)

    def message(*arguments):
        with pytest.raises((TypeError, ValueError)) as caught:
            sdpa(*arguments, device=device)
        return type(caught.value), str(caught.value)

    for wrong in (k.astype(np.int32), k[:, :, :, :8], k[0, 0, 0]):
        assert message(q, library.of(wrong), v) == message(q, wrong, v)


@pytest.mark.parametrize("of", [memoryview, OnlyArray, OnlyDLPack, TORCH.of],
                         ids=["memoryview", "__array__", "__dlpack__", "torch"])  # fmt: skip
def test_complex_numbers(device, of):
    with pytest.raises(TypeError, match=r"array.*complex64|complex64.*array"):
        clattn.tensor(of(np.zeros((2, 3), np.complex64)), device=device)


def test_buffers_of_other_formats(device):
    """Records, characters, pointers: TypeErrors that name the argument."""
    records = np.zeros(3, [("x", "f4"), ("y", "i2")])
    for wrong in (memoryview(records), memoryview(np.zeros(3, "S4")),
                  memoryview(bytearray(8)).cast("P"),
                  memoryview(np.zeros(3, np.longdouble))):  # fmt: skip
        with pytest.raises(TypeError, match=r"\barray\b"):
            clattn.tensor(wrong, device=device)


class Raises:
    """__array__ raises, or gives what is no array."""

    def __init__(self, answer):
        self.answer = answer

    def __array__(self, dtype=None, copy=None):
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.mark.parametrize("answer", [None, [1.0, 2.0], 3.0, "x"], ids=str)
def test_array_methods_that_give_no_array(device, answer):
    with pytest.raises((TypeError, ValueError)):
        clattn.tensor(Raises(answer), device=device)


def test_array_methods_that_raise(device):
    """The message repeats the reason."""
    q, k, v = qkv((2, 3), 5, 17, WIDE)
    for kind in (ValueError, TypeError, RuntimeError):
        with pytest.raises((TypeError, ValueError), match="such a reason"):
            sdpa(q, Raises(kind("such a reason")), v, device=device)
    with pytest.raises(KeyboardInterrupt):
        sdpa(q, Raises(KeyboardInterrupt()), v, device=device)
    same(sdpa(q, k, v, device=device), sdpa(q, k, v, device=device))


# ---- libraries that say so themselves ----


class Theirs(OnlyDLPack):
    """An array of a library that `clattn` has never heard of."""


def taken(source):
    return Theirs(np.from_dlpack(source))


def test_a_library_with_a_namespace(device):
    """Results go through the from_dlpack of __array_namespace__, without a copy."""
    seen = []

    class Named(Theirs):
        def __array_namespace__(self, api_version=None):
            def from_dlpack(source, /, *, device=None, copy=None):
                seen.append(np.from_dlpack(source))
                return Named(seen[-1])

            return types.SimpleNamespace(from_dlpack=from_dlpack)

    arrays = qkv((2, 3), 5, 17, WIDE)
    right = sdpa(*arrays, device=device)
    got = sdpa(*map(Named, arrays), device=device)
    assert type(got) is Named and got.array is seen[-1]
    same(got.array, right)
    assert got.array.flags.writeable
    got.array[:] = 0


def test_a_library_whose_module_takes_dlpack(device, monkeypatch):
    module = types.ModuleType("an_array_library")
    module.from_dlpack = taken
    monkeypatch.setitem(sys.modules, "an_array_library", module)
    monkeypatch.setattr(Theirs, "__module__", "an_array_library")
    arrays = qkv((2, 3), 5, 17, WIDE)
    got = sdpa(*map(Theirs, arrays), device=device)
    assert type(got) is Theirs
    same(got.array, sdpa(*arrays, device=device))


def test_reference_counts(device):
    """Nothing keeps the arguments, after right calls and wrong ones."""
    arrays, small = qkv((2, 3), 5, 17, WIDE), draw((2, 3, 17, 8))
    libraries = [lib for lib in LIBRARIES if lib.name not in ("torch", "jax")]
    libraries += [lib for lib in LIBRARIES if lib.name in sys.modules]
    sets = [[lib.of(a) for a in (*arrays, small)] for lib in libraries]
    things = [thing for given in ([*arrays, small], *sets) for thing in given]

    def calls():
        for q, k, v, wrong in sets:
            sdpa(q, k, v, device=device, return_lse=True)
            clattn.tensor(q, device=device)
            for bad in ((q, wrong, v), (q, k, v, q)):
                with pytest.raises((TypeError, ValueError)):
                    sdpa(*bad, device=device)

    assert_references_return(calls, things)
