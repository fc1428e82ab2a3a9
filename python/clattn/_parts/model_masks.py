"""What models of transformers attend to: numbers and padding in place of dense masks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree
from transformers import masking_utils

from clattn._parts import torch_sequences

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["AttentionMask", "BandOptions", "count_seen_keys", "make_mask"]

# Families that take 0 in a mask for a key that is attended to, in a bool mask too: DeepSeek-V4
# joins a bias of 0 and -inf to the mask, NLLB-MoE reads padding from it.
_OF_FLOATS = ("deepseek_v4", "nllb-moe")


class BandOptions(NamedTuple):
    """Keys by their distance from a row: arguments of scaled_dot_product_attention."""

    is_causal: bool = False
    window: tuple[int, int] | None = None
    query_offset: int = 0


class AttentionMask(torch.Tensor):  # type: ignore[misc]
    """A bool mask (B, 1, L, S) that is known by its band and its padding: see `make_mask`.

    It has no elements at first. A function of torch that gets the mask works on the tensor that
    ``masking_utils.sdpa_mask`` returns. So models that use or change the mask work as with "sdpa".
    A mask that was changed, or of which a view was taken, keeps its elements in place of the band:
    the view may be changed too.

    Attributes
    ----------
    band : tuple or None
        ``is_causal``, ``window`` and ``query_offset`` of `clattn.scaled_dot_product_attention`.
        None: the elements count.
    padding : Tensor of shape (B, S) or None
        bool; True where a key is attended to.
    sequences : Packed, Padded or None
        The sequences of packed rows, or those that a ragged call takes in place of the padding.
    open : bool
        True if nothing but the band excludes a key: the user gives no mask, and transformers has
        found no packed rows.
    """

    band: BandOptions | None
    padding: torch.Tensor | None
    sequences: torch_sequences.Sequences
    open: bool
    _build: Callable[[], torch.Tensor]

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, int, int, int],
        band: BandOptions,
        padding: torch.Tensor | None,
        build: Callable[[], torch.Tensor],
        device: torch.device | str,
        sequences: torch_sequences.Sequences = None,
        is_open: bool = False,
    ) -> AttentionMask:
        """Make a mask that `build` would make as a tensor."""
        mask: AttentionMask
        device = torch.device(device)
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.band, mask.padding, mask._build = band, padding, build
        mask.sequences, mask.open = sequences, is_open
        return mask

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch with the elements."""
        kwargs = kwargs or {}
        # An argument with alias_info is written to, or the result is a view of it.
        schema = function._schema.arguments
        names = {argument.name for argument in schema if argument.alias_info is not None}
        named = zip((argument.name for argument in schema), args, strict=False)
        shared = [value for name, value in (*named, *kwargs.items()) if name in names]
        masks = {
            id(mask._keep()): mask for mask in _pytree.tree_leaves(shared) if type(mask) is cls
        }
        args, kwargs = _pytree.tree_map_only(cls, cls.dense, (args, kwargs))
        result = function(*args, **kwargs)
        # Functions that write return what they wrote to.
        return masks.get(id(result), result)

    def dense(self) -> torch.Tensor:
        """Return the mask as a tensor with elements."""
        return self._build()

    def _keep(self) -> torch.Tensor:
        """Make the elements now, and keep them in the place of the band."""
        if self.band is not None:
            elements = self._build()
            self.band, self.padding, self._build = None, None, lambda: elements
            self.sequences, self.open = None, False
        return self._build()

    def __copy__(self) -> AttentionMask:
        """Return the mask itself: a shallow copy of a tensor has its memory."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a tensor with the elements."""
        return memo.setdefault(id(self), self.dense().clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the elements."""
        return self.dense().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Shape, band, and whether there is padding."""
        band = "elements" if self.band is None else str(self.band)
        padding = "" if self.padding is None else ", padding"
        packed = ", packed" if isinstance(self.sequences, torch_sequences.Packed) else ""
        return f"AttentionMask({tuple(self.shape)}, {band}{padding}{packed})"


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """Make the mask of a model: transformers calls it with these arguments.

    Causality, windows, padding and the sequences of packed rows stay numbers and a (B, S) array,
    so that a kernel skips the keys that they exclude. Other masks, such as those of chunks, become
    the tensor (B, 1, L, S) that they are for "sdpa". DeepSeek-V4 and NLLB-MoE get the floats that
    "eager" gets, because these models use a mask for more than attention.

    Parameters
    ----------
    batch_size, q_length, kv_length : int
        B, L and S.
    q_offset, kv_offset : int
        Positions of the first row and the first key.
    mask_function : callable
        What is attended to: a function of (batch, head, row's position, key's position).
    attention_mask : Tensor of shape (B, number of tokens), optional
        bool; False where a token is padding. Tokens that it lacks are excluded.
    local_size : int, optional
        The window, or the length of chunks, of `mask_function`.
    device : torch.device or str
        Where the mask lies.
    **kwargs
        The other arguments of ``masking_utils.sdpa_mask``; ``config`` is the model's.

    Returns
    -------
    AttentionMask, Tensor of shape (B, 1, L, S), or None
        None: causality alone decides, by the rule of "sdpa".
    """
    of_floats = getattr(kwargs.get("config"), "model_type", None) in _OF_FLOATS
    # The types of both leave out a Tensor as q_offset.
    maker: Any = masking_utils.eager_mask if of_floats else masking_utils.sdpa_mask
    dense = partial(
        maker,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        device=device,
    )
    divided = None if torch.compiler.is_compiling() else _divide_packed(mask_function)
    within, numbers = divided or (mask_function, None)
    band = None if torch.compiler.is_compiling() else _find_band(within, local_size)
    if of_floats or band is None or (attention_mask is not None and attention_mask.dim() != 2):
        return dense(**kwargs)
    offset = int(q_offset) - kv_offset
    padding: torch.Tensor | None = None
    sequences: torch_sequences.Sequences = None
    if numbers is not None:
        sequences = torch_sequences.pack_by_numbers(numbers, batch_size, q_length, kv_length)
    if attention_mask is not None:
        padding = attention_mask[:, kv_offset : kv_offset + kv_length]
        padding = torch.nn.functional.pad(padding, (0, kv_length - padding.shape[1]))
        seen = padding[:, : count_seen_keys(band, offset, q_length, kv_length)]
        if seen.all():
            padding = None
        elif seen.is_cpu:
            sequences = torch_sequences.find_padded(
                seen, q_length, offset, band.is_causal, band.window is not None
            )
    kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return AttentionMask(
        (batch_size, 1, q_length, kv_length),
        band._replace(query_offset=offset),
        padding,
        partial(dense, **kwargs),
        device,
        sequences,
        attention_mask is None and numbers is None,
    )


def count_seen_keys(band: BandOptions, offset: int, L: int, S: int) -> int:
    """Return how many keys some row may see: a static cache has more."""
    return max(0, min(S, offset + L)) if band.is_causal else S


def _divide_packed(mask_function: Any) -> tuple[Any, torch.Tensor] | None:
    """Return what is attended to within sequences, and the number of each row's, (B, L).

    None: transformers has not made the function for packed rows. It joins such a function, which
    may count positions within sequences, to one that compares the numbers of sequences.
    """
    joined = _captured(mask_function, masking_utils.and_masks())
    if joined is None or len(joined["mask_functions"]) != 2:
        return None
    within, apart = joined["mask_functions"]
    compared = _captured(apart, masking_utils.packed_sequence_mask_function(torch.empty(0)))
    if compared is None or not compared["packed_sequence_mask"].is_cpu:
        return None
    remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
    counted = None if remap is None else _captured(within, remap(within, torch.empty(0)))
    if counted is not None:
        within = counted["mask_function"]
    return within, compared["packed_sequence_mask"]


def _captured(function: Any, like: Any) -> dict[str, Any] | None:
    """Return what a function captures, by name, if its text is that of another one."""
    names = like.__code__.co_freevars
    if getattr(function, "__code__", None) is not like.__code__:
        return None
    cells = [cell.cell_contents for cell in function.__closure__]
    return dict(zip(names, cells, strict=True))


def _find_band(mask_function: Callable[..., Any], local_size: int | None) -> BandOptions | None:
    """Find out whether a mask function is one of those that are a band."""
    known = [
        (masking_utils.causal_mask_function, BandOptions(is_causal=True)),
        (masking_utils.bidirectional_mask_function, BandOptions()),
    ]
    if local_size is not None:  # key > row - local_size; |key - row| <= local_size
        causal = masking_utils.sliding_window_causal_mask_function(local_size)
        both = masking_utils.sliding_window_bidirectional_mask_function(local_size)
        known.append((causal, BandOptions(is_causal=True, window=(local_size - 1, 0))))
        known.append((both, BandOptions(window=(local_size, local_size))))
    return next((band for function, band in known if _is_same(mask_function, function)), None)


def _is_same(one: Any, other: Any) -> bool:
    """Compare functions: they are the same if they have one text and capture the same.

    transformers makes its mask functions anew for each mask: ``and_masks(*functions)`` of
    ``masking_utils`` returns a closure over a tuple of functions, and
    ``sliding_window_overlay(4)``, one of these, a closure over the int 4. So a causal window of 4
    equals another one, and differs from a window of 5 and from one that a model has added to.
    """
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if hasattr(one, "__code__"):
        cells = ([cell.cell_contents for cell in f.__closure__ or ()] for f in (one, other))
        return one.__code__ is other.__code__ and _is_same(*map(tuple, cells))
    return isinstance(one, int) and one == other
