"""Packed sequences and jagged tensors of torch, with gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from clattn import varlen
from clattn._arguments.devices import find_named
from clattn._arguments.integers import integer, integers, table
from clattn._arguments.torch_tensors import autocast, check_tensors
from clattn._parts.checks import check_flag
from clattn._parts.lists import pack_lists
from clattn._parts.packed import packed_backward
from clattn._parts.torch_operator import (
    OPTIONS,
    Options,
    causal_word,
    define,
    device_number,
    wide,
)
from clattn._parts.torch_reasons import (
    FLOATS,
    OURS,
    count,
    needs_gradients,
)
from clattn.flex.opaque import opaque
from clattn.gradients import AttentionGradients

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Literal

    import numpy as np

    from clattn._arguments.arrays import DeviceLike

__all__ = ["attend_jagged", "attend_packed", "check_jagged", "takes_jagged", "varlen_attn"]

_TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor cu_seq_q, Tensor? cu_seq_k, "
    "Tensor? seqused_k, Tensor? block_table"
)
_FLOATS = ("query", "key", "value", "sinks")


class _Operands(NamedTuple):
    """The tensors of a call."""

    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None
    cu_seq_q: Tensor
    cu_seq_k: Tensor | None
    seqused_k: Tensor | None
    block_table: Tensor | None


def _read(args: tuple[Any, ...]) -> tuple[_Operands, Any, Options]:
    """Return an operator's arguments: tensors without gradients, the layout of pages, options."""
    operands = len(_Operands._fields)
    detached: list[Any] = [None if one is None else one.detach() for one in args[:operands]]
    page_layout, *options = args[operands:]
    return _Operands(*detached), page_layout, Options(*options)


def _attention(*args: Any) -> tuple[Tensor, Tensor]:
    return _attend({}, *args)


@opaque
def _attend(special: dict[str, Any], *args: Any) -> tuple[Tensor, Tensor]:
    """Compute output and log-sum-exp, with arguments that operators do not take, too."""
    operands, page_layout, options = _read(args)
    output, lse = varlen.varlen_attn(
        **operands._asdict(),
        window_size=options.window_size(),
        page_layout=page_layout,
        return_lse=True,
        **options.common(),
        **special,
    )
    return output, lse


def _fake_attention(*args: Any) -> tuple[Tensor, Tensor]:
    query, _, value, *_ = args
    rows, heads, _ = query.shape
    output = query.new_empty((rows, heads, value.shape[-1]))
    return output, output.new_empty((heads, rows), dtype=wide(output))


def _backward(
    out: tuple[Tensor | None, ...],
    grad_output: Tensor,
    grad_lse: Tensor | None,
    output: Tensor,
    lse: Tensor,
    *args: Any,
) -> None:
    operands, _, options = _read(args)
    query, key, value, sinks, *_ = operands
    by_query, by_key, by_value, by_sinks = out
    cu_seq_k, seqused_k = operands.cu_seq_k, operands.seqused_k
    sums = None
    if sinks is not None:  # sums of half types would lose digits
        sinks = sinks.to(torch.promote_types(sinks.dtype, torch.float32))
        sums = None if by_sinks is None else torch.empty_like(sinks)
    packed_backward(
        grad_output,
        query,
        key,
        value,
        output,
        lse,
        cu_seq_q=integers(operands.cu_seq_q, "cu_seq_q"),
        cu_seq_k=integers(cu_seq_k, "cu_seq_k"),
        seqused_k=None if seqused_k is None else integers(seqused_k, "seqused_k"),
        out=AttentionGradients(by_query, by_key, by_value, None, sums),
        window=(options.left, options.right),
        sinks=sinks,
        grad_lse=grad_lse,
        **options.common(),
    )
    if by_sinks is not None and sums is not None:
        by_sinks.copy_(sums)


_call = define(
    "varlen_attention",
    _TENSORS,
    f"str page_layout, {OPTIONS}",
    len(_FLOATS),
    _attention,
    _fake_attention,
    _backward,
)


def varlen_attn(
    query: Tensor | Sequence[Tensor],
    key: Tensor | Sequence[Tensor],
    value: Tensor | Sequence[Tensor],
    cu_seq_q: Sequence[int] | Tensor | None = None,
    cu_seq_k: Sequence[int] | Tensor | None = None,
    max_q: int | None = None,
    max_k: int | None = None,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Sequence[int] | Tensor | None = None,
    block_table: Tensor | None = None,
    is_causal: bool | Literal["lower_right"] = False,
    page_layout: Literal["NHD", "HND"] = "NHD",
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    key_scale: Tensor | float | None = None,
    value_scale: Tensor | float | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    device: DeviceLike | None = None,
) -> Any:
    """Return `clattn.varlen_attn` of torch's tensors, with gradients.

    Gradients are those of query, key, value and sinks. What no sequence has, or uses, gets 0. There
    is no second derivative. ``torch.compile`` sees one operator.

    Parameters
    ----------
    query : Tensor of shape (total_q, Hq, E), or list of Tensors
        float16, bfloat16, float32 or float64, on the CPU. Lists are those of `clattn.varlen_attn`.
    key : Tensor of shape (total_k, Hk, E), or list of Tensors
        Of query's dtype; pages with `block_table`, which have no gradients.
    value : Tensor of shape (total_k, Hk, Ev), or list of Tensors
        Likewise.
    cu_seq_q, cu_seq_k : integers of shape (n + 1,)
        As in `clattn.varlen_attn`.
    max_q, max_k : int, optional
        Taken as torch's function does, and not needed.
    scale, window_size, enable_gqa, seqused_k, block_table : optional
        As in `clattn.varlen_attn`.
    is_causal, page_layout, softcap, sinks : optional
        As in `clattn.varlen_attn`.
    key_scale, value_scale, score_mod, mask_mod : optional
        As in `clattn.varlen_attn`, for calls without gradients.
    return_lse : bool
        Also return the log-sum-exp, which has a gradient.
    out : Tensor of shape (total_q, Hq, Ev), optional
        The result is written here, without gradients.
    device : Device, str or int, optional
        Where to run, see `clattn.devices`. Default: `clattn.get_default_device`.

    Returns
    -------
    output : Tensor of shape (total_q, Hq, Ev)
        Of query's dtype. With a list of queries, a list of Tensors.
    lse : Tensor of shape (Hq, total_q)
        With `return_lse`: float32, float64 for float64. Likewise.

    Raises
    ------
    TypeError, ValueError, MemoryError, DeviceError
        As `clattn.varlen_attn`.
    NotImplementedError
        Gradients are needed, and `block_table`, a scale of keys or values, a mod or `out` is given.

    Examples
    --------
    >>> import torch
    >>> x = torch.ones(5, 2, 8, requires_grad=True)  # sequences of 3 and 2 rows
    >>> varlen_attn(x, x, x, [0, 3, 5], [0, 3, 5], is_causal=True).sum().backward()
    >>> x.grad.shape
    torch.Size([5, 2, 8])
    """
    lists = pack_lists(query, key, value, cu_seq_q, cu_seq_k, out)
    floats: dict[str, Tensor] = {"query": lists.query, "key": lists.key, "value": lists.value}
    packed = [*floats.values()]
    if sinks is not None:
        floats["sinks"] = sinks
    check_tensors("varlen_attn", **floats)
    check_flag("return_lse", return_lse)
    for number, name in (max_q, "max_q"), (max_k, "max_k"):
        if number is not None:
            integer(number, name)
    special = {
        "key_scale": key_scale,
        "value_scale": value_scale,
        "score_mod": score_mod,
        "mask_mod": mask_mod,
        "out": out,
    }
    if needs_gradients([*floats.values()]):
        _refuse_gradients({"block_table": block_table, **special})
    if torch.is_autocast_enabled("cpu"):
        packed = [autocast(one) for one in packed]
    left, right = varlen.read_window(window_size)
    options = Options(
        causal=causal_word(is_causal),
        scale=scale,
        enable_gqa=enable_gqa,
        left=left,
        right=right,
        softcap=softcap,
        device=device_number(find_named(device)),
    )
    args = (
        *packed,
        sinks,
        _numbers(lists.cu_seq_q, "cu_seq_q"),
        _numbers(lists.cu_seq_k, "cu_seq_k"),
        _numbers(seqused_k, "seqused_k"),
        _numbers(block_table, "block_table", table),
        page_layout,
        *options,
    )
    plain = all(one is None for one in special.values())
    output, lse = _call(*args) if plain else _attend(special, *args)
    if not torch.compiler.is_compiling():
        count(OURS)
    return lists.results((output, lse) if return_lse else output, return_lse)


def _numbers(
    given: Any, name: str, read: Callable[[Any, str], np.ndarray] = integers
) -> Tensor | None:
    """Return integers as a tensor."""
    if given is None or isinstance(given, Tensor):
        return given
    if torch.compiler.is_compiling():
        return torch.as_tensor(given)
    return torch.from_numpy(read(given, name))


def _refuse_gradients(given: dict[str, Any]) -> None:
    """Refuse what has no backward pass."""
    remedies = {
        "block_table": "pass keys that are packed, with cu_seq_k",
        "score_mod": "call clattn.torch.flex_attention, with a mask_mod of clattn.flex that keeps "
        "sequences apart",
        "out": "leave it out",
        "key_scale": "multiply key by it",
        "value_scale": "multiply value by it",
    }
    remedies["mask_mod"] = remedies["score_mod"]
    for name, argument in given.items():
        if argument is not None:
            raise NotImplementedError(
                f"{name} is given, with which varlen_attn has no gradients; {remedies[name]}, or "
                "call it under torch.no_grad()"
            )


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    options: Options,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of packed rows, with gradients where torch records them."""
    output, lse = _call(
        query, key, value, sinks, cu_seq_q, cu_seq_k, seqused_k, None, "NHD", *options
    )
    return output, lse


# ---- jagged tensors ----


def takes_jagged(tensors: Sequence[Tensor], enable_gqa: bool = False) -> bool:
    """Whether query, key and value are jagged tensors (B, H, j, E) that fit each other."""
    if not all([_is_jagged(tensor) for tensor in tensors]):
        return False
    query, key, value = tensors
    heads, key_heads = query.shape[1], key.shape[1]
    return bool(
        query.dtype == key.dtype == value.dtype
        and query.dtype in FLOATS
        and query.shape[0] == key.shape[0] == value.shape[0]
        and query.shape[3] == key.shape[3]
        and key_heads == value.shape[1]
        and (heads == key_heads or (enable_gqa and key_heads > 0 and heads % key_heads == 0))
        and _same_rows(key, value)
    )


def check_jagged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    query_offset: Any,
    options: Options,
) -> None:
    """Refuse jagged tensors that do not fit, and what a call with them does not take."""
    given = {
        "attn_mask": attn_mask is not None,
        "query_offset": not (isinstance(query_offset, int) and query_offset == 0),
        "dropout_p": options.dropout_p != 0,
        "window": options.left is not None or options.right is not None,
    }
    for name, is_given in given.items():
        if is_given:
            raise ValueError(
                f"{name} is given, which jagged tensors do not take; clattn.torch.varlen_attn has "
                "windows and mods"
            )
    if not takes_jagged((query, key, value), options.enable_gqa):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, key, value))
        raise ValueError(
            f"query, key and value have the shapes {shapes}; expected jagged tensors (B, H, j, E) "
            "of one float dtype on the CPU whose sizes fit, key and value with the same offsets"
        )


def _is_jagged(tensor: object) -> bool:
    """Whether it is the view (B, H, j, E) of a jagged tensor (B, j, H, E) on the CPU."""
    return bool(
        isinstance(tensor, Tensor)
        and tensor.is_nested
        and tensor.layout is torch.jagged
        and tensor.is_cpu
        and tensor.dim() == 4
        and getattr(tensor, "_ragged_idx", None) == 2
    )


def _same_rows(key: Any, value: Any) -> bool:
    """Whether keys and values are as many, at the same places."""
    pairs = (key.offsets(), value.offsets()), (key.lengths(), value.lengths())
    return all(
        one is other or (one is not None and other is not None and torch.equal(one, other))
        for one, other in pairs
    )


def attend_jagged(
    query: Any, key: Any, value: Any, options: Options, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of what `takes_jagged` takes, jagged as the query is.

    Windows, offsets and dropout are not among the options.
    """
    q, k, v = [tensor.values().transpose(0, 1) for tensor in (query, key, value)]
    if torch.is_autocast_enabled("cpu"):
        q, k, v = autocast(q), autocast(k), autocast(v)
    cu_seq_q, cu_seq_k, seqused_k = query.offsets(), key.offsets(), None
    if query.lengths() is not None or key.lengths() is not None:
        cu_seq_q, _ = _with_gaps(query)
        cu_seq_k, seqused_k = _with_gaps(key)
    output, lse = attend_packed(q, k, v, sinks, cu_seq_q, cu_seq_k, options, seqused_k)
    return _like(query, output), _like(query, lse.transpose(0, 1))


def _with_gaps(tensor: Any) -> tuple[Tensor, Tensor]:
    """Return offsets in which the rows before each sequence are one, too, and the keys of each.

    Those before a sequence have no keys.
    """
    offsets, lengths = tensor.offsets(), tensor.lengths()
    if lengths is None:
        lengths = offsets.diff()
    first = offsets[:-1]
    ends = torch.stack([first, first + lengths], 1).flatten()
    used = torch.stack([torch.zeros_like(lengths), lengths], 1).flatten()
    return torch.cat([offsets.new_zeros(1), ends]), used


def _like(query: Any, packed: Tensor) -> Tensor:
    """Return rows (total, H, …) as a tensor (B, H, j, …) with the rows of the query."""
    rows = torch.nested.nested_tensor_from_jagged(packed, query.offsets(), query.lengths())
    return rows.transpose(1, 2)
