"""Attention and diagonal matrices on OpenCL devices, for NumPy.

``clattn.scaled_dot_product_attention`` computes attention,
``clattn.scaled_dot_product_attention_backward`` its gradients, ``clattn.KVCache`` and
``clattn.PagedKVCache`` keep keys and values for decoding, and ``clattn.merge_attention`` joins
results over parts of the keys.
``clattn.tensor`` puts an array into a device's memory. ``clattn.onnx``, ``clattn.openvino`` and
``clattn.directml`` offer attention under the names and by the rules of these specifications.
``clattn.diagonal_matrix``, ``eye``, ``tril`` and ``triu`` fill or keep bands of diagonals.
``clattn.devices()`` lists the devices, and ``clattn.warm_up`` builds programs ahead of time.
``clattn.varlen_attn`` computes packed sequences of different lengths.
``clattn.flex_attention`` takes scores and masks that the user writes (``clattn.flex``), and
``clattn.flex_attention_backward`` differentiates the scores.
``clattn.torch``, ``transformers``, ``jax``, ``dask`` and ``mpi`` are imported when they are first
used, because they need packages that clattn does not install. Importing clattn touches no OpenCL;
the first call that needs a device opens it.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from clattn import directml, flex, onnx, openvino
from clattn._core import Device, DeviceError, Tensor
from clattn._core import __version__ as __version__
from clattn.attention import scaled_dot_product_attention
from clattn.cache import KVCache
from clattn.device import devices, get_default_device, set_default_device, use_device
from clattn.diagonal import diagonal_matrix, eye, tril, triu
from clattn.flex import (
    BlockMask,
    FlexGradients,
    and_masks,
    create_block_mask,
    flex_attention,
    flex_attention_backward,
    lookup,
    or_masks,
)
from clattn.gradients import AttentionGradients, scaled_dot_product_attention_backward
from clattn.merging import merge_attention
from clattn.paged import PagedKVCache
from clattn.quantizing import dequantize, quantize
from clattn.tensors import empty_cache, memory_stats, synchronize, tensor
from clattn.varlen import varlen_attn
from clattn.warming import warm_up

if TYPE_CHECKING:
    from clattn import dask as dask
    from clattn import jax as jax
    from clattn import mpi as mpi
    from clattn import torch as torch
    from clattn import transformers as transformers

__all__ = [
    "AttentionGradients",
    "BlockMask",
    "Device",
    "DeviceError",
    "FlexGradients",
    "KVCache",
    "PagedKVCache",
    "Tensor",
    "and_masks",
    "create_block_mask",
    "dequantize",
    "devices",
    "diagonal_matrix",
    "directml",
    "empty_cache",
    "eye",
    "flex",
    "flex_attention",
    "flex_attention_backward",
    "get_default_device",
    "lookup",
    "memory_stats",
    "merge_attention",
    "onnx",
    "openvino",
    "or_masks",
    "quantize",
    "scaled_dot_product_attention",
    "scaled_dot_product_attention_backward",
    "set_default_device",
    "show_config",
    "synchronize",
    "tensor",
    "tril",
    "triu",
    "use_device",
    "varlen_attn",
    "warm_up",
]

_ON_DEMAND = ("dask", "jax", "mpi", "torch", "transformers")


def show_config() -> None:
    """Print versions, environment variables, drivers, devices and the kernel cache.

    ``python -m clattn doctor`` prints the same, tries a call on each device, and says what to do.
    Problems, such as a missing driver or a wrong environment variable, do not raise an exception
    here.
    """
    from clattn._commands import doctor

    doctor.show()


if not TYPE_CHECKING:  # type checkers would take any name

    def __getattr__(name: str) -> ModuleType:
        """Import a module that needs another package."""
        if name not in _ON_DEMAND:
            raise AttributeError(f"module 'clattn' has no attribute {name!r}")
        try:
            return import_module(f"clattn.{name}")
        except ImportError as error:  # hasattr and getattr's default expect an AttributeError
            raise AttributeError(f"module 'clattn' has no attribute {name!r}: {error}") from error

    def __dir__() -> list[str]:
        """Return the names of the module, with those that are not imported yet."""
        return sorted({*globals(), *_ON_DEMAND})
