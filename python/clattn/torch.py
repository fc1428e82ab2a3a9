"""clattn behind ``torch.nn.functional.scaled_dot_product_attention``.

``clattn.torch.patch()``, or ``with clattn.torch.sdpa():`` for a block, puts clattn where the
modules of a model call torch, so an unchanged model runs on clattn, in inference and in training.
Calls that clattn does not take go where they went before.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from clattn import attention
from clattn._arguments.devices import find_named
from clattn._host.fork import call_in_children
from clattn._parts.checks import shape_of_call

try:
    import torch

    if torch.__version__ < "2.5":  # a TorchVersion, which compares numbers
        raise ImportError(f"torch {torch.__version__} is too old")
except ImportError as error:
    raise ImportError("clattn.torch needs torch 2.5 or later: pip install torch") from error

from torch._C._functorch import peek_interpreter_stack
from torch.overrides import handle_torch_function, has_torch_function

from clattn._arguments.operands import FACTORS
from clattn._arguments.torch_tensors import autocast, check_tensors
from clattn._parts.torch_operator import Options, allocate, attend, causal_word, device_number
from clattn._parts.torch_reasons import (
    FLOATS,
    OURS,
    PLAIN,
    REFUSED,
    TENSORS,
    count,
    counts,
    find_reason,
    is_refused,
    is_strange,
    needs_gradients,
)
from clattn._parts.torch_varlen import attend_jagged, check_jagged, takes_jagged, varlen_attn
from clattn.flex.torch_function import flex_attention

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator, Sequence
    from typing import Literal

    from clattn._arguments.arrays import DeviceLike
    from clattn._arguments.options import Window
    from clattn._core import Device

__all__ = [
    "call_counts",
    "flex_attention",
    "is_patched",
    "patch",
    "scaled_dot_product_attention",
    "sdpa",
    "unpatch",
    "varlen_attn",
]

_torch_attention = torch.nn.functional.scaled_dot_product_attention

# The call of patch() and the blocks of sdpa() that are in force, oldest first, with their devices.
# _replaced is the attention function that torch.nn.functional had before the first of them.
_uses: dict[object, Device | None] = {}
_device: Device | None = None
_replaced = _torch_attention
# Whether this thread is in a call of _replaced.
_leaving = ContextVar("_leaving", default=False)

# Guards _uses. A signal handler may call `sdpa` while its own thread holds the lock.
_lock = threading.RLock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


call_in_children(_renew_lock)


def patch(device: DeviceLike | None = None) -> None:
    """Put clattn behind ``torch.nn.functional.scaled_dot_product_attention``.

    In this process and all its threads, until `unpatch`. Calling it again changes the device.

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
    chosen = find_named(device)
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
        "clattn", "clattn: " with the way of a call of `clattn.transformers.attend`, and "torch: "
        with a reason. Two of them can be subtracted. Calls that raised an error of clattn do not
        count, nor do those of programs that ``torch.compile`` has made.

    Examples
    --------
    >>> import torch
    >>> x = torch.ones(1, 2, 4, 8)
    >>> before = call_counts()
    >>> with sdpa():
    ...     y = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    ...     y = torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=2.0)
    Traceback (most recent call last):
    RuntimeError: dropout probability has to be between 0 and 1, but got 2
    >>> for who, count in (call_counts() - before).items():
    ...     print(count, who)
    1 clattn
    1 torch: clattn refuses the arguments
    """
    return counts()


@contextmanager
def sdpa(device: DeviceLike | None = None) -> Iterator[None]:
    """Do as `patch` does, for a ``with`` block.

    Blocks may nest: the innermost one names the device. As with `patch`, a block is in force in all
    threads. Blocks of several threads may overlap: the one that began last names the device, and
    torch's function returns when the last of them ends.

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
    chosen, use = find_named(device), object()
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
    is_causal: bool | Literal["lower_right"] = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: Window = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    query_offset: int | torch.Tensor = 0,
    return_lse: bool = False,
    layout: Literal["BHLE", "BLHE"] = "BHLE",
    device: DeviceLike | None = None,
) -> Any:
    """Return what torch's function of this name does, by clattn where it can.

    `patch` puts it into ``torch.nn.functional``; it may be called by itself. clattn computes calls
    with strided CPU tensors of one float dtype, and their gradients. Calls with one of the
    keywords, or with ``is_causal="lower_right"``, which torch does not have, are always clattn's.
    Jagged tensors may have offsets of their own in query and key; the result has those of query.
    Other calls go to the function that `patch` has replaced, usually torch's:

    - gradients by a device without fast kernels for them, such as a GPU, or of head sizes above
      256, and forward-mode ones;
    - tensors of other devices or dtypes, sparse and quantized ones, subclasses, nested ones but
      for jagged tensors (B, H, j, E) without mask and dropout;
    - ``torch.compile`` and ``torch.export`` without gradients, ``torch.jit.trace``, the transforms
      of ``torch.func``, and modes that watch operators, as counters of FLOP do;
    - arguments that clattn refuses, so that errors about them are torch's.

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
    is_causal : bool or "lower_right"
        Row i attends key j where ``j <= i``; "lower_right": where ``j <= i + S - L``.
    scale : float, optional
        Default ``1 / sqrt(E)``.
    enable_gqa : bool
        Grouped heads: query head h reads key and value head ``h // (Hq // Hk)``.
    window, softcap, sinks, query_offset : optional
        As in `clattn.scaled_dot_product_attention`. `sinks` has a gradient.
    return_lse : bool
        Also return the log-sum-exp, which has a gradient.
    layout : "BHLE" or "BLHE"
        "BLHE": heads come after rows in query, key, value and output, as in (..., L, Hq, E).
    device : Device, str or int, optional
        Where to run, see `clattn.devices`. Default: the device of `patch` or `sdpa`, else
        `clattn.get_default_device`.

    Returns
    -------
    output : Tensor of shape (..., Hq, L, Ev)
        Of query's dtype, with the strides that torch gives it: where ``query.transpose(1, 2)`` is
        contiguous, so is ``output.transpose(1, 2)``.
    lse : Tensor of shape (..., Hq, L)
        With `return_lse`: float32, float64 for float64.

    Raises
    ------
    MemoryError
        Host or device memory does not suffice.
    DeviceError
        No OpenCL device is usable, or OpenCL reports an error.
    ValueError
        An environment variable of clattn has a wrong value, or does not allow the call.

    Notes
    -----
    Under ``torch.autocast`` query, key, value and a float mask are cast as torch casts them.
    Gradients are those of `clattn.scaled_dot_product_attention_backward`, laid out as what they
    belong to. The seed of dropout comes from torch's generator. ``torch.compile`` sees one
    operator; ``torch.func.grad`` and ``vmap`` take it; there is no second derivative.

    Examples
    --------
    >>> import torch
    >>> x = torch.ones(1, 2, 4, 8)
    >>> scaled_dot_product_attention(x, x, x, is_causal=True).shape
    torch.Size([1, 2, 4, 8])
    """
    if (
        return_lse
        or window is not None
        or softcap
        or sinks is not None
        or is_causal == "lower_right"
        or not (isinstance(query_offset, int) and query_offset == 0)
        or layout != "BHLE"
        or device is not None
    ):
        number = device_number(_device if device is None else find_named(device))
        options = Options(
            dropout_p, causal_word(is_causal), scale, enable_gqa, *_sides(window), softcap,
            device=number,
        )  # fmt: skip
        return _extended(
            query, key, value, attn_mask, sinks, query_offset, return_lse, layout, options
        )
    tensors = (query, key, value)
    if torch.compiler.is_compiling():
        given = tensors if attn_mask is None else (*tensors, attn_mask)
        if needs_gradients(given):
            reason = find_reason(given, dropout_p, is_causal, scale, enable_gqa, _device)
            if reason is None or _is_jagged_call(reason, given, dropout_p, enable_gqa):
                return _attend_recorded(given, dropout_p, is_causal, scale, enable_gqa)
    else:
        overridden = has_torch_function((query, key, value, attn_mask))
        if overridden and all(type(tensor) in PLAIN for tensor in tensors):
            return _let_override(*tensors, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        result = _attend(*tensors, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if result is not None:
            return result
    return _leave(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _sides(window: Any) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    try:
        left, right = window
    except (TypeError, ValueError):
        raise TypeError(f"window must be None or (left, right), got {window!r:.80}") from None
    return left, right


def _extended(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    query_offset: int | torch.Tensor,
    return_lse: bool,
    layout: str,
    options: Options,
) -> Any:
    """Compute a call that has no counterpart in torch, with gradients where torch records them."""
    given = {"query": query, "key": key, "value": value, "attn_mask": attn_mask, "sinks": sinks}
    check_tensors(
        "scaled_dot_product_attention",
        **{name: tensor for name, tensor in given.items() if tensor is not None or name in FACTORS},
    )
    if layout != "BHLE":
        query, key, value = (_swap_heads(given[name], name, layout) for name in FACTORS)
    if query.is_nested or key.is_nested or value.is_nested:
        check_jagged(query, key, value, attn_mask, query_offset, options)
        results = attend_jagged(query, key, value, options, sinks)
        if not torch.compiler.is_compiling():
            count(OURS)
        return results if return_lse else results[0]
    offsets = None if isinstance(query_offset, int) else torch.as_tensor(query_offset)
    if torch.is_autocast_enabled("cpu"):
        query, key, value = autocast(query), autocast(key), autocast(value)
        attn_mask = None if attn_mask is None else autocast(attn_mask)
    options = options._replace(position=query_offset if isinstance(query_offset, int) else 0)
    if not torch.compiler.is_compiling() and peek_interpreter_stack() is None:
        shape_of_call(  # refuses wrong arguments in the words of the core
            attention.scaled_dot_product_attention,
            query.detach(),
            key.detach(),
            value.detach(),
            None if attn_mask is None else attn_mask.detach(),
            sinks=None if sinks is None else sinks.detach(),
            **options.keywords(None, offsets),
        )
    output, lse = attend(query, key, value, attn_mask, options, sinks=sinks, offsets=offsets)
    if not torch.compiler.is_compiling():
        count(OURS)
    if layout != "BHLE":
        output = output.transpose(-3, -2)
    return (output, lse) if return_lse else output


def _swap_heads(tensor: Any, name: str, layout: object) -> Any:
    """Return the view (..., H, L, E) of a tensor (..., L, H, E), which is no nested one."""
    if layout != "BLHE":
        raise ValueError(f'layout is {layout!r:.80}; expected "BHLE" or "BLHE"')
    if tensor.is_nested:
        raise ValueError(f'{name} is nested; expected layout="BHLE", as jagged tensors have it')
    if tensor.dim() < 3:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; expected three dimensions or more, with "
            f'layout="{layout}"'
        )
    return tensor.transpose(-3, -2)


def _put() -> None:
    """Put clattn's function or the replaced one in place, by `_uses`. The caller holds the lock."""
    global _device, _replaced
    _device = [None, *_uses.values()][-1]
    functions = torch.nn.functional
    stands = functions.scaled_dot_product_attention
    if _uses and stands is not scaled_dot_product_attention:
        _replaced = stands
        functions.scaled_dot_product_attention = scaled_dot_product_attention
    elif not _uses and stands is scaled_dot_product_attention:
        functions.scaled_dot_product_attention = _replaced
        _replaced = _torch_attention


def _leave(*args: Any, **options: Any) -> torch.Tensor:
    """Call the function that clattn's has replaced.

    It may be a wrapper of clattn's function, made under an earlier patch. A call that comes back
    from the wrapper is torch's.
    """
    if _replaced is _torch_attention or torch.compiler.is_compiling():
        return _replaced(*args, **options)
    if _leaving.get():
        return _torch_attention(*args, **options)
    token = _leaving.set(True)
    try:
        return _replaced(*args, **options)
    finally:
        _leaving.reset(token)


def _let_override(
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

    A mode, such as that of ``torch.set_default_device``, is told clattn's function, and calls it
    again. A mask's class, such as ``CausalBias``, is told what stands in ``torch.nn.functional``:
    it compares the function with that.
    """
    by_class = attn_mask is not None and type(attn_mask) not in PLAIN
    return handle_torch_function(
        torch.nn.functional.scaled_dot_product_attention
        if by_class
        else scaled_dot_product_attention,
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


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor | None:
    """Compute attention by clattn; None where the call is torch's. Counts the call."""
    given = [query, key, value] if attn_mask is None else [query, key, value, attn_mask]
    reason = find_reason(given, dropout_p, is_causal, scale, enable_gqa, _device)
    result = None
    if reason is not None:
        if _is_jagged_call(reason, given, dropout_p, enable_gqa):
            result = _attend_recorded(given, dropout_p, is_causal, scale, enable_gqa)
            reason = None
    else:
        recorded = needs_gradients(given)
        if not recorded and any([tensor.requires_grad for tensor in given]):
            given = [tensor.detach() for tensor in given]
        try:
            if recorded or dropout_p:
                result = _attend_recorded(given, dropout_p, is_causal, scale, enable_gqa)
                count(OURS)
                return result
            if torch.is_autocast_enabled("cpu"):
                given = [autocast(tensor) for tensor in given]
            query, key, value, *mask = given
            result = attention.scaled_dot_product_attention(
                query,
                key,
                value,
                mask[0] if mask else None,
                0.0,
                is_causal,
                scale,
                enable_gqa,
                out=allocate(query, key, value, enable_gqa),
                device=_device,
            )
        except Exception:
            if not is_refused(given, dropout_p, is_causal, scale, enable_gqa):
                raise  # a device fails, or a variable of the environment is wrong
            taken = query.dtype in FLOATS and not any(map(is_strange, given))
            reason = REFUSED if taken else TENSORS
    count(reason or OURS)
    return result


def _is_jagged_call(
    reason: str, given: Sequence[torch.Tensor], dropout_p: float, enable_gqa: bool
) -> bool:
    """Whether a call that would be torch's has jagged tensors that clattn takes."""
    return (
        reason is TENSORS and len(given) == 3 and not dropout_p and takes_jagged(given, enable_gqa)
    )


def _attend_recorded(
    given: Sequence[torch.Tensor],
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Compute a call that torch may differentiate, that drops weights, or of jagged tensors."""
    options = Options(
        float(dropout_p),
        causal_word(is_causal),
        None if scale is None else float(scale),
        enable_gqa,
        device=device_number(_device),
    )
    query, key, value, *mask = given
    if query.is_nested:
        return attend_jagged(query, key, value, options)[0]
    if torch.is_autocast_enabled("cpu"):
        query, key, value, *mask = [autocast(tensor) for tensor in given]
    return attend(query, key, value, mask[0] if mask else None, options)[0]
