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

from clattn._arguments.autocast import autocast
from clattn._parts import torch_operator
from clattn._parts.model_masks import AttentionMask, BandOptions, make_mask

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
_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


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
        Arguments that say nothing about attention are ignored. A warning names unknown ones.

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
        Shapes do not fit; an argument chooses keys in a way that clattn does not know; or
        weights are asked for while torch records gradients.
    DeviceError
        No OpenCL device is usable, or OpenCL reports an error.
    MemoryError
        Host or device memory does not suffice.

    Notes
    -----
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
    (_, Hq, L, _), (_, _, S, Ev) = query.shape, value.shape
    band = BandOptions()
    mask: Any = attention_mask
    if mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        band = BandOptions(is_causal=bool(causal) and L > 1)
    elif isinstance(mask, AttentionMask):
        if mask.band is not None and mask.shape[2] == L and mask.shape[3] >= S:
            mask, band = mask.padding, mask.band
            mask = None if mask is None else mask[:, None, None]
        else:
            mask = mask.dense()
    if mask is not None:
        mask = mask[..., :S]
    if position_bias is not None:
        mask = _add_bias(position_bias[..., :S], mask)
    if mask is not None and casts:
        mask = autocast(mask)
    if records:
        left, right = band.window or (None, None)
        found = torch_operator.attend(
            *(operands.query, operands.key, operands.value, mask),
            torch_operator.Options(
                dropout_p=dropout,
                causal="upper_left" if band.is_causal else "",
                scale=scaling,
                enable_gqa=True,
                left=left,
                right=right,
                softcap=softcap or 0.0,
                position=band.query_offset,
                device=torch_operator.device_number(device),
            ),
            sinks=of_heads,
        )
        return _apply_sinks(found[0].transpose(1, 2).contiguous(), None, found[1], of_rows)
    mask = None if mask is None else mask.detach()
    B = next((n for n in (len(query), len(key), len(value)) if n != 1), 1)
    output = operands.query.new_empty((B, L, Hq, Ev))
    result = attention.scaled_dot_product_attention(
        **replace(operands, attn_mask=mask).given(),
        dropout_p=dropout,
        is_causal=band.is_causal,
        scale=scaling,
        enable_gqa=True,
        window=band.window,
        softcap=softcap or 0.0,
        seed=int(torch.randint(2**63 - 1, ())) if dropout else None,
        return_lse=of_rows is not None,
        out=output.transpose(1, 2),
        device=device,
        query_offset=band.query_offset,
        return_weights=bool(output_attentions),
    )
    weights = result[-1] if output_attentions else None
    return _apply_sinks(output, weights, result[1] if of_rows is not None else None, of_rows)


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
    # A tensor that is no AttentionMask was made for the sequences of a packed batch.
    choosing = _CHOOSING if type(mask) is torch.Tensor else (*_CHOOSING, *_PACKING)
    for name in choosing:
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


def _add_bias(bias: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Join a bias and a mask to one mask of floats."""
    if mask is None:
        return bias
    return torch.where(mask, bias, -torch.inf) if mask.dtype is torch.bool else mask + bias
