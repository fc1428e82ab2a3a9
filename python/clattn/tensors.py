"""Arrays that stay in a device's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clattn import _core

if TYPE_CHECKING:
    from clattn._core import Device, Tensor
    from clattn._typing import Array

__all__ = ["empty_cache", "memory_stats", "synchronize", "tensor"]


def tensor(array: Array, device: Device | str | None = None) -> Tensor:
    """Copy an array to a device.

    Parameters
    ----------
    array : array
        NumPy's, a Tensor, another library's on the host (anything with ``__dlpack__``, the
        buffer protocol or ``__array__``): bool, an integer type, float16, bfloat16, float32
        or float64, of any shape, strides and byte order.
    device : Device or str, optional
        See `clattn.devices`. Default: that of a Tensor, else `clattn.get_default_device`.

    Returns
    -------
    Tensor
        C-contiguous. It shares no memory with `array`, which may be changed at once.

    Raises
    ------
    TypeError
        No array, or one of another dtype.
    ValueError
        Another library's array that cannot be read: one that requires gradients, or lies on
        a device of its own.
    MemoryError
        The device's memory does not suffice.
    DeviceError
        No usable OpenCL device, or what it reports.

    Notes
    -----
    A call whose results are Tensors is not waited for: it returns once it is enqueued, and
    what uses the results is enqueued behind it. `Tensor.numpy`, `synchronize` and whatever
    else looks at elements wait. What OpenCL reports of a call later is raised there, with
    the call's name.

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


def synchronize(device: Device | str | None = None) -> None:
    """Wait for all calls of a device; None: of every device in use.

    Raises
    ------
    DeviceError
        One of them failed; the message has its name.
    """
    _core.synchronize(device)


def memory_stats(device: Device | str | None = None) -> dict[str, int]:
    """Return how much of a device's memory Tensors use.

    Parameters
    ----------
    device : Device or str, optional
        Default: `clattn.get_default_device`.

    Returns
    -------
    dict of str to int
        ``allocated_bytes`` and ``allocated_blocks``: in use by Tensors, by what other
        libraries hold of them, and by running calls; views count once. ``pooled_bytes`` and
        ``pooled_blocks``: kept for later Tensors. ``peak_bytes``: the most that was allocated
        so far. Bytes are those of the blocks: some KiB at least, and up to a quarter larger
        than what is in them.
    """
    return _core.memory_stats(device)


def empty_cache(device: Device | str | None = None) -> None:
    """Give the memory that is kept for later Tensors back to the system.

    Tensors that are in use stay. Nothing has to call this: where memory runs out, it is
    done before a call fails.

    Parameters
    ----------
    device : Device or str, optional
        Default: every device in use.
    """
    _core.empty_cache(device)
