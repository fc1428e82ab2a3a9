"""How the rows of a call are divided among sequences."""

from __future__ import annotations

from typing import Any

import numpy as np

from clattn._arguments.integers import integers

__all__ = ["counts_of"]


def counts_of(cu_seq: Any, name: str, sequences: int, rows: int, of: str) -> list[int]:
    """Return how many of the rows belong to each sequence."""
    if cu_seq is None:
        count = rows // sequences if sequences else 0
        if count * sequences != rows:
            raise ValueError(
                f"{of} has {rows} rows for {sequences} sequences; expected as many for each, or "
                f"{name}"
            )
        return [count] * sequences
    ends = integers(cu_seq, name)
    counts = np.diff(ends)
    if ends.size != sequences + 1:
        raise ValueError(
            f"{name} has shape {ends.shape}; expected ({sequences + 1},), one more than sequences"
        )
    if ends[0] != 0 or (counts < 0).any() or ends[-1] > rows:
        raise ValueError(
            f"{name} is {ends.tolist()!r:.80}; expected offsets from 0 to at most {rows}, the rows "
            f"of {of}, that never fall"
        )
    found: list[int] = counts.tolist()
    return found
