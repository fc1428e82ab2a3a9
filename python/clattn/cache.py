"""Keys and values of all positions so far, for decoding token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

import numpy as np

from clattn._arguments.integers import integers, one_or_several, size
from clattn._caches.base import Cache, renew_locks
from clattn._host.fork import call_in_children
from clattn.flex.compile import trace_mods

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, Literal, Unpack

    from numpy.typing import DTypeLike

    from clattn._arguments.arrays import Array, ArrayT, DeviceLike
    from clattn._arguments.options import AttendOptions, Window
    from clattn._core import Tensor

__all__ = ["KVCache"]


class KVCache(Cache):
    """Keys and values of a batch of sequences, in a device's memory.

    The cache allocates memory for `capacity` positions once. `append` writes behind the filled
    positions, and `attend` reads them in place: a growing sequence causes no copy and no
    compilation.

    Parameters
    ----------
    batch : int
        Sequences, B.
    num_kv_heads : int
        Heads of keys and values, Hk. Query heads share them in groups.
    capacity : int
        The number of positions that fit.
    head_size : int
        Of queries and keys, E: 1 to 65,536.
    v_head_size : int, optional
        Of values, Ev: 1 to 65,536. Default: `head_size`.
    dtype : dtype or str
        How keys and values are kept: float16, bfloat16, float32 or float64; or as codes, "int8",
        "float8_e4m3fn", "float8_e5m2" or "int4", see Notes.
    device : Device, str or int, optional
        See `clattn.devices`. Default: `clattn.get_default_device`.
    key_scale, value_scale : float, or array of shape (Hk,)
        Of float8: a key is its code times the scale.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong kind or range; the message names it.
    ModuleNotFoundError
        `dtype` is the word "bfloat16", and ml_dtypes is not installed.
    MemoryError
        The device's memory does not suffice.
    DeviceError
        There is no usable OpenCL device, or OpenCL reports an error.

    Notes
    -----
    Keys and values of earlier positions are kept because decoding needs them for each new token
    (Pope et al., 2022, "Efficiently scaling transformer inference", arXiv:2211.05102).

    ======= ================================== ============== ================== ==================
    word    a number is                        bytes of a key `key`              `key_scale`
    ======= ================================== ============== ================== ==================
    floats  itself                             E * itemsize   (B, Hk, length, E) None
    int8    ``code * scale``                   E + 4          (B, Hk, length, E) (B, Hk, length)
    float8  ``code * scale``                   E              (B, Hk, length, E) (Hk,)
    int4    ``code * scale + offset``, both    E/2 + E/4      (B, Hk, length,    (B, Hk, length,
            for each 32 numbers                               E/2)               E/32)
    ======= ================================== ============== ================== ==================

    Bytes are those of a key of one head; a cache has B * Hk * capacity keys, and as many values.
    Codes are int8, or uint8 for float8. For int4 two codes are in a byte, the first one in its low
    half, and E/2 and E/32 are rounded up. Scales and offsets (`key_offset`, of the shape of
    `key_scale`) are float32. Codes are rounded to nearest, ties to even. A number too large for
    float8 becomes the largest code. NaN and infinity make the scale of their key NaN in int8 and
    int4.

    Examples
    --------
    >>> cache = KVCache(batch=1, num_kv_heads=2, capacity=100, head_size=8)
    >>> for _ in range(3):
    ...     cache.append(np.ones((1, 2, 1, 8), np.float32), np.ones((1, 2, 1, 8), np.float32))
    >>> cache.attend(np.ones((1, 4, 1, 8), np.float32)).shape, cache.length
    ((1, 4, 1, 8), 3)
    """

    __slots__ = ()

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        capacity: int,
        head_size: int,
        v_head_size: int | None = None,
        dtype: DTypeLike = np.float32,
        device: DeviceLike | None = None,
        *,
        key_scale: float | Array = 1.0,
        value_scale: float | Array = 1.0,
    ) -> None:
        batch = size(batch, "batch", 1)
        capacity = size(capacity, "capacity", 0)
        super().__init__(
            batch, capacity, num_kv_heads, head_size, v_head_size, dtype, key_scale, value_scale,
            device,
        )  # fmt: skip

    def append(self, key: Array, value: Array, counts: Sequence[int] | Array | None = None) -> None:
        """Write keys and values behind the filled positions.

        Parameters
        ----------
        key : array of shape (B, Hk, n, E)
            A NumPy array, a Tensor on the cache's device, or an array of another library on the
            host. Of the cache's dtype; where the cache keeps codes, of any float dtype.
        value : array of shape (B, Hk, n, Ev)
            Likewise.
        counts : integers of shape (B,), optional
            Sequence b takes only the last ``counts[b]`` of the n positions, because a batch of
            prompts is padded on the left. Default: all n.

        Raises
        ------
        TypeError
            An argument of the wrong kind or dtype.
        ValueError
            Shapes do not fit, counts are outside 0 to n, or a sequence would exceed the
            capacity. The cache stays as it was.
        MemoryError
            Host or device memory does not suffice. The cache stays as it was.
        DeviceError
            OpenCL reports an error.
        RuntimeError
            The handler of a signal changes a cache that its thread is changing, or overwrites what
            its thread is reading.

        Notes
        -----
        Ctrl-C ends a call that takes long. The cache stays as it was.
        """
        numbers = None if counts is None else integers(counts, "counts")
        self._state.append(key, value, numbers)

    @overload
    def attend(
        self,
        query: ArrayT,
        attn_mask: Array | None = None,
        is_causal: bool = True,
        scale: float | None = None,
        window: Window = None,
        softcap: float = 0.0,
        *,
        return_lse: Literal[False] = False,
        **options: Unpack[AttendOptions],
    ) -> ArrayT: ...
    @overload
    def attend(
        self,
        query: Tensor,
        attn_mask: Array | None = None,
        is_causal: bool = True,
        scale: float | None = None,
        window: Window = None,
        softcap: float = 0.0,
        *,
        return_lse: Literal[True],
        **options: Unpack[AttendOptions],
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def attend(
        self,
        query: ArrayT,
        attn_mask: Array | None = None,
        is_causal: bool = True,
        scale: float | None = None,
        window: Window = None,
        softcap: float = 0.0,
        *,
        return_lse: Literal[True],
        **options: Unpack[AttendOptions],
    ) -> tuple[ArrayT, Any]: ...
    @overload
    def attend(
        self,
        query: ArrayT,
        attn_mask: Array | None = None,
        is_causal: bool = True,
        scale: float | None = None,
        window: Window = None,
        softcap: float = 0.0,
        *,
        return_lse: bool = False,
        **options: Unpack[AttendOptions],
    ) -> Any: ...
    def attend(
        self,
        query: Array,
        attn_mask: Array | None = None,
        is_causal: bool = True,
        scale: float | None = None,
        window: Window = None,
        softcap: float = 0.0,
        *,
        score_mod: Callable[..., Any] | None = None,
        return_lse: bool = False,
        out: Array | None = None,
    ) -> Any:
        """Return the attention of queries to the keys in the cache.

        The queries are the last L positions of each sequence: row i of sequence b is at
        position ``p = lengths[b] - L + i``.

        Parameters
        ----------
        query : array of shape (B, Hq, L, E)
            Of the cache's dtype; where the cache keeps codes, of any float dtype. Hq is a multiple
            of Hk, query head h reads key head ``h // (Hq // Hk)``.
        attn_mask : array, optional
            Broadcasts to (B, Hq, L, length). bool (True attends) or any float dtype (added to the
            scaled scores; -inf excludes).
        is_causal : bool
            Row i attends key j where ``j <= p``. Composes with `attn_mask`.
        scale : float, optional
            Default ``1 / sqrt(E)``.
        window : (int or None, int or None), optional
            ``(left, right)`` keeps the keys ``p - left ... p + right``.
        softcap : float
            Above 0, a scaled score s becomes ``softcap * tanh(s / softcap)`` before the mask.
        score_mod : callable, optional
            A function of (score, b, h, q_idx, kv_idx) that returns the score to use, see
            `clattn.flex_attention`; q_idx is the position p.
        return_lse : bool
            Also return the log-sum-exp of the masked scores.
        out : array of shape (B, Hq, L, Ev), optional
            The result is written here and `out` is returned; of query's dtype, with any strides.
            It may share memory with the cache or with an argument; no two of its elements may share
            any.

        Returns
        -------
        output : array of shape (B, Hq, L, Ev)
            Of the library of `query`. A row with no key to attend to is zero.
        lse : array of shape (B, Hq, L)
            With `return_lse`: natural logarithm, float32 (float64 for float64), -inf for a row
            with no key.

        Raises
        ------
        TypeError, ValueError, MemoryError, DeviceError
            As `clattn.scaled_dot_product_attention`.
        RuntimeError
            The handler of a signal attends during a `reorder` of its thread.
        """
        mods = None if score_mod is None else trace_mods(score_mod, None, query)
        return self._state.attend(
            query,
            attn_mask=attn_mask,
            is_causal=is_causal,
            scale=scale,
            window=window,
            softcap=softcap,
            return_lse=return_lse,
            out=out,
            mods=mods,
        )

    def truncate(self, n: int | Sequence[int] | Array) -> None:
        """Forget the positions from n on.

        Parameters
        ----------
        n : int, or integers of shape (B,)
            One number shortens every longer sequence to n; several are the new lengths.

        Raises
        ------
        TypeError
            `n` is not made of integers.
        ValueError
            A number is below 0 or above the length. The cache stays as it was.
        RuntimeError
            As for `append`.
        """
        lengths = one_or_several(n, "n")
        self._state.truncate(size(lengths, "n", 0) if isinstance(lengths, int) else lengths)

    def reset(self) -> None:
        """Forget all positions.

        Raises
        ------
        RuntimeError
            As for `append`.
        """
        self._state.truncate(0)

    def reorder(self, indices: Sequence[int] | Array) -> None:
        """Let sequence b become what sequence ``indices[b]`` was, as beam search does.

        A sequence may be taken several times. Those that move are copied on the device, by way of
        memory for the filled positions.

        Parameters
        ----------
        indices : integers of shape (B,)
            Each 0 to B - 1.

        Raises
        ------
        TypeError
            `indices` is not made of integers.
        ValueError
            Not B numbers, or a number is no sequence's. The cache stays as it was.
        MemoryError, DeviceError
            The device's memory does not suffice, or OpenCL reports an error. The cache stays as it
            was, or, where the error comes while sequences move, those that move have no positions.
        RuntimeError
            As for `append`.

        Examples
        --------
        >>> cache = KVCache(batch=2, num_kv_heads=1, capacity=4, head_size=1)
        >>> first = np.array([[[[1]]], [[[2]]]], np.float32)
        >>> cache.append(first, first)
        >>> cache.reorder([1, 1])
        >>> cache.key.numpy().ravel()
        array([2., 2.], dtype=float32)
        """
        self._state.reorder(integers(indices, "indices"))

    def copy(self) -> KVCache:
        """Return a new cache with the same sizes, keys and values, in memory of its own.

        Raises
        ------
        MemoryError
            The device's memory does not suffice.
        DeviceError
            OpenCL reports an error.
        RuntimeError
            As for `append`.
        """
        other = KVCache(
            self.batch, self.num_kv_heads, self.capacity, self.head_size, self.v_head_size,
            self.dtype, self.device, **self._float8_scales(),
        )  # fmt: skip
        other._state.copy_from(self._state)
        return other

    def _float8_scales(self) -> dict[str, Any]:
        if not str(self.dtype).startswith("float8"):
            return {}
        return {"key_scale": self.key_scale, "value_scale": self.value_scale}

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        """Return `copy`."""
        return self.copy()

    def __reduce__(self) -> Any:
        """Refuse: a device's memory does not go to other processes."""
        instead = "" if isinstance(self.dtype, str) else (
            "; pickle cache.key.numpy() and cache.value.numpy(), and append them to a new cache"
        )  # fmt: skip
        raise TypeError(f"a clattn.KVCache cannot be pickled{instead}")

    @property
    def length(self) -> int:
        """The length of the longest sequence."""
        return self._state.length

    @property
    def lengths(self) -> np.ndarray:
        """The length of each sequence: int64 of shape (B,), a new array."""
        return np.array(self._state.lengths, np.int64)

    def _shown(self, rows: Tensor) -> Tensor:
        """Return a view of the filled positions."""
        return rows[:, :, : self.length]

    @property
    def batch(self) -> int:
        """The number of sequences, B."""
        return self._state.key.shape[0]

    @property
    def capacity(self) -> int:
        """The number of positions that fit."""
        return self._state.key.shape[2]

    def __repr__(self) -> str:
        """Sizes, how much is filled, dtype and device."""
        lengths = self._state.lengths
        filled = lengths[0] if len(set(lengths)) == 1 else list(lengths)
        return self._show(batch=self.batch, capacity=self.capacity, length=filled)


call_in_children(renew_locks)
