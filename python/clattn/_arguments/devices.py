"""The device that a caller names for later calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clattn import _core

if TYPE_CHECKING:
    from clattn._arguments.arrays import DeviceLike
    from clattn._core import Device


def find_named(device: DeviceLike | None) -> Device | None:
    """Find the device that is named. None stays None, and no OpenCL is opened."""
    return None if device is None else _core.find_device(device)
