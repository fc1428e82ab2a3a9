"""The types of arrays that the functions take."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np

if TYPE_CHECKING:
    from typing import SupportsIndex

    from clattn._core import Device, Tensor

__all__ = ["Array", "ArrayT", "DeviceLike", "LseT"]


class _HasDLPack(Protocol):
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, int]: ...


class _HasArray(Protocol):
    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray: ...


Array: TypeAlias = (
    "np.ndarray | Tensor | _HasDLPack | _HasArray | memoryview | bytearray | array[Any]"
)

# A result has the type of an argument. A log-sum-exp has other dimensions than the result, and
# NumPy's types count these, so its type is Any; and so are results where a flag is no literal.
ArrayT = TypeVar("ArrayT", bound=Array)
LseT = TypeVar("LseT", bound=Array)

# What names a device: itself, words such as "gpu:1", or its index in `clattn.devices()`.
DeviceLike: TypeAlias = "Device | str | SupportsIndex"
