# SPDX-License-Identifier: MIT
"""Capsules of DLPack, right and wrong: what is read, what is refused by name, what is released.

Every capsule is released exactly once, whatever happens. The producers are in fake_dlpack.py.
"""

import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_void_p

import clattn
import numpy as np
import pytest
from references.diagonal import DTYPES
from support.checks import assert_references_return
from support.data import draw, sdpa
from support.dlpack_structs import (
    BFLOAT,
    BOOL,
    COMPLEX,
    CUDA,
    FLOAT,
    HOST,
    INT,
    IS_COPIED,
    OPAQUE,
    PADDED,
    READ_ONLY,
    UINT,
)
from support.fake_dlpack import OldestProducer, OldProducer, Producer, name_of, numbers
from support.foreign import same
from support.layouts import misaligned, negative_everywhere, sliced, transposed
from support.loops import looped

BOTH = looped("versioned", [True, False], ids=["versioned", "unversioned"])
PLAIN = draw((2, 3))
MINUS = np.iinfo(np.int64).min


def good(device, producer, right):
    """clattn takes it, renames its capsule, and releases it once, before it returns."""
    same(clattn.tensor(producer, device=device), right)
    if producer.fields.get("deleter", True) is not None:
        assert producer.deletions == 1
        assert producer.released() == 1, "the capsule's own destructor would release it again"
    assert name_of(producer.made[0][0]).startswith(b"used_")
    assert not producer.is_kept()


# ---- right ones ----


@BOTH
@looped("dtype", DTYPES, ids=str)
def test_every_dtype(device, dtype, versioned):
    a = numbers(3, 4, dtype=dtype)
    good(device, Producer(a, versioned=versioned), a)


@BOTH
@pytest.mark.parametrize("of", [sliced, negative_everywhere, transposed, misaligned,
                                lambda a: np.broadcast_to(a[:1], a.shape),
                                lambda a: np.broadcast_to(a[:1, :1, :1], a.shape)])  # fmt: skip
def test_strides(device, of, versioned):
    a = of(numbers(3, 4, 5))
    good(device, Producer(a, versioned=versioned), a)


RIGHT = {  # fields that are changed, and what the array then is
    "no strides": ({"strides": None}, PLAIN),
    "an offset": ({"byte_offset": 12, "shape": (1, 3)}, PLAIN[1:]),
    "an offset to the last": ({"byte_offset": 20, "shape": (1, 1)}, PLAIN[1:, 2:]),
    "a later minor version": ({"minor": 99}, PLAIN),
    "read-only": ({"flags": READ_ONLY}, PLAIN),
    "a copy": ({"flags": IS_COPIED}, PLAIN),
    "flags of later versions": ({"flags": PADDED | 1 << 40}, PLAIN),
    "no deleter": ({"deleter": None}, PLAIN),
    "no dimension": ({"ndim": 0, "shape": None, "strides": None}, PLAIN[0, 0].reshape(())),
    "sixty-four dimensions": ({"ndim": 64, "shape": (1,) * 63 + (6,), "strides": (1,) * 64},
                              PLAIN.reshape((1,) * 63 + (6,))),
    "any stride of size 1": ({"shape": (1, 3), "strides": (MINUS, 1)}, PLAIN[:1]),
    "nothing in it": ({"shape": (2, 0)}, np.zeros((2, 0), "f4")),
    "nothing in it, no data": ({"shape": (0, 3), "data": None}, np.zeros((0, 3), "f4")),
    "nothing in it, odd strides": ({"shape": (0, 3), "strides": (MINUS, 2**62)},
                                   np.zeros((0, 3), "f4")),
    "nothing in it, an odd offset": ({"shape": (0, 3), "byte_offset": 2**64 - 1},
                                     np.zeros((0, 3), "f4")),
    "another device number": ({"capsule_device": (HOST, 7)}, PLAIN),
}  # fmt: skip


@BOTH
@looped("row", RIGHT.values(), ids=RIGHT)
def test_right_ones(device, row, versioned):
    fields, right = row
    good(device, Producer(PLAIN, versioned=versioned, **fields), right)


@pytest.mark.parametrize("kind", [Producer, OldProducer, OldestProducer])
def test_producers_of_every_age(device, kind):
    """Those that take a version are told one from 1.0 on; the others are asked without."""
    producer = kind(PLAIN)
    good(device, producer, PLAIN)
    if kind is Producer:
        assert producer.given[0]["max_version"] >= (1, 0)
        assert producer.given[0].get("stream") is None
    result = sdpa(kind(PLAIN), kind(PLAIN), kind(PLAIN), device=device)
    assert type(result) is np.ndarray
    same(result, sdpa(PLAIN, PLAIN, PLAIN, device=device))


@BOTH
def test_every_argument_is_released_once(device, versioned):
    """Each capsule is released after the call that reads it; results do not depend on it."""
    arrays = {"query": draw((5, 8)), "key": draw((7, 8)), "value": draw((7, 8), seed=1),
              "attn_mask": draw((7,))}  # fmt: skip
    producers = {name: Producer(a, versioned=versioned) for name, a in arrays.items()}
    result, _ = clattn.scaled_dot_product_attention(**producers, return_lse=True, device=device)
    assert [p.released() for p in producers.values()] == [1] * 4
    same(result, clattn.scaled_dot_product_attention(**arrays, device=device))


def test_one_producer_three_times(device):
    """The producer makes three capsules; each is released."""
    producer = Producer(draw((5, 8)))
    sdpa(producer, producer, producer, device=device)
    assert len(producer.made) == 3
    assert [name_of(capsule) for capsule, _ in producer.made] == [b"used_dltensor_versioned"] * 3
    assert len(producer.threads) == 3


def test_out(device):
    """out is written through the capsule; one that is or may be read-only is refused."""
    q = draw((5, 8))
    out = np.zeros((5, 8), np.float32)
    producer = Producer(out)
    assert sdpa(q, q, q, device=device, out=producer) is producer
    assert producer.released() == 1
    same(out, sdpa(q, q, q, device=device))
    for fields in ({"flags": READ_ONLY}, {"versioned": False}):
        out = np.zeros((5, 8), np.float32)
        producer = Producer(out, **fields)
        with pytest.raises(ValueError, match=r"\bout\b.*read-only"):
            sdpa(q, q, q, device=device, out=producer)
        assert producer.released() == 1
        assert not out.any()


# ---- releases ----


WRONG_CALLS = {
    "another argument is wrong": lambda p, d: sdpa(p, PLAIN[:, :2], PLAIN, device=d),
    "a later argument is no array": lambda p, d: sdpa(p, PLAIN, [1.0], device=d),
    "an option is wrong": lambda p, d: sdpa(p, PLAIN, PLAIN, window=(-1, 0), device=d),
    "the device is unknown": lambda p, d: sdpa(p, PLAIN, PLAIN, device="no such device"),
    "its dtype does not fit": lambda p, d: sdpa(PLAIN.astype("f8"), p, PLAIN, device=d),
    "its shape does not fit": lambda p, d: sdpa(PLAIN, PLAIN, PLAIN, p, device=d),
    "as out": lambda p, d: sdpa(PLAIN, PLAIN, np.zeros((2, 4), "f4"), out=p, device=d),
    "a producer after it raises": lambda p, d: sdpa(
        p, Producer(PLAIN, answer=RuntimeError("x")), PLAIN, device=d),
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("call", WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_released_once_after_an_error(device, call, versioned):
    producer = Producer(PLAIN, versioned=versioned)
    with pytest.raises((TypeError, ValueError)):
        call(producer, device)
    if producer.made:
        assert producer.released() == 1
        assert not producer.is_kept()


def test_too_large_for_the_device(device):
    """A MemoryError or a ValueError of a producer that says it has 2**60 bytes, all the same."""
    producer = Producer(PLAIN, shape=(2**29, 2**29), strides=(0, 0))
    with pytest.raises((MemoryError, ValueError)):
        clattn.tensor(producer, device=device)
    assert producer.released() == 1


def test_threads(device):
    """Calls of many threads, right and wrong: each capsule is released once, by anyone."""
    right = sdpa(PLAIN, PLAIN, PLAIN, device=device)

    def call(number):
        wrong = {"ndim": -1} if number % 3 == 0 else {}
        producers = [Producer(PLAIN), Producer(PLAIN, **wrong), Producer(PLAIN)]
        try:
            same(sdpa(*producers, device=device), right)
        except ValueError:
            assert wrong
        return [p.released() for p in producers if p.made]

    with ThreadPoolExecutor(8) as pool:
        for counts in pool.map(call, range(200), timeout=60):
            assert set(counts) == {1}


def test_producers_that_call_clattn(device):
    """A producer may call clattn while clattn asks it for its array."""

    class Busy(Producer):
        def __dlpack__(self, **options):
            inner.append(sdpa(PLAIN, PLAIN, PLAIN, device=device))
            return super().__dlpack__(**options)

    inner = []
    right = sdpa(PLAIN, PLAIN, PLAIN, device=device)
    same(sdpa(Busy(PLAIN), Busy(PLAIN), Busy(PLAIN), device=device), right)
    assert len(inner) == 3
    for result in inner:
        same(result, right)


def test_reference_counts(device):
    """Nothing keeps a reference to producers, their errors or their answers."""
    producer, refusing, empty = Producer(PLAIN), Producer(PLAIN), Producer(PLAIN, answer=(1, 2))
    things = [producer, refusing, empty, empty.answer, PLAIN]

    def calls():
        sdpa(producer, producer, producer, device=device)
        clattn.tensor(producer, device=device)
        refusing.answer = ValueError("no")
        for wrong in (refusing, empty):
            with pytest.raises((TypeError, ValueError)):
                sdpa(producer, wrong, producer, device=device)
        refusing.answer = None  # an error holds the frames that it went through
        producer.made.clear()

    assert_references_return(calls, things)


# ---- wrong ones ----


def bad(device, producer, exception, match):
    """Refused by name, released once, nothing kept; afterwards a right call works."""
    with pytest.raises(exception, match=match) as caught:
        clattn.tensor(producer, device=device)
    assert type(caught.value) is exception
    assert "array" in str(caught.value)
    assert producer.released() == 1
    assert not producer.is_kept()
    same(clattn.tensor(PLAIN, device=device), PLAIN)


HUGE = 2**62
VALUE_ERRORS = {
    "a consumed capsule": ({"name": "used_dltensor_versioned"}, "consumed|used"),
    "another name": ({"name": "dltensor_v9"}, "dltensor_v9|name"),
    "an empty name": ({"name": ""}, "name|capsule"),
    "no name": ({"name": None}, "name|capsule"),
    "version 2": ({"major": 2}, "2"),
    "the largest version": ({"major": 2**32 - 1}, str(2**32 - 1)),
    "a negative ndim": ({"ndim": -1}, "-1"),
    "65 dimensions": ({"ndim": 65, "shape": (1,) * 65, "strides": (1,) * 65}, "65"),
    "the largest ndim": ({"ndim": 2**31 - 1}, str(2**31 - 1)),
    "the least ndim": ({"ndim": -(2**31)}, str(-(2**31))),
    "no shape": ({"shape": None}, "shape"),
    "a negative size": ({"shape": (2, -3)}, "negative|-3"),
    "the least size": ({"shape": (MINUS, 3)}, f"negative|{MINUS}"),
    "a negative size of nothing": ({"shape": (0, -3)}, "negative|-3"),
    "no data": ({"data": None}, "data|memory|NULL"),
    "no data but an offset": ({"data": None, "byte_offset": 64}, "data|memory|NULL"),
    "more elements than 64 bits": ({"shape": (HUGE, 4), "strides": (0, 0)}, "."),
    "more elements than 64 bits, unstrided": ({"shape": (HUGE, HUGE), "strides": None}, "."),
    "more bytes than 64 bits": ({"shape": (2, HUGE), "strides": (0, 0)}, "."),
    "as many elements as 0 in 64 bits": ({"shape": (2**32, 2**32), "strides": (0, 0)}, "."),
    "a stride that overflows in bytes": ({"strides": (HUGE, 1)}, "."),
    "a stride below that": ({"strides": (-HUGE, 1)}, "."),
    "the least stride": ({"strides": (MINUS, 1)}, "."),
    "strides that overflow together": ({"shape": (3, 3), "strides": (2**60, 2**60)}, "."),
    "an offset beyond all addresses": ({"byte_offset": 2**64 - 12}, "address space"),
    "memory below all addresses": ({"strides": (-(2**59), 1)}, "address space"),
    "data at the last address": ({"data": 2**64 - 1}, "address space"),
    "a foreign device": ({"capsule_device": (CUDA, 0)}, "CUDA"),
}  # fmt: skip


@looped("row", VALUE_ERRORS.values(), ids=VALUE_ERRORS)
def test_wrong_values(device, row):
    fields, match = row
    producer = Producer(PLAIN, **fields)
    if "name" not in fields:
        bad(device, producer, ValueError, match)
        return
    # Such a capsule is nobody's to release: whoever named it so did that already.
    with pytest.raises(ValueError, match=match) as caught:
        clattn.tensor(producer, device=device)
    assert "array" in str(caught.value)
    assert producer.deletions == 0
    assert name_of(producer.made[0][0]) == (
        None if fields["name"] is None else fields["name"].encode()
    )


UNVERSIONED = {name: row for name, row in VALUE_ERRORS.items() if not {"name", "major"} & {*row[0]}}


@looped("row", UNVERSIONED.values(), ids=UNVERSIONED)
def test_wrong_values_without_a_version(device, row):
    fields, match = row
    bad(device, OldProducer(PLAIN, **fields), ValueError, match)


def test_a_consumed_capsule_without_a_version(device):
    producer = OldProducer(PLAIN, name="used_dltensor")
    with pytest.raises(ValueError, match="array"):
        clattn.tensor(producer, device=device)
    assert producer.deletions == 0


def test_a_capsule_that_is_given_twice(device):
    """The second time the capsule is consumed already: it is refused and not released again."""
    producer = Producer(PLAIN)
    producer.answer = producer.capsule()
    same(clattn.tensor(producer, device=device), PLAIN)
    for _ in range(2):
        with pytest.raises(ValueError, match="array"):
            clattn.tensor(producer, device=device)
    assert producer.released() == 1


def test_a_capsule_of_null(device):
    """Python makes no such capsule; the test writes into its memory."""
    producer = Producer(PLAIN)
    producer.answer = producer.capsule()
    slot = c_void_p.from_address(id(producer.answer) + object.__basicsize__)
    assert slot.value == ctypes.addressof(producer.managed), "CPython's layout has changed"
    slot.value = None
    with pytest.raises(ValueError, match="array"):
        clattn.tensor(producer, device=device)
    slot.value = ctypes.addressof(producer.managed)
    assert producer.deletions == 0


TYPE_ERRORS = [
    (INT, 4, 1), (UINT, 1, 1), (INT, 128, 1), (INT, 24, 1), (FLOAT, 8, 1), (FLOAT, 80, 1),
    (FLOAT, 128, 1), (FLOAT, 0, 1), (BFLOAT, 32, 1), (BFLOAT, 8, 1), (BOOL, 1, 1), (BOOL, 16, 1),
    (COMPLEX, 64, 1), (COMPLEX, 128, 1), (OPAQUE, 64, 1), (FLOAT, 32, 2), (FLOAT, 32, 0),
    (INT, 8, 4), (UINT, 16, 65535), (7, 8, 1), (8, 8, 1), (12, 8, 1), (17, 4, 1), (99, 32, 1),
    (255, 255, 65535),
]  # fmt: skip


@BOTH
@looped("dtype", TYPE_ERRORS, ids=str)
def test_wrong_dtypes(device, dtype, versioned):
    bad(device, Producer(PLAIN, versioned=versioned, dtype=dtype), TypeError, "array")


DEVICES = {2: "CUDA", 4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROC", 14: "oneAPI", 12: "",
           99: "99", -1: "-1", 0: "0"}  # fmt: skip


@looped("number", DEVICES)
def test_foreign_devices(device, number):
    """The message names the device, and the array is not asked for; a capsule may say so too."""
    q, match = draw((2, 3)), rf"(?i)\bkey\b.*{DEVICES[number]}"
    producer = Producer(PLAIN, device=(number, 0))
    with pytest.raises(ValueError, match=match):
        sdpa(q, producer, q, device=device)
    assert not producer.made
    producer = Producer(PLAIN, capsule_device=(number, 0))
    with pytest.raises(ValueError, match=match):
        sdpa(q, producer, q, device=device)
    assert producer.released() == 1


@looped("wrong", [None, 1, (), (1,), (1, 0, 0), "ab", (None, 0), ("cpu", 0),
                                   (1.5, 0), (2**40, 0)], ids=str)  # fmt: skip
def test_devices_that_are_none(device, wrong):
    with pytest.raises((TypeError, ValueError), match="array"):
        clattn.tensor(Producer(PLAIN, device=wrong), device=device)


@looped("answer", [None, 1, "dltensor", b"dltensor", (1, 2), [], PLAIN], ids=str)
def test_no_capsule(device, answer):
    producer = Producer(PLAIN, answer=answer)
    before = sys.getrefcount(answer)
    for name, arguments in (("query", (producer, PLAIN, PLAIN)), ("key", (PLAIN, producer, PLAIN))):
        with pytest.raises(TypeError, match=rf"\b{name}\b"):
            sdpa(*arguments, device=device)
    assert sys.getrefcount(answer) <= before + 2


class Reason(Exception):
    pass


ERRORS = [RuntimeError, BufferError, ValueError, TypeError, AttributeError, Reason, OSError]


@looped("kind", ERRORS, ids=lambda e: e.__name__)
def test_producers_that_raise(device, kind):
    """A ValueError names the argument and repeats the producer's reason."""
    error = kind("the moon is in the wrong phase")
    with pytest.raises(ValueError, match=r"\bkey\b.*the moon is in the wrong phase") as caught:
        sdpa(PLAIN, Producer(PLAIN, answer=error), PLAIN, device=device)
    assert caught.value.__cause__ is error
    same(sdpa(PLAIN, PLAIN, PLAIN, device=device), sdpa(PLAIN, PLAIN, PLAIN, device=device))


def test_an_interrupt_is_no_fault_of_an_array(device):
    with pytest.raises(KeyboardInterrupt):
        clattn.tensor(Producer(PLAIN, answer=KeyboardInterrupt()), device=device)


def test_devices_that_raise(device):
    class Raises(Producer):
        def __dlpack_device__(self):
            raise ValueError("no device for this")

    producer = Raises(PLAIN)
    with pytest.raises(ValueError, match=r"\bvalue\b.*no device for this"):
        sdpa(PLAIN, PLAIN, producer, device=device)
    assert not producer.made
