# SPDX-License-Identifier: MIT
"""What tests of clattn.torch share: torch's own function, arrays as tensors and back."""

import torch
from support.data import qkv
from support.foreign import from_torch, to_torch

__all__ = ["TORCH", "close", "from_torch", "tensors", "to_torch"]

TORCH = torch.nn.functional.scaled_dot_product_attention


def tensors(*args, **options):
    """Query, key and value."""
    return tuple(map(to_torch, qkv(*args, **options)))


def close(ours, theirs):
    """Equal but for rounding in float32: both err by a few eps of values of a few units."""
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=0, atol=4e-6)
