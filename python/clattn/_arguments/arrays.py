"""The arrays that the functions take: their types, and their elements on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np

from clattn import _core

if TYPE_CHECKING:
    from array import array
    from typing import Any, Protocol, SupportsIndex

    from clattn._core import Device, Tensor

    class _HasDLPack(Protocol):
        def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
        def __dlpack_device__(self) -> tuple[Any, int]: ...

    class _HasArray(Protocol):
        def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray: ...

    class _InBuffer(Protocol):
        """A pyopencl.array.Array, as far as its types are known."""

        queue: Any
        base_data: Any
        offset: Any


__all__ = ["Array", "ArrayT", "DeviceLike", "LseT", "host_array", "tensor_or_host"]


Array: TypeAlias = (
    "np.ndarray | Tensor | _HasDLPack | _HasArray | _InBuffer | memoryview | bytearray | array[Any]"
)

# A result has the type of an argument. A log-sum-exp has other dimensions than the result, and
# NumPy's types count these, so its type is Any; and so are results where a flag is no literal.
ArrayT = TypeVar("ArrayT", bound=Array)
LseT = TypeVar("LseT", bound=Array)

# What names a device: itself, words such as "gpu:1", or its index in `clattn.devices()`.
DeviceLike: TypeAlias = "Device | str | SupportsIndex"


def host_array(array: Any, name: str) -> np.ndarray:
    """Return the elements of an array of any library, in native byte order.

    They are copied only where they lie on a device or in another byte order. Structured dtypes of
    NumPy pass; a masked array is refused, as in the core.
    """
    plain = isinstance(array, np.ndarray) and not isinstance(array, np.ma.MaskedArray)
    found = array if plain else _core.host_array(array, name)
    native: np.ndarray = found.astype(found.dtype.newbyteorder("="), copy=False)
    return native


def tensor_or_host(array: Array, name: str) -> np.ndarray | Tensor:
    """Return a Tensor as it is, the elements of any other array on the host."""
    return array if isinstance(array, _core.Tensor) else host_array(array, name)
