"""Attention over packed sequences of different lengths, with keys in pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from clattn import _core
from clattn._arguments.bytes import read_bytes
from clattn._arguments.integers import integer, integers, table
from clattn._parts.lists import pack_lists
from clattn.flex.compile import trace_mods

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, Literal

    from clattn._arguments.arrays import Array, DeviceLike

__all__ = ["read_window", "varlen_attn"]


def varlen_attn(
    query: Array | Sequence[Array],
    key: Array | Sequence[Array],
    value: Array | Sequence[Array],
    cu_seq_q: Sequence[int] | Array | None = None,
    cu_seq_k: Sequence[int] | Array | None = None,
    max_q: int | None = None,
    max_k: int | None = None,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Sequence[int] | Array | None = None,
    block_table: Array | None = None,
    is_causal: bool | Literal["lower_right"] = False,
    page_layout: Literal["NHD", "HND"] = "NHD",
    softcap: float = 0.0,
    sinks: Array | None = None,
    key_scale: Array | float | None = None,
    value_scale: Array | float | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    device: DeviceLike | None = None,
) -> Any:
    """Return the attention of packed sequences: each one's rows attend to its own keys.

    As ``torch.nn.attention.varlen.varlen_attn``, with additions. Rows ``cu_seq_q[b]`` to
    ``cu_seq_q[b + 1] - 1`` of `query` are sequence b, and likewise of `key` and `value` by
    `cu_seq_k`. A sequence may have no rows or no keys. Work is divided by what each sequence costs.
    An array is a NumPy array, a `Tensor`, or an array of another library on the host.

    Parameters
    ----------
    query : array of shape (total_q, Hq, E), or list of arrays
        float16, bfloat16, float32 or float64. A list has an array (rows, Hq, E) for each sequence,
        of one library; it is packed, which copies it, and the results are lists.
    key : array of shape (total_k, Hk, E), or list of arrays
        Of query's dtype, int8, or float8 (``ml_dtypes.float8_e4m3fn``, ``float8_e5m2``): bytes that
        the scales multiply. With `block_table`, pages: (num_pages, page_size, Hk, E), or
        (num_pages, Hk, page_size, E) with `page_layout` "HND".
    value : array of shape (total_k, Hk, Ev), or list of arrays
        Likewise; a list if `key` is one.
    cu_seq_q : integers of shape (n + 1,)
        Offsets of the sequences: the first is 0, none is below the one before, the last is at most
        total_q. Needed but beside a list of queries. A Tensor is waited for; NumPy arrays and lists
        cost least.
    cu_seq_k : integers of shape (n + 1,), optional
        Likewise, of the keys. With `block_table` and `seqused_k` it is not needed. Not beside lists
        of keys and values.
    max_q, max_k : int, optional
        Taken as torch's function does, and not needed.
    scale : float, optional
        Default ``1 / sqrt(E)``.
    window_size : (int, int)
        ``(left, right)``: row i of a sequence of r rows and s keys keeps the keys
        ``p - left ... p + right``, where p is ``i + s - r``. -1 leaves a side unbounded. So
        ``(-1, 0)`` is causal, aligned at the end.
    enable_gqa : bool
        Grouped heads: Hq is a multiple of Hk, query head h reads key head ``h // (Hq // Hk)``.
    seqused_k : integers of shape (n,), optional
        How many keys of each sequence count. It ends there, for windows and alignment too.
    block_table : integers of shape (n, most), optional
        The pages of each sequence, in the order of its keys. An entry that no key needs may hold
        anything.
    is_causal : bool or "lower_right"
        True: row i attends key j where ``j <= i``; "lower_right": where ``j <= i + s - r``.
    page_layout : {"NHD", "HND"}
        How pages lie, with `block_table`.
    softcap : float
        Above 0, a scaled score s becomes ``softcap * tanh(s / softcap)``.
    sinks : array of shape (Hq,), optional
        See `clattn.scaled_dot_product_attention`.
    key_scale, value_scale : float32, optional
        Factors of keys and of values: one number, one for each head, (Hk,), or one for each key, of
        key's shape without the last dimension. int8 needs them. Default: 1.
    score_mod, mask_mod : callable, optional
        See `clattn.flex_attention`. b is the number of the sequence; positions count within it.
    return_lse : bool
        Also return the log-sum-exp of the scores.
    out : array of shape (total_q, Hq, Ev), optional
        The result is written here and `out` is returned.
    device : Device, str or int, optional
        Where to run, see `clattn.devices`. Default: `clattn.get_default_device`.

    Returns
    -------
    output : array of shape (total_q, Hq, Ev)
        Of the library of `query`. Rows behind the last sequence, and rows without a key, are 0.
        With a list of queries, a list of arrays (rows, Hq, Ev).
    lse : array of shape (Hq, total_q)
        With `return_lse`: natural logarithm, float32 (float64 for float64), -inf for these rows.
        With a list of queries, a list of arrays (Hq, rows).

    Raises
    ------
    TypeError, ValueError, MemoryError, DeviceError
        As `clattn.scaled_dot_product_attention`. Offsets, lengths and pages that do not fit are a
        ValueError that names them.

    Examples
    --------
    >>> import numpy as np
    >>> q = k = v = np.ones((5, 2, 8), np.float32)  # sequences of 3 and 2 rows
    >>> varlen_attn(q, k, v, [0, 3, 5], [0, 3, 5], is_causal=True).shape
    (5, 2, 8)

    Sequences that are arrays of their own:

    >>> x = [np.ones((n, 2, 8), np.float32) for n in (3, 0, 2)]
    >>> [len(rows) for rows in varlen_attn(x, x, x)]
    [3, 0, 2]
    """
    for number, name in (max_q, "max_q"), (max_k, "max_k"):
        if number is not None:
            integer(number, name)
    if page_layout not in ("NHD", "HND"):
        raise ValueError(f'page_layout is {page_layout!r}; expected "NHD" or "HND"')
    lists = pack_lists(query, key, value, cu_seq_q, cu_seq_k, out)
    modified = score_mod is not None or mask_mod is not None
    keys, values, code = read_bytes(lists.key, lists.value, key_scale, value_scale)
    results = _core.varlen_attn(
        lists.query,
        keys,
        values,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        window=read_window(window_size),
        softcap=softcap,
        out=out,
        device=device,
        sinks=sinks,
        key_scale=_scale(key_scale, "key_scale", code),
        value_scale=_scale(value_scale, "value_scale", code),
        code=code,
        layout="BLHE",
        mods=trace_mods(score_mod, mask_mod, lists.query) if modified else None,
        return_lse=return_lse,
        cu_seq_q=integers(lists.cu_seq_q, "cu_seq_q"),
        cu_seq_k=None if lists.cu_seq_k is None else integers(lists.cu_seq_k, "cu_seq_k"),
        seqused_k=None if seqused_k is None else integers(seqused_k, "seqused_k"),
        block_table=None if block_table is None else table(block_table, "block_table"),
        heads_first=page_layout == "HND",
    )
    return lists.results(results, return_lse)


def _scale(scale: Any, name: str, code: str | None) -> Any:
    """Return a scale as an array; None: there is none to multiply by."""
    if scale is None and code is not None:
        scale = 1
    if isinstance(scale, int | float | np.integer | np.floating):
        try:
            with np.errstate(over="raise"):
                return np.array(scale, np.float32)
        except (OverflowError, FloatingPointError):
            raise ValueError(f"{name} is beyond float32; expected a number of its range") from None
    return scale


def read_window(window_size: Any) -> tuple[int | None, int | None]:
    """Return a window of torch's as clattn's."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise TypeError(f"window_size is {window_size!r:.80}; expected two integers") from None
    sides = []
    for number in (left, right):
        side = integer(number, "window_size")
        if side < -1:
            raise ValueError(f"window_size is {window_size!r:.80}; expected -1 or more")
        sides.append(None if side == -1 else side)
    return sides[0], sides[1]
