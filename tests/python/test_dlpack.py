# SPDX-License-Identifier: MIT
"""Capsules of DLPack that are right, and when they are released: once each, whatever happens.

Wrong ones are in test_dlpack_faults.py; the producers are those of fake_dlpack.py.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import clattn
import numpy as np
import pytest
from references.diagonal import DTYPES
from support.dlpack_structs import HOST, IS_COPIED, PADDED, READ_ONLY
from support.fake_dlpack import OldestProducer, OldProducer, Producer, name_of, numbers
from support.foreign import same
from support.helpers import assert_references_return, draw, sdpa
from support.layouts import misaligned, negative_everywhere, sliced, transposed

BOTH = pytest.mark.parametrize("versioned", [True, False], ids=["versioned", "unversioned"])
PLAIN = draw((2, 3))
MINUS = np.iinfo(np.int64).min


def good(device, producer, right):
    """clattn takes it, renames its capsule, and releases it once, before it returns."""
    same(clattn.tensor(producer, device=device), right)
    capsule = producer.made[0][0]
    if producer.fields.get("deleter", True) is not None:
        assert producer.deletions == 1
        assert producer.released() == 1, "the capsule's own destructor would release it again"
    assert name_of(capsule).startswith(b"used_")
    assert sys.getrefcount(capsule) == 3, "the capsule is kept"


# ---- right ones ----


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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
@pytest.mark.parametrize("row", RIGHT.values(), ids=RIGHT)
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
    """After the call that reads it; results do not depend on it."""
    arrays = {"query": draw((5, 8)), "key": draw((7, 8)), "value": draw((7, 8), seed=1),
              "attn_mask": draw((7,))}  # fmt: skip
    producers = {name: Producer(a, versioned=versioned) for name, a in arrays.items()}
    result, _ = clattn.scaled_dot_product_attention(**producers, return_lse=True, device=device)
    assert [p.released() for p in producers.values()] == [1] * 4
    same(result, clattn.scaled_dot_product_attention(**arrays, device=device))


def test_one_producer_three_times(device):
    """Three capsules, three releases."""
    producer = Producer(draw((5, 8)))
    sdpa(producer, producer, producer, device=device)
    assert len(producer.made) == 3
    assert [name_of(capsule) for capsule, _ in producer.made] == [b"used_dltensor_versioned"] * 3
    assert len(producer.threads) == 3


def test_out(device):
    """Written through the capsule; what is, or may be, read-only is refused and not written."""
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
        capsule = producer.made[0][0]
        assert sys.getrefcount(capsule) == 3, "the capsule is kept"


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
    """While it is asked for its array, one makes calls of its own."""

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
    """Producers, and what they raise or give, are kept by nobody."""
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
