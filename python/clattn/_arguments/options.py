"""The keyword arguments that all overloads of a function share, for type checkers only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Required, TypedDict

from numpy.typing import DTypeLike

from clattn._arguments.arrays import Array, DeviceLike

__all__ = [
    "AttendOptions",
    "AttentionOptions",
    "BandOptions",
    "Diagonal1Options",
    "DiagonalOptions",
    "MaskType",
    "MultiheadOptions",
    "RingOptions",
    "Window",
]

Window = tuple[int | None, int | None] | None

MaskType = Literal[
    "none",
    "boolean",
    "key_sequence_length",
    "key_sequence_end_start",
    "key_query_sequence_length_start_end",
]


class AttentionOptions(TypedDict, total=False):
    """Of `clattn.scaled_dot_product_attention`."""

    window: Window
    softcap: float
    seed: int | None
    out: Array | None
    device: DeviceLike | None
    sinks: Array | None
    query_offset: int | Sequence[int] | Array
    layout: Literal["BHLE", "BLHE"]


class BandOptions(TypedDict, total=False):
    """Keywords that say which keys a row attends to by its position, and how."""

    is_causal: bool | Literal["lower_right"]
    scale: float | None
    enable_gqa: bool
    window: Window


class RingOptions(BandOptions, total=False):
    """Of functions of `clattn.mpi` that let keys go round."""

    comm: Any
    layout: Literal["contiguous", "zigzag"]


class AttendOptions(TypedDict, total=False):
    """Of `clattn.KVCache.attend`."""

    score_mod: Callable[..., Any] | None
    out: Array | None


class _DiagonalOptions(TypedDict, total=False):
    sizes: Sequence[int] | None
    dtype: DTypeLike | None
    value: Required[float]
    device: DeviceLike | None


class Diagonal1Options(_DiagonalOptions):
    """Of `clattn.directml.diagonal_matrix1`."""

    diagonal_fill_begin: Required[int]
    diagonal_fill_end: Required[int]


class DiagonalOptions(_DiagonalOptions):
    """Of `clattn.directml.diagonal_matrix`."""

    offset: Required[int]


class MultiheadOptions(TypedDict, total=False):
    """Of `clattn.directml.multihead_attention`."""

    stacked_query_key: Array | None
    stacked_key_value: Array | None
    stacked_query_key_value: Array | None
    bias: Array | None
    mask: Array | None
    mask_type: MaskType
    relative_position_bias: Array | None
    past_key: Array | None
    past_value: Array | None
    scale: Required[float]
    mask_filter_value: float
    head_count: Required[int]
    return_present: bool
    device: DeviceLike | None
