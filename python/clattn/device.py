"""Lists the OpenCL devices and chooses the device of a call."""

from __future__ import annotations

import copyreg
from contextlib import contextmanager
from typing import TYPE_CHECKING

from clattn import _core
from clattn._host.fork import call_in_children

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from clattn._arguments.arrays import DeviceLike
    from clattn._core import Device

__all__ = ["devices", "get_default_device", "set_default_device", "use_device"]


def devices() -> list[Device]:
    """Return the usable devices: GPUs, then accelerators, then CPUs.

    CPUs that use host memory in place come before other CPUs. A device that cannot build kernels
    is left out; ``python -m clattn`` says why.

    Raises
    ------
    DeviceError
        No OpenCL loader, platform or device is installed.
    ValueError
        An environment variable of clattn has a wrong value.
    """
    return [device for device in _core.all_devices() if device.usable]


def get_default_device() -> Device:
    """Return the device that a call without ``device=`` uses in this thread.

    It is the device of the innermost `use_device`, else of `set_default_device`, else the device
    that the environment variable ``CLATTN_DEVICE`` names, else the first GPU, else the first
    accelerator, else the CPU.

    Raises
    ------
    DeviceError
        No device is usable.
    ValueError
        ``CLATTN_DEVICE`` names no device, or another environment variable of clattn has a wrong
        value.
    """
    return _core.find_device(None)


def set_default_device(device: DeviceLike | None) -> None:
    """Set the device of later calls in this process; None restores the first choice.

    Parameters
    ----------
    device : Device, str, int or None
        A device; its index in `devices`; "cpu", "gpu" or "accelerator"; "gpu:1" for the second
        GPU; "intel", "pocl", "nvidia", "amd" or "oclgrind" for a platform; or a part of the name
        of a platform, else of a device, in upper or lower case. A name that fits several
        platforms is refused.

    Raises
    ------
    TypeError, ValueError
        Not a device, or no device matches.
    DeviceError
        There is no usable OpenCL device.
    """
    _core.set_default_device(device)


def use_device(device: DeviceLike) -> AbstractContextManager[Device]:
    """Use a device for the calls inside a ``with`` block, in this thread or task only.

    Parameters
    ----------
    device : Device, str or int
        As for `set_default_device`.

    Returns
    -------
    context manager
        ``with`` binds the Device. Blocks nest: the innermost one names the device.

    Raises
    ------
    TypeError, ValueError
        Not a device, or no device matches.
    DeviceError
        There is no usable OpenCL device.

    Examples
    --------
    >>> with use_device("cpu") as device:
    ...     print(device.type)
    cpu
    """
    return _use(_core.find_device(device))


@contextmanager
def _use(device: Device) -> Iterator[Device]:
    token = _core.device_override.set(device)
    try:
        yield device
    finally:
        _core.device_override.reset(token)


def _find_again(platform: str, name: str, number: int) -> Device:
    """Return a device that another process has pickled."""
    alike = _alike(platform, name)
    if number >= len(alike):
        raise _core.DeviceError(
            f"a pickled Device is number {number} of platform {platform!r} with the name {name!r}; "
            f"here are {len(alike)} of these"
        )
    return alike[number]


def _alike(platform: str, name: str) -> list[Device]:
    return [d for d in _core.all_devices() if (d.platform, d.name) == (platform, name)]


def _reduce(device: Device) -> tuple[Callable[..., Device], tuple[str, str, int]]:
    """Pickle a device by its names; equal ones are told apart by their number."""
    alike = _alike(device.platform, device.name)
    if device not in alike:
        raise TypeError(
            "a Device of a queue of pyopencl cannot be pickled; pickle the one of clattn.devices() "
            "that the queue is on"
        )
    return _find_again, (device.platform, device.name, alike.index(device))


copyreg.pickle(_core.Device, _reduce)

call_in_children(_core.after_fork)
