"""Attention with the signature of ``jax.nn.dot_product_attention``.

`dot_product_attention` is a callback of JAX's programs: ``jax.jit`` and ``jax.vmap`` take it as
they take functions of ``jax.nn``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

from clattn import _core, attention, gradients
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
        Shapes or options do not fit, or no device matches.
    DeviceError
        No OpenCL device is usable.
    MemoryError
        Host or device memory does not suffice for an argument or for the check of the dtypes.

    What fails while a program runs is raised by JAX, with clattn's message inside.

    Notes
    -----
    A row with no key to attend to is zero; jax's is the mean of the values. ``jax.grad`` and
    ``jax.vjp`` differentiate in query, key, value and bias, by
    `clattn.scaled_dot_product_attention_backward`; there is no forward mode and no second
    derivative.

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
    options = {
        "scale": _read_number(scale),
        "is_causal": is_causal,
        "window": _read_window(local_window_size),
        "enable_gqa": True,
        "device": _core.find_device(device),
    }
    operands = _read_operands(
        query, key, value, bias, mask, query_seq_lengths, key_value_seq_lengths
    )
    _check_dtypes(options, operands)
    output, residual = _call(options, _find_result(operands), operands, return_residual)
    shape = jnp.shape(query)
    if return_residual:
        return output.reshape(shape), residual.reshape(shape[:-1])
    return output.reshape(shape)


def _read_operands(*given: Any) -> _Operands:
    """Return arrays of JAX, with a batch; the lengths are left as they are."""
    try:
        return _Operands._make([*map(_with_batch, given[:5]), *given[5:]])
    except OverflowError as error:  # an integer in the place of an array
        raise ValueError(str(error)) from error
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise MemoryError(str(error)) from error
        raise


def _find_result(operands: _Operands) -> Any:
    """Return shape and dtype of the result, by jax's rules, whose errors are not all documented."""
    try:
        result = jax.eval_shape(_theirs, **operands._asdict())
    except OverflowError as error:  # an integer in the place of lengths
        raise ValueError(str(error)) from error
    except (AssertionError, ZeroDivisionError) as error:  # numbers of heads, without a message
        shapes = ", ".join(
            f"{name} {array.shape}"
            for name, array in operands._asdict().items()
            if hasattr(array, "shape")
        )
        raise ValueError(
            "the heads do not fit: query needs a multiple of the heads of key, bias and mask need "
            f"1 or those of query; got {shapes}"
        ) from error
    B, L, Hq, _ = operands.query.shape
    scores = (B, Hq, L, operands.key.shape[1])
    for name in ("bias", "mask"):
        array = getattr(operands, name)
        # jax lets one key stand for as many as they have.
        if array is not None and np.broadcast_shapes(array.shape, scores) != scores:
            raise ValueError(
                f"{name} has shape {array.shape}; expected one that broadcasts to {scores}"
            )
    return result


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


def _check_dtypes(options: dict[str, Any], operands: _Operands) -> None:
    """Let clattn refuse dtypes and options before the program runs.

    It attends with arrays of these dtypes that have no rows and one head.
    """
    query: Any
    key: Any
    value: Any
    query, key, value, bias = (
        None if array is None else np.zeros((1, 0, 1), array.dtype) for array in operands[:4]
    )
    if bias is not None and not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(f"bias is an array of {bias.dtype}; expected floats, or mask=… for bools")
    mask: Any = bias if bias is None else bias[..., :0]
    attention.scaled_dot_product_attention(query, key, value, mask, **options)


def _call(
    options: dict[str, Any], result: Any, operands: _Operands, return_residual: bool
) -> tuple[jax.Array, Any]:
    """Make the computation a part of JAX's program: output and residual, which may be None.

    The backward pass keeps the operands, the output and the log-sum-exp.
    """
    B, L, Hq, _ = result.shape
    wide = jnp.float64 if result.dtype == jnp.float64 else jnp.float32
    lse_result = jax.ShapeDtypeStruct((B, Hq, L), wide)
    attend = partial(attention.scaled_dot_product_attention, **options)

    def forward(operands: Any, *, return_lse: bool) -> Any:
        compute = partial(_compute, attend, return_lse)
        results = result, lse_result if return_lse else None
        return jax.pure_callback(compute, results, operands, vmap_method="expand_dims")

    @jax.custom_vjp  # type: ignore[untyped-decorator, unused-ignore]
    def call(operands: Any) -> Any:
        return forward(operands, return_lse=return_residual)

    def keep(operands: Any) -> Any:
        output, lse = forward(operands, return_lse=True)
        return (output, lse if return_residual else None), (operands, output, lse)

    def differentiate(kept: Any, cotangents: Any) -> Any:
        operands, output, lse = kept
        factors = ("query", "key", "value", "bias")
        shapes = _Operands(
            *(
                jax.ShapeDtypeStruct(array.shape, array.dtype)
                if name in factors and array is not None
                else None
                for name, array in operands._asdict().items()
            )
        )
        compute = partial(_differentiate, options)
        given = (operands, output, lse, *cotangents)
        return (jax.pure_callback(compute, shapes, given, vmap_method="expand_dims"),)

    call.defvjp(keep, differentiate)
    output, lse = call(operands)
    return output, None if lse is None else lse.swapaxes(1, 2).astype(output.dtype)


def _read_arrays(
    operands: _Operands,
) -> tuple[tuple[np.ndarray, ...], np.ndarray | None, np.ndarray | None]:
    """Return query, key and value with heads before rows, their mask, and the rows that have ended.

    Under vmap each operand has a dimension more in front, of size 1 if vmap does not go over it:
    of three queries and one key, query is (3, B, L, Hq, E) and key is (1, B, S, Hk, E). The result
    is (3, B, L, Hq, E). Nested vmaps add several dimensions.
    """
    given = _Operands(*(None if array is None else np.asarray(array) for array in operands))
    query, key, value = (x.swapaxes(-3, -2) for x in (given.query, given.key, given.value))
    L, S = query.shape[-2], key.shape[-2]
    mask, lengths, beyond = given.mask, given.query_seq_lengths, None
    if given.key_value_seq_lengths is not None:
        within = np.arange(S) < given.key_value_seq_lengths[..., None, None, None]
        mask = within if mask is None else mask & within
    if given.bias is not None:
        bias = given.bias
        mask = bias if mask is None else np.where(mask, bias, bias.dtype.type(-np.inf))
    leading = [array.shape[:-3] for array in (query, key, value, mask) if array is not None]
    batch = np.broadcast_shapes(*leading, () if lengths is None else lengths.shape)
    if lengths is not None:
        beyond = np.broadcast_to(np.arange(L) >= lengths[..., None], (*batch, L))
    query = np.broadcast_to(query, (*batch, *query.shape[-3:]))
    return (query, key, value), mask, beyond


def _compute(attend: Any, return_lse: bool, operands: _Operands) -> Any:
    """Attend: output and log-sum-exp, which is None if it is not asked for."""
    (query, key, value), mask, beyond = _read_arrays(operands)
    *batch, Hq, L, _ = query.shape
    output = np.empty((*batch, L, Hq, value.shape[-1]), query.dtype)
    result = attend(query, key, value, mask, return_lse=return_lse, out=output.swapaxes(-3, -2))
    lse = result[1] if return_lse else None
    if beyond is not None:
        output[beyond] = 0
        if lse is not None:
            lse.swapaxes(-2, -1)[beyond] = -np.inf
    return output, lse


def _differentiate(options: dict[str, Any], given: Any) -> _Operands:
    """Compute the gradients of query, key, value and bias."""
    operands, output, lse, grad_output, grad_lse = given
    arrays, mask, beyond = _read_arrays(operands)
    output, lse, grad = (np.asarray(array) for array in (output, lse, grad_output))
    rest = None if grad_lse is None else np.asarray(grad_lse)
    *given_batch, Hq, L, E = arrays[0].shape
    # vmap may go over the cotangents alone, as jax.jacrev does.
    others = () if rest is None else rest.shape[:-2]
    batch = np.broadcast_shapes(tuple(given_batch), grad.shape[:-3], others)
    rest = None if rest is None else np.broadcast_to(rest, (*batch, Hq, L))
    query = arrays[0]
    grad = np.broadcast_to(grad, (*batch, L, Hq, E))
    if beyond is not None:  # such rows are constants
        ended = beyond[..., None, :, None]
        query = np.where(ended, query.dtype.type(0), query)
        grad = np.where(ended.swapaxes(-3, -2), grad.dtype.type(0), grad)
        rest = None if rest is None else np.where(ended[..., 0], rest.dtype.type(0), rest)
    # Each entry that vmap goes over has gradients of its own.
    own: list[Any] = [
        np.broadcast_to(x, (*batch[:-1], *x.shape[-4:])) for x in (query, *arrays[1:])
    ]
    bias = operands.bias
    found = gradients.scaled_dot_product_attention_backward(
        grad.swapaxes(-3, -2),
        own[0],
        own[1],
        own[2],
        np.broadcast_to(output, (*batch, L, Hq, E)).swapaxes(-3, -2),
        np.broadcast_to(lse, (*batch, Hq, L)),
        None if mask is None else np.broadcast_to(mask, (*batch[:-1], *mask.shape[-4:])),
        grad_lse=rest,
        needs=("query", "key", "value", *(("attn_mask",) if bias is not None else ())),
        **options,
    )
    of_bias = None
    if bias is not None:
        of_bias = found.attn_mask
        shape = np.shape(bias)[-4:]
        axes = tuple(d - 4 for d in range(4) if shape[d] == 1 and of_bias.shape[d - 4] != 1)
        wide = np.result_type(of_bias.dtype, np.float32)
        of_bias = of_bias.astype(wide).sum(axis=axes, keepdims=True).astype(bias.dtype)
    query, key, value = (array.swapaxes(-3, -2) for array in found[:3])
    return _Operands(query, key, value, of_bias, None, None, None)
