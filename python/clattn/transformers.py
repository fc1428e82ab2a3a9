"""clattn as an attention implementation of Hugging Face's models.

After ``clattn.transformers.register()`` the name "clattn" is one of those that
``attn_implementation=`` and ``set_attn_implementation`` take, beside "sdpa" and "eager".
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from clattn import attention
from clattn._arguments.devices import find_named
from clattn._arguments.operands import FACTORS, Operands
from clattn._host.extras import how_to_install

try:
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.utils.versions import require_version

    require_version("transformers>=5.4")
except ImportError as error:
    raise ImportError(
        "clattn.transformers needs torch and transformers 5.4 or later: "
        f"{how_to_install('transformers')}"
    ) from error

from clattn._arguments.torch_tensors import autocast
from clattn._parts import torch_operator, torch_sequences
from clattn._parts.model_masks import AttentionMask, BandOptions, count_seen_keys, make_mask
from clattn._parts.torch_reasons import DENSE, KEYS, OURS, PACKED, UNPADDED, count

if TYPE_CHECKING:
    from clattn._arguments.arrays import DeviceLike
    from clattn._core import Device

__all__ = ["AttentionMask", "attend", "make_mask", "register"]

# Arguments of models that say nothing about attention, or what the mask says already.
_SAID = {
    "deterministic",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "sliding_window",
    "use_cache",
}
# Arguments that choose keys beside the mask.
_CHOOSING = ("block_indices", "cache", "indices")
# Arguments that divide rows and keys into sequences.
_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k")
_PACKING = (*_LENGTHS, "max_length_q", "max_length_k", "seq_idx")


def register(device: DeviceLike | None = None) -> None:
    """Make ``attn_implementation="clattn"`` known to the models of transformers.

    In this process. Calling it again changes the device.

    Parameters
    ----------
    device : Device, str or int, optional
        Where attention runs, see `clattn.devices`. Default: `clattn.get_default_device` at
        each call.

    Raises
    ------
    TypeError, ValueError, DeviceError
        Not a device, or no device matches.

    Examples
    --------
    >>> import torch, transformers
    >>> register()
    >>> config = transformers.LlamaConfig(
    ...     vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
    ...     num_attention_heads=4, num_key_value_heads=2, attn_implementation="clattn")
    >>> model = transformers.LlamaForCausalLM(config)
    >>> with torch.inference_mode():
    ...     model(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 100])
    """
    AttentionInterface.register("clattn", partial(attend, device=find_named(device)))
    AttentionMaskInterface.register("clattn", make_mask)


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    output_attentions: bool | None = False,
    *,
    device: Device | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the attention of a module: transformers calls it with these arguments.

    Parameters
    ----------
    module : Module
        Its ``is_causal``, True if it has none, holds if nothing else says what to attend to.
    query : Tensor of shape (B, Hq, L, E)
        float16, bfloat16, float32 or float64, on the host, with any strides.
    key : Tensor of shape (B, Hk, S, E)
        Query head h reads key and value head ``h // (Hq // Hk)``.
    value : Tensor of shape (B, Hk, S, Ev)
        Of query's dtype.
    attention_mask : Tensor, optional
        An `AttentionMask`, or a tensor that broadcasts to (B, Hq, L, S or more): bool (True
        attends) or of any float dtype (added).
    dropout : float
        Probability with which each weight is dropped. torch's generator gives the seed.
    scaling : float, optional
        Default ``1 / sqrt(E)``.
    is_causal : bool, optional
        Overrides the module's. Both hold only without a mask, for more than one row.
    softcap : float, optional
        A score s becomes ``softcap * tanh(s / softcap)``, before the mask.
    s_aux : Tensor, optional
        Logits that take part in the softmax's sum and in no value: one for each query head, (Hq,),
        or what broadcasts to (B, Hq, L, 1). Some models call them ``sinks``.
    position_bias : Tensor, optional
        Broadcasts to (B, Hq, L, S or more); added to the scaled scores.
    output_attentions : bool, optional
        Also return the weights.
    device : Device, optional
        Where to run.
    **kwargs
        The sequences of packed rows: ``cu_seq_lens_q`` and ``cu_seq_lens_k``, offsets (n + 1,)
        among the B * L rows and the B * S keys, one of which will do if L is S; or ``seq_idx``, the
        number of each row's sequence, (B, L) or (1, L); or ``position_ids``, see below. Arguments
        that say nothing about attention are ignored. A warning names unknown ones.

    Returns
    -------
    output : Tensor of shape (B, L, Hq, Ev)
        Contiguous, of query's dtype.
    weights : Tensor of shape (B, Hq, L, S) or None

    Raises
    ------
    TypeError
        The mask is of another kind, or a tensor of a wrong dtype or device.
    ValueError
        Shapes or offsets do not fit; an argument chooses keys in a way that clattn does not know;
        or weights are asked for while torch records gradients.
    DeviceError
        No OpenCL device is usable, or OpenCL reports an error.
    MemoryError
        Host or device memory does not suffice.

    Notes
    -----
    Offsets win, then numbers, then what `make_mask` has found. If none of them says so, and there
    is no mask, ``position_ids`` of shape (L,), (1, L) or (3, 1, L) divide the rows where a position
    is not greater than the one before: of three positions, where none is.
    `clattn.torch.call_counts` says which calls were packed, and which left out padding.

    Under ``torch.autocast`` query, key, value and a float mask, with the bias in it, are cast as
    torch casts them. Where a tensor requires gradients and they are enabled, torch records the
    call: see `clattn.torch.scaled_dot_product_attention`.
    """
    _check(kwargs, attention_mask)
    name, sinks = ("sinks", kwargs.get("sinks")) if s_aux is None else ("s_aux", s_aux)
    of_heads, of_rows = _divide_sinks(name, sinks, query)
    operands = Operands(query, key, value, sinks=of_heads)
    given = (*operands.given().values(), attention_mask, position_bias, of_rows)
    records = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    if records and output_attentions:
        raise ValueError(
            "output_attentions is True, and gradients are enabled, which weights do not have; run "
            "the model under torch.no_grad(), or without output_attentions"
        )
    if not records:
        operands = operands.map(torch.Tensor.detach)
    casts = torch.is_autocast_enabled("cpu")
    if casts:
        operands = operands.map(autocast, *FACTORS)
    L, S = query.shape[2], value.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    band, mask, sequences = _read_mask(attention_mask, len(query), L, S, bool(causal))
    by_lengths = any(kwargs.get(name) is not None for name in _LENGTHS)
    seen = S if by_lengths else count_seen_keys(band, band.query_offset, L, S)
    if seen < S:
        operands, S = operands.cut("S", slice(seen)), seen
    packed = _find_packed(kwargs, attention_mask, sequences, band, operands)
    left, right = band.window or (None, None)
    options = torch_operator.Options(
        dropout_p=dropout,
        causal="upper_left" if band.is_causal else "",
        scale=scaling,
        enable_gqa=True,
        left=left,
        right=right,
        softcap=softcap or 0.0,
        position=band.query_offset,
        device=torch_operator.device_number(device),
    )
    if not (dropout or output_attentions) and position_bias is None and of_rows is None:
        output = _attend_ragged(operands, packed or sequences, mask, options, records)
        if output is not None:
            return output, None
    mask = None if mask is None else mask[..., :S]
    if packed is not None:
        mask = _join(torch_sequences.keep_apart(packed, len(query), L, S), mask)
    if position_bias is not None:
        mask = _join(position_bias[..., :S], mask)
    if mask is not None and casts:
        mask = autocast(mask)
    if records:
        result = _attend_recorded(replace(operands, attn_mask=mask), options, of_rows)
    else:
        mask = None if mask is None else mask.detach()
        operands = replace(operands, attn_mask=mask)
        result = _attend_directly(operands, options, of_rows, bool(output_attentions))
    count(OURS if mask is None else KEYS if mask.shape[1:3] == (1, 1) else DENSE)
    return result


def _attend_recorded(
    operands: Operands, options: torch_operator.Options, of_rows: torch.Tensor | None
) -> tuple[torch.Tensor, None]:
    """Return the output (B, L, Hq, Ev) of a call that torch records."""
    output, lse = torch_operator.attend(
        *(operands.query, operands.key, operands.value, operands.attn_mask),
        options,
        sinks=operands.sinks,
    )
    output, _ = _apply_sinks(output.transpose(1, 2).contiguous(), None, lse, of_rows)
    return output, None


def _attend_directly(
    operands: Operands,
    options: torch_operator.Options,
    of_rows: torch.Tensor | None,
    return_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output (B, L, Hq, Ev) of a call without gradients, and weights if asked for."""
    batches = [len(one) for one in (operands.query, operands.key, operands.value)]
    B = next((n for n in batches if n != 1), 1)
    (_, Hq, L, _), Ev = operands.query.shape, operands.value.shape[3]
    output = operands.query.new_empty((B, L, Hq, Ev))
    result = attention.scaled_dot_product_attention(
        **operands.given(),
        **options.keywords(torch_operator.draw_seed() if options.dropout_p else None, None),
        return_lse=of_rows is not None,
        out=output.transpose(1, 2),
        return_weights=return_weights,
    )
    weights = result[-1] if return_weights else None
    return _apply_sinks(output, weights, None if of_rows is None else result[1], of_rows)


def _read_mask(
    mask: torch.Tensor | None, B: int, L: int, S: int, is_causal: bool
) -> tuple[BandOptions, Any, torch_sequences.Sequences]:
    """Return what a mask says: its band, what excludes more keys, and its sequences."""
    if mask is None:
        return BandOptions(is_causal=is_causal and L > 1), None, None
    if not isinstance(mask, AttentionMask):
        return BandOptions(), mask, None
    packed = isinstance(mask.sequences, torch_sequences.Packed)
    fits = mask.shape[2] == L and mask.shape[3] >= S
    if mask.band is None or not fits or (packed and mask.shape != (B, 1, L, S)):
        return BandOptions(), mask.dense(), None
    padding = None if mask.padding is None else mask.padding[:, None, None]
    return mask.band, padding, mask.sequences


def _find_packed(
    kwargs: dict[str, Any],
    mask: torch.Tensor | None,
    sequences: torch_sequences.Sequences,
    band: BandOptions,
    operands: Operands,
) -> torch_sequences.Packed | None:
    """Find the sequences of packed rows: by lengths or numbers, the mask, or positions."""
    (B, _, L, _), S = operands.query.shape, operands.key.shape[2]
    by_lengths = {name: kwargs[name] for name in _LENGTHS if kwargs.get(name) is not None}
    if by_lengths:
        return torch_sequences.pack_by_lengths(by_lengths, B, L, S)
    alike = L == S and band.query_offset == 0 and B == len(operands.key) == len(operands.value)
    if kwargs.get("seq_idx") is not None:
        return torch_sequences.pack_by_numbers(kwargs["seq_idx"], B, L, S)
    if isinstance(sequences, torch_sequences.Packed):
        return sequences
    if alike and (mask is None or getattr(mask, "open", False)):
        return torch_sequences.pack_by_positions(kwargs.get("position_ids"), B, L)
    return None


def _attend_ragged(
    operands: Operands,
    sequences: torch_sequences.Sequences,
    mask: torch.Tensor | None,
    options: torch_operator.Options,
    records: bool,
) -> torch.Tensor | None:
    """Return the output (B, L, Hq, Ev) of a ragged call; None: a batch says more or is faster."""
    arrays = operands.query, operands.key, operands.value, operands.sinks
    if isinstance(sequences, torch_sequences.Packed) and mask is None:
        causal = "lower_right" if options.causal else ""
        output = torch_sequences.attend_packed_rows(
            *arrays, sequences, options._replace(causal=causal)
        )
        count(PACKED)
        return output
    if isinstance(sequences, torch_sequences.Padded) and not records:
        found = torch_sequences.attend_without_padding(*arrays, sequences, options)
        if found is not None:
            count(UNPADDED)
        return found
    return None


def _apply_sinks(
    output: torch.Tensor,
    weights: torch.Tensor | None,
    lse: torch.Tensor | None,
    of_rows: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Let sinks of rows, (B, Hq, L, 1), take part in the sums of a result (B, L, Hq, Ev)."""
    if of_rows is None or lse is None:
        return output, weights
    lse = lse[..., None]
    # The rest of the sum, divided by the whole sum.
    rest = torch.where(lse.isneginf(), 0.0, torch.sigmoid(lse - of_rows))
    output = (output * rest.transpose(1, 2)).to(output.dtype)
    return output, None if weights is None else (weights * rest).to(weights.dtype)


def _check(kwargs: dict[str, Any], mask: Any) -> None:
    """Refuse arguments and masks that clattn does not know."""
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 4):
        shape = f" of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else ""
        raise TypeError(
            f"attention_mask is of type {type(mask).__name__}{shape}; expected None or a tensor of "
            "four dimensions, as clattn.transformers.register() makes masks"
        )
    given = {name for name, value in kwargs.items() if value is not None}
    for name in _CHOOSING:
        if name in given:
            raise ValueError(
                f"{name} is given, which chooses keys beside the mask; expected a mask that says "
                'what is attended to. attn_implementation="sdpa" may run this model'
            )
    for name in sorted(given - _SAID - {"sinks", *_PACKING}):
        warnings.warn(f"clattn ignores {name}, which this model gives", stacklevel=3)


def _divide_sinks(
    name: str, sinks: torch.Tensor | None, query: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return sinks as one for each head, or as four dimensions if rows or batches differ."""
    B, Hq, L, _ = query.shape
    if sinks is None or sinks.shape == (Hq,):
        return sinks, None
    fits = sinks.dim() == 4 and all(
        size in (1, most) for size, most in zip(sinks.shape, (B, Hq, L, 1), strict=True)
    )
    if not fits:
        raise ValueError(
            f"{name} has shape {tuple(sinks.shape)}; expected ({Hq},), one for each query head, or "
            f"a shape that broadcasts to ({B}, {Hq}, {L}, 1)"
        )
    if sinks.shape[0] == sinks.shape[2] == 1:
        return sinks.reshape(-1).expand(Hq), None
    return None, sinks


def _join(one: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Join two masks, or a bias and a mask: bools exclude, floats are added."""
    if mask is None:
        return one
    if one.dtype is torch.bool:
        return one & mask if mask.dtype is torch.bool else torch.where(one, mask, -torch.inf)
    return torch.where(mask, one, -torch.inf) if mask.dtype is torch.bool else mask + one
