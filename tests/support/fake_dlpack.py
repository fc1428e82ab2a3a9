# SPDX-License-Identifier: MIT
"""Producers of DLPack capsules that can break any rule, and that count what becomes of them.

The structs are those of the DLPack specification, 1.0 and before. A `Producer` exports a NumPy
array; keyword arguments replace fields of what it exports.

The capsule has no destructor: `released` does afterwards what one would do, and says how often
the producer's deleter was called in all.
"""

import ctypes
import sys
import threading
from ctypes import CFUNCTYPE, POINTER, c_int64, c_void_p, pointer, py_object

import numpy as np
from references.attention import bfloat16
from support.dlpack_structs import BFLOAT, BOOL, COMPLEX, FLOAT, HOST, INT, UINT, Plain, Versioned
from support.dlpack_structs import get_name as name_of

DELETER = CFUNCTYPE(None, c_void_p)

new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = py_object, (c_void_p, c_void_p, c_void_p)


def dtype_fields(dtype):
    """(code, bits, lanes)"""
    if dtype == bfloat16:
        return BFLOAT, 16, 1
    code = {"i": INT, "u": UINT, "f": FLOAT, "c": COMPLEX, "b": BOOL}[dtype.kind]
    return code, 8 * dtype.itemsize, 1


NOTHING = object()


class Producer:
    """An array with __dlpack__ on `device`. `versioned`: "dltensor_versioned", else "dltensor".

    `answer` is given instead of a capsule, and raised if it is an exception. Of fields there are
    those of Tensor, and name, major, minor, flags, deleter (None: NULL), dtype, device, shape and
    strides (None: NULL).
    """

    def __init__(self, array, *, versioned=True, device=(HOST, 0), answer=NOTHING, **fields):
        self.array, self.versioned, self.device = array, versioned, device
        self.answer, self.fields = answer, fields
        self.deletions, self.threads = 0, []
        self.made = []  # (capsule, what it points to): both live as long as this
        self.given = []  # keyword arguments of each call

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        self.given.append(options)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.capsule() if self.answer is NOTHING else self.answer

    def is_kept(self):
        """Whether others hold the first capsule: it has more references than an object like it."""
        alike = [(object(), None)]
        return sys.getrefcount(self.made[0][0]) > sys.getrefcount(alike[0][0])

    def capsule(self):
        fields = {"name": "dltensor_versioned" if self.versioned else "dltensor"} | self.fields
        name = fields["name"]
        struct = Versioned() if self.versioned else Plain()
        if self.versioned:
            struct.major, struct.minor = fields.get("major", 1), fields.get("minor", 0)
            struct.flags = fields.get("flags", 0)
        called = DELETER(self.delete)
        if fields.get("deleter", called) is not None:
            struct.deleter = ctypes.cast(called, c_void_p)
        words = None if name is None else ctypes.create_string_buffer(name.encode())
        held = [struct, called, words, self.array]
        held += self.fill(struct.dl_tensor, fields)
        self.managed = struct
        capsule = new_capsule(ctypes.addressof(struct), words and ctypes.addressof(words), None)
        self.made.append((capsule, held))
        return capsule

    def fill(self, tensor, fields):
        """Returns what has to live on."""
        a = self.array
        tensor.data = fields.get("data", a.ctypes.data)
        device = fields.get("capsule_device", (HOST, 0))
        tensor.device_type, tensor.device_id = device
        tensor.code, tensor.bits, tensor.lanes = fields.get("dtype") or dtype_fields(a.dtype)
        tensor.byte_offset = fields.get("byte_offset", 0)
        tensor.ndim = fields.get("ndim", a.ndim)
        steps = tuple(step // a.itemsize for step in a.strides)
        held = []
        for name, default in (("shape", a.shape), ("strides", steps)):
            numbers = fields.get(name, default)
            if numbers is not None:
                held.append((c_int64 * max(len(numbers), 1))(*numbers))
                setattr(tensor, name, ctypes.cast(pointer(held[-1]), POINTER(c_int64)))
        return held

    def delete(self, managed):
        """The deleter: of the struct that was exported, from whatever thread."""
        if managed == ctypes.addressof(self.managed):
            self.deletions += 1
        self.threads.append(threading.get_ident())

    def released(self):
        """How often the deleter ran for the only capsule, its own destructor's call included."""
        ((capsule, _),) = self.made
        if name_of(capsule) in (b"dltensor", b"dltensor_versioned"):
            self.delete(ctypes.addressof(self.managed))
        return self.deletions


class OldProducer(Producer):
    """Takes no argument but stream, and knows no versions."""

    def __init__(self, array, **fields):
        super().__init__(array, versioned=False, **fields)

    def __dlpack__(self, stream=None):
        return super().__dlpack__(stream=stream)


class OldestProducer(OldProducer):
    """Takes no argument at all."""

    def __dlpack__(self):
        return Producer.__dlpack__(self)


def numbers(*shape, dtype=np.float32):
    """1, 2, 3, …"""
    return np.arange(1, 1 + int(np.prod(shape)), dtype=np.float64).reshape(shape).astype(dtype)
