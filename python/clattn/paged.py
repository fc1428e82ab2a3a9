"""Keys and values of many sequences in pages that they share, for serving a model."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from clattn import _core
from clattn._arguments.arrays import tensor_or_host
from clattn._arguments.dtypes import FLOATS
from clattn._arguments.integers import counts_of, size
from clattn._caches.base import Cache
from clattn._caches.pages import PagedSequence, Pages
from clattn.flex.compile import trace_mods

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from numpy.typing import DTypeLike

    from clattn._arguments.arrays import Array, DeviceLike
    from clattn._arguments.options import Window
    from clattn._caches.pages import Draft

__all__ = ["PagedKVCache"]

_T = TypeVar("_T")

# A place is a number of 63 bits, and a table of pages has 31.
_MOST_PAGES = 2**31 - 1


class PagedKVCache(Cache):
    """Keys and values of many sequences, in pages of a device's memory.

    The cache allocates memory for all pages once. A sequence takes a page when its last one is
    full, and gives its pages back when it is closed: so sequences of any lengths share the memory.
    A fork of a sequence shares its pages until one of the two writes.

    Parameters
    ----------
    num_pages : int
        Pages that there are.
    page_size : int
        Positions of a page.
    num_kv_heads : int
        Heads of keys and values, Hk. Query heads share them in groups.
    head_size : int
        Of queries and keys, E: 1 to 65,536.
    v_head_size : int, optional
        Of values, Ev: 1 to 65,536. Default: `head_size`.
    dtype : dtype or str
        How keys and values are kept: float16, bfloat16, float32 or float64; or as codes, "int8",
        "float8_e4m3fn", "float8_e5m2" or "int4", see `KVCache`.
    key_scale, value_scale : float, or array of shape (Hk,)
        Of float8: a key is its code times the scale.
    device : Device, str or int, optional
        See `clattn.devices`. Default: `clattn.get_default_device`.

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
    Pages and tables of them are those of PagedAttention (Kwon et al., 2023, "Efficient memory
    management for large language model serving with PagedAttention", arXiv:2309.06180).

    Codes, and the shapes of codes, scales and offsets, are those of `KVCache`, with pages for
    sequences: `key` is of shape (num_pages, Hk, page_size, E), `key_scale` of "int8" of shape
    (num_pages, Hk, page_size).

    Examples
    --------
    >>> cache = PagedKVCache(num_pages=8, page_size=4, num_kv_heads=2, head_size=8)
    >>> first, second = cache.open(2)
    >>> prompts = np.ones((9, 2, 8), np.float32)  # 6 positions of the first, 3 of the second
    >>> cache.append([first, second], prompts, prompts, cu_seq=[0, 6, 9])
    >>> branch = cache.fork(first)
    >>> cache.append([first, second, branch], prompts[:3], prompts[:3])
    >>> [cache.length(sequence) for sequence in (first, second, branch)], cache.free_pages
    ([7, 4, 7], 4)
    """

    __slots__ = ("_guard", "_pages")

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_size: int,
        v_head_size: int | None = None,
        dtype: DTypeLike = np.float32,
        key_scale: float | Array = 1.0,
        value_scale: float | Array = 1.0,
        device: DeviceLike | None = None,
    ) -> None:
        num_pages = size(num_pages, "num_pages", 0)
        if num_pages > _MOST_PAGES:
            raise ValueError(f"num_pages is {num_pages}; expected {_MOST_PAGES} at most")
        page_size = size(page_size, "page_size", 1)
        super().__init__(
            num_pages, page_size, num_kv_heads, head_size, v_head_size, dtype, key_scale,
            value_scale, device,
        )  # fmt: skip
        self._pages = Pages(num_pages, page_size)
        self._make_guard()

    def _make_guard(self) -> None:
        # Held for an instant: those who look at pages do not wait for a long change. Handlers of
        # signals may look, too.
        try:
            self._guard = threading.RLock()
        except RuntimeError as error:
            raise MemoryError("no memory for the lock of a cache") from error

    def _renew_locks(self) -> None:
        super()._renew_locks()
        self._make_guard()

    def _change(self, what: str, name: str, work: Callable[[Draft], _T]) -> _T:
        """Do the work of a change, which happens as a whole or not at all.

        `what` is a word of csrc/python/lock.h.
        """
        with self._state.hold(what, f"PagedKVCache.{name}"):
            with self._guard:
                draft = self._pages.draft()
            result = work(draft)
            with self._guard:
                self._pages.settle(draft)
            return result

    def _check(self, sequence: Any, name: str) -> PagedSequence:
        """Return a sequence of this cache."""
        if not isinstance(sequence, PagedSequence):
            raise TypeError(
                f"{name} is {type(sequence).__name__}; expected a sequence that `open` or `fork` "
                f"has returned"
            )
        if sequence.cache is not self._pages:
            raise ValueError(f"{name} is of another cache; expected one of this cache")
        return sequence

    def _listed(self, sequences: Any) -> list[PagedSequence]:
        """Return sequences of this cache, which may be closed."""
        given = [sequences] if isinstance(sequences, PagedSequence) else sequences
        try:
            listed = list(given)
        except TypeError:
            raise TypeError(
                f"sequences must be a list of sequences, got {type(sequences).__name__}"
            ) from None
        return [
            self._check(sequence, f"sequences[{place}]") for place, sequence in enumerate(listed)
        ]

    def _snapshot(self, listed: Sequence[PagedSequence]) -> tuple[np.ndarray, np.ndarray]:
        """Return the pages and the lengths of sequences at one time."""
        with self._guard:
            self._pages.settle()
            for place, sequence in enumerate(listed):
                self._pages.check(sequence, f"sequences[{place}]")
            return self._pages.table(listed)

    def open(self, n: int = 1) -> list[PagedSequence]:
        """Return n new sequences without positions.

        A sequence that is gone without having been closed gives its pages back.

        Raises
        ------
        TypeError, ValueError
            `n` is no whole number of 0 or more.
        """
        return [PagedSequence(self._pages) for _ in range(size(n, "n", 0))]

    def append(
        self,
        sequences: PagedSequence | Sequence[PagedSequence],
        key: Array,
        value: Array,
        cu_seq: Sequence[int] | Array | None = None,
    ) -> None:
        """Write keys and values behind the positions of sequences.

        Parameters
        ----------
        sequences : list of sequences
            Open ones of this cache, each of them once.
        key : array of shape (total, Hk, E)
            The new positions, those of one sequence behind those of the one before: a NumPy array,
            a Tensor on the cache's device, or an array of another library on the host. Of the
            cache's dtype; where the cache keeps codes, of any float dtype.
        value : array of shape (total, Hk, Ev)
            Likewise.
        cu_seq : integers of shape (len(sequences) + 1,), optional
            The rows of sequence n are ``cu_seq[n]`` to ``cu_seq[n + 1] - 1``. Default: as many for
            each sequence.

        Raises
        ------
        TypeError
            An argument of the wrong kind or dtype.
        ValueError
            Shapes or `cu_seq` do not fit, or a sequence is closed, of another cache, or there
            twice.
        MemoryError
            No page is free for a sequence, or host or device memory does not suffice.
        DeviceError
            OpenCL reports an error.
        RuntimeError
            The handler of a signal changes a cache that its thread is changing, or overwrites what
            its thread is reading.

        Notes
        -----
        After an exception the cache is as it was, for all sequences of the call. Ctrl-C ends a call
        that takes long.
        """
        listed = self._listed(sequences)
        if len(set(map(id, listed))) != len(listed):
            twice = next(n for n, each in enumerate(listed) if each in listed[:n])
            raise ValueError(f"sequences[{twice}] is there twice; expected each sequence once")
        # Arrays of other libraries are read before the change: their code may do anything.
        keys, values = tensor_or_host(key, "key"), tensor_or_host(value, "value")
        rows = self._state.count_rows(keys, values)
        counts = counts_of(cu_seq, "cu_seq", len(listed), rows, "key")

        def work(draft: Draft) -> None:
            found = []
            for place, (sequence, count) in enumerate(zip(listed, counts, strict=True)):
                self._pages.check(sequence, f"sequences[{place}]")
                found.append(draft.extend(sequence, count, f"sequences[{place}]"))
            places = np.concatenate(found, dtype=np.int64) if found else np.zeros(0, np.int64)
            if draft.copies:
                self._state.copy_rows(draft.moves())
            if places.size > 0:
                self._state.write_rows(keys, values, places)

        self._change("grows", "append", work)

    def attend(
        self,
        query: Array,
        sequences: PagedSequence | Sequence[PagedSequence],
        cu_seq_q: Sequence[int] | Array | None = None,
        is_causal: bool = True,
        scale: float | None = None,
        window: Window = None,
        softcap: float = 0.0,
        *,
        sinks: Array | None = None,
        score_mod: Callable[..., Any] | None = None,
        return_lse: bool = False,
        out: Array | None = None,
    ) -> Any:
        """Return the attention of queries to the keys of their sequences.

        The rows of a sequence are its last positions: row i of r is at position
        ``p = length - r + i``. One call takes prompts and single tokens together.

        Parameters
        ----------
        query : array of shape (total, Hq, E)
            The rows of one sequence behind those of the one before. Of the cache's dtype; where the
            cache keeps codes, of any float dtype. Hq is a multiple of Hk, query head h reads key
            head ``h // (Hq // Hk)``.
        sequences : list of sequences
            Open ones of this cache. One may be there several times.
        cu_seq_q : integers of shape (len(sequences) + 1,), optional
            The rows of sequence n are ``cu_seq_q[n]`` to ``cu_seq_q[n + 1] - 1``. Default: as many
            for each sequence.
        is_causal : bool
            Row i attends key j where ``j <= p``.
        scale : float, optional
            Default ``1 / sqrt(E)``.
        window : (int or None, int or None), optional
            ``(left, right)`` keeps the keys ``p - left ... p + right``.
        softcap : float
            Above 0, a scaled score s becomes ``softcap * tanh(s / softcap)``.
        sinks : array of shape (Hq,), optional
            See `clattn.scaled_dot_product_attention`.
        score_mod : callable, optional
            A function of (score, b, h, q_idx, kv_idx) that returns the score to use, see
            `clattn.flex_attention`: b is the sequence's place in `sequences`, q_idx is the position
            p.
        return_lse : bool
            Also return the log-sum-exp of the scores.
        out : array of shape (total, Hq, Ev), optional
            The result is written here and `out` is returned.

        Returns
        -------
        output : array of shape (total, Hq, Ev)
            Of the library of `query`. A row with no key to attend to is zero.
        lse : array of shape (Hq, total)
            With `return_lse`: natural logarithm, float32 (float64 for float64), -inf for a row with
            no key.

        Raises
        ------
        TypeError, ValueError, MemoryError, DeviceError
            As `clattn.varlen_attn`; or a sequence is closed or of another cache.

        Examples
        --------
        >>> cache = PagedKVCache(num_pages=8, page_size=4, num_kv_heads=2, head_size=8)
        >>> waiting, running = cache.open(2)
        >>> cache.append([waiting, running], *np.ones((2, 6, 2, 8), "f4"), cu_seq=[0, 5, 6])
        >>> query = np.ones((6, 4, 8), "f4")  # the prompt of one, a token of the other
        >>> cache.attend(query, [waiting, running], cu_seq_q=[0, 5, 6]).shape
        (6, 4, 8)
        """
        listed = self._listed(sequences)
        rows = self._rows_of(query)
        counts = counts_of(cu_seq_q, "cu_seq_q", len(listed), rows, "query")
        mods = None if score_mod is None else trace_mods(score_mod, None, query)
        if not isinstance(is_causal, bool | np.bool_):
            raise TypeError(f"is_causal is {is_causal!r:.80}; expected True or False")
        with self._state.hold("reads", "PagedKVCache.attend"):
            table, lengths = self._snapshot(listed)
            return _core.varlen_attn(
                query,
                self._state.key,
                self._state.value,
                is_causal="lower_right" if is_causal else False,
                scale=scale,
                enable_gqa=True,
                window=window,
                softcap=softcap,
                sinks=sinks,
                layout="BLHE",
                mods=mods,
                out=out,
                return_lse=return_lse,
                cu_seq_q=np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]),
                seqused_k=lengths,
                block_table=table.astype(np.int64),
                heads_first=True,
                rows_are_last=True,
                key_scale=self.key_scale,
                value_scale=self.value_scale,
                key_offset=self.key_offset,
                value_offset=self.value_offset,
                value_size=self.v_head_size,
                code=self.dtype if isinstance(self.dtype, str) else None,
            )

    def _rows_of(self, query: Any) -> int:
        """Return how many rows a query has. Its dtype is the cache's, unless that keeps codes."""
        name = str(getattr(query, "dtype", "")).removeprefix("torch.")
        if not isinstance(self.dtype, str) and name in FLOATS and name != self.dtype.name:
            raise TypeError(f"query has dtype {name}; expected {self.dtype}, that of the cache")
        shape = [int(size) for size in getattr(query, "shape", ())]
        fits = len(shape) == 3 and shape[1] % self.num_kv_heads == 0
        if not fits or shape[2] != self.head_size:
            raise ValueError(
                f"query has shape {tuple(shape)}; expected (total, Hq, {self.head_size}), Hq a "
                f"multiple of the cache's {self.num_kv_heads} heads"
            )
        return int(shape[0])

    def fork(self, sequence: PagedSequence) -> PagedSequence:
        """Return a new sequence with the positions of another one.

        The two share pages. A page is copied when one of them writes to it while the other has it.

        Raises
        ------
        TypeError, ValueError
            No open sequence of this cache.
        RuntimeError
            As for `append`.

        Examples
        --------
        >>> cache = PagedKVCache(num_pages=2, page_size=4, num_kv_heads=1, head_size=1)
        >>> (sequence,) = cache.open()
        >>> cache.append(sequence, np.ones((3, 1, 1), "f4"), np.ones((3, 1, 1), "f4"))
        >>> branch = cache.fork(sequence)
        >>> cache.free_pages
        1
        >>> cache.append(branch, np.zeros((1, 1, 1), "f4"), np.zeros((1, 1, 1), "f4"))
        >>> cache.free_pages, cache.length(sequence), cache.length(branch)
        (0, 3, 4)
        """
        self._check(sequence, "sequence")

        def work(draft: Draft) -> PagedSequence:
            self._pages.check(sequence, "sequence")
            return draft.fork(sequence)

        return self._change("shares", "fork", work)

    def truncate(self, sequence: PagedSequence, n: int) -> None:
        """Forget the positions from n on. Pages without a position are free again.

        Raises
        ------
        TypeError
            No sequence, or `n` is no whole number.
        ValueError
            `n` is below 0 or above the length, or the sequence is closed or of another cache. The
            cache stays as it was.
        RuntimeError
            As for `append`.
        """
        self._check(sequence, "sequence")
        n = size(n, "n", 0)

        def work(draft: Draft) -> None:
            length = self._pages.table([sequence])[1][0]
            self._pages.check(sequence, "sequence")
            if n > length:
                raise ValueError(f"n is {n}; expected 0 to {length}, the length")
            draft.truncate(sequence, n)

        self._change("forgets", "truncate", work)

    def close(self, sequence: PagedSequence) -> None:
        """Give the pages of a sequence back. No call takes the sequence any more.

        Raises
        ------
        TypeError, ValueError
            No open sequence of this cache.
        RuntimeError
            As for `append`.
        """
        self._check(sequence, "sequence")

        def work(draft: Draft) -> None:
            self._pages.check(sequence, "sequence")
            draft.close(sequence)

        self._change("forgets", "close", work)

    def length(self, sequence: PagedSequence) -> int:
        """Return the number of positions of a sequence.

        Raises
        ------
        TypeError, ValueError
            No open sequence of this cache.
        """
        sequence = self._check(sequence, "sequence")
        with self._guard:
            self._pages.settle()
            self._pages.check(sequence, "sequence")
            return int(self._pages.table([sequence])[1][0])

    def block_table(self, sequences: PagedSequence | Sequence[PagedSequence]) -> np.ndarray:
        """Return the pages of sequences, as `clattn.varlen_attn` takes them.

        A copy, int32 of shape (n, most): the pages of sequence n in order, then -1. It is valid
        until one of the sequences changes.

        Raises
        ------
        TypeError, ValueError
            Not all are open sequences of this cache.
        """
        return self._snapshot(self._listed(sequences))[0]

    def __reduce__(self) -> Any:
        """Refuse: a device's memory does not go to other processes."""
        raise TypeError("a clattn.PagedKVCache cannot be pickled or copied")

    @property
    def free_pages(self) -> int:
        """The number of pages that no sequence has."""
        with self._guard:
            return self._pages.free

    @property
    def num_pages(self) -> int:
        """The number of pages."""
        return self._pages.num_pages

    @property
    def page_size(self) -> int:
        """The positions of a page."""
        return self._pages.page_size

    def __repr__(self) -> str:
        """Sizes, how much is free, dtype and device."""
        return self._show(
            num_pages=self.num_pages, page_size=self.page_size, free_pages=self.free_pages
        )
