"""DirectML's diagonal-matrix operators, on NumPy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clattn import _core

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    import numpy as np
    from numpy.typing import DTypeLike

    from clattn._core import Device

__all__ = ["diagonal_matrix", "diagonal_matrix1"]


def diagonal_matrix1(
    input: np.ndarray | None = None,
    *,
    sizes: Sequence[int] | None = None,
    dtype: DTypeLike | None = None,
    value: float,
    diagonal_fill_begin: int,
    diagonal_fill_end: int,
    device: Device | str | None = None,
) -> Any:
    """Compute ``DML_DIAGONAL_MATRIX1_OPERATOR_DESC``.

    In the last two dimensions, at column x and row y, `value` fills the band
    ``diagonal_fill_begin <= x - y < diagonal_fill_end``, or where begin is above end all but
    ``diagonal_fill_end <= x - y < diagonal_fill_begin``.

    Parameters
    ----------
    input : ndarray of shape (..., rows, columns), optional
        What is copied elsewhere; without it that is zero. Two to four dimensions; an integer
        type, float16, float32 or float64.
    sizes : tuple or list of int, optional
        The shape; needed without an input, else the input's.
    dtype : dtype, optional
        Needed without an input, else the input's.
    value : number
        Exact for integer types; rounded for float types, as NumPy does.
    diagonal_fill_begin, diagonal_fill_end : int
        Of 32 bits, INT32_MIN and INT32_MAX included.
    device : Device or str, optional
        Where to run, see `clattn.devices`. Default: `clattn.get_default_device`.

    Returns
    -------
    output : ndarray of shape (..., rows, columns)

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype.
    ValueError
        What the specification refuses; the message names the argument.
    MemoryError
        Host or device memory does not suffice.
    DeviceError
        No usable OpenCL device, or what it reports.

    Examples
    --------
    >>> diagonal_matrix1(
    ...     sizes=(2, 3), dtype="int32", value=7, diagonal_fill_begin=0, diagonal_fill_end=2
    ... )
    array([[7, 7, 0],
           [0, 7, 7]], dtype=int32)
    """
    return _core.directml_diagonal_matrix1(
        input, sizes, dtype, value, diagonal_fill_begin, diagonal_fill_end, device
    )


def diagonal_matrix(
    input: np.ndarray | None = None,
    *,
    sizes: Sequence[int] | None = None,
    dtype: DTypeLike | None = None,
    value: float,
    offset: int,
    device: Device | str | None = None,
) -> Any:
    """Compute ``DML_DIAGONAL_MATRIX_OPERATOR_DESC``: fill the diagonal ``x - y == offset``.

    Parameters
    ----------
    input : ndarray of shape (..., rows, columns), optional
        What is copied elsewhere; without it that is zero. Two to four dimensions; an integer
        type, float16, float32 or float64.
    sizes : tuple or list of int, optional
        The shape; needed without an input, else the input's.
    dtype : dtype, optional
        Needed without an input, else the input's.
    value : number
        Exact for integer types; rounded for float types, as NumPy does.
    offset : int
        Of 32 bits, INT32_MIN and INT32_MAX included.
    device : Device or str, optional
        Where to run, see `clattn.devices`. Default: `clattn.get_default_device`.

    Returns
    -------
    output : ndarray of shape (..., rows, columns)

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype.
    ValueError
        What the specification refuses; the message names the argument.
    MemoryError
        Host or device memory does not suffice.
    DeviceError
        No usable OpenCL device, or what it reports.

    Examples
    --------
    >>> diagonal_matrix(sizes=(2, 3), dtype="int32", value=7, offset=1)
    array([[0, 7, 0],
           [0, 0, 7]], dtype=int32)
    """
    return _core.directml_diagonal_matrix(input, sizes, dtype, value, offset, device)
