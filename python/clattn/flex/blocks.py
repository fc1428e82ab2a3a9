"""Block masks: which blocks of a mask are empty, partial or full."""

from __future__ import annotations

import copy
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from clattn import _core
from clattn._arguments.devices import without_torch
from clattn.flex.block_lists import flags_of, lists_of
from clattn.flex.compile import MASK_PARAMETERS, Mods, trace_mods
from clattn.flex.masks import lookup
from clattn.flex.opaque import opaque
from clattn.flex.opencl_c import uses
from clattn.flex.tables import checksum, dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from clattn._arguments.arrays import Array, DeviceLike
    from clattn._core import Device, Tensor

    ForKernels = tuple[Tensor, int, int, tuple[int, int], bool, bool]

__all__ = ["BlockMask", "create_block_mask", "from_torch"]

# The values of entries: CA_BLOCK_… of kernels/attention/params.h.
_EMPTY, _PARTIAL, _FULL = range(3)

# What a drawing shows for them, and its most blocks along a side.
_MARKS = " ░█"
_MOST_DRAWN = 32


class BlockMask:
    """A mask_mod, and what is known of each of its blocks: `create_block_mask` makes it.

    Rows and keys are divided into blocks of `BLOCK_SIZE`. `flex_attention` skips an empty block,
    asks the mask_mod for each key of a partial one, and for no key of a full one. The mask
    itself, (L, S), is never in memory.

    Attributes
    ----------
    mask_mod : callable
        The function of (b, h, q_idx, kv_idx).
    shape : tuple of int
        (B, H, Q_LEN, KV_LEN); B and H are 1 where the mask is the same for all.
    BLOCK_SIZE : int or tuple of int
        Rows of a block, and its keys: one number for both, or two.
    entries : Tensor
        uint8 of shape (B, H, blocks of rows, blocks of keys): 0 empty, 1 partial, 2 full.
    device : Device
        The device that holds `entries`.
    """

    __slots__ = (
        "BLOCK_SIZE", "_checksums", "_copies", "_mods", "_uses", "entries", "mask_mod", "shape",
    )  # fmt: skip

    def __init__(
        self,
        mask_mod: Callable[..., Any],
        mods: Mods,
        entries: Tensor,
        shape: tuple[int, int, int, int],
        block_size: int | tuple[int, int],
    ) -> None:
        self.mask_mod = mask_mod
        self._mods = mods._replace(tables=())
        self._checksums = tuple(map(checksum, mods.tables))
        self._uses = uses(mods.text, "b"), uses(mods.text, "h")
        self.entries = entries
        self.shape = shape
        self.BLOCK_SIZE = block_size
        self._copies: dict[Device, tuple[Tensor, Tensor]] = {}  # entries, and what was copied

    @property
    def device(self) -> Device:
        """The device that holds the blocks."""
        return self.entries.device

    def sparsity(self) -> float:
        """Return how many blocks are empty, in per cent.

        Raises
        ------
        MemoryError
            The host's memory does not suffice.
        DeviceError
            OpenCL reports an error, also one of the kernel that makes the blocks.
        """
        return 100.0 * float(np.mean(self.entries.numpy() == _EMPTY))

    def to_dense(self) -> np.ndarray:
        """Return which blocks have a key that is attended to.

        Returns
        -------
        int32 array of shape (B, H, blocks of rows, blocks of keys)
            1 for partial and full blocks, 0 for empty ones.

        Raises
        ------
        MemoryError
            The host's memory does not suffice.
        DeviceError
            OpenCL reports an error, also one of the kernel that makes the blocks.
        """
        return np.asarray(self.entries.numpy() != _EMPTY, np.int32)

    # ---- as torch's ----

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks: Array,
        kv_indices: Array,
        full_kv_num_blocks: Array | None = None,
        full_kv_indices: Array | None = None,
        BLOCK_SIZE: int | tuple[int, int] = 128,
        mask_mod: Callable[..., Any] | None = None,
        seq_lengths: tuple[int, int] | None = None,
        *,
        device: DeviceLike | None = None,
    ) -> BlockMask:
        """Make a block mask of lists of blocks, as torch's classmethod does.

        Parameters
        ----------
        kv_num_blocks : array of integers of shape (B, H, blocks of rows)
            How many blocks of keys are partial.
        kv_indices : array of integers of shape (B, H, blocks of rows, blocks of keys)
            Which ones: the first of each row count.
        full_kv_num_blocks, full_kv_indices : array of integers, optional
            The same of the full blocks. Default: none is full.
        BLOCK_SIZE : int or tuple of int
            Rows of a block, and its keys.
        mask_mod : callable, optional
            What is attended to in partial blocks. Default: everything.
        seq_lengths : tuple of int, optional
            Q_LEN and KV_LEN. Default: those of whole blocks.
        device : Device, str or int, optional
            See `clattn.devices`. Default: `clattn.get_default_device`.

        Returns
        -------
        BlockMask
            For `flex_attention`. Its mask_mod is the given one with the blocks.

        Raises
        ------
        TypeError
            The mask_mod cannot be traced, or an array has no integers.
        ValueError
            The shapes do not belong together, or a list names a block that is not there.
        MemoryError
            Host or device memory does not suffice.
        DeviceError
            There is no usable OpenCL device, or OpenCL reports an error.
        """
        if (full_kv_num_blocks is None) != (full_kv_indices is None):
            raise TypeError(
                "full_kv_num_blocks and full_kv_indices: one is None; expected both, or none"
            )
        entries = flags_of(kv_num_blocks, kv_indices, "kv_indices").astype(np.uint8) * _PARTIAL
        if full_kv_indices is not None:
            full = flags_of(full_kv_num_blocks, full_kv_indices, "full_kv_indices")
            if full.shape != entries.shape:
                raise ValueError(
                    f"full_kv_indices has shape {full.shape}; expected that of kv_indices, "
                    f"{entries.shape}"
                )
            entries[full] = _FULL
        rows, keys = _pair(BLOCK_SIZE)
        B, H, down, across = entries.shape
        if seq_lengths is None:
            seq_lengths = down * rows, across * keys
        Q_LEN, KV_LEN = map(operator.index, seq_lengths)
        shape = (B, H, Q_LEN, KV_LEN)
        on_device = _core.tensor(entries, without_torch(device))
        mask_mod = _by_blocks(mask_mod or _everything, on_device, rows, keys)
        mods = trace_mods(None, mask_mod)
        size = rows if rows == keys else (rows, keys)
        return cls(mask_mod, mods, on_device, shape, size)

    def __getitem__(self, index: Any) -> BlockMask:
        """Return the block mask of some batches and heads: mask[b, h], mask[0:2].

        An index keeps its dimension, as in torch. The mask_mod gets the numbers that batches and
        heads have here.
        """
        keys = index if isinstance(index, tuple) else (index,)
        if len(keys) > 2:
            raise TypeError(
                f"block_mask is indexed by {len(keys)} indexes; expected b, or b and h: "
                "query_offset=… of flex_attention is for some of its rows"
            )
        entries = self.entries.numpy()
        picked = []
        for axis, key in enumerate(keys):
            if isinstance(key, (int, np.integer)):
                key = [key]
            picks = np.arange(entries.shape[axis], dtype=np.int32)[key]
            if picks.ndim != 1 or picks.size == 0:
                raise IndexError(
                    f"block_mask is indexed by {key!r}; expected one or more of B or H"
                )
            entries = entries.take(picks, axis)
            picked.append(picks)
        mask_mod = _of_some(self.mask_mod, self.shape[:2], picked)
        shape = (*entries.shape[:2], *self.shape[2:])
        on_device = _core.tensor(entries, self.device)
        mods = trace_mods(None, mask_mod)
        return BlockMask(mask_mod, mods, on_device, shape, self.BLOCK_SIZE)

    def to(self, device: DeviceLike | None) -> BlockMask:
        """Return the same block mask on a device."""
        made = copy.copy(self)
        made.entries = _core.tensor(self.entries, without_torch(device))
        return made

    def __copy__(self) -> BlockMask:
        """Return a block mask of the same entries."""
        made = object.__new__(BlockMask)
        for name in self.__slots__:
            setattr(made, name, getattr(self, name))
        made._copies = {}
        return made

    def __deepcopy__(self, memo: Any) -> BlockMask:
        """Return a block mask of the same entries, which nobody writes to."""
        return copy.copy(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle holds: entries as an array. The mask_mod is pickled by its name."""
        state = {name: getattr(self, name) for name in self.__slots__}
        return state | {"entries": self.entries.numpy(), "_copies": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Entries go to the default device."""
        for name, kept in (state | {"entries": _core.tensor(state["entries"], None)}).items():
            setattr(self, name, kept)

    @property
    def seq_lengths(self) -> tuple[int, int]:
        """Q_LEN and KV_LEN."""
        return self.shape[2:]

    def _lists(self, entry: int, of_rows: bool = False) -> tuple[np.ndarray, np.ndarray]:
        flags = self.entries.numpy() == entry
        return lists_of(flags.swapaxes(2, 3) if of_rows else flags)

    @property
    def kv_num_blocks(self) -> np.ndarray:
        """How many blocks of each row of blocks are partial: int32 (B, H, blocks of rows)."""
        return self._lists(_PARTIAL)[0]

    @property
    def kv_indices(self) -> np.ndarray:
        """Which ones are partial: int32 (B, H, blocks of rows, blocks of keys), these first."""
        return self._lists(_PARTIAL)[1]

    @property
    def full_kv_num_blocks(self) -> np.ndarray:
        """How many blocks of each row of blocks are full."""
        return self._lists(_FULL)[0]

    @property
    def full_kv_indices(self) -> np.ndarray:
        """Which ones are full, these first."""
        return self._lists(_FULL)[1]

    @property
    def q_num_blocks(self) -> np.ndarray:
        """How many blocks of each column of blocks are partial: int32 (B, H, blocks of keys)."""
        return self._lists(_PARTIAL, of_rows=True)[0]

    @property
    def q_indices(self) -> np.ndarray:
        """Which ones are partial: int32 (B, H, blocks of keys, blocks of rows), these first."""
        return self._lists(_PARTIAL, of_rows=True)[1]

    @property
    def full_q_num_blocks(self) -> np.ndarray:
        """How many blocks of each column of blocks are full."""
        return self._lists(_FULL, of_rows=True)[0]

    @property
    def full_q_indices(self) -> np.ndarray:
        """Which ones of a column are full, these first."""
        return self._lists(_FULL, of_rows=True)[1]

    # ---- for a call ----

    def for_kernels(self, device: DeviceLike | None = None) -> ForKernels:
        """Return entries, Q_LEN, KV_LEN, BLOCK_SIZE, and whether the mask_mod uses b, and h.

        Entries are those on `device`, to which they are copied once.
        """
        _, _, rows, keys = self.shape
        entries = self.entries
        there = entries.device if device is None else _core.find_device(device)
        if there != entries.device:
            kept = self._copies.get(there)
            if kept is None or kept[1] is not entries:
                kept = self._copies[there] = _core.tensor(entries, there), entries
            entries = kept[0]
        return entries, rows, keys, _pair(self.BLOCK_SIZE), *self._uses

    def check_unchanged(self, now: Mods) -> None:
        """Raise ValueError if the mask_mod is no longer the one that the blocks are made for.

        Parameters
        ----------
        now : Mods
            The mask_mod as it is traced now.
        """
        made = self._mods
        if now.text != made.text or len(now.tables) != len(self._checksums):
            raise _changed("computes something else than at create_block_mask")
        if repr(now.numbers) != repr(made.numbers):  # NaN is equal to itself
            raise _changed(
                f"captures other numbers than at create_block_mask, {_numbers(now)} instead of "
                f"{_numbers(made)}"
            )
        for table, before in zip(now.tables, self._checksums, strict=True):
            after = checksum(table)
            if after != before and None not in (after, before):
                raise _changed(
                    "captures an array of other numbers than at create_block_mask, "
                    f"{dtype_name(table.dtype)} of shape {tuple(table.shape)}"
                )

    def __repr__(self) -> str:
        """Shape, sparsity, and a drawing of the first mask; raises as `sparsity`."""
        B, H, rows, keys = self.shape
        return (
            f"clattn.BlockMask(shape=({B}, {H}, {rows}, {keys}), BLOCK_SIZE={self.BLOCK_SIZE}, "
            f"sparsity={self.sparsity():.2f}%)\n{_draw(self.entries.numpy()[0, 0])}"
        )


def _pair(size: Any) -> tuple[Any, Any]:
    """Return the rows and the keys of a block."""
    pair = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    if len(pair) != 2:
        raise ValueError(
            f"BLOCK_SIZE is {size!r}; expected a number, or one for rows and one for keys"
        )
    return pair


def _everything(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> bool:
    """Attend to all keys."""
    return True


def _by_blocks(
    mask_mod: Callable[..., Any], entries: Tensor, rows: int, keys: int
) -> Callable[..., Any]:
    """Return the mask_mod that attends as the blocks say, and asks another in partial ones.

    Kernels ask for each key where blocks of their own have several of the mask's.
    """
    B, H = entries.shape[:2]

    def mask_by_blocks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        of = (b if B > 1 else 0, h if H > 1 else 0)
        entry = lookup(entries, *of, q_idx // rows, kv_idx // keys)
        return (entry == _FULL) | ((entry == _PARTIAL) & mask_mod(b, h, q_idx, kv_idx))

    return mask_by_blocks


def _of_some(
    mask_mod: Callable[..., Any], sizes: tuple[int, ...], picked: list[np.ndarray]
) -> Callable[..., Any]:
    """Return the mask_mod of some batches and heads of several."""

    def number(axis: int, place: Any) -> Any:
        if axis >= len(picked) or sizes[axis] == 1:
            return place
        picks = picked[axis]
        return int(picks[0]) if len(picks) == 1 else lookup(picks, place)

    def mask_of_some(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask_mod(number(0, b), number(1, h), q_idx, kv_idx)

    return mask_of_some


def from_torch(mask: Any, device: DeviceLike | None) -> BlockMask | None:
    """Return the block mask of one of torch's; None for other objects."""
    kind = type(mask)
    if kind.__name__ != "BlockMask" or not kind.__module__.startswith("torch.nn.attention."):
        return None
    return BlockMask.from_kv_blocks(
        mask.kv_num_blocks,
        mask.kv_indices,
        mask.full_kv_num_blocks,
        mask.full_kv_indices,
        mask.BLOCK_SIZE,
        mask.mask_mod,
        mask.seq_lengths,
        device=device,
    )


def _changed(how: str) -> ValueError:
    return ValueError(f"block_mask: its mask_mod {how}; expected the same: make a new block mask")


def _numbers(mods: Mods) -> str:
    return ", ".join(map(str, mods.numbers)) or "none"


def _draw(entries: np.ndarray) -> str:
    """Draw blocks, several as one where they are many: full if all are, empty if all are."""
    down, across = (-(-size // _MOST_DRAWN) for size in entries.shape)
    lines = []
    for top in range(0, entries.shape[0], down):
        drawn = ""
        for left in range(0, entries.shape[1], across):
            some = entries[top : top + down, left : left + across]
            alike = bool((some == some[0, 0]).all())
            drawn += _MARKS[some[0, 0] if alike else _PARTIAL] * 2
        lines.append(drawn.rstrip())
    return "\n".join(lines)


@opaque
def create_block_mask(
    mask_mod: Callable[..., Any],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: DeviceLike | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
) -> BlockMask:
    """Find the empty, partial and full blocks of a mask.

    As ``torch.nn.attention.flex_attention.create_block_mask``. A kernel computes the blocks; no
    memory of the size (Q_LEN, KV_LEN) is used. One block mask serves many calls.

    The blocks belong to the numbers and arrays that the mask_mod captures now. `flex_attention`
    refuses a block mask if a number has changed, or an array on the host: it compares a checksum at
    each call. What a Tensor holds is not compared; after a change of it the user has to make the
    block mask anew.

    Parameters
    ----------
    mask_mod : callable
        A function of (b, h, q_idx, kv_idx) that says what is attended to.
    B, H : int or None
        How many batches and heads have a mask of their own. None or 1: all have the same, and
        `flex_attention` refuses more than one if the function uses b or h. B counts the entries
        of all dimensions before the heads.
    Q_LEN : int
        Rows of the mask: at least as many as the positions of the queries.
    KV_LEN : int
        Keys: at least as many as those of the call.
    device : Device, str or int, optional
        See `clattn.devices`. Default: `clattn.get_default_device`, also for torch's CPU.
    BLOCK_SIZE : int or tuple of int
        Rows of a block, and its keys: one number for both, or two.
    _compile : bool
        Torch's argument, without effect.

    Returns
    -------
    BlockMask
        For `flex_attention`.

    Raises
    ------
    TypeError
        The mask_mod cannot be traced, or a size is no whole number.
    ValueError
        A size is below 1, or an array that the mask_mod captures does not fit.
    MemoryError
        Host or device memory does not suffice.
    DeviceError
        There is no usable OpenCL device, or OpenCL reports an error.

    Notes
    -----
    Block masks of FlexAttention: Dong et al., 2024, arXiv:2412.05496.

    Examples
    --------
    >>> def causal(b, h, q_idx, kv_idx):
    ...     return q_idx >= kv_idx
    >>> create_block_mask(causal, None, None, 512, 512)
    clattn.BlockMask(shape=(1, 1, 512, 512), BLOCK_SIZE=128, sparsity=37.50%)
    ░░
    ██░░
    ████░░
    ██████░░
    """
    if mask_mod is None:
        raise TypeError(f"mask_mod is None; expected a function of {MASK_PARAMETERS}")
    mods = trace_mods(None, mask_mod)
    shape = (1 if B is None else B, 1 if H is None else H, Q_LEN, KV_LEN)
    block = _pair(BLOCK_SIZE)
    entries = _core.find_blocks(mods, *shape, *block, without_torch(device))
    sizes = tuple(map(operator.index, shape))
    rows, keys = map(operator.index, block)
    size = rows if rows == keys else (rows, keys)
    return BlockMask(mask_mod, mods, entries, sizes, size)  # type: ignore[arg-type]
