"""Block masks: which blocks of a mask are empty, partial or full."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from clattn import _core
from clattn.flex.compile import MASK_PARAMETERS, Mods, trace_mods
from clattn.flex.opencl_c import uses
from clattn.flex.tables import checksum, dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from clattn._arguments.arrays import DeviceLike
    from clattn._core import Device, Tensor

__all__ = ["BlockMask", "create_block_mask"]

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
    BLOCK_SIZE : int
        Rows of a block, and its keys.
    entries : Tensor
        uint8 of shape (B, H, blocks of rows, blocks of keys): 0 empty, 1 partial, 2 full.
    device : Device
        The device that holds `entries`.
    """

    __slots__ = ("BLOCK_SIZE", "_checksums", "_mods", "_uses", "entries", "mask_mod", "shape")

    def __init__(
        self,
        mask_mod: Callable[..., Any],
        mods: Mods,
        entries: Tensor,
        shape: tuple[int, int, int, int],
        block_size: int,
    ) -> None:
        self.mask_mod = mask_mod
        self._mods = mods._replace(tables=())
        self._checksums = tuple(map(checksum, mods.tables))
        self._uses = uses(mods.text, "b"), uses(mods.text, "h")
        self.entries = entries
        self.shape = shape
        self.BLOCK_SIZE = block_size

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

    def for_kernels(self) -> tuple[Tensor, int, int, int, bool, bool]:
        """Return entries, Q_LEN, KV_LEN, BLOCK_SIZE, and whether the mask_mod uses b, and h."""
        _, _, rows, keys = self.shape
        return self.entries, rows, keys, self.BLOCK_SIZE, *self._uses

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


def create_block_mask(
    mask_mod: Callable[..., Any],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: DeviceLike | None = None,
    BLOCK_SIZE: int = 128,
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
        Keys.
    device : Device, str or int, optional
        See `clattn.devices`. Default: `clattn.get_default_device`.
    BLOCK_SIZE : int
        Rows of a block, and its keys.

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
    entries = _core.find_blocks(mods, *shape, BLOCK_SIZE, device)
    sizes = tuple(map(operator.index, shape))
    return BlockMask(mask_mod, mods, entries, sizes, operator.index(BLOCK_SIZE))  # type: ignore[arg-type]
