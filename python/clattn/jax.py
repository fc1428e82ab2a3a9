"""Attention with the signature of ``jax.nn.dot_product_attention``.

`dot_product_attention` is a callback of JAX's programs: ``jax.jit`` and ``jax.vmap`` take it as
they take functions of ``jax.nn``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

from clattn import _core, attention
from clattn._arguments.integers import integer
from clattn._host.extras import how_to_install

try:
    import jax
    import jax.numpy as jnp
    from jax.core import Tracer

    if jax.__version_info__ < (0, 6):
        raise ImportError(f"jax {jax.__version__} is too old")
except ImportError as error:
    raise ImportError(f"clattn.jax needs jax 0.6 or later: {how_to_install('jax')}") from error

if TYPE_CHECKING:
    from typing import Literal, TypedDict, Unpack

    from jax.typing import ArrayLike

    from clattn._arguments.arrays import DeviceLike

    class _Options(TypedDict, total=False):
        scale: ArrayLike | None
        is_causal: bool
        query_seq_lengths: ArrayLike | None
        key_value_seq_lengths: ArrayLike | None
        local_window_size: ArrayLike | tuple[int, int] | None
        implementation: None
        device: DeviceLike | None


__all__ = ["dot_product_attention"]

# Shapes and dtypes have the rules of jax's function, which is traced once for each of them. Other
# options have no rules there, and not every version knows all of them.
_theirs = jax.jit(jax.nn.dot_product_attention)


class _Operands(NamedTuple):
    """The arrays of a call, as jax's function names them; query to mask have four dimensions."""

    query: Any  # (B, L, Hq, E)
    key: Any  # (B, S, Hk, E)
    value: Any
    bias: Any  # None, or it broadcasts to (B, Hq, L, S), as mask does
    mask: Any
    query_seq_lengths: Any  # None or (B,)
    key_value_seq_lengths: Any


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[_Options],
) -> jax.Array: ...
@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[True],
    **options: Unpack[_Options],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: bool = False,
    **options: Unpack[_Options],
) -> Any: ...
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: ArrayLike | tuple[int, int] | None = None,
    implementation: None = None,
    return_residual: bool = False,
    device: DeviceLike | None = None,
) -> Any:
    """Return what ``jax.nn.dot_product_attention`` returns, computed by clattn.

    Arrays pass through the host's memory. Rules and messages about shapes are those of jax.

    Parameters
    ----------
    query : array of shape (B, L, Hq, E) or (L, Hq, E)
        float16, bfloat16, float32 or float64.
    key, value : array of shape (B, S, Hk, E) or (S, Hk, E)
        Of query's dtype. Hq is a multiple of Hk; query head h reads head ``h // (Hq // Hk)``.
    bias : array, optional
        Broadcasts to (B, Hq, L, S); of any float dtype; added to the scaled scores.
    mask : array, optional
        Broadcasts to (B, Hq, L, S); bool, True attends.
    scale : float, optional
        Default ``1 / sqrt(E)``. A number, or an array of no dimensions that is not traced.
    is_causal : bool
        Row i attends key j where ``j <= i``.
    query_seq_lengths : int32 array of shape (B,), optional
        Rows from this number on are zero in the result.
    key_value_seq_lengths : int32 array of shape (B,), optional
        Keys from this number on are excluded.
    local_window_size : int or (int, int), optional
        ``(left, right)`` keeps the keys ``i - left ... i + right`` of row i; an int is both. An
        array that is not traced will do.
    implementation : None
        jax's word for one of its own implementations, which is refused here.
    return_residual : bool
        Also return the log-sum-exp of the masked scores, with every version of jax.
    device : Device, str or int, optional
        Where to run, see `clattn.devices`. Default: `clattn.get_default_device` when the call
        is traced.

    Returns
    -------
    output : array of query's shape and dtype
    residual : array of shape (B, L, Hq) or (L, Hq)
        With `return_residual`, of query's dtype; -inf for a row with no key, and for the rows from
        `query_seq_lengths` on.

    Raises
    ------
    TypeError
        A dtype that clattn does not take, an option of another type or a traced one, or not a
        device.
    ValueError
        Shapes or options do not fit, gradients are asked for, or no device matches.
    DeviceError
        No OpenCL device is usable.
    MemoryError
        Host or device memory does not suffice for the check of the dtypes.

    What fails while a program runs is raised by JAX, with clattn's message inside.

    Notes
    -----
    A row with no key to attend to is zero; jax's is the mean of the values.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> x = jnp.ones((2, 4, 8, 16))
    >>> jax.jit(partial(dot_product_attention, is_causal=True))(x, x, x).shape
    (2, 4, 8, 16)
    """
    if implementation is not None:
        raise ValueError(
            f"implementation is {implementation!r}, which names one of jax's; expected None, for "
            "clattn is the implementation"
        )
    for name, flag in (("is_causal", is_causal), ("return_residual", return_residual)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, got {type(flag).__name__}")
    arrays = [_with_batch(array) for array in (query, key, value, bias, mask)]
    operands = _Operands._make([*arrays, query_seq_lengths, key_value_seq_lengths])
    result = jax.eval_shape(_theirs, **operands._asdict())
    if return_residual:
        result = (result, jax.ShapeDtypeStruct(result.shape[:-1], result.dtype))
    attend = partial(
        attention.scaled_dot_product_attention,
        scale=_read_number(scale),
        is_causal=is_causal,
        window=_read_window(local_window_size),
        enable_gqa=True,
        return_lse=return_residual,
        device=_core.find_device(device),
    )
    _check_dtypes(attend, operands)
    output = _call(partial(_compute, attend), result, operands)
    shape = jnp.shape(query)
    if return_residual:
        return output[0].reshape(shape), output[1].reshape(shape[:-1])
    return output.reshape(shape)


def _read_number(scale: Any) -> Any:
    """Return the number of an array without dimensions, and other objects as they are."""
    if isinstance(scale, Tracer):
        raise TypeError(
            "scale is traced; expected a number, which a program keeps: make it a static argument "
            "of jax.jit, or multiply query by it and pass scale=1.0"
        )
    is_number = isinstance(scale, jax.Array | np.ndarray) and scale.ndim == 0
    return scale.item() if is_number else scale


def _read_window(size: Any) -> tuple[int, int] | None:
    """Return how many keys a window has to the left and to the right."""
    if size is None:
        return None
    if isinstance(size, Tracer):
        raise TypeError(
            "local_window_size is traced; expected an integer or two, which a program keeps: make "
            "it a static argument of jax.jit"
        )
    try:
        numbers = size if np.ndim(size) else (size, size)
        both = tuple(integer(number, "local_window_size") for number in numbers)
    except (TypeError, ValueError):  # ValueError: np.ndim of sequences in a sequence
        both = ()
    if len(both) != 2:
        raise TypeError(
            f"local_window_size is {size!r:.80}; expected an integer, or two: (left, right)"
        )
    if min(both) < 0:
        raise ValueError(f"local_window_size is {size!r:.80}; expected 0 or more")
    return both


def _with_batch(array: Any) -> Any:
    """Put dimensions of size 1 in front, up to four."""
    if array is None:
        return None
    array = jnp.asarray(array)
    return jnp.expand_dims(array, tuple(range(4 - array.ndim)))


def _check_dtypes(attend: Any, operands: _Operands) -> None:
    """Let clattn refuse dtypes and options before the program runs.

    It attends with arrays of these dtypes that have no rows and one head.
    """
    query, key, value, bias = (
        None if array is None else np.zeros((1, 0, 1), array.dtype) for array in operands[:4]
    )
    if bias is not None and bias.dtype == bool:
        raise TypeError("bias is an array of bool; expected floats, or mask=… for bools")
    attend(query, key, value, bias if bias is None else bias[..., :0])


def _call(compute: Any, result: Any, operands: _Operands) -> Any:
    """Make the computation a part of JAX's program."""

    @jax.custom_jvp  # type: ignore[untyped-decorator, unused-ignore]
    def call(operands: Any) -> Any:
        return jax.pure_callback(compute, result, operands, vmap_method="expand_dims")

    @call.defjvp  # type: ignore[untyped-decorator, unused-ignore]
    def refuse(primals: Any, tangents: Any) -> Any:
        raise ValueError(
            "clattn.jax.dot_product_attention has no gradients: differentiate "
            "jax.nn.dot_product_attention, or hand jax.lax.stop_gradient(…) of the arrays over"
        )

    return call(operands)


def _compute(attend: Any, operands: _Operands) -> Any:
    """Attend.

    Under vmap each operand has a dimension more in front, of size 1 if vmap does not go over it:
    of three queries and one key, query is (3, B, L, Hq, E) and key is (1, B, S, Hk, E). The result
    is (3, B, L, Hq, E). Nested vmaps add several dimensions.
    """
    given = _Operands(*(None if array is None else np.asarray(array) for array in operands))
    query, key, value = (x.swapaxes(-3, -2) for x in (given.query, given.key, given.value))
    L, S = query.shape[-2], key.shape[-2]
    mask, lengths = given.mask, given.query_seq_lengths
    if given.key_value_seq_lengths is not None:
        within = np.arange(S) < given.key_value_seq_lengths[..., None, None, None]
        mask = within if mask is None else mask & within
    if given.bias is not None:
        bias = given.bias
        mask = bias if mask is None else np.where(mask, bias, bias.dtype.type(-np.inf))
    leading = [array.shape[:-3] for array in (query, key, value, mask) if array is not None]
    batch = np.broadcast_shapes(*leading, () if lengths is None else lengths.shape)
    output = np.empty((*batch, L, *query.shape[-3:-2], value.shape[-1]), query.dtype)
    result = attend(
        np.broadcast_to(query, (*batch, *query.shape[-3:])),
        key,
        value,
        mask,
        out=output.swapaxes(-3, -2),
    )
    residual = result[1].swapaxes(-2, -1).astype(query.dtype) if isinstance(result, tuple) else None
    if lengths is not None:
        beyond = np.broadcast_to(np.arange(L) >= lengths[..., None], (*batch, L))
        output[beyond] = 0
        if residual is not None:
            residual[beyond] = -np.inf
    return output if residual is None else (output, residual)
