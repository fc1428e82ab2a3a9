"""The types of arrays that the functions take."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from clattn._core import Device, Tensor

__all__ = ["Array", "DeviceLike"]


class _HasDLPack(Protocol):
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, int]: ...


class _HasArray(Protocol):
    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray: ...


Array: TypeAlias = (
    "np.ndarray | Tensor | _HasDLPack | _HasArray | memoryview | bytearray | array[Any]"
)

# What names a device: itself, words such as "gpu:1", or its index in `clattn.devices()`.
DeviceLike: TypeAlias = "Device | str | int"
