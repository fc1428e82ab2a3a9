"""The device that a caller names for later calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clattn import _core

if TYPE_CHECKING:
    from typing import Any

    from clattn._arguments.arrays import DeviceLike
    from clattn._core import Device


def find_named(device: DeviceLike | None) -> Device | None:
    """Find the device that is named. None stays None, and no OpenCL is opened."""
    return None if device is None else _core.find_device(device)


def without_torch(device: Any) -> DeviceLike | None:
    """Return the device that a caller names; None for torch's CPU, where its tensors lie.

    ValueError: another device of torch.
    """
    kind = type(device)
    if kind.__name__ != "device" or kind.__module__ != "torch":
        return device  # type: ignore[no-any-return]
    if device.type != "cpu":
        raise ValueError(
            f"device is {device!r}; expected torch.device('cpu'), or a device of clattn: 'gpu'"
        )
    return None
