"""Arrays that mods capture, of any library, as far as Python looks into them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from clattn import _core

__all__ = [
    "MOST_DIMS",
    "MOST_TABLES",
    "array_of",
    "checksum",
    "dimensions",
    "dtype_like",
    "dtype_name",
    "elements",
    "highest",
    "read_element",
    "requires_gradients",
    "share_arguments",
    "stack_shared",
    "without_gradients",
]

# The most dimensions of a table, and the most tables that kernels read: CA_TABLE_DIMS and CA_TABLES
# of kernels/attention/params.h.
MOST_DIMS = 5
MOST_TABLES = 4

# For each table the number of its argument, and its place there: None if it is alone.
Arguments = list[tuple[int, int | None]]


def dimensions(array: Any) -> int | None:
    """Return the number of dimensions of an array; None if the object is none."""
    dims = getattr(array, "ndim", None)
    if dims is None and hasattr(type(array), "__dlpack__"):
        dims = len(getattr(array, "shape", ()))
    return dims if type(dims) is int else None


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype of any library: torch.float32 and np.float32 are float32."""
    if dtype is None:  # which NumPy takes for float64
        return "None"
    try:
        return str(np.dtype(dtype).name)
    except (TypeError, ValueError, SyntaxError):
        return str(dtype).rpartition(".")[2]


def array_of(numbers: list[Any] | tuple[Any, ...]) -> np.ndarray:
    """Return the array of a list of numbers, of int32 if that holds them.

    ValueError: it is no list of numbers, or lists of them, of one length.
    """
    array = np.asarray(numbers)
    narrow = array.astype(np.int32) if array.dtype.kind == "i" else array
    return narrow if (narrow == array).all() else array


def share_arguments(tables: list[Any]) -> Arguments | None:
    """Return which argument of a kernel each table is in; None if that takes too many.

    While there are few tables, each is an argument. Of more, those of one dtype and shape are
    stacked in one.
    """
    if len(tables) <= MOST_TABLES:
        return [(n, None) for n in range(len(tables))]
    groups: dict[Any, list[int]] = {}
    for n, table in enumerate(tables):
        shape = tuple(table.shape)
        alone = n if len(shape) == MOST_DIMS else None
        groups.setdefault((dtype_name(table.dtype), shape, alone), []).append(n)
    if len(groups) > MOST_TABLES:
        return None
    arguments: Arguments = [(0, None)] * len(tables)
    for argument, members in enumerate(groups.values()):
        for place, n in enumerate(members):
            arguments[n] = argument, (place if len(members) > 1 else None)
    return arguments


def stack_shared(tables: list[Any], arguments: Arguments) -> tuple[Any, ...]:
    """Return the arguments that hold the tables."""
    members: list[list[Any]] = [[] for _ in range(1 + max([n for n, _ in arguments], default=-1))]
    for table, (argument, _) in zip(tables, arguments, strict=True):
        members[argument].append(without_gradients(table))
    return tuple([m[0] if len(m) == 1 else np.stack([*map(_on_host, m)]) for m in members])


def dtype_like(array: Any, name: str) -> Any:
    """Return the dtype of a name, of the array's library: torch's, or else NumPy's.

    None is an array that is not known yet: then the dtype is torch's if torch is there.
    """
    torch = sys.modules.get("torch")
    if torch is not None and (array is None or isinstance(array, torch.Tensor)):
        return getattr(torch, name)
    return np.dtype(name)


def read_element(array: Any) -> Any:
    """Return the number of an array without dimensions; a float for a float of another library."""
    read = getattr(array, "item", None)
    element = np.array(array, copy=True).item() if read is None else read()
    return float(element) if isinstance(element, np.generic) else element


def elements(values: Any) -> list[Any] | None:
    """Return the numbers of an array, or of a list, tuple or set; None for other objects."""
    if isinstance(values, (list, tuple, set, frozenset, range)):
        return list(values)
    if dimensions(values) is None:
        return None
    listed: Any = _on_host(values).ravel().tolist()
    return listed if isinstance(listed, list) else None


def _elements(table: Any) -> np.ndarray:
    """Return what a table holds, in host memory; waits for a Tensor.

    A dimension that is broadcast, with a stride of 0, may be long and is there once.
    """
    elements = np.asarray(_on_host(table))
    return elements[tuple(slice(1) if step == 0 else slice(None) for step in elements.strides)]


def _on_host(table: Any) -> np.ndarray:
    if isinstance(table, np.ndarray):
        return table
    if not isinstance(table, _core.Tensor):
        try:
            return np.from_dlpack(table)
        except (BufferError, RuntimeError, TypeError, ValueError):
            pass  # a dtype that NumPy's function does not know, such as torch's bfloat16
        table = _core.tensor(table, None)
    return table.numpy()  # type: ignore[no-any-return]


def highest(table: Any) -> int:
    """Return the highest element of a table of unsigned integers, or 0."""
    return int(_elements(table).max(initial=0))


def checksum(table: Any) -> tuple[Any, ...] | None:
    """Return the shape of a table and a CRC-32 of its elements; None for a Tensor.

    Equal elements have the same one, whatever their order in memory, byte order and library, but
    for arrays that are broadcast. 16 MB take 4 ms.
    """
    import zlib  # a library that importing clattn does not load

    if isinstance(table, _core.Tensor):
        return None
    flags: Any = ["readonly", "contig", "nbo"]  # in NumPy's stub "contig" is misspelt
    parts: Any = np.nditer(
        _elements(table),
        ["external_loop", "buffered", "zerosize_ok"],
        [flags],
        order="C",
        buffersize=1 << 16,
    )
    total = 0
    for part in parts:
        total = zlib.crc32(part.view(np.uint8), total)
    return (tuple(table.shape), total)


# ---- torch's gradients ----


def requires_gradients(array: Any) -> bool:
    """Return whether torch would expect the gradient of an array."""
    if getattr(array, "requires_grad", False) is not True:
        return False
    torch = sys.modules.get("torch")
    return torch is None or bool(torch.is_grad_enabled())


def without_gradients(array: Any) -> Any:
    """Return the array, or torch's view of it that requires no gradients."""
    return array.detach() if getattr(array, "requires_grad", False) is True else array
