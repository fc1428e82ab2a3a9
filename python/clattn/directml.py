"""DirectML's operators under their own names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, overload

from clattn import _core
from clattn._arguments.arrays import ArrayT

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Unpack

    import numpy as np
    from numpy.typing import DTypeLike

    from clattn._arguments.arrays import Array, DeviceLike
    from clattn._arguments.options import (
        Diagonal1Options,
        DiagonalOptions,
        MaskType,
        MultiheadOptions,
    )

__all__ = [
    "MultiheadAttentionOutput",
    "diagonal_matrix",
    "diagonal_matrix1",
    "multihead_attention",
]


class MultiheadAttentionOutput(NamedTuple, Generic[ArrayT]):
    """The results of `multihead_attention`; present ones are None without `return_present`."""

    output: ArrayT
    present_key: Any
    present_value: Any


@overload
def multihead_attention(
    query: ArrayT,
    key: Array | None = None,
    value: Array | None = None,
    **options: Unpack[MultiheadOptions],
) -> MultiheadAttentionOutput[ArrayT]: ...
@overload
def multihead_attention(
    query: None = None,
    key: Array | None = None,
    value: Array | None = None,
    **options: Unpack[MultiheadOptions],
) -> MultiheadAttentionOutput[Any]: ...
def multihead_attention(
    query: Array | None = None,
    key: Array | None = None,
    value: Array | None = None,
    *,
    stacked_query_key: Array | None = None,
    stacked_key_value: Array | None = None,
    stacked_query_key_value: Array | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    mask_type: MaskType = "none",
    relative_position_bias: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    scale: float,
    mask_filter_value: float = -10000.0,
    head_count: int,
    return_present: bool = False,
    device: DeviceLike | None = None,
) -> MultiheadAttentionOutput[Any]:
    """Return multi-head attention as ``DML_MULTIHEAD_ATTENTION_OPERATOR_DESC`` defines it.

    ``softmax(scale * (query + bias) @ (key + bias).T + relative_position_bias + mask) @
    (value + bias)`` for each head. H is `head_count`, B the batch, L the length of the
    query, S the number of new keys, P of past keys, ``T = P + S``. Query, key and value have
    exactly one source each: ``query, key, value``; ``stacked_query_key, value``;
    ``query, stacked_key_value``; or ``stacked_query_key_value``. Any strides are accepted,
    inputs are never modified. Scores, softmax and sums are in float32. An array is a NumPy
    array, a `Tensor`, or an array of another library on the host; results are of the library of
    the query.

    Parameters
    ----------
    query : array of shape (B, L, H * E), optional
        float32 or float16; all arrays but `mask` have one dtype. 3 to 5 dimensions; dimensions
        before the last 3 are of size 1. Head sizes are 65,536 at most.
    key : array of shape (B, S, H * E), optional
        3 to 5 dimensions, as query.
    value : array of shape (B, S, H * Ev), optional
        3 to 5 dimensions, as query.
    stacked_query_key : array of shape (B, L, H, 2, E), optional
        Query and key of self-attention, S = L.
    stacked_key_value : array of shape (B, S, H, 2, E), optional
        Key and value, Ev = E.
    stacked_query_key_value : array of shape (B, L, H, 3, E), optional
        All three.
    bias : array of shape (H * E + H * E + H * Ev,), optional
        Added to query, key and value, not to the past; 1 to 5 dimensions, the leading ones of size
        1.
    mask : array of int32, optional
        The positions that are padding, as `mask_type` says; 1 to 5 dimensions.
    mask_type : str
        "boolean": 0 is padding; (B, T), (B, L, T), or four dimensions that broadcast to
        (B, H, L, T), with leading 1s. "key_sequence_length": (B,) or (1, B); keys from
        that number on are padding. "key_sequence_end_start": (2, B) or (2 * B,), ends and
        then starts; keys outside of ``start <= j < end`` are padding.
        "key_query_sequence_length_start_end": (3 * B + 2,); B key lengths that say what is
        padding, and the running totals of a packed batch, which are checked: B query
        starts and the last end, B key starts and the last end. Lengths and indices
        count past keys too.
    relative_position_bias : array, optional
        Added to the scaled scores; four dimensions that broadcast to (B, H, L, T), or five
        with a leading 1. -inf excludes a key.
    past_key : array of shape (B, H, P, E), optional
        Keys before the new ones; a leading 1 is allowed. Together with `past_value`.
    past_value : array of shape (B, H, P, Ev), optional
        Values before the new ones; a leading 1 is allowed.
    scale : float
        Multiplies the scores, usually ``1 / sqrt(E)``.
    mask_filter_value : float
        A finite number that is added to the scores of padding: a row of nothing but padding
        attends to all its keys as if none were padding.
    head_count : int
        H.
    return_present : bool
        Also return the past keys and values followed by the new ones.
    device : Device, str or int, optional
        Where to run, see `clattn.devices`. Default: `clattn.get_default_device`.

    Returns
    -------
    output : array of shape (B, L, H * Ev)
        With the leading 1s of the query, and of its dtype.
    present_key : array of shape (B, H, T, E) or None
        With `return_present`: past keys, then the new ones, with their bias.
    present_value : array of shape (B, H, T, Ev) or None
        With `return_present`: past values, then the new ones, with their bias.

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype.
    ValueError
        Query, key or value are missing or given twice; shapes, ranges or combinations that the
        operator does not allow; the message names the argument.
    MemoryError
        Host or device memory does not suffice.
    DeviceError
        There is no usable OpenCL device, or OpenCL reports an error.

    Notes
    -----
    Microsoft, "DML_MULTIHEAD_ATTENTION_OPERATOR_DESC structure (directml.h)", feature level 6.1.

    Examples
    --------
    >>> import numpy as np
    >>> stacked = np.ones((1, 4, 2, 3, 8), np.float32)
    >>> multihead_attention(stacked_query_key_value=stacked, scale=0.35, head_count=2)[0].shape
    (1, 4, 16)
    """
    return MultiheadAttentionOutput(
        *_core.directml_multihead_attention(
            query,
            key,
            value,
            stacked_query_key,
            stacked_key_value,
            stacked_query_key_value,
            bias,
            mask,
            relative_position_bias,
            past_key,
            past_value,
            mask_type=mask_type,
            scale=scale,
            mask_filter_value=mask_filter_value,
            head_count=head_count,
            return_present=return_present,
            device=device,
        )
    )


@overload
def diagonal_matrix1(input: ArrayT, **options: Unpack[Diagonal1Options]) -> ArrayT: ...
@overload
def diagonal_matrix1(input: None = None, **options: Unpack[Diagonal1Options]) -> np.ndarray: ...
def diagonal_matrix1(
    input: Array | None = None,
    *,
    sizes: Sequence[int] | None = None,
    dtype: DTypeLike | None = None,
    value: float,
    diagonal_fill_begin: int,
    diagonal_fill_end: int,
    device: DeviceLike | None = None,
) -> Any:
    """Compute ``DML_DIAGONAL_MATRIX1_OPERATOR_DESC``.

    In the last two dimensions, at column x and row y, `value` fills the band
    ``diagonal_fill_begin <= x - y < diagonal_fill_end``. If begin is above end, it fills all
    elements but ``diagonal_fill_end <= x - y < diagonal_fill_begin``.

    Parameters
    ----------
    input : array of shape (..., rows, columns), optional
        Copied outside the band; without an input these elements are zero. Two to four
        dimensions; an integer type, float16, float32 or float64.
    sizes : tuple or list of int, optional
        The shape; needed without an input, else the input's.
    dtype : dtype, optional
        Needed without an input, else the input's.
    value : number
        Exact for integer types; rounded for float types, as NumPy does.
    diagonal_fill_begin, diagonal_fill_end : int
        Of 32 bits, INT32_MIN and INT32_MAX included.
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
        The specification refuses the call; the message names the argument.
    MemoryError
        Host or device memory does not suffice.
    DeviceError
        There is no usable OpenCL device, or OpenCL reports an error.

    Notes
    -----
    Microsoft, "DML_DIAGONAL_MATRIX1_OPERATOR_DESC structure (directml.h)".

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


@overload
def diagonal_matrix(input: ArrayT, **options: Unpack[DiagonalOptions]) -> ArrayT: ...
@overload
def diagonal_matrix(input: None = None, **options: Unpack[DiagonalOptions]) -> np.ndarray: ...
def diagonal_matrix(
    input: Array | None = None,
    *,
    sizes: Sequence[int] | None = None,
    dtype: DTypeLike | None = None,
    value: float,
    offset: int,
    device: DeviceLike | None = None,
) -> Any:
    """Compute ``DML_DIAGONAL_MATRIX_OPERATOR_DESC``: fill the diagonal ``x - y == offset``.

    Parameters
    ----------
    input : array of shape (..., rows, columns), optional
        Copied outside the band; without an input these elements are zero. Two to four
        dimensions; an integer type, float16, float32 or float64.
    sizes : tuple or list of int, optional
        The shape; needed without an input, else the input's.
    dtype : dtype, optional
        Needed without an input, else the input's.
    value : number
        Exact for integer types; rounded for float types, as NumPy does.
    offset : int
        Of 32 bits, INT32_MIN and INT32_MAX included.
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
        The specification refuses the call; the message names the argument.
    MemoryError
        Host or device memory does not suffice.
    DeviceError
        There is no usable OpenCL device, or OpenCL reports an error.

    Notes
    -----
    Microsoft, "DML_DIAGONAL_MATRIX_OPERATOR_DESC structure (directml.h)".

    Examples
    --------
    >>> diagonal_matrix(sizes=(2, 3), dtype="int32", value=7, offset=1)
    array([[0, 7, 0],
           [0, 0, 7]], dtype=int32)
    """
    return _core.directml_diagonal_matrix(input, sizes, dtype, value, offset, device)
