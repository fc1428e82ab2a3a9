"""Attention on dask arrays: on more keys or heads than one memory holds, or on several machines.

``clattn.dask.scaled_dot_product_attention`` and ``clattn.dask.flex_attention`` return lazy arrays.
A task attends to one chunk of keys, and tasks of a tree merge the results. Importing this module
imports dask, which the extra ``dask`` installs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from clattn._host.extras import how_to_install

try:
    import dask.array as da
except ImportError as error:
    raise ImportError(f"clattn.dask needs dask: {how_to_install('dask')}") from error

from clattn import attention
from clattn._arguments.operands import FACTORS, Operands
from clattn._parts.bands import Band, band_of
from clattn.dask.chunks import check_call, lay_out, read_operands
from clattn.dask.graph import build_graph
from clattn.dask.mods import trace_for_chunks
from clattn.dask.tasks import Call, packed
from clattn.flex.attention import attend_with_mods
from clattn.flex.compile import trace_mods

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal, TypedDict, Unpack

    from clattn._arguments.arrays import Array, DeviceLike
    from clattn._arguments.options import Window

    class _Where(TypedDict, total=False):
        device: DeviceLike | None
        split_every: int | None

    class _Options(_Where, total=False):
        window: Window
        softcap: float
        sinks: da.Array | Array | None


__all__ = ["flex_attention", "scaled_dot_product_attention"]


@overload
def scaled_dot_product_attention(
    query: da.Array,
    key: da.Array,
    value: da.Array,
    attn_mask: da.Array | Array | None = None,
    is_causal: bool | Literal["lower_right"] = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> da.Array: ...
@overload
def scaled_dot_product_attention(
    query: da.Array,
    key: da.Array,
    value: da.Array,
    attn_mask: da.Array | Array | None = None,
    is_causal: bool | Literal["lower_right"] = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[da.Array, da.Array]: ...
@overload
def scaled_dot_product_attention(
    query: da.Array,
    key: da.Array,
    value: da.Array,
    attn_mask: da.Array | Array | None = None,
    is_causal: bool | Literal["lower_right"] = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: bool = False,
    **options: Unpack[_Options],
) -> Any: ...
def scaled_dot_product_attention(
    query: da.Array,
    key: da.Array,
    value: da.Array,
    attn_mask: da.Array | Array | None = None,
    is_causal: bool | Literal["lower_right"] = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: Window = None,
    softcap: float = 0.0,
    sinks: da.Array | Array | None = None,
    return_lse: bool = False,
    device: DeviceLike | None = None,
    split_every: int | None = None,
) -> Any:
    """Return attention over dask arrays, as a dask array.

    The arguments are those of `clattn.scaled_dot_product_attention`. Nothing is computed here.
    Every dimension but the last may be in chunks; the result has the chunks of `query`. Pairs
    of chunks that causality or the window excludes are not in the graph.

    Parameters
    ----------
    query, key, value : dask arrays of shape (..., Hq, L, E), (..., Hk, S, E), (..., Hk, S, Ev)
        Where the leading dimensions of key and value have other chunks than query's, they are
        rechunked to query's. Value is unified with key along S.
    attn_mask : dask array or other array, optional
        Broadcasts to (..., Hq, L, S). It is rechunked to the chunks of query and key.
    is_causal : bool or "lower_right"
        As for the whole arrays: True is ``j <= i``, "lower_right" is ``j <= i + S - L``.
    scale : float, optional
        Default ``1 / sqrt(E)``.
    enable_gqa : bool
        Grouped heads. Chunks of query's heads that cut groups repeat key heads.
    window : (int or None, int or None), optional
        Keys to the left and to the right of a row's position that are kept.
    softcap : float
        Above 0, a scaled score s becomes ``softcap * tanh(s / softcap)`` before the mask.
    sinks : dask array or other array of shape (Hq,), optional
        A logit for each query head that takes part in the sum and in no value.
    return_lse : bool
        Also return the log-sum-exp of the masked scores.
    device : Device, str or int, optional
        Where workers run. A Device is found by its platform, name and number. Default: each
        worker's default device, such as its ``CLATTN_DEVICE``.
    split_every : int, optional
        At most so many parts are merged in one task, 2 or more. Default: dask's.

    Returns
    -------
    output : dask array of shape (..., Hq, L, Ev)
        Of query's dtype.
    lse : dask array of shape (..., Hq, L)
        With `return_lse`: natural logarithm, float32 (float64 for float64).

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype.
    ValueError
        Shapes, ranges or combinations do not fit, or chunks do not; the message has the
        ``rechunk`` that helps.
    MemoryError, DeviceError
        While the result is computed: memory of a worker or its device does not suffice, it has no
        such device, or OpenCL reports an error.

    Notes
    -----
    A row's results over several chunks of keys are float32 (float64 for float64). They are merged
    in float64, by the base and the sum of each row's softmax, and rounded once. Splits of the keys
    are those of Flash-Decoding (Dao et al., 2023).

    Examples
    --------
    >>> import dask.array as da
    >>> q = k = v = da.random.random((2, 4096, 64), chunks=(1, 1024, 64))
    >>> scaled_dot_product_attention(q, k, v, is_causal=True).chunks
    ((1, 1), (1024, 1024, 1024, 1024), (64,))
    """
    options: dict[str, Any] = {
        "scale": scale,
        "enable_gqa": enable_gqa,
        "softcap": softcap,
    }
    operands = read_operands(Operands(query, key, value, attn_mask, sinks))
    shape = check_call(
        attention.scaled_dot_product_attention,
        operands,
        return_lse,
        is_causal=is_causal,
        window=window,
        device=device,
        **options,
    )
    no_heads = operands.sinks is not None and len(shape) == 1
    if no_heads:  # but sinks are of heads
        operands, shape = operands.map(lambda array: array[None], *FACTORS), (1, *shape)
    layout = lay_out(shape, operands, enable_gqa)
    band = band_of(is_causal, window, query.shape[-2], key.shape[-2])
    # Tasks get a window for causality too.
    options["window"] = None if band.left is None and band.right is None else band[:2]
    call = Call(options, band.shift, None, packed(device), bool(return_lse))
    results = build_graph(layout, call, band, split_every)
    if not no_heads:
        return results
    return tuple(result[0] for result in results) if return_lse else results[0]


@overload
def flex_attention(
    query: da.Array,
    key: da.Array,
    value: da.Array,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[False] = False,
    **where: Unpack[_Where],
) -> da.Array: ...
@overload
def flex_attention(
    query: da.Array,
    key: da.Array,
    value: da.Array,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[True],
    **where: Unpack[_Where],
) -> tuple[da.Array, da.Array]: ...
@overload
def flex_attention(
    query: da.Array,
    key: da.Array,
    value: da.Array,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: bool = False,
    **where: Unpack[_Where],
) -> Any: ...
def flex_attention(
    query: da.Array,
    key: da.Array,
    value: da.Array,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: bool = False,
    device: DeviceLike | None = None,
    split_every: int | None = None,
) -> Any:
    """Return attention with scores and masks that the user writes, over dask arrays.

    The arguments are those of `clattn.flex_attention`; chunks, `device` and `split_every` those
    of `scaled_dot_product_attention`. Functions get the numbers of batch, head, row and key in the
    whole arrays. They are called with symbols here, more than once, and not in the tasks. Numbers
    and arrays that they capture are copied here.

    Parameters
    ----------
    query, key, value : dask arrays of shape (..., Hq, L, E), (..., Hk, S, E), (..., Hk, S, Ev)
        Any chunks but of the last dimension.
    score_mod : callable, optional
        A function of (score, b, h, q_idx, kv_idx) that returns the score to use.
    mask_mod : callable, optional
        A function of (b, h, q_idx, kv_idx) that says what is attended to. Every pair of chunks
        is in the graph.
    scale : float, optional
        Default ``1 / sqrt(E)``.
    enable_gqa : bool
        Grouped heads.
    return_lse : bool
        Also return the log-sum-exp of the scores.
    device : Device, str or int, optional
        Where workers run.
    split_every : int, optional
        At most so many parts are merged in one task, 2 or more. Default: dask's.

    Returns
    -------
    output : dask array of shape (..., Hq, L, Ev)
        Of query's dtype.
    lse : dask array of shape (..., Hq, L)
        With `return_lse`.

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype, or a function that cannot be traced.
    ValueError
        Shapes, ranges, combinations or chunks do not fit.
    MemoryError, DeviceError
        While the result is computed, as for `scaled_dot_product_attention`.

    Examples
    --------
    >>> import dask.array as da
    >>> q = k = v = da.ones((2, 4096, 64), chunks=(1, 1024, 64))
    >>> def near(b, h, q_idx, kv_idx):
    ...     return abs(q_idx - kv_idx) < 100
    >>> flex_attention(q, k, v, mask_mod=near).numblocks
    (2, 4, 1)
    """
    options = {"scale": scale, "enable_gqa": enable_gqa}
    functions = {"score_mod": score_mod, "mask_mod": mask_mod}
    operands = read_operands(Operands(query, key, value))
    if score_mod is None and mask_mod is None:
        return scaled_dot_product_attention(
            query, key, value, None, False, scale, enable_gqa, return_lse=return_lse,
            device=device, split_every=split_every,
        )  # fmt: skip
    shape = check_call(
        attend_with_mods,
        operands,
        return_lse,
        mods=trace_mods(**functions),
        device=device,
        **options,
    )
    layout = lay_out(shape, operands, enable_gqa)
    mods = trace_for_chunks(functions, shape if len(shape) > 1 else (1, *shape), key.shape[-2])
    call = Call(options, 0, mods, packed(device), bool(return_lse))
    return build_graph(layout, call, Band(None, None, 0), split_every)
