"""The backward pass of packed sequences, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clattn._parts.bands import band_of_packed
from clattn.gradients import AttentionGradients, scaled_dot_product_attention_backward

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    import numpy as np

    from clattn._arguments.options import Window

__all__ = ["packed_backward"]


def packed_backward(
    grad_output: Any,
    query: Any,
    key: Any,
    value: Any,
    output: Any,
    lse: Any,
    *,
    cu_seq_q: np.ndarray,
    cu_seq_k: np.ndarray,
    seqused_k: np.ndarray | None,
    out: AttentionGradients,
    is_causal: bool | str,
    window: Window,
    sinks: Any = None,
    grad_lse: Any = None,
    **options: Any,
) -> None:
    """Write the gradients of a checked call of `clattn.varlen_attn` to the arrays of `out`.

    Arrays are of one library, rows first: (total_q, Hq, E), and (Hq, total_q) for `lse` and
    `grad_lse`. What no sequence has, or uses, gets the gradient 0. That of sinks is summed in their
    dtype. `options` go to `clattn.scaled_dot_product_attention_backward`.
    """
    for array in out:
        if array is not None:
            array[...] = 0
    for rows, keys in _sequences(cu_seq_q, cu_seq_k, seqused_k):
        count = rows.stop - rows.start
        if count == 0 or (out.sinks is None and keys.stop == keys.start):
            continue
        band = band_of_packed(is_causal, window, count, keys.stop - keys.start)
        bounded = band.left is not None or band.right is not None
        found = scaled_dot_product_attention_backward(
            grad_output[None, rows],
            query[None, rows],
            key[None, keys],
            value[None, keys],
            output[None, rows],
            lse[None, :, rows],
            grad_lse=None if grad_lse is None else grad_lse[None, :, rows],
            needs=[name for name, array in out._asdict().items() if array is not None],
            window=(band.left, band.right) if bounded else None,
            query_offset=band.shift if bounded else 0,
            sinks=sinks,
            layout="BLHE",
            out=(
                None if out.query is None else out.query[None, rows],
                None if out.key is None else out.key[None, keys],
                None if out.value is None else out.value[None, keys],
                None,
                None,
            ),
            **options,
        )
        if out.sinks is not None:
            out.sinks[...] += found.sinks


def _sequences(
    cu_seq_q: np.ndarray, cu_seq_k: np.ndarray, seqused_k: np.ndarray | None
) -> Iterator[tuple[slice, slice]]:
    """Yield the rows and the keys of each sequence."""
    used = cu_seq_k[1:] - cu_seq_k[:-1] if seqused_k is None else seqused_k
    sequences = zip(cu_seq_q[:-1], cu_seq_q[1:], cu_seq_k[:-1], used, strict=True)
    for first, end, key, count in sequences:
        yield slice(int(first), int(end)), slice(int(key), int(key + count))
