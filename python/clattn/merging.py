"""Results of attention over parts of the keys, joined."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from clattn import _core
from clattn._arguments.dtypes import FLOAT_WORDS, FLOATS
from clattn._parts.copies import copy_into
from clattn.attention import scaled_dot_product_attention

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from clattn._arguments.arrays import ArrayT, LseT
    from clattn._core import Tensor

__all__ = ["merge_attention"]


def merge_attention(parts: Iterable[tuple[ArrayT, LseT]]) -> tuple[ArrayT, LseT]:
    """Join results of attention over disjoint parts of the keys.

    Each part is what `clattn.scaled_dot_product_attention` returns with ``return_lse=True`` for the
    same queries and some of the keys. The result is that of one call with all keys, as far as the
    log-sum-exps tell it, see Notes.

    Parameters
    ----------
    parts : pairs (out, lse)
        One or more, in any order. `out` has the shape (..., L, Ev), `lse` (..., L); all parts have
        the same shapes and dtypes. Tensors are on one device.

    Returns
    -------
    out : array of shape (..., L, Ev)
        New, of the library and the dtype of the first part's. Half types are computed in float32
        and rounded once.
    lse : array of shape (..., L)
        Likewise.

    Raises
    ------
    TypeError
        `parts` cannot be iterated, a part is no pair of arrays, or dtypes differ.
    ValueError
        There is no part, shapes differ, or Tensors are on several devices.
    MemoryError
        Host or device memory does not suffice.
    DeviceError
        There is no usable OpenCL device, or OpenCL reports an error.

    Notes
    -----
    ``lse = log(sum(exp(lse[p])))`` and ``out = sum(exp(lse[p] - lse) * out[p])``. A row whose lse
    is -inf has no key in its part, and does not matter, whatever it holds. If no part has a key,
    the row is zeros, its lse -inf. A sink belongs to one of the parts.

    Weights are as exact as lse, whose spacing is about ``1e-7 * abs(lse)`` for float32: with scores
    of 1e4 the weights of parts have an error of 0.1 %, and from about 1e8 on the number of a part's
    keys is lost, as in rows of a mask whose elements are all ``finfo.min``. `clattn.dask` and
    `clattn.mpi` merge without this loss.

    Attention over splits of the keys is of Flash-Decoding (Dao et al., 2023); parts that several
    queries share make cascade attention (FlashInfer: Ye et al., 2025, arXiv:2501.01005).

    Examples
    --------
    >>> import numpy as np
    >>> from clattn import scaled_dot_product_attention
    >>> q = k = v = np.ones((2, 6, 8), np.float32)
    >>> halves = [slice(0, 4), slice(4, 6)]
    >>> out, lse = merge_attention(
    ...     scaled_dot_product_attention(q, k[:, keys], v[:, keys], return_lse=True)
    ...     for keys in halves
    ... )
    >>> out.shape, lse.shape
    ((2, 6, 8), (2, 6))
    """
    try:
        each = iter(parts)
    except TypeError:
        raise TypeError(
            f"parts must be pairs (out, lse), such as a list of them, got {type(parts).__name__}"
        ) from None
    pairs = list(each)
    if not pairs:
        raise ValueError("parts is empty; expected one pair (out, lse) or more")
    like: Any = None
    tensors: list[tuple[Tensor, Tensor]] = []
    for n, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"parts[{n}] must be a pair (out, lse), got {_kind(pair)}")
        like = pair[0] if n == 0 else like
        device = tensors[0][0].device if tensors else None
        out = _tensor(pair[0], f"parts[{n}][0]", device)
        lse = _tensor(pair[1], f"parts[{n}][1]", out.device)
        _check(out, lse, n, tensors[0][0] if tensors else out)
        tensors.append((out, lse[..., None]))

    # A softmax over the lses of the parts gives their weights. So a row attends to its parts as if
    # they were keys. Queries and keys have no columns, which makes all products 0; the lses are the
    # mask, so scores are 0 + lse; and the value of a part is its row of out.
    outs, lses = (_stacked(arrays) for arrays in zip(*tensors, strict=True))
    shape = tensors[0][0].shape
    last = len(shape) - 1
    values = outs.transpose(*range(1, last + 1), 0, last + 1)  # (..., L, parts, Ev)
    mask = lses.transpose(*range(1, last + 2), 0)  # (..., L, 1, parts)
    keys = np.empty((len(tensors), 0), outs.dtype)
    results: Any = scaled_dot_product_attention(
        _without_columns(like, outs.dtype, shape), keys, values, mask, return_lse=True
    )
    merged, total = results
    return merged.reshape(shape), total.reshape(shape[:-1])


def _kind(pair: Any) -> str:
    sized = isinstance(pair, tuple | list)
    return f"{len(pair)} elements" if sized else type(pair).__name__


def _tensor(array: Any, name: str, device: Any) -> Tensor:
    """Return the array as a Tensor on a device; None: the array's own."""
    if isinstance(array, _core.Tensor):
        if device is not None and array.device != device:
            raise ValueError(
                f"{name} is on device '{array.device.name}' ({array.device.platform}), that of "
                f"parts[0][0] is '{device.name}' ({device.platform}); expected one device: move a "
                "Tensor with .to(device)"
            )
        return array
    try:
        return _core.tensor(array, device)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None


def _check(out: Tensor, lse: Tensor, n: int, first: Tensor) -> None:
    """Check the shapes and dtypes of a part by those of the first one."""
    name = str(out.dtype)
    if name not in FLOATS:
        raise TypeError(f"parts[{n}][0] has dtype {name}; expected {FLOAT_WORDS}")
    if out.dtype != first.dtype:
        raise TypeError(f"parts[{n}][0] has dtype {name}; expected {first.dtype}, as parts[0][0]")
    right = "float64" if name == "float64" else "float32"
    if str(lse.dtype) != right:
        raise TypeError(f"parts[{n}][1] has dtype {lse.dtype}; expected {right}, the lse of {name}")
    if out.ndim < 2:
        raise ValueError(f"parts[{n}][0] has shape {out.shape}; expected two dimensions or more")
    if out.shape != first.shape:
        raise ValueError(
            f"parts[{n}][0] has shape {out.shape}; expected {first.shape}, as parts[0][0]"
        )
    if lse.shape != out.shape[:-1]:
        raise ValueError(f"parts[{n}][1] has shape {lse.shape}; expected {out.shape[:-1]}")


def _stacked(arrays: Sequence[Tensor]) -> Tensor:
    """Return a new Tensor (parts, ...) of arrays of one shape."""
    shape = arrays[0].shape
    stack = _core.empty((len(arrays), *shape), arrays[0].dtype, arrays[0].device)
    for n, array in enumerate(arrays):
        copy_into(stack[n], array)
    return stack


def _without_columns(array: Any, dtype: np.dtype[Any], shape: Sequence[int]) -> Any:
    """Return an array (..., L, 1, 0), of the library of an array (..., L, Ev) if it has views."""
    wanted = (*shape[:-1], 1, 0)
    try:
        return array[..., :0].reshape(wanted)
    except (AttributeError, TypeError, ValueError, IndexError, NotImplementedError):
        return np.empty(wanted, dtype)
