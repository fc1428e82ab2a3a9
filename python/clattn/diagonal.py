"""Fill or keep a band of diagonals of matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

import numpy as np

from clattn import _core

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from numpy.typing import DTypeLike

    from clattn._arguments.arrays import Array, ArrayT, DeviceLike

__all__ = ["diagonal_matrix", "eye", "tril", "triu"]


@overload
def diagonal_matrix(
    input_or_shape: Sequence[int],
    value: float,
    begin: int,
    end: int,
    *,
    dtype: DTypeLike | None = None,
    out: None = None,
    device: DeviceLike | None = None,
) -> np.ndarray: ...
@overload
def diagonal_matrix(
    input_or_shape: ArrayT,
    value: float,
    begin: int,
    end: int,
    *,
    dtype: DTypeLike | None = None,
    out: None = None,
    device: DeviceLike | None = None,
) -> ArrayT: ...
@overload
def diagonal_matrix(
    input_or_shape: Array | Sequence[int],
    value: float,
    begin: int,
    end: int,
    *,
    dtype: DTypeLike | None = None,
    out: ArrayT,
    device: DeviceLike | None = None,
) -> ArrayT: ...
def diagonal_matrix(
    input_or_shape: Array | Sequence[int],
    value: float,
    begin: int,
    end: int,
    *,
    dtype: DTypeLike | None = None,
    out: Array | None = None,
    device: DeviceLike | None = None,
) -> Any:
    """Fill a band of diagonals with a value.

    In the last two dimensions, at column x and row y, the band is ``begin <= x - y < end``. If
    ``begin > end``, all elements but ``end <= x - y < begin`` are filled; if they are equal, none.
    The other elements are the input's, or zero. An array is a NumPy array, a `Tensor`, or an
    array of another library on the host; results are of the library of the input.

    Parameters
    ----------
    input_or_shape : array of shape (..., rows, columns), or tuple or list of int
        The array that is copied outside the band, or the shape of a result that is zero there. Two
        dimensions or more; all but the last two are a batch. Any strides are accepted. bool,
        an integer type, float16, bfloat16 (``ml_dtypes.bfloat16``), float32 or float64.
    value : number
        Exact for bool and integer types; rounded for float types, as NumPy does.
    begin, end : int
        Any whole numbers; 0 is the main diagonal, 1 the diagonal right of it.
    dtype : dtype, optional
        With a shape: of the result, default float32. With an input: the input's.
    out : array of the result's shape and dtype, optional
        The result is written here and `out` is returned; with any strides. It may be the input
        itself, which is then changed in place. It may not share memory with the input otherwise,
        and no two of its elements may share any.
    device : Device, str or int, optional
        Where to run, see `clattn.devices`. Default: `clattn.get_default_device`.

    Returns
    -------
    output : array of shape (..., rows, columns)

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype.
    ValueError
        A shape, value or combination does not fit; the message names the argument.
    MemoryError
        Host or device memory does not suffice.
    DeviceError
        There is no usable OpenCL device, or OpenCL reports an error.

    Examples
    --------
    >>> diagonal_matrix((2, 3), 7, 0, 2, dtype="int32")
    array([[7, 7, 0],
           [0, 7, 7]], dtype=int32)
    """
    return _core.diagonal_matrix(
        input_or_shape, value=value, begin=begin, end=end, dtype=dtype, out=out, device=device
    )


def eye(
    n: int,
    m: int | None = None,
    *,
    dtype: DTypeLike | None = np.float32,
    device: DeviceLike | None = None,
) -> np.ndarray:
    """Return a matrix with ones on the main diagonal and zeros elsewhere.

    Parameters
    ----------
    n : int
        Rows.
    m : int, optional
        Columns; default n.
    dtype : dtype
        As in `diagonal_matrix`.
    device : Device, str or int, optional
        Where to run, see `clattn.devices`. Default: `clattn.get_default_device`.

    Returns
    -------
    output : array of shape (n, m)

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype.
    ValueError
        A negative size; the message names the argument.
    MemoryError
        Host or device memory does not suffice.
    DeviceError
        There is no usable OpenCL device, or OpenCL reports an error.

    Examples
    --------
    >>> eye(2, 3)
    array([[1., 0., 0.],
           [0., 1., 0.]], dtype=float32)
    """
    return _core.eye(n, m, dtype, device)


def tril(input: ArrayT, diagonal: int = 0, *, out: Array | None = None) -> ArrayT:
    """Return the lower triangle of matrices: zero where ``x - y > diagonal``.

    Parameters
    ----------
    input : array of shape (..., rows, columns)
        As in `diagonal_matrix`.
    diagonal : int
        The last diagonal that is kept; 0 is the main diagonal, 1 the diagonal right of it.
    out : array of input's shape, optional
        The result is written here and `out` is returned, as in `diagonal_matrix`.

    Returns
    -------
    output : array of shape (..., rows, columns)
        Of input's dtype.

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype.
    ValueError
        Fewer than two dimensions, or an `out` of another shape; the message names the argument.
    MemoryError
        Host or device memory does not suffice.
    DeviceError
        There is no usable OpenCL device, or OpenCL reports an error.

    Notes
    -----
    Without Tensors the call runs on `clattn.get_default_device`. In place: ``tril(a, out=a)``.

    Examples
    --------
    >>> tril(np.arange(6).reshape(2, 3))
    array([[0, 0, 0],
           [3, 4, 0]])
    """
    return _core.tril(input, diagonal, out)


def triu(input: ArrayT, diagonal: int = 0, *, out: Array | None = None) -> ArrayT:
    """Return the upper triangle of matrices: zero where ``x - y < diagonal``.

    Parameters
    ----------
    input : array of shape (..., rows, columns)
        As in `diagonal_matrix`.
    diagonal : int
        The first diagonal that is kept; 0 is the main diagonal, 1 the diagonal right of it.
    out : array of input's shape, optional
        The result is written here and `out` is returned, as in `diagonal_matrix`.

    Returns
    -------
    output : array of shape (..., rows, columns)
        Of input's dtype.

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype.
    ValueError
        Fewer than two dimensions, or an `out` of another shape; the message names the argument.
    MemoryError
        Host or device memory does not suffice.
    DeviceError
        There is no usable OpenCL device, or OpenCL reports an error.

    Notes
    -----
    Without Tensors the call runs on `clattn.get_default_device`. In place: ``triu(a, out=a)``.

    Examples
    --------
    >>> triu(np.arange(6).reshape(2, 3))
    array([[0, 1, 2],
           [0, 4, 5]])
    """
    return _core.triu(input, diagonal, out)
