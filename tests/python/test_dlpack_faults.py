# SPDX-License-Identifier: MIT
"""Capsules of DLPack, and producers of them, that break a rule: the promised error, by name.

Each capsule is released exactly once all the same. The producers are those of fake_dlpack.py.
"""

import ctypes
import sys
from ctypes import c_void_p

import clattn
import numpy as np
import pytest
from support.dlpack_structs import BFLOAT, BOOL, COMPLEX, CUDA, FLOAT, INT, OPAQUE, UINT
from support.fake_dlpack import OldProducer, Producer, name_of
from support.foreign import same
from support.helpers import draw, sdpa

BOTH = pytest.mark.parametrize("versioned", [True, False], ids=["versioned", "unversioned"])
PLAIN = draw((2, 3))
MINUS = np.iinfo(np.int64).min


def bad(device, producer, exception, match):
    """Refused by name, released once, nothing kept; afterwards a right call works."""
    with pytest.raises(exception, match=match) as caught:
        clattn.tensor(producer, device=device)
    assert type(caught.value) is exception
    assert "array" in str(caught.value)
    assert producer.released() == 1
    capsule = producer.made[0][0]
    assert sys.getrefcount(capsule) == 3, "the capsule is kept"
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
    "a foreign device": ({"capsule_device": (CUDA, 0)}, "CUDA"),
}  # fmt: skip


@pytest.mark.parametrize("row", VALUE_ERRORS.values(), ids=VALUE_ERRORS)
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


UNVERSIONED = [
    name for name, (fields, _) in VALUE_ERRORS.items() if not {"name", "major"} & {*fields}
]


@pytest.mark.parametrize("name", UNVERSIONED)
def test_wrong_values_without_a_version(device, name):
    fields, match = VALUE_ERRORS[name]
    bad(device, OldProducer(PLAIN, **fields), ValueError, match)


def test_a_consumed_capsule_without_a_version(device):
    producer = OldProducer(PLAIN, name="used_dltensor")
    with pytest.raises(ValueError, match="array"):
        clattn.tensor(producer, device=device)
    assert producer.deletions == 0


def test_a_capsule_that_is_given_twice(device):
    """The second time it is consumed: refused, and not released again."""
    producer = Producer(PLAIN)
    producer.answer = producer.capsule()
    same(clattn.tensor(producer, device=device), PLAIN)
    for _ in range(2):
        with pytest.raises(ValueError, match="array"):
            clattn.tensor(producer, device=device)
    assert producer.released() == 1


def test_a_capsule_of_null(device):
    """Python makes none, but its memory can be written to."""
    producer = Producer(PLAIN)
    producer.answer = producer.capsule()
    slot = c_void_p.from_address(id(producer.answer) + 2 * ctypes.sizeof(c_void_p))
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
@pytest.mark.parametrize("dtype", TYPE_ERRORS, ids=str)
def test_wrong_dtypes(device, dtype, versioned):
    bad(device, Producer(PLAIN, versioned=versioned, dtype=dtype), TypeError, "array")


DEVICES = {2: "CUDA", 4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROC", 14: "oneAPI", 12: "",
           99: "99", -1: "-1", 0: "0"}  # fmt: skip


@pytest.mark.parametrize("number", DEVICES)
def test_foreign_devices(device, number):
    """Told by its name; the array is not even asked for. The same of a capsule that says so."""
    q, match = draw((2, 3)), rf"(?i)\bkey\b.*{DEVICES[number]}"
    producer = Producer(PLAIN, device=(number, 0))
    with pytest.raises(ValueError, match=match):
        sdpa(q, producer, q, device=device)
    assert not producer.made
    producer = Producer(PLAIN, capsule_device=(number, 0))
    with pytest.raises(ValueError, match=match):
        sdpa(q, producer, q, device=device)
    assert producer.released() == 1


@pytest.mark.parametrize("wrong", [None, 1, (), (1,), (1, 0, 0), "ab", (None, 0), ("cpu", 0),
                                   (1.5, 0), (2**40, 0)], ids=str)  # fmt: skip
def test_devices_that_are_none(device, wrong):
    with pytest.raises((TypeError, ValueError), match="array"):
        clattn.tensor(Producer(PLAIN, device=wrong), device=device)


@pytest.mark.parametrize("answer", [None, 1, "dltensor", b"dltensor", (1, 2), [], PLAIN], ids=str)
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


@pytest.mark.parametrize("kind", ERRORS, ids=lambda e: e.__name__)
def test_producers_that_raise(device, kind):
    """A ValueError from theirs, which names the argument and tells the reason."""
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
