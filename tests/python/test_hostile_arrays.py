# SPDX-License-Identifier: MIT
"""Arguments that lie, or that change while clattn reads them: no crash, nothing left behind.

Every argument may run code of the caller: __float__, __index__, __array__, __dlpack__, a mod. That
code, or another thread, may do to other arguments all that NumPy allows.
"""

import threading
import time
from array import array as flat_array
from contextlib import suppress

import clattn
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from support.checks import assert_references_return
from support.data import draw, qkv, sdpa
from support.fake_dlpack import Producer
from support.loops import looped

G = 2**40  # elements of an array whose strides are 0
LARGE = 6_000_000  # bytes of an array whose memory the allocator gives back at once


class Number:
    """A number for which Python asks by running `act`."""

    def __init__(self, act, number=1):
        self.act, self.number = act, number

    def __index__(self):
        self.act()
        return self.number

    def __float__(self):
        return float(self.__index__())


class Acting(Producer):
    """An array that runs `act` when it is handed over."""

    def __init__(self, array, act):
        super().__init__(array)
        self.act = act

    def __dlpack__(self, **options):
        self.act()
        return super().__dlpack__(**options)


def rows():
    """Enough rows for memory that the allocator gives back, so a stale pointer faults."""
    return np.ones((1, 1, LARGE // 32, 8), np.float32)


FEW = draw((1, 1, 5, 8))


def pull(array):
    """Frees the array's memory if NumPy lets it. Returns whether NumPy refused."""
    try:
        array.resize((1,), refcheck=False)
    except ValueError:
        return True
    return False


def of_array(array):
    return array


def of_view(array):
    return array[..., 1:, :]


def of_buffer(array):
    """A view of a view, of another kind."""
    return np.asarray(memoryview(array[:, 0]))[None]


ATTEND = {  # calls in which `act` runs after the array was read
    "scale": lambda a, act: sdpa(a, FEW, FEW, scale=Number(act), device=None),
    "window": lambda a, act: sdpa(a, FEW, FEW, window=(Number(act), None), device=None),
    "another array": lambda a, act: sdpa(a, Acting(FEW, act), FEW, device=None),
    "key": lambda a, act: sdpa(FEW, a, a, scale=Number(act), device=None),
    "mask": lambda a, act: sdpa(
        np.ones((1, 1, a.shape[2], 8), np.float32), FEW, FEW, a[..., :1], scale=Number(act),
        device=None),
    "out": lambda a, act: clattn.KVCache(1, 1, 5, 8).attend(
        a, out=a, softcap=Number(act), is_causal=False),
    "onnx": lambda a, act: clattn.onnx.attention(a, FEW, FEW, scale=Number(act)),
    "openvino": lambda a, act: clattn.openvino.scaled_dot_product_attention(
        a[0], FEW[0], FEW[0], scale=Number(act)),
    "directml": lambda a, act: clattn.directml.multihead_attention(
        a[0], FEW[0], FEW[0], head_count=2, scale=Number(act)),
    "diagonal_matrix": lambda a, act: clattn.diagonal_matrix(a, Number(act), 0, 1),
    "tril": lambda a, act: clattn.tril(a, Number(act)),
}  # fmt: skip


@looped("of", [of_array, of_view, of_buffer])
@looped("name", ATTEND)
def test_an_array_is_not_resized_during_a_call(device, name, of):
    """A NumPy array with refcheck=False: the view or the array itself would lose its memory."""
    array, refused = rows(), []
    with clattn.use_device(device):
        ATTEND[name](of(array), lambda: refused.append(pull(array)))
    assert refused and all(refused)
    assert not pull(array), "after the call it is free again"


def test_a_table_is_read_after_the_mod(device):
    """What a mod does to a table shows or is refused; the call reads memory that is there."""
    table = np.ones(LARGE // 4, np.float32)

    def mod(score, b, h, q_idx, kv_idx):
        got = score + clattn.lookup(table, kv_idx)
        pull(table)
        return got

    assert clattn.flex_attention(FEW, FEW, FEW, mod, device=device).shape == FEW.shape


def during(call, *changes):
    """Runs each change in another thread while the call runs; what they raised."""
    raised = []

    def change():
        time.sleep(0.02)
        for one in changes:
            try:
                one()
                raised.append(None)
            except Exception as error:
                raised.append(type(error))

    thread = threading.Thread(target=change)
    thread.start()
    call()
    thread.join()
    return raised


@pytest.mark.cpus
def test_memory_stays_while_a_kernel_runs(device):
    """Arrays, `out`, and buffers that are no NumPy array's."""
    query, out = np.ones((2, 20000, 8), np.float32), np.ones((2, 20000, 8), np.float32)
    raw, numbers = bytearray(query.nbytes), flat_array("f", bytes(query.nbytes))
    key = np.frombuffer(raw, np.float32).reshape(query.shape)
    value = memoryview(numbers).cast("b").cast("f", query.shape)
    raised = during(
        lambda: sdpa(query, key, value, out=out, device=device),
        lambda: query.resize(1, refcheck=False),
        lambda: out.resize(1, refcheck=False),
        raw.clear,
        numbers.pop,
    )
    assert raised == [ValueError, ValueError, BufferError, BufferError]


@pytest.mark.by_turns
def test_a_thread_changes_what_it_may(device):
    """Shapes, flags, dtypes and numbers of arguments, and lists: an answer or a refusal."""
    array, mask = np.ones((2, 2, 30, 8), np.float32), np.ones((30, 30), np.float32)
    table, window, ended = np.arange(30, dtype=np.int32), [3, None], threading.Event()

    def disturb():
        for n in range(10**9):
            array.shape = (2, 2, 30, 8) if n % 2 else (4, 30, 8)
            array.dtype = np.int32 if n % 3 else np.float32
            array.flags.writeable = n % 5 > 0
            mask[:], table[:] = np.nan, (-(2**31)) ** (n % 2)
            window[:] = [n % 7, None][: n % 3]
            if ended.wait(1e-5):
                return

    def mod(score, b, h, q_idx, kv_idx):
        return score + clattn.lookup(table, clattn.lookup(table, kv_idx))

    calls = (
        lambda: sdpa(array, array, array, mask, window=window, out=array, device=device),
        lambda: clattn.flex_attention(array, array, array, mod, device=device),
        lambda: clattn.diagonal_matrix(array, 1, 0, 1, out=array, device=device),
        lambda: clattn.tensor(array, device=device),
    )
    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            for call in calls:
                with suppress(TypeError, ValueError):
                    call()
    finally:
        ended.set()
        thread.join()


def test_arguments_that_call_clattn(device):
    """A call inside a call, from wherever Python code runs; the cache counts each once."""
    key = draw((1, 2, 3, 8))
    right = sdpa(key, key, key, device=device)

    def inner():
        np.testing.assert_array_equal(sdpa(key, key, key, device=device), right)

    inside = Acting(key, inner)
    got = sdpa(key, inside, inside, scale=Number(inner, 8**-0.5), device=device)
    assert np.isfinite(got).all()
    cache = clattn.KVCache(1, 2, 10, 8, device=device)
    inside = Acting(key, lambda: cache.append(key, key))
    cache.append(inside, inside)
    assert cache.length == 9
    inside = Acting(key, cache.reset)
    assert not np.array(cache.attend(inside)).any()  # the keys were gone when it was handed over


INTERRUPTS = (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError)


@looped("kind", INTERRUPTS)
def test_interrupts_pass_unchanged(device, kind):
    """Nothing is left behind either."""
    q, k, v = qkv((1, 1), 4, 4, 8)

    def act():
        raise kind("of the caller")

    def mod(score, b, h, q_idx, kv_idx):
        raise kind("of the caller")

    def calls():
        for call in (
            lambda: sdpa(q, k, v, scale=Number(act), device=device),
            lambda: sdpa(q, Acting(k, act), v, device=device),
            lambda: clattn.diagonal_matrix(q, Number(act), 0, 1, device=device),
            lambda: clattn.flex_attention(q, k, v, mod, device=device),
        ):
            with pytest.raises(kind, match="of the caller"):
                call()

    assert_references_return(calls, (q, k, v))


def giant(*shape, dtype=np.float32):
    """As many ones as one likes, in the memory of one."""
    return np.broadcast_to(np.ones((), dtype), shape)


NEAR = np.ones((2, 4, 8), np.float32)
GIANTS = {
    "query": lambda: sdpa(giant(2, G, 8), NEAR, NEAR, device=None),
    "batch": lambda: sdpa(giant(G, 4, 8), NEAR[:1], NEAR[:1], device=None),
    "attn_mask": lambda: sdpa(NEAR, NEAR, NEAR, giant(G, 4, 4), device=None),
    "sinks": lambda: sdpa(NEAR, NEAR, NEAR, sinks=giant(G), device=None),
    "query_offset": lambda: sdpa(*[NEAR[None]] * 3, query_offset=giant(G, dtype="i8"), device=None),
    "out": lambda: sdpa(NEAR, NEAR, NEAR, out=as_strided(NEAR, (G, 4, 8), (0, 0, 4)), device=None),
    "weights": lambda: sdpa(*[giant(2, 2**20, 8)] * 3, return_weights=True, device=None),
    "onnx": lambda: clattn.onnx.attention(*[NEAR[None]] * 3, None, *[giant(1, 2, G, 8)] * 2),
    "openvino": lambda: clattn.openvino.scaled_dot_product_attention(giant(2, G, 8), NEAR, NEAR),
    "directml": lambda: clattn.directml.multihead_attention(
        giant(2, G, 8), NEAR, NEAR, head_count=2, scale=1.0),
    "diagonal_matrix": lambda: clattn.diagonal_matrix((G, G), 1, 0, 1),
    "tril": lambda: clattn.tril(giant(G, 2**10)),
    "eye": lambda: clattn.eye(2**63 - 1),
    "tensor": lambda: clattn.tensor(giant(2, G)),
    "KVCache": lambda: clattn.KVCache(1, 1, 2**50, 8),
    "append": lambda: clattn.KVCache(1, 1, 8, 8).append(*[giant(1, 1, G, 8)] * 2),
    "create_block_mask": lambda: clattn.create_block_mask(
        lambda b, h, i, j: i >= j, 2**20, 2**20, 2**20, 2**20),
    "merge_attention": lambda: clattn.merge_attention([(giant(2, G, 8), giant(2, G))] * 2),
}  # fmt: skip


@looped("name", GIANTS)
def test_giants_of_no_memory_are_refused_at_once(device, name):
    with clattn.use_device(device), pytest.raises((ValueError, MemoryError)):
        GIANTS[name]()


class Interface:
    """What NumPy believes."""

    def __init__(self, **fields):
        self.__array_interface__ = fields


class Liar(Interface):
    def __array__(self, dtype=None, copy=None):
        return np.asarray(Interface(**self.__array_interface__))


LIES = {"shape": (-1, 8), "strides": (4,), "typestr": "zz", "data": None}


@looped("field", LIES)
def test_an_array_interface_that_lies(device, field):
    """NumPy refuses what it can see; the error names the argument."""
    fields = NEAR.__array_interface__ | {field: LIES[field]}
    with pytest.raises(ValueError, match=r"query \(Liar\) cannot be read"):
        sdpa(Liar(**fields), NEAR, NEAR, device=device)
    with pytest.raises(TypeError, match="query must be an array"):
        sdpa(Interface(**fields), NEAR, NEAR, device=device)


class Disguised(np.ndarray):
    """A subclass whose Python side says what the memory is not."""

    dtype = np.dtype(np.int8)
    shape = (1,)
    strides = (1 << 40,)
    __array_interface__ = {"data": (8, False)}  # noqa: RUF012

    def __array__(self, *args, **options):
        raise ZeroDivisionError

    __dlpack__ = __array_ufunc__ = __array__


def test_a_subclass_is_read_by_its_memory(device):
    arrays = qkv((2,), 4, 4, 8)
    right = sdpa(*arrays, device=device)
    disguised = [a.view(Disguised) for a in arrays]
    got = sdpa(*disguised, device=device)
    assert type(got) is np.ndarray
    np.testing.assert_array_equal(got, right)
    out = np.zeros((2, 4, 8), np.float32).view(Disguised)
    assert sdpa(*disguised, out=out, device=device) is out
    np.testing.assert_array_equal(out.view(np.ndarray), right)
