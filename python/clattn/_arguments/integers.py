"""Integers that a caller hands over: one, a sequence, or any array. A bool is refused."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from clattn import _core

if TYPE_CHECKING:
    from typing import NoReturn

# The most numbers that are copied. A view or a range may stand for more than memory could hold.
MOST = 2**28

_ONE_OR_SEVERAL = "an int or a sequence of integers"


def _shown(given: Any) -> str:
    """Return the beginning of repr; Python prints no numbers of more than 4300 digits."""
    try:
        return f"{given!r:.80}"
    except ValueError:
        return "a number too long to print"


def _index(number: Any) -> int:
    """Return a whole number, or raise a TypeError."""
    if type(number) is int:
        return number
    if isinstance(number, bool) or str(getattr(number, "dtype", "")).endswith("bool"):
        raise TypeError
    return operator.index(number)


def integer(number: Any, name: str, expected: str = "an integer") -> int:
    """Return a whole number of any size."""
    try:
        return _index(number)
    except TypeError:
        raise TypeError(f"{name} must be {expected}, got {type(number).__name__}") from None


def size(number: Any, name: str, lowest: int) -> int:
    """Return a whole number of `lowest` or more, of 63 bits."""
    found = integer(number, name)
    if not lowest <= found < 2**63:
        raise ValueError(f"{name} is {_shown(found)}; expected {lowest} or more, below 2**63")
    return found


def head_size_of(number: Any, name: str) -> int:
    """Return a head size that calls take."""
    found = size(number, name, 1)
    if found > _core.MOST_HEAD_SIZE:
        raise ValueError(f"{name} is {found}; expected {_core.MOST_HEAD_SIZE} at most")
    return found


def integers(numbers: Any, name: str, expected: str = "a sequence of integers") -> np.ndarray:
    """Return a new int64 array of one dimension."""
    kind = type(numbers)
    if hasattr(kind, "__array__") or hasattr(kind, "__dlpack__"):
        return _from_array(_read(numbers, name), numbers, name)
    if isinstance(numbers, str | bytes):
        raise TypeError(f"{name} must be {expected}, got {kind.__name__}")
    if isinstance(numbers, Sequence) and not isinstance(numbers, memoryview):
        return _from_sequence(numbers, name)
    try:
        view = memoryview(numbers)
    except TypeError:
        raise TypeError(f"{name} must be {expected}, got {kind.__name__}") from None
    return _from_array(np.asarray(view), numbers, name)


def table(numbers: Any, name: str) -> np.ndarray:
    """Return a new int64 array of two dimensions."""
    is_foreign = hasattr(type(numbers), "__dlpack__")
    try:
        array = _read(numbers, name) if is_foreign else np.asarray(numbers)
    except ValueError:
        if is_foreign:
            raise
        raise ValueError(f"{name} is {_shown(numbers)}; expected rows of one length") from None
    if array.size > 0:
        _check_kind(array, name)
    if array.ndim != 2:
        raise ValueError(f"{name} has shape {array.shape}; expected two dimensions")
    return _as_int64(array, numbers, name)


def counts_of(cu_seq: Any, name: str, sequences: int, rows: int, of: str) -> list[int]:
    """Return how many of the rows belong to each sequence."""
    if cu_seq is None:
        count = rows // sequences if sequences else 0
        if count * sequences != rows:
            raise ValueError(
                f"{of} has {rows} rows for {sequences} sequences; expected as many for each, or "
                f"{name}"
            )
        return [count] * sequences
    ends = integers(cu_seq, name).tolist()
    if len(ends) != sequences + 1:
        raise ValueError(
            f"{name} has shape ({len(ends)},); expected ({sequences + 1},), one more than sequences"
        )
    check_offsets(ends, name, rows, of)
    return [end - start for start, end in itertools.pairwise(ends)]


def check_offsets(ends: list[int], name: str, rows: int, of: str) -> None:
    """Refuse offsets that do not divide some of the rows of an array."""
    if not ends:
        raise ValueError(f"{name} has shape (0,); expected (n + 1,), for n sequences")
    if ends[0] != 0:
        raise ValueError(f"{name}[0] is {ends[0]}; expected 0")
    for place, (start, end) in enumerate(itertools.pairwise(ends)):
        if end < start:
            raise ValueError(
                f"{name}[{place + 1}] is {end}; expected {start} or more, which {name}[{place}] is"
            )
    if ends[-1] > rows:
        raise ValueError(
            f"{name}[{len(ends) - 1}] is {ends[-1]}; expected at most {rows}, the rows of {of}"
        )


def one_or_several(numbers: Any, name: str) -> int | np.ndarray:
    """Return an int, or int64 numbers of one dimension."""
    dims = getattr(numbers, "ndim", None)
    if dims == 0 or (dims is None and hasattr(type(numbers), "__index__")):
        return integer(numbers, name, _ONE_OR_SEVERAL)
    return integers(numbers, name, _ONE_OR_SEVERAL)


def offsets(query_offset: Any) -> int | np.ndarray:
    """Return the argument `query_offset`: an int, or int64 numbers of one dimension."""
    return one_or_several(query_offset, "query_offset")


def _read(numbers: Any, name: str) -> np.ndarray:
    """Return another library's array, which may refuse to be read, as NumPy's."""
    kind = type(numbers)
    try:
        return np.asarray(numbers) if hasattr(kind, "__array__") else np.from_dlpack(numbers)
    except (MemoryError, ImportError, _core.DeviceError):
        raise
    except Exception as error:
        raise ValueError(f"{name} ({kind.__name__}) cannot be read: {error}") from error


def _from_array(array: np.ndarray, given: Any, name: str) -> np.ndarray:
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}; expected one dimension")
    if array.dtype.kind == "O":
        return _from_sequence(array, name)
    return _as_int64(array, given, name)


def _check_kind(array: np.ndarray, name: str) -> None:
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {array.dtype}")


def _as_int64(array: np.ndarray, given: Any, name: str) -> np.ndarray:
    _check_kind(array, name)
    _check_length(array.size, name)
    copy = array.astype(np.int64, order="C")
    if array.dtype.kind == "u" and (copy < 0).any():
        _refuse_large(given, name)
    return copy


def _from_sequence(numbers: Sequence[Any] | np.ndarray, name: str) -> np.ndarray:
    length = len(numbers)
    _check_length(length, name)
    try:
        return np.fromiter(
            (_index(number) for number in itertools.islice(numbers, length)), np.int64
        )
    except OverflowError:
        _refuse_large(numbers, name)
    except TypeError:
        if dims := _regular_shape(numbers)[1:]:
            raise ValueError(
                f"{name} has shape {(length, *dims)}; expected one dimension"
            ) from None
        raise TypeError(f"{name} must be integers, got {_shown(numbers)}") from None


def _regular_shape(numbers: Any) -> tuple[int, ...]:
    """Return the shape of nested sequences; () if they have none."""
    try:
        return np.shape(numbers)
    except (TypeError, ValueError):
        return ()


def _check_length(length: int, name: str) -> None:
    if length > MOST:
        raise ValueError(f"{name} has {length} numbers; expected at most {MOST}")


def _refuse_large(numbers: Any, name: str) -> NoReturn:
    raise ValueError(f"{name} is {_shown(numbers)}; expected numbers of 63 bits") from None
