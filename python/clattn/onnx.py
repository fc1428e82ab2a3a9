"""Operators of ONNX under their own names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, cast

from clattn import _core
from clattn._arguments.arrays import ArrayT
from clattn._arguments.bytes import as_bytes, float8_of
from clattn._arguments.devices import find_named
from clattn._host.extras import how_to_install

if TYPE_CHECKING:
    import numpy as np

    from clattn._arguments.arrays import Array, DeviceLike

__all__ = ["AttentionOutput", "attention", "reference_ops", "tensor_scatter"]


class AttentionOutput(NamedTuple, Generic[ArrayT]):
    """The outputs of `attention`; None: the call did not ask for this output."""

    Y: ArrayT
    """(B, Hq, L, Ev), or (B, L, Hq * Ev) for inputs of three dimensions; Q's dtype."""
    present_key: Any
    """(B, Hk, T, E): past_key followed by K."""
    present_value: Any
    """(B, Hk, T, Ev): past_value followed by V."""
    qk_matmul_output: Any
    """(B, Hq, L, T), Q's dtype: scores at the stage of qk_matmul_output_mode."""


def attention(
    Q: ArrayT,
    K: Array,
    V: Array,
    attn_mask: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    nonpad_kv_seqlen: Array | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    left_window_size: int = -1,
    right_window_size: int = -1,
    opset: int = 25,
    pre_errata: bool = False,
    return_qk: bool = False,
    device: DeviceLike | None = None,
) -> AttentionOutput[ArrayT]:
    """Compute ONNX ``Attention`` of opset 23, 24 or 25.

    There are T = P + S keys, the past ones followed by the new ones. Query row i is at position
    ``p = i + offset`` among them (offset: P with a past, ``nonpad_kv_seqlen[b] - L`` with
    `nonpad_kv_seqlen`, else 0)::

        score = scale * Q @ K.T
        score = softcap * tanh(score / softcap)            where softcap > 0
        score = score + attn_mask                          bool: False excludes
        Y     = softmax(score) @ V

    A row with no key to attend to is zero. An array is a NumPy array, a `Tensor`, or an array of
    another library on the host; results are of the library of `Q`, present_value of that of `V`.

    Parameters
    ----------
    Q : array of shape (B, Hq, L, E) or (B, L, Hq * E)
        float16, bfloat16 (``ml_dtypes.bfloat16``), float32 or float64. With three dimensions, K and
        V have three too, and `q_num_heads` and `kv_num_heads` are needed. E and Ev are 65,536 at
        most.
    K : array of shape (B, Hk, S, E) or (B, S, Hk * E)
        Of Q's dtype. Hq is a multiple of Hk; query head h reads head ``h // (Hq // Hk)``.
    V : array of shape (B, Hk, S, Ev) or (B, S, Hk * Ev)
        Of any of these dtypes.
    attn_mask : array, optional
        Broadcasts to (B, Hq, L, T). bool (True attends); any other number is added. From opset 24
        on, keys beyond a shorter last dimension (1 included) are excluded.
    past_key, past_value : array of shape (B, Hk, P, E) and (B, Hk, P, Ev), optional
        Both or neither; with them, present_key and present_value are returned.
    nonpad_kv_seqlen : array of shape (B,), optional
        int64, 0 to S: keys from this number on are excluded. From opset 24 on, without a past.
    is_causal : int
        1: row i attends key j where ``j <= p``. Composes with `attn_mask`.
    kv_num_heads, q_num_heads : int, optional
        Numbers of heads; for four dimensions they have to agree with the shapes.
    qk_matmul_output_mode : int
        The stage of the scores that `return_qk` returns: 0 the scaled products, 1 after the
        softcap, 2 after softcap and mask, 3 after the softmax. Refused without `return_qk`, except
        for 0.
    scale : float, optional
        0 or more (the specification scales Q and K by its square root). Default
        ``1 / sqrt(E)``.
    softcap : float
        0: none.
    softmax_precision : int, optional
        1 float32, 10 float16, 11 float64, 16 bfloat16. This is the least: everything is computed
        in float32, or in float64 if this argument or an input asks for it.
    left_window_size, right_window_size : int
        Keep keys ``p - left ... p + right``; -1: no bound. From opset 25 on.
    opset : int
        23, 24 or 25. Arguments that this opset lacks are refused.
    pre_errata : bool
        The operator of opsets 23 and 24 as first published: mask before softcap, causality
        ``j <= i`` with any past, mode 1 after the mask, mode 2 after mask and softcap.
    return_qk : bool
        Also return the scores; without it they are never in memory.
    device : Device, str or int, optional
        Where to run, see `clattn.devices`. Default: `clattn.get_default_device`.

    Returns
    -------
    AttentionOutput
        ``(Y, present_key, present_value, qk_matmul_output)``.

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
    https://onnx.ai/onnx/operators/onnx__Attention.html, as corrected in ONNX 1.23.

    Examples
    --------
    >>> import numpy as np
    >>> Q = K = V = np.ones((1, 2, 4, 8), np.float32)
    >>> attention(Q, K, V, is_causal=1).Y.shape
    (1, 2, 4, 8)
    """
    return AttentionOutput(
        *_core.onnx_attention(
            Q,
            K,
            V,
            attn_mask,
            past_key,
            past_value,
            nonpad_kv_seqlen,
            is_causal,
            kv_num_heads,
            q_num_heads,
            qk_matmul_output_mode=qk_matmul_output_mode,
            scale=scale,
            softcap=softcap,
            softmax_precision=softmax_precision,
            left_window_size=left_window_size,
            right_window_size=right_window_size,
            opset=opset,
            pre_errata=pre_errata,
            return_qk=return_qk,
            device=device,
        )
    )


def tensor_scatter(
    past_cache: ArrayT,
    update: Array,
    write_indices: Array | None = None,
    *,
    axis: int = -2,
    mode: str = "linear",
    device: DeviceLike | None = None,
) -> ArrayT:
    """Compute ONNX ``TensorScatter`` of opset 24: a cache of keys or values with new rows in it.

    The result is `past_cache` where, for row r of entry b of the batch, the position
    ``write_indices[b] + r`` along `axis` has that row of `update`. `past_cache` stays as it is. An
    array is a NumPy array, a `Tensor`, or an array of another library on the host; the result is of
    the library of `past_cache`.

    Parameters
    ----------
    past_cache : array of shape (B, ..., capacity, ...)
        Two dimensions or more. bool, integers, float16, bfloat16 (``ml_dtypes.bfloat16``), float32,
        float64, or a float8 of ``ml_dtypes`` or of the array's library. Bits are copied as they
        are.
    update : array of shape (B, ..., n, ...)
        Of `past_cache`'s dtype and shape, but for `axis`: n is `capacity` at most.
    write_indices : array of shape (B,), optional
        int64 or int32, 0 or more. Default: zeros.
    axis : int
        The dimension of the positions; not the first one, which is the batch.
    mode : str
        "linear": ``write_indices[b] + n`` is `capacity` at most. "circular": positions count modulo
        `capacity`.
    device : Device, str or int, optional
        Where to run, see `clattn.devices`. Default: `clattn.get_default_device`.

    Returns
    -------
    array
        Of `past_cache`'s shape and dtype.

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype.
    ValueError
        The specification or ONNX Runtime refuses the call; the message names the argument.
    MemoryError
        Host or device memory does not suffice.
    DeviceError
        There is no usable OpenCL device, or OpenCL reports an error.

    Notes
    -----
    https://onnx.ai/onnx/operators/onnx__TensorScatter.html. Indices in a `Tensor` are read on the
    host, which waits for the calls that compute them.

    Examples
    --------
    >>> import numpy as np
    >>> cache, update = np.zeros((2, 4, 1), np.float32), np.ones((2, 2, 1), np.float32)
    >>> tensor_scatter(cache, update, np.array([0, 3]), mode="circular")[..., 0]
    array([[1., 1., 0., 0.],
           [1., 0., 0., 1.]], dtype=float32)
    """
    dtype = float8_of(past_cache)
    if dtype is not None:
        other = getattr(update, "dtype", None)
        if other is not None and other != dtype:
            raise TypeError(f"update has dtype {other}; expected {dtype}, that of past_cache")
        past_cache, update = as_bytes(past_cache), as_bytes(update)
    result: Any = _core.onnx_tensor_scatter(past_cache, update, write_indices, axis, mode, device)
    return cast("ArrayT", result if dtype is None else result.view(dtype))


def reference_ops(device: DeviceLike | None = None) -> list[type]:
    """Return operators with which ``onnx.reference.ReferenceEvaluator`` runs models on clattn.

    Parameters
    ----------
    device : Device, str or int, optional
        Where to run, see `clattn.devices`. Default: `clattn.get_default_device` at each call.

    Returns
    -------
    list of type
        ``Attention``, which is `attention` of the opset that the model names, and
        ``TensorScatter``, which is `tensor_scatter`.

    Raises
    ------
    ImportError
        onnx is not installed.
    TypeError, ValueError, DeviceError
        Not a device, or no device matches.

    Examples
    --------
    >>> import numpy as np
    >>> from onnx import TensorProto, helper
    >>> from onnx.reference import ReferenceEvaluator
    >>> x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "XY")
    >>> node = helper.make_node("Attention", ["X", "X", "X"], ["Y"], is_causal=1)
    >>> model = helper.make_model(
    ...     helper.make_graph([node], "graph", [x], [y]),
    ...     opset_imports=[helper.make_opsetid("", 25)])
    >>> evaluator = ReferenceEvaluator(model, new_ops=reference_ops())
    >>> evaluator.run(None, {"X": np.ones((1, 2, 4, 8), np.float32)})[0].shape
    (1, 2, 4, 8)
    """
    try:
        from onnx import defs
        from onnx.reference.op_run import OpRun
    except ImportError as error:
        raise ImportError(
            f"clattn.onnx.reference_ops needs onnx 1.19 or later: {how_to_install('onnx')}"
        ) from error
    chosen = find_named(device)

    class Attention(OpRun):  # type: ignore[misc]
        """A node of a model."""

        def _run(
            self,
            Q: np.ndarray,
            K: np.ndarray,
            V: np.ndarray,
            *others: np.ndarray | None,
            scale: float | None = None,
            softcap: float = 0.0,
            **attributes: Any,
        ) -> tuple[Any, ...]:
            opset = defs.get_schema("Attention", self.run_params["opsets"][""], "").since_version
            wanted = len(self.output)
            if wanted < 4:
                attributes.pop("qk_matmul_output_mode", None)  # of an output that is not there
            result = attention(
                Q,
                K,
                V,
                *others,
                scale=None if scale is None else float(scale),
                softcap=float(softcap),
                opset=opset,
                return_qk=wanted > 3,
                device=chosen,
                **attributes,
            )
            if result.present_key is None and wanted > 1:  # the keys of a call without a past
                heads = attributes["kv_num_heads"]
                result = result._replace(
                    present_key=_split_heads(K, heads), present_value=_split_heads(V, heads)
                )
            return result[:wanted]

    class TensorScatter(OpRun):  # type: ignore[misc]
        """A node of a model."""

        def _run(self, *inputs: Any, **attributes: Any) -> tuple[Any, ...]:
            return (tensor_scatter(*inputs, device=chosen, **attributes),)

    return [Attention, TensorScatter]


def _split_heads(array: np.ndarray, heads: int) -> np.ndarray:
    """View (B, S, H * X) as (B, H, S, X)."""
    if array.ndim == 4:
        return array
    return array.reshape(*array.shape[:2], heads, -1).swapaxes(1, 2)
