"""Queues and arrays of pyopencl: what `_core` calls for them.

The core imports this module only when a call gets an object of pyopencl.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any

from clattn import _core
from clattn._host import drivers
from clattn._host.extras import how_to_install

try:
    import pyopencl as cl
    from pyopencl.array import Array
except ImportError as error:
    raise ImportError(
        f"clattn.Device.from_pyopencl needs pyopencl: {how_to_install('pyopencl')}"
    ) from error

if TYPE_CHECKING:
    from clattn._core import Device, Tensor


@cache
def _check_loader() -> None:
    """Open OpenCL, and check that pyopencl calls the loader that clattn calls.

    A loader may keep data of its own in a driver's objects, so another one does not know them.
    """
    _core.all_devices()
    ours, theirs = _core.loader(), drivers.loader_of_pyopencl()
    if ours is not None and theirs is not None and ours != theirs:
        raise _core.DeviceError(
            f"queue belongs to pyopencl's OpenCL loader, {os.fsdecode(theirs)}, while clattn calls "
            f"{os.fsdecode(ours)}; expected one loader for both: import pyopencl before clattn's "
            "first call, or build a pyopencl that calls the system's loader: "
            "pip install --no-binary pyopencl pyopencl"
        )


def device_of(queue: cl.CommandQueue) -> Device:
    """Return the device that runs calls in the queue, and in the queue's context."""
    if not isinstance(queue, cl.CommandQueue):
        raise TypeError(
            f"queue is of type {type(queue).__name__}; expected a pyopencl.CommandQueue"
        )
    _check_loader()
    return _core.adopt_queue(queue.int_ptr)


def as_tensor(array: Array, name: str) -> Tensor:
    """Return a Tensor of the Array's buffer, without a copy.

    Commands of the Array's queue are in order. Events of other queues are waited for.
    """
    queue = array.queue
    if queue is None:
        raise ValueError(
            f"{name} has no queue; expected an Array with one: {name}.with_queue(queue)"
        )
    device = device_of(queue)
    shape, strides, dtype = array.shape, array.strides, array.dtype
    size = dtype.itemsize
    if not dtype.isnative or array.offset % size or any(stride % size for stride in strides):
        raise ValueError(
            f"{name} has dtype {dtype.str}, offset {array.offset} and strides {strides}; expected "
            "the byte order of this machine, and whole elements"
        )
    if 0 in shape:
        return _core.adopt_buffer(device, 0, 0, shape, strides, dtype, array, name)
    memory = array.base_data
    if not isinstance(memory, cl.MemoryObjectHolder):
        raise TypeError(
            f"{name} lies in an object of type {type(memory).__name__}; expected a pyopencl.Buffer"
        )
    reached = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True)]
    first = array.offset + sum(min(step, 0) for step in reached)
    last = array.offset + sum(max(step, 0) for step in reached) + size
    if first < 0 or last > memory.size:
        raise ValueError(
            f"{name} reaches from byte {first} to byte {last} of a buffer of {memory.size} bytes; "
            "expected elements inside the buffer"
        )
    for event in array.events:
        if event.command_queue != queue:
            event.wait()
    counted = tuple(stride // size for stride in strides)
    return _core.adopt_buffer(
        device, memory.int_ptr, array.offset, shape, counted, dtype, array, name
    )


def empty(like: Array, shape: tuple[int, ...], dtype: Any) -> Tensor:
    """Return a Tensor of a new Array, which is not initialised: the memory of a result."""
    try:
        array = Array(like.queue, shape, dtype, allocator=like.allocator)
    except cl.MemoryError as error:
        raise MemoryError(
            f"pyopencl has no memory for a result of shape {shape}: {error}"
        ) from error
    return as_tensor(array, "the result")
