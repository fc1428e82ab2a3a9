"""The operators of OpenVINO under their own names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clattn import _core

if TYPE_CHECKING:
    import numpy as np

    from clattn._arguments.arrays import Array, ArrayT, DeviceLike

__all__ = ["scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: ArrayT,
    key: Array,
    value: Array,
    attention_mask: Array | np.generic | None = None,
    scale: float | Array | np.generic | None = None,
    *,
    causal: bool = False,
    device: DeviceLike | None = None,
) -> ArrayT:
    """Return ``softmax(scale * query @ key.T + attention_mask) @ value``.

    OpenVINO's ScaledDotProductAttention-13. Any strides are accepted, inputs are never modified.
    Scores and softmax are computed in float32 at least (float64 for float64). A row with no key
    to attend to gives zeros. An excluded key does not matter, even if it is NaN. An array is a
    NumPy array, a `Tensor`, or an array of another library on the host; results are of the
    library of `query`.

    Batch dimensions broadcast as in NumPy. In addition, a dimension whose size divides the
    largest size among query, key and value is repeated as a whole, as ``numpy.tile`` does, without
    a copy.

    Parameters
    ----------
    query : array of shape (N, ..., L, E)
        float16, bfloat16 (``ml_dtypes.bfloat16``), float32 or float64; three dimensions or
        more. E and Ev are 65,536 at most.
    key : array of shape (N, ..., S, E)
        Of query's dtype.
    value : array of shape (N, ..., S, Ev)
        Of query's dtype.
    attention_mask : array of shape (..., L, S) or scalar, optional
        bool (True attends) or of query's dtype (added to the scaled scores; -inf excludes);
        two dimensions or more. L and S broadcast; the others broadcast or are repeated. A
        scalar 0 of query's dtype, in an array without dimensions or a NumPy scalar, is no
        mask. With `causal` the mask is not even checked.
    scale : float, array or scalar, optional
        A Python number, or a NumPy scalar or an array of shape () or (1,) of query's dtype.
        Default ``1 / sqrt(E)``.
    causal : bool
        Row i attends key j where ``j <= i``, and `attention_mask` is ignored.
    device : Device, str or int, optional
        Where to run, see `clattn.devices`. Default: `clattn.get_default_device`.

    Returns
    -------
    array of shape (N, ..., L, Ev)
        Of query's dtype.

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype.
    ValueError
        Shapes, ranges or combinations do not fit; the message names the argument.
    MemoryError
        Host or device memory does not suffice.
    DeviceError
        There is no usable OpenCL device, or OpenCL reports an error.

    Notes
    -----
    OpenVINO, "ScaledDotProductAttention" of opset 13:
    https://docs.openvino.ai/2024/documentation/openvino-ir-format/operation-sets/operation-specs/sequence/scaled-dot-product-attention.html

    Examples
    --------
    >>> import numpy as np
    >>> q = k = v = np.ones((1, 2, 4, 8), np.float32)
    >>> scaled_dot_product_attention(q, k, v, causal=True).shape
    (1, 2, 4, 8)
    """
    return _core.openvino_scaled_dot_product_attention(
        query,
        key,
        value,
        attention_mask=attention_mask,
        scale=scale,
        causal=causal,
        device=device,
    )
