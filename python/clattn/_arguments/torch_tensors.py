"""Arguments that have to be torch.Tensors: a check, and the cast of ``torch.autocast``."""

from __future__ import annotations

import torch


def autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Cast a tensor as torch does for its attention: floats but float64."""
    casts = tensor.is_floating_point() and tensor.dtype is not torch.float64
    return tensor.to(torch.get_autocast_dtype("cpu")) if casts else tensor


def check_tensors(name: str, **given: object) -> None:
    """Raise a TypeError for the first argument of function `name` that is no torch.Tensor."""
    for argument, tensor in given.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{argument} must be a torch.Tensor, got {type(tensor).__name__}; "
                f"clattn.{name} takes other arrays"
            )
