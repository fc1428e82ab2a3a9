"""clattn behind ``torch.nn.functional.scaled_dot_product_attention``.

``clattn.torch.patch()``, or ``with clattn.torch.sdpa():`` for a block, puts clattn where the
modules of a model call torch, so that the model runs on clattn as it is. Calls that clattn
does not take, such as those that need gradients, go to torch as before.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from clattn import _core, attention

try:
    import torch
except ImportError as error:
    raise ImportError("clattn.torch needs torch 2.5 or later: pip install torch") from error

from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clattn._arguments.arrays import DeviceLike
    from clattn._core import Device

__all__ = [
    "call_counts",
    "is_patched",
    "patch",
    "scaled_dot_product_attention",
    "sdpa",
    "unpatch",
]

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})

_torch_attention = torch.nn.functional.scaled_dot_product_attention

# Why torch computes a call, in `call_counts`.
_DROPOUT = "torch: dropout_p is not 0"
_RECORDING = "torch: it records or transforms the call"
_TENSORS = "torch: tensors of other kinds, devices or dtypes"
_GRADIENTS = "torch: gradients are needed"
_REFUSED = "torch: clattn refuses the arguments"

# The uses in force, the newest last: the call of patch() and the blocks of sdpa(), with the
# device of each. _replaced is what stood in torch.nn.functional before the first of them.
_lock = threading.Lock()
_uses: dict[object, Device | None] = {}
_device: Device | None = None
_replaced = _torch_attention

_counting = threading.Lock()
_counts: Counter[str] = Counter()


def patch(device: DeviceLike | None = None) -> None:
    """Put clattn behind ``torch.nn.functional.scaled_dot_product_attention``.

    In this process and all its threads, until `unpatch`. Calling it again changes the
    device.

    Parameters
    ----------
    device : Device, str or int, optional
        Where attention runs, see `clattn.devices`. Default: `clattn.get_default_device` at
        each call.

    Raises
    ------
    TypeError, ValueError, DeviceError
        Not a device, or no device matches.

    Notes
    -----
    What is called is the attribute of ``torch.nn.functional``: a name that was imported from
    there earlier (``from torch.nn.functional import scaled_dot_product_attention``) stays
    torch's function. `call_counts` tells what became of the calls.

    torch's threads wait awake for their next work, on the cores that clattn shares with them. A
    model is faster if the environment variable ``OMP_WAIT_POLICY`` is ``passive`` when torch is
    imported.

    Examples
    --------
    >>> import torch
    >>> x = torch.ones(1, 2, 4, 8)
    >>> patch()
    >>> torch.nn.functional.scaled_dot_product_attention(x, x, x).shape
    torch.Size([1, 2, 4, 8])
    >>> unpatch()
    """
    chosen = _find_device(device)
    with _lock:
        _uses.pop(patch, None)
        _uses[patch] = chosen
        _put()


def unpatch() -> None:
    """Undo `patch`; without one, do nothing.

    Blocks of `sdpa` stay in force to their ends.
    """
    with _lock:
        _uses.pop(patch, None)
        _put()


def is_patched() -> bool:
    """Return whether `patch` or a block of `sdpa` is in force, and calls reach clattn.

    False if something else has been put in the place of torch's function since.

    Examples
    --------
    >>> with sdpa():
    ...     is_patched()
    True
    """
    return torch.nn.functional.scaled_dot_product_attention is scaled_dot_product_attention


def call_counts() -> Counter[str]:
    """Return how many calls clattn has computed in this process, and torch for which reason.

    Returns
    -------
    counts : collections.Counter
        "clattn", and "torch: " with a reason. Two of them can be subtracted. Calls that raised an
        error of clattn do not count, nor do those of programs that ``torch.compile`` has made.

    Examples
    --------
    >>> import torch
    >>> x = torch.ones(1, 2, 4, 8)
    >>> before = call_counts()
    >>> with sdpa():
    ...     y = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    ...     y = torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    >>> for who, count in (call_counts() - before).items():
    ...     print(count, who)
    1 clattn
    1 torch: dropout_p is not 0
    """
    with _counting:
        return _counts.copy()


@contextmanager
def sdpa(device: DeviceLike | None = None) -> Iterator[None]:
    """Do as `patch` does, for a ``with`` block.

    Blocks nest; the newest one that has not ended names the device. As `patch`, they hold
    for all threads: blocks of several threads may overlap, and torch's function is back
    when the last of them has ended.

    Parameters
    ----------
    device : Device, str or int, optional
        As for `patch`.

    Raises
    ------
    TypeError, ValueError, DeviceError
        Not a device, or no device matches.

    Examples
    --------
    >>> import torch
    >>> x = torch.ones(1, 2, 4, 8)
    >>> with sdpa("cpu"):
    ...     y = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    >>> y.dtype
    torch.float32
    """
    chosen, use = _find_device(device), object()
    with _lock:
        _uses[use] = chosen
        _put()
    try:
        yield
    finally:
        with _lock:
            del _uses[use]
            _put()


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return what torch's function of this name does, by clattn where it can.

    It is what `patch` puts into ``torch.nn.functional``, and may be called itself. clattn
    computes for strided CPU tensors of one float dtype, while no gradients are needed and
    torch is not recording what it is called with. The rest is torch's:

    - a tensor that requires gradients while they are enabled, forward-mode ones included;
    - `dropout_p` other than 0, since it is torch's random numbers that drop;
    - tensors of other devices or dtypes, nested, sparse and quantized ones, subclasses;
    - ``torch.compile``, ``torch.export``, ``torch.jit.trace``, the transforms of
      ``torch.func``, and modes that watch operators, as counters of FLOP do;
    - arguments that clattn does not take, so that errors about them are those of torch.

    Parameters
    ----------
    query : Tensor of shape (..., Hq, L, E)
        float16, bfloat16, float32 or float64, with any strides.
    key : Tensor of shape (..., Hk, S, E)
        Of query's dtype.
    value : Tensor of shape (..., Hk, S, Ev)
        Of query's dtype.
    attn_mask : Tensor, optional
        Broadcasts to (..., Hq, L, S); bool (True attends) or any float dtype (added to the
        scaled scores).
    dropout_p : float
        Probability with which each weight is dropped.
    is_causal : bool
        Row i attends key j where ``j <= i``.
    scale : float, optional
        Default ``1 / sqrt(E)``.
    enable_gqa : bool
        Grouped heads: query head h reads key and value head ``h // (Hq // Hk)``.

    Returns
    -------
    output : Tensor of shape (..., Hq, L, Ev)
        Of query's dtype. Its heads are laid out as those of query, as torch's are: where
        ``query.transpose(1, 2)`` is contiguous, so is ``output.transpose(1, 2)``.

    Raises
    ------
    MemoryError
        Host or device memory does not suffice.
    DeviceError
        No usable OpenCL device, or what it reports.
    ValueError
        ``CLATTN_DEVICE`` names no device.

    Notes
    -----
    Under ``torch.autocast`` query, key and value are cast as torch casts them.

    Examples
    --------
    >>> import torch
    >>> x = torch.ones(1, 2, 4, 8)
    >>> scaled_dot_product_attention(x, x, x, is_causal=True).shape
    torch.Size([1, 2, 4, 8])
    """
    if not torch.compiler.is_compiling():
        tensors = (query, key, value)
        overridden = has_torch_function((query, key, value, attn_mask))
        if overridden and all(type(tensor) in _PLAIN for tensor in tensors):
            return _hand_over(*tensors, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        result = _attend(*tensors, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        with _counting:
            _counts[result if isinstance(result, str) else "clattn"] += 1
        if not isinstance(result, str):
            return result
    return _torch_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _find_device(device: DeviceLike | None) -> Device | None:
    """Find the device that is named. None is left to each call, and touches no OpenCL."""
    return None if device is None else _core.find_device(device)


def _put() -> None:
    """Put in place what `_uses` say. The caller holds the lock."""
    global _device, _replaced
    _device = next(reversed(_uses.values()), None)
    functions = torch.nn.functional
    stands = functions.scaled_dot_product_attention
    if _uses and stands is not scaled_dot_product_attention:
        _replaced = stands
        functions.scaled_dot_product_attention = scaled_dot_product_attention
    elif not _uses and stands is scaled_dot_product_attention:
        functions.scaled_dot_product_attention = _replaced


def _hand_over(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Let a ``TorchFunctionMode`` or the mask's class decide, as torch's functions do.

    A mode, such as that of ``torch.set_default_device``, then calls the function again. A
    mask's class, such as ``CausalBias``, knows the function by the name that it has in torch.
    """
    function = scaled_dot_product_attention
    if attn_mask is not None and type(attn_mask) not in _PLAIN:
        function = torch.nn.functional.scaled_dot_product_attention
    return handle_torch_function(
        function,
        (attn_mask,),
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )


def _is_watched() -> bool:
    """Whether torch records or transforms what it is called with, beyond gradients."""
    return (
        peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: object,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor | str:
    """Compute attention by clattn; return the reason where it is torch's."""
    if dropout_p != 0.0:
        return _DROPOUT
    if not isinstance(is_causal, bool):  # clattn has words for is_causal that torch refuses
        return _REFUSED
    if _is_watched():
        return _RECORDING
    given = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if not all(map(_is_plain, given)):
        return _TENSORS
    if any([tensor.requires_grad for tensor in given]):
        if torch.is_grad_enabled():
            return _GRADIENTS
        query, key, value = query.detach(), key.detach(), value.detach()
        attn_mask = None if attn_mask is None else attn_mask.detach()
    if torch.is_autocast_enabled("cpu"):
        query, key, value = autocast(query), autocast(key), autocast(value)
    if query.dtype not in _FLOATS:
        return _TENSORS
    try:
        return attention.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask,
            0.0,
            is_causal,
            scale,
            enable_gqa,
            out=_allocate(query, key, value),
            device=_device,
        )
    except TypeError:  # a dtype or a class that clattn does not take
        return _REFUSED
    except ValueError:
        if _are_taken(query, key, value, attn_mask, scale, enable_gqa):
            raise  # about the device or the environment, such as CLATTN_KERNEL
        return _REFUSED


def _are_taken(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    scale: float | None,
    enable_gqa: bool,
) -> bool:
    """Whether shapes and scale keep the rules of `attention.scaled_dot_product_attention`."""
    tensors = (query, key, value)
    if min(tensor.dim() for tensor in tensors) < 2:
        return False
    (L, E), (S, Ek), (Sv, _) = (tensor.shape[-2:] for tensor in tensors)
    if Ek != E or Sv != S:
        return False
    wide = query.dtype is torch.float64
    largest = torch.finfo(torch.float64).max if wide else torch.finfo(torch.float32).max / 2
    if scale is not None and not abs(scale) <= largest:
        return False
    leading = [tensor.shape[:-2] for tensor in tensors]
    if enable_gqa:
        Hq, Hk, Hv = (shape[-1] if shape else 1 for shape in leading)
        if Hv != Hk or (Hq % Hk if Hk else Hq):
            return False
        # Heads are grouped in place of broadcast: give all three the heads of query.
        leading = [torch.Size((*shape[:-1], Hq)) if shape else shape for shape in leading]
    try:
        scores = (*torch.broadcast_shapes(*leading), L, S)
        return attn_mask is None or torch.broadcast_shapes(attn_mask.shape, scores) == scores
    except RuntimeError:  # dimensions that do not broadcast
        return False


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is an array of the host and nothing else."""
    return (
        type(tensor) in _PLAIN
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_neg()
    )


def autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Cast as torch does for its function under autocast, which leaves float64 alone."""
    if tensor.dtype is torch.float64 or not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.get_autocast_dtype("cpu"))


def _allocate(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    """Allocate a result with query's order of dimensions, as torch does; None elsewhere.

    Where the heads of a query are views of one row, (B, L, Hq, E) transposed, joining them
    again then needs no copy. That is for four dimensions, of which key and value bring no
    batch and no heads of their own, and Ev = E.
    """
    if query.is_contiguous():  # so is clattn's result
        return None
    shape, keys, values = query.shape, key.shape, value.shape
    if not (len(shape) == len(keys) == len(values) == 4 and query.stride(3) == 1):
        return None
    if not (shape[0] == keys[0] == values[0] and shape[3] == values[3]):
        return None
    return torch.empty_like(query) if keys[1] <= shape[1] >= values[1] else None
