"""Attention with the signature of ``jax.nn.dot_product_attention``.

`dot_product_attention` is a callback of JAX's programs: ``jax.jit`` and ``jax.vmap`` take it as
they take functions of ``jax.nn``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from clattn import _core, attention

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    raise ImportError("clattn.jax needs jax 0.6 or later: pip install 'clattn[jax]'") from error

if TYPE_CHECKING:
    from typing import Literal, TypedDict, Unpack

    from clattn._arguments.arrays import DeviceLike

    class _Options(TypedDict, total=False):
        scale: float | None
        is_causal: bool
        query_seq_lengths: jax.Array | None
        key_value_seq_lengths: jax.Array | None
        local_window_size: int | tuple[int, int] | None
        implementation: None
        device: DeviceLike | None


__all__ = ["dot_product_attention"]

_OPTIONS = ("scale", "is_causal", "local_window_size", "return_residual")
# Shapes and rules are those of jax's function, which is traced once for each of them.
_theirs = jax.jit(jax.nn.dot_product_attention, static_argnames=_OPTIONS)


@overload
def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[_Options],
) -> jax.Array: ...
@overload
def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    return_residual: Literal[True],
    **options: Unpack[_Options],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    return_residual: bool = False,
    **options: Unpack[_Options],
) -> Any: ...
def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
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
        Default ``1 / sqrt(E)``. A number of Python, not a traced one.
    is_causal : bool
        Row i attends key j where ``j <= i``.
    query_seq_lengths : int32 array of shape (B,), optional
        Rows from this number on are zero in the result.
    key_value_seq_lengths : int32 array of shape (B,), optional
        Keys from this number on are excluded.
    local_window_size : int or (int, int), optional
        ``(left, right)`` keeps the keys ``i - left ... i + right`` of row i; an int is both.
    implementation : None
        jax's word for one of its own implementations, which is refused here.
    return_residual : bool
        Also return the log-sum-exp of the masked scores.
    device : Device, str or int, optional
        Where to run, see `clattn.devices`. Default: `clattn.get_default_device` when the call
        is traced.

    Returns
    -------
    output : array of query's shape and dtype
    residual : array of shape (B, L, Hq) or (L, Hq)
        With `return_residual`, of query's dtype; -inf for a row with no key.

    Raises
    ------
    TypeError
        A dtype that clattn does not take, or not a device.
    ValueError
        Shapes or options do not fit, gradients are asked for, or no device matches.
    DeviceError
        There is no usable OpenCL device.

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
    options: dict[str, Any] = {"scale": scale, "is_causal": is_causal}
    if return_residual:
        options["return_residual"] = True
    window: Any = local_window_size
    if window is not None:
        window = (window, window) if isinstance(window, int) else tuple(window)
        if min(window) < 0:
            raise ValueError(f"local_window_size is {local_window_size}; expected 0 or more")
        options["local_window_size"] = window
    shape = jnp.shape(query)
    arrays = [_with_batch(array) for array in (query, key, value, bias, mask)]
    lengths = {
        "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths,
    }
    result = jax.eval_shape(_theirs, *arrays, **lengths, **options)
    attend = partial(
        attention.scaled_dot_product_attention,
        scale=scale,
        is_causal=is_causal,
        window=window,
        enable_gqa=True,
        return_lse=return_residual,
        device=_core.find_device(device),
    )
    _check_dtypes(attend, arrays)
    output = _call(partial(_compute, attend), result, (*arrays, *lengths.values()))
    if return_residual:
        return output[0].reshape(shape), output[1].reshape(shape[:-1])
    return output.reshape(shape)


def _with_batch(array: Any) -> Any:
    """Put dimensions of size 1 in front, up to four."""
    if array is None:
        return None
    array = jnp.asarray(array)
    return jnp.expand_dims(array, tuple(range(4 - array.ndim)))


def _check_dtypes(attend: Any, arrays: list[Any]) -> None:
    """Let clattn refuse dtypes and options before the program runs: attend by no row."""
    query, key, value, bias = (
        None if array is None else np.zeros((1, 0, 1), array.dtype) for array in arrays[:4]
    )
    if bias is not None and bias.dtype == bool:
        raise TypeError("bias is an array of bool; expected floats, or mask=… for bools")
    attend(query, key, value, bias if bias is None else bias[..., :0])


def _call(compute: Any, result: Any, operands: tuple[Any, ...]) -> Any:
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


def _compute(attend: Any, operands: tuple[Any, ...]) -> Any:
    """Attend. vmap puts dimensions before the batch, of size 1 for operands that lack them."""
    query, key, value = (np.asarray(x).swapaxes(-3, -2) for x in operands[:3])  # (…, B, H, L, E)
    bias, mask, rows, keys = (None if x is None else np.asarray(x) for x in operands[3:])
    L = query.shape[-2]
    if keys is not None:
        within = np.arange(key.shape[-2]) < keys[..., None, None, None]
        mask = within if mask is None else mask & within
    if bias is not None:
        mask = bias if mask is None else np.where(mask, bias, bias.dtype.type(-np.inf))
    leading = [array.shape[:-3] for array in (query, key, value, mask) if array is not None]
    batch = np.broadcast_shapes(*leading, () if rows is None else rows.shape)
    output = np.empty((*batch, L, *query.shape[-3:-2], value.shape[-1]), query.dtype)
    result = attend(
        np.broadcast_to(query, (*batch, *query.shape[-3:])),
        key,
        value,
        mask,
        out=output.swapaxes(-3, -2),
    )
    residual = result[1].swapaxes(-2, -1).astype(query.dtype) if isinstance(result, tuple) else None
    if rows is not None:
        beyond = np.broadcast_to(np.arange(L) >= rows[..., None], (*batch, L))
        output[beyond] = 0
        if residual is not None:
            residual[beyond] = -np.inf
    return output if residual is None else (output, residual)
