"""Arrays that stay in a device's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clattn import _core

if TYPE_CHECKING:
    from clattn._arguments.arrays import Array, DeviceLike
    from clattn._core import Tensor

__all__ = ["empty_cache", "memory_stats", "synchronize", "tensor"]


def tensor(array: Array, device: DeviceLike | None = None) -> Tensor:
    """Copy an array to a device.

    Parameters
    ----------
    array : array
        A NumPy array, a Tensor, or an array of another library on the host (with ``__dlpack__``,
        the buffer protocol or ``__array__``): bool, an integer type, float16, bfloat16, float32
        or float64, of any shape, strides and byte order.
    device : Device, str or int, optional
        See `clattn.devices`. Default: the device of a Tensor, else `clattn.get_default_device`.

    Returns
    -------
    Tensor
        C-contiguous. It shares no memory with `array`: you may change `array` at once.

    Raises
    ------
    TypeError
        `array` is no array, or has another dtype.
    ValueError
        `array` is of another library and cannot be read: it requires gradients, or lies on a
        device of its own.
    MemoryError
        The device's memory does not suffice.
    DeviceError
        There is no usable OpenCL device, or OpenCL reports an error.

    Notes
    -----
    A call that returns Tensors enqueues its work and returns; later calls on the results are
    enqueued behind it. `Tensor.numpy`, `synchronize` and everything else that reads elements
    wait. If the call fails later, they raise the error, with the name of the call.

    Examples
    --------
    >>> import numpy as np
    >>> q = tensor(np.ones((1, 2, 4, 8), np.float32))
    >>> q.shape, q.dtype
    ((1, 2, 4, 8), dtype('float32'))
    >>> q[0, 0].numpy().sum()
    np.float32(32.0)
    """
    return _core.tensor(array, device)


def synchronize(device: DeviceLike | None = None) -> None:
    """Wait for all calls on a device.

    Parameters
    ----------
    device : Device, str or int, optional
        Default: every device in use.

    Raises
    ------
    TypeError, ValueError
        Not a device, or no device matches.
    DeviceError
        A call failed; the message names the call. Or there is no usable OpenCL device.
    """
    _core.synchronize(device)


def memory_stats(device: DeviceLike | None = None) -> dict[str, int]:
    """Return how much of a device's memory Tensors use.

    Parameters
    ----------
    device : Device, str or int, optional
        Default: `clattn.get_default_device`.

    Returns
    -------
    dict of str to int
        ``allocated_bytes`` and ``allocated_blocks``: in use by Tensors, by arrays of other
        libraries that share their memory, and by pending calls; views count once.
        ``pooled_bytes`` and ``pooled_blocks``: kept for later Tensors. ``peak_bytes``: the
        largest ``allocated_bytes`` so far. Bytes are the sizes of blocks of memory: a block has
        some KiB at least, and may be a quarter larger than its Tensor.

    Raises
    ------
    TypeError, ValueError
        Not a device, or no device matches.
    DeviceError
        There is no usable OpenCL device.
    """
    return _core.memory_stats(device)


def empty_cache(device: DeviceLike | None = None) -> None:
    """Return the memory that is kept for later Tensors to the system.

    Tensors in use keep their memory. You need not call this function: clattn calls it before a
    call fails for lack of memory.

    Parameters
    ----------
    device : Device, str or int, optional
        Default: every device in use.

    Raises
    ------
    TypeError, ValueError
        Not a device, or no device matches.
    DeviceError
        There is no usable OpenCL device, or a pending call failed.
    """
    _core.empty_cache(device)
