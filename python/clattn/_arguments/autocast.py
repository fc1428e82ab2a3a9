"""Tensors under ``torch.autocast``."""

from __future__ import annotations

import torch


def autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Cast a tensor as torch does for its attention: floats but float64."""
    casts = tensor.is_floating_point() and tensor.dtype is not torch.float64
    return tensor.to(torch.get_autocast_dtype("cpu")) if casts else tensor
