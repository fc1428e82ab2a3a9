# SPDX-License-Identifier: MIT
"""Targets of atheris: what Python hands to the extension.

tools/fuzz_parsers.py runs this file, with the tests in PYTHONPATH:

    inputs.py TARGET [arguments of libFuzzer]

An input may give an answer or an exception of the documented kinds. Everything else is a finding:
another exception, a report of a sanitizer, a crash.
"""

import contextlib
import ctypes
import json
import os
import sys
import tempfile
from pathlib import Path

import atheris
import clattn
import numpy as np
from clattn import _core
from clattn._host import drivers, tuning
from support.fake_dlpack import Producer
from support.wrong_calls import RIGHT, WRONG

DOCUMENTED = (TypeError, ValueError, MemoryError, clattn.DeviceError)
MEMORY = np.arange(512, dtype=np.float64)  # of all arrays
DTYPES = [
    "f2",
    "f4",
    "f8",
    "i1",
    "i4",
    "i8",
    "u2",
    "u8",
    "?",
    "c8",
    ">f4",
    "S3",
    "O",
    "V5",
]
DEVICE = clattn.devices()[0]
FUNCTIONS = list(RIGHT)
_core.force("reference")


def integer(data):
    """Small, near a power of two, or anything."""
    kind = data.ConsumeIntInRange(0, 2)
    if kind == 0:
        return data.ConsumeIntInRange(-3, 10)
    if kind == 1:
        return (1 << data.ConsumeIntInRange(0, 66)) * data.PickValueInList([1, -1]) + (
            data.ConsumeIntInRange(-2, 2)
        )
    return data.ConsumeInt(data.ConsumeIntInRange(1, 9))


def array(data):
    """Any dtype, shape and strides within MEMORY; few elements."""
    dtype = np.dtype(data.PickValueInList(DTYPES))
    if dtype.hasobject:
        return np.array([None, 1])
    shape = [data.ConsumeIntInRange(0, 9) for _ in range(data.ConsumeIntInRange(0, 6))]
    if np.prod(shape) > 4096:
        return np.zeros(shape[:2], dtype)
    strides, low, high = [], 0, 0
    for size in shape:
        step = data.PickValueInList([0, 1, dtype.itemsize, -dtype.itemsize, 8, 24, -64, 320])
        reach = step * max(size - 1, 0)
        if high - low + abs(reach) + dtype.itemsize > MEMORY.nbytes:
            step = reach = 0
        strides.append(step)
        low, high = low + min(reach, 0), high + max(reach, 0)
    room = MEMORY.nbytes - (high - low) - dtype.itemsize
    offset = -low + data.ConsumeIntInRange(0, max(room, 0))
    return np.ndarray(shape, dtype, MEMORY.data, offset, strides)


def value(data, depth=0):
    kind = data.ConsumeIntInRange(0, 11 if depth < 3 else 8)
    if kind <= 2:
        return array(data)
    if kind == 3:
        return integer(data)
    if kind == 4:
        return data.ConsumeFloat()
    if kind == 5:
        return data.ConsumeUnicode(data.ConsumeIntInRange(0, 20))
    if kind == 6:
        return data.PickValueInList(WRONG)
    if kind == 7:
        return data.ConsumeBytes(data.ConsumeIntInRange(0, 40))
    if kind == 8:
        made = array(data)
        with contextlib.suppress(*DOCUMENTED):
            return clattn.tensor(made, DEVICE)
        return made
    several = [value(data, depth + 1) for _ in range(data.ConsumeIntInRange(0, 4))]
    if kind == 9:
        return several
    return tuple(several) if kind == 10 else {str(n): item for n, item in enumerate(several)}


def arguments(data):
    """Calls of every door in which some arguments are anything."""
    function = data.PickValueInList(FUNCTIONS)
    given = dict(RIGHT[function])
    names = list(given)
    for _ in range(data.ConsumeIntInRange(1, 4)):
        given[data.PickValueInList(names)] = value(data)
    with contextlib.suppress(*DOCUMENTED), clattn.use_device(DEVICE):
        function(**given)


def cache(data):
    """Methods of a KVCache with anything."""
    with contextlib.suppress(*DOCUMENTED):
        one = clattn.KVCache(2, 1, 6, 4, dtype=data.PickValueInList(["f4", "int8", "int4"]),
                             device=DEVICE)  # fmt: skip
        for _ in range(data.ConsumeIntInRange(1, 6)):
            name = data.PickValueInList(["append", "attend", "truncate", "reorder", "append"])
            count = {"append": 3, "attend": 4, "truncate": 1, "reorder": 1}[name]
            right = np.ndarray((2, 1, 1, 4), "f4", MEMORY.data)
            given = [right if data.ConsumeBool() and n < 2 else value(data) for n in range(count)]
            with contextlib.suppress(*DOCUMENTED):
                getattr(one, name)(*given)
            assert all(0 <= n <= 6 for n in one.lengths)


def pages(data):
    """Methods of a PagedKVCache with anything."""
    with contextlib.suppress(*DOCUMENTED):
        one = clattn.PagedKVCache(3, 2, 1, 4, dtype=data.PickValueInList(["f4", "int8", "int4"]),
                                  device=DEVICE)  # fmt: skip
        known = one.open(2)
        for _ in range(data.ConsumeIntInRange(1, 8)):
            name = data.PickValueInList(["append", "truncate", "fork", "close", "block_table"])
            count = {"append": 4, "truncate": 2}.get(name, 1)
            right = np.ndarray((2, 1, 4), "f4", MEMORY.data)
            given = [
                right if data.ConsumeBool() and 0 < n < 3 else value(data) for n in range(count)
            ]
            if data.ConsumeBool():
                given[0] = known if name == "append" else data.PickValueInList(known)
            with contextlib.suppress(*DOCUMENTED):
                answer = getattr(one, name)(*given)
                known += [answer] if name == "fork" else []
            assert 0 <= one.free_pages <= 3


def extent(shape, strides, size):
    """The first and last byte of an array, from its start; None for no elements."""
    if 0 in shape:
        return None
    reaches = [step * (n - 1) * size for n, step in zip(shape, strides, strict=True)]
    return sum(min(r, 0) for r in reaches), sum(max(r, 0) for r in reaches) + size


def in_64_bits(number):
    """As ctypes stores it."""
    return (number + 2**63) % 2**64 - 2**63


def capsules(data):
    """DLPack's structs with any fields. A capsule that says what is true may be read.

    One whose memory is not there, but could be, is not tried: a consumer has to believe it.
    """
    source = MEMORY.view(data.PickValueInList(["f4", "f8", "f2", "i8", "u1"]))
    ndim = data.ConsumeIntInRange(0, 5)
    shape = [in_64_bits(integer(data)) for _ in range(ndim)]
    strides = [in_64_bits(integer(data)) for _ in range(ndim)] if data.ConsumeBool() else None
    fields = {"shape": shape, "strides": strides, "ndim": ndim}
    if data.ConsumeIntInRange(0, 9) == 0:
        fields["ndim"] = data.PickValueInList([-1, 65, 2**31 - 1, -(2**31)])
    if data.ConsumeIntInRange(0, 9) == 0:
        fields["shape"] = None
    if data.ConsumeIntInRange(0, 4) == 0:
        fields["dtype"] = tuple(data.ConsumeIntInRange(0, n) for n in (9, 255, 3))
    if data.ConsumeIntInRange(0, 4) == 0:
        fields["byte_offset"] = integer(data) % 2**64
    if data.ConsumeIntInRange(0, 9) == 0:
        fields["capsule_device"] = (data.ConsumeIntInRange(-1, 20), integer(data) % 2**31)
    if data.ConsumeIntInRange(0, 9) == 0:
        fields["data"] = data.PickValueInList([0, 1, 2**64 - 1])
    if data.ConsumeIntInRange(0, 9) == 0:
        fields["name"] = data.PickValueInList([None, "", "dltensor", "used_dltensor", "x" * 300])
    if data.ConsumeIntInRange(0, 9) == 0:
        fields["deleter"] = None
    fields |= {"flags": data.ConsumeIntInRange(0, 7) | data.PickValueInList([0, 2**63])}
    fields |= {"major": data.PickValueInList([1, 1, 1, 0, 2, 2**32 - 1])}
    versioned = data.ConsumeBool()
    if fields.get("name") == "dltensor":
        versioned = False
    bits = fields.get("dtype", (0, 8 * source.itemsize, 1))[1]
    dense = strides or [int(np.prod(shape[d + 1 :], dtype=object)) for d in range(ndim)]
    reach = extent(shape, dense, max(bits // 8, 1)) if min(shape, default=0) >= 0 else None
    if reach is not None and fields["ndim"] == ndim and (fields["shape"] is not None or ndim == 0):
        offset = fields.get("byte_offset", 0)
        start, end = offset + reach[0], offset + reach[1]
        there = start >= 0 and end <= source.nbytes and "data" not in fields
        data_start = fields.get("data", source.ctypes.data)
        could_be = data_start + start >= 0 and data_start + end < 2**64
        if could_be and not there and fields.get("data") != 0:
            return
    if (
        min(shape, default=0) >= 0
        and 2**20 < np.prod([n or 1 for n in shape], dtype=object) < 2**45
    ):
        return  # the memory of the result might be there
    producer = Producer(source, versioned=versioned, **fields)
    out = np.zeros(1, "f4")
    with contextlib.suppress(*DOCUMENTED), clattn.use_device(DEVICE):
        if data.ConsumeBool():
            clattn.tensor(producer)
        elif data.ConsumeBool():
            clattn.tril(producer, 0)
        else:
            clattn.scaled_dot_product_attention(out.reshape(1, 1), producer, producer, out=None)


def words(data):
    """Names of devices, what tests force, and environment variables that are words."""
    texts = [data.ConsumeUnicode(data.ConsumeIntInRange(0, 30)) for _ in range(3)]
    known = ["cpu", "gpu:1", "reference", "-mma,-tiled", "mma_emulated", "-", "16", "1 << 20"]
    texts = [data.PickValueInList(known) + t if data.ConsumeBool() else t for t in texts]
    with contextlib.suppress(*DOCUMENTED):
        _core.force(*texts)
    _core.force("reference")
    with contextlib.suppress(*DOCUMENTED), clattn.use_device(texts[0]):
        pass
    for name in ("CLATTN_MEMORY", "CLATTN_TUNING"):
        os.environ[name] = texts[1].replace("\0", "").encode("utf-8", "replace").decode()
    with contextlib.suppress(ValueError):
        drivers.check_environment()
    for name in ("CLATTN_MEMORY", "CLATTN_TUNING"):
        del os.environ[name]


def plain(data, depth=0):
    """What JSON can hold."""
    kind = data.ConsumeIntInRange(0, 7 if depth < 3 else 4)
    if kind == 0:
        return integer(data)
    if kind == 1:
        return data.ConsumeFloat()
    if kind == 2:
        return data.PickValueInList([None, True, False])
    if kind <= 4:
        return data.ConsumeUnicodeNoSurrogates(data.ConsumeIntInRange(0, 12))
    several = [plain(data, depth + 1) for _ in range(data.ConsumeIntInRange(0, 3))]
    return several if kind == 5 else {str(n): item for n, item in enumerate(several)}


CLASSES, KNOBS = _core.tunables()
FILE = Path(tempfile.mkdtemp()) / "winners.json"


def winners(data):
    """Files of tuned winners: any bytes, any JSON, and right files with wrong parts."""
    kind = data.ConsumeIntInRange(0, 4)
    if kind == 0:
        content = data.ConsumeBytes(data.remaining_bytes())
    elif kind == 1:
        content = json.dumps(plain(data)).encode()
    else:
        found = {}
        for _ in range(data.ConsumeIntInRange(0, 3)):
            variant = data.PickValueInList(list(KNOBS))
            knobs = {
                name: data.PickValueInList(list(values)) if data.ConsumeBool() else plain(data)
                for name, values in KNOBS[variant].items()
                if data.ConsumeBool()
            }
            winner = {"variant": variant, "knobs": knobs}
            if data.ConsumeBool():
                winner[data.PickValueInList([*winner, "more"])] = plain(data)
            name = data.PickValueInList(CLASSES) if data.ConsumeBool() else str(plain(data))
            found[name] = winner
        whole = tuning._identity(DEVICE) | {"winners": found}
        if data.ConsumeIntInRange(0, 4) == 0:
            whole[data.PickValueInList(list(whole))] = plain(data)
        content = json.dumps(whole).encode()
    FILE.write_bytes(content)
    read, warning = tuning.read(str(FILE), DEVICE)
    assert not (read and warning)
    tuning.apply(DEVICE, read)
    with contextlib.suppress(*DOCUMENTED, OverflowError):
        _core.tune(DEVICE, *(value(data) for _ in range(3)))


TARGETS = {f.__name__: f for f in (arguments, cache, pages, capsules, words, winners)}


def main():
    target = TARGETS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, lambda data: target(atheris.FuzzedDataProvider(data)))
    atheris.Fuzz()


if __name__ == "__main__":
    ctypes.pythonapi  # noqa: B018  the capsules of fake_dlpack need it
    main()
