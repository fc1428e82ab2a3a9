"""The dtypes of attention under ``torch.autocast``."""

from __future__ import annotations

import torch


def autocast_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to which autocast casts tensors of a dtype; it leaves float64 alone."""
    casts = dtype.is_floating_point and dtype is not torch.float64
    return torch.get_autocast_dtype("cpu") if casts else dtype


def autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Cast a tensor as torch does for its attention."""
    return tensor.to(autocast_dtype(tensor.dtype))
