# SPDX-License-Identifier: MIT
"""DLPack's structs as base/dlpack.h has them, and capsules of them as a consumer handles them."""

import ctypes as c
import os

import clattn

HOST, CUDA, OPENCL = 1, 2, 4  # kDLCPU, kDLCUDA, kDLOpenCL
INT, UINT, FLOAT, OPAQUE, BFLOAT, COMPLEX, BOOL = range(7)
READ_ONLY, IS_COPIED, PADDED = 1, 2, 4  # flags


class Tensor(c.Structure):
    """DLTensor: strides in elements, the first one at data + byte_offset."""

    _fields_ = (
        ("data", c.c_void_p), ("device_type", c.c_int32), ("device_id", c.c_int32),
        ("ndim", c.c_int32), ("code", c.c_uint8), ("bits", c.c_uint8), ("lanes", c.c_uint16),
        ("shape", c.POINTER(c.c_int64)), ("strides", c.POINTER(c.c_int64)),
        ("byte_offset", c.c_uint64),
    )  # fmt: skip


class Plain(c.Structure):
    """DLManagedTensor."""

    _fields_ = (("dl_tensor", Tensor), ("manager_ctx", c.c_void_p), ("deleter", c.c_void_p))


class Versioned(c.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = (("major", c.c_uint32), ("minor", c.c_uint32), ("manager_ctx", c.c_void_p),
                ("deleter", c.c_void_p), ("flags", c.c_uint64), ("dl_tensor", Tensor))  # fmt: skip


STRUCTS = {b"dltensor": Plain, b"dltensor_versioned": Versioned}
get_name = c.pythonapi.PyCapsule_GetName
get_name.restype, get_name.argtypes = c.c_char_p, [c.py_object]
get_pointer = c.pythonapi.PyCapsule_GetPointer
get_pointer.restype, get_pointer.argtypes = c.c_void_p, [c.py_object, c.c_char_p]
set_name = c.pythonapi.PyCapsule_SetName
set_name.restype, set_name.argtypes = c.c_int, [c.py_object, c.c_char_p]
set_destructor = c.pythonapi.PyCapsule_SetDestructor
set_destructor.restype, set_destructor.argtypes = c.c_int, [c.py_object, c.c_void_p]
USED = {name: b"used_" + name for name in STRUCTS}  # a capsule's name is not copied


def look_into(capsule):
    """The struct of a capsule that nobody has consumed."""
    name = get_name(capsule)
    return STRUCTS[name].from_address(get_pointer(capsule, name))


def deleter_of(capsule):
    """The deleter of a capsule that nobody has consumed, as a function."""
    struct = look_into(capsule)
    address = c.addressof(struct)
    deleter = c.CFUNCTYPE(None, c.c_void_p)(struct.deleter)
    return lambda: deleter(address)


def consume(capsule):
    """Take the struct over as a consumer does; returns it, and its deleter as a function.

    The function is called without the GIL, as a consumer written in C may do.
    """
    struct, deleter = look_into(capsule), deleter_of(capsule)
    assert set_name(capsule, USED[get_name(capsule)]) == 0
    return struct, deleter


def open_opencl():
    """The OpenCL loader that clattn has opened."""
    return c.CDLL(os.fsdecode(clattn._core.loader()))
