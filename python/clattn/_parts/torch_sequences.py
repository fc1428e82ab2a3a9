"""The sequences of a batch of torch, packed in its rows or padded, as ragged calls take them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from clattn import _core, varlen
from clattn._arguments.integers import check_offsets, integers
from clattn._parts.torch_operator import device_of
from clattn._parts.torch_varlen import attend_packed

if TYPE_CHECKING:
    from torch import Tensor

    from clattn._parts.torch_operator import Options

__all__ = [
    "Packed",
    "Padded",
    "Sequences",
    "attend_packed_rows",
    "attend_without_padding",
    "find_padded",
    "keep_apart",
    "pack_by_lengths",
    "pack_by_numbers",
    "pack_by_positions",
]

# A ragged call reads no padding, and takes 30 microseconds more than a call with padding. It is
# faster by 5 % or more if at least this share of the keys is padding, and the other call would read
# at least this many bytes of it. A kernel reads the keys once for this many rows.
_PADDING = 0.25
_BYTES = 2 << 20
_ROWS = 16


class Packed(NamedTuple):
    """Sequences that lie one behind the other: offsets among all rows, and among all keys."""

    rows: np.ndarray
    keys: np.ndarray


class Padded:
    """The sequence of each entry of a batch: a run of its keys, and its rows from one on.

    Between two sequences a ragged call has another one, the rows of padding, which uses no keys.
    All layers of a model share this, so that offsets are computed once.

    Parameters
    ----------
    row, first, end : int64 arrays of shape (B,)
        The first row; the first key, and the one behind the last.
    L, S : int
        Rows and keys of an entry.
    causal : str
        As in `Options`.
    """

    def __init__(
        self, row: np.ndarray, first: np.ndarray, end: np.ndarray, L: int, S: int, causal: str
    ) -> None:
        entry = np.arange(len(row))
        self.shape = len(row), L, S
        self.causal = causal
        self.rows = np.append(0, np.stack([entry * L + row, (entry + 1) * L], 1))
        self.used = np.stack([np.zeros_like(row), end - first], 1).ravel()
        self.left_out = len(row) * S - int(self.used.sum())
        self._runs = np.stack([first, end], 1)
        self._keys: dict[int, np.ndarray] = {}

    def keys(self, step: int) -> np.ndarray:
        """Return the offsets of keys, of which those of an entry begin at its number * step."""
        if step not in self._keys:
            begin = np.arange(len(self._runs))[:, None] * step
            self._keys[step] = np.append(0, begin + self._runs)
        return self._keys[step]


Sequences = Packed | Padded | None


# ---- packed ----


def pack_by_lengths(given: dict[str, Any], B: int, L: int, S: int) -> Packed:
    """Read the offsets that a model is given; those of rows are those of keys if one is not."""
    counts = {"cu_seq_lens_q": B * L, "cu_seq_lens_k": B * S}
    for name in counts:
        if name not in given and L != S:
            raise ValueError(
                f"{name} is not given, and there are {L} rows and {S} keys; expected offsets of "
                "both, or as many keys as rows"
            )
    found = []
    for name, offsets in given.items():
        ends = integers(offsets, name)
        check_offsets(ends.tolist(), name, counts[name], "the batch")
        found.append(ends)
    rows, keys = found[0], found[-1]
    if len(rows) != len(keys):
        raise ValueError(
            f"cu_seq_lens_k has shape ({len(keys)},); expected ({len(rows)},), that of "
            "cu_seq_lens_q"
        )
    return Packed(rows, keys)


def pack_by_numbers(numbers: Any, B: int, L: int, S: int) -> Packed:
    """Begin a sequence where the number of a row, (B, L) or (1, L), is another one."""
    if not isinstance(numbers, torch.Tensor):
        raise TypeError(f"seq_idx must be a torch.Tensor, got {type(numbers).__name__}")
    if L != S or tuple(numbers.shape) not in ((B, L), (1, L)):
        raise ValueError(
            f"seq_idx has shape {tuple(numbers.shape)}, for {B} x {L} rows and {S} keys of each; "
            f"expected ({B}, {L}), the number of each row's sequence, and as many keys as rows"
        )
    return _begin(numbers[:, 1:] != numbers[:, :-1], B)


def pack_by_positions(positions: Any, B: int, L: int) -> Packed | None:
    """Begin a sequence where a position is not greater than the one before; None: nowhere.

    Positions are (L,) or (1, L), or (3, 1, L): those of text, or of images and videos, whose
    patches share their first position. There a sequence begins where none of the three is greater.
    Others are not packed.
    """
    known = isinstance(positions, torch.Tensor) and positions.is_cpu and L > 1
    if not known or tuple(positions.shape) not in ((L,), (1, L), (3, 1, L)):
        return None
    positions = positions.reshape(-1, L)
    begins = (positions[:, 1:] <= positions[:, :-1]).all(0, keepdim=True)
    return _begin(begins, B) if begins.any() else None


def _begin(begins: Tensor, B: int) -> Packed:
    """Return offsets: a sequence begins at row 0 of each entry, and behind it where `begins`."""
    begins = torch.nn.functional.pad(begins, (1, 0), value=True)
    begins = begins.expand(B, -1).reshape(-1)
    rows = np.append(np.flatnonzero(begins.numpy()), len(begins))
    return Packed(rows, rows)


def keep_apart(packed: Packed, B: int, L: int, S: int) -> Tensor:
    """Return a mask (B, 1, L, L) for sequences whose keys are their rows."""
    if L != S or not np.array_equal(packed.rows, packed.keys):
        raise ValueError(
            "cu_seq_lens_q and cu_seq_lens_k differ; expected the same beside a mask, a bias, "
            "dropout, sinks of rows or weights"
        )
    numbers = np.searchsorted(packed.rows[1:], np.arange(B * L), "right").reshape(B, 1, L)
    numbers[numbers == len(packed.rows) - 1] = -1  # rows of no sequence
    number = torch.from_numpy(numbers)
    return (number[..., None] == number[..., None, :]) & (number >= 0)[..., None]


def attend_packed_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    packed: Packed,
    options: Options,
) -> Tensor:
    """Return the output (B, L, Hq, Ev), with gradients where torch records them.

    Query, key and value are (B, H, L or S, E or Ev).
    """
    q, k, v = [one.transpose(1, 2).flatten(0, 1) for one in (query, key, value)]
    rows, keys = torch.from_numpy(packed.rows), torch.from_numpy(packed.keys)
    output, _ = attend_packed(q, k, v, sinks, rows, keys, options)
    return output.unflatten(0, (query.shape[0], query.shape[2]))


# ---- padded ----


def find_padded(
    padding: Tensor, L: int, offset: int, is_causal: bool, bounded: bool
) -> Padded | None:
    """Find the run of keys of each sequence; None: it has several, or no ragged call does.

    Parameters
    ----------
    padding : Tensor of shape (B, S)
        bool; True where a key counts.
    L, offset : int
        Rows, and the position of the first one. Those at padding before a causal sequence see no
        key.
    is_causal, bounded : bool
        Causality, and whether there is a window.
    """
    counts = padding.numpy()
    B, S = counts.shape
    first, end = counts.argmax(1), S - counts[:, ::-1].argmax(1)
    sums = counts.sum(1)
    first[sums == 0] = end[sums == 0] = S
    if (end - first != sums).any():
        return None
    if not is_causal:
        return None if bounded else Padded(np.zeros(B, np.int64), first, end, L, S, "")
    row = np.clip(first - offset, 0, L)
    if (end == S).all() and L + offset == S:
        return Padded(row, first, end, L, S, "lower_right")
    return None if bounded or offset else Padded(row, first, end, L, S, "upper_left")


def attend_without_padding(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    padded: Padded,
    options: Options,
) -> Tensor | None:
    """Return the output (B, L, Hq, Ev) of a ragged call, without gradients.

    None: such a call would not be faster, or would copy the keys. Rows of padding are 0. The
    causality of `padded` stands in place of that of `options`.
    """
    (B, Hq, L, _), (_, Hk, S, E), Ev = query.shape, key.shape, value.shape[3]
    fits = padded.shape == (B, L, S) and B == len(key) == len(value)
    if not fits or not _is_cpu(options):
        return None
    keys = padded.left_out * Hk * -(-L // _ROWS)
    read = keys * (E + Ev) * key.element_size()
    if padded.left_out < _PADDING * B * S or read < _BYTES:
        return None
    step = _step(key)
    if step is None or step != _step(value):
        return None
    output = query.new_empty((B, L, Hq, Ev))
    varlen.varlen_attn(
        query.transpose(1, 2).flatten(0, 1),
        _in_one_row(key, step),
        _in_one_row(value, step),
        padded.rows,
        padded.keys(step),
        seqused_k=padded.used,
        sinks=sinks,
        window_size=options.window_size(),
        out=output.flatten(0, 1),
        **options._replace(causal=padded.causal).common(),
    )
    return output


def _is_cpu(options: Options) -> bool:
    device = device_of(options.device) or _core.find_device(None)
    return device.type == "cpu"


def _step(keys: Tensor) -> int | None:
    """Return how many keys an entry of a batch lies behind the one before; None: no whole number.

    A cache (B, H, S, E) has E numbers from a key to the next one, and H * S * E from an entry to
    the next one.
    """
    B, _, S, _ = keys.shape
    by_entry, _, by_key, _ = keys.stride()
    if B == 1:
        return int(S)
    whole = by_key > 0 and by_entry % by_key == 0 and by_entry // by_key >= S
    return int(by_entry // by_key) if whole else None


def _in_one_row(keys: Tensor, step: int) -> Tensor:
    """Return keys (B, H, S, E) as a view (total, H, E), of which key j of entry b is b * step + j.

    Those between two entries may be keys of other heads.
    """
    B, H, S, E = keys.shape
    _, by_head, by_key, by_number = keys.stride()
    return keys.as_strided(((B - 1) * step + S, H, E), (by_key, by_head, by_number))
