# SPDX-License-Identifier: MIT
"""What tests of clattn.torch share: torch's own function, arrays as tensors and back."""

import numpy as np
import torch
from references.attention import bfloat16
from support.helpers import qkv

TORCH = torch.nn.functional.scaled_dot_product_attention


def to_torch(array):
    """The same memory as a tensor, bfloat16 included."""
    if array.dtype == bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def from_torch(tensor):
    """The same memory as an array, bfloat16 included."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(bfloat16)
    return tensor.numpy()


def tensors(*args, **options):
    """Query, key and value."""
    return tuple(map(to_torch, qkv(*args, **options)))


def close(ours, theirs):
    """Equal but for rounding in float32: both err by a few eps of values of a few units."""
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=0, atol=4e-6)
