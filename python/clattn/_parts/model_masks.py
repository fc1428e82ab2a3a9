"""What models of transformers attend to: numbers and padding in place of dense masks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree
from transformers import masking_utils

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["AttentionMask", "BandOptions", "make_mask"]

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
    """

    band: BandOptions | None
    padding: torch.Tensor | None
    _build: Callable[[], torch.Tensor]

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, int, int, int],
        band: BandOptions,
        padding: torch.Tensor | None,
        build: Callable[[], torch.Tensor],
        device: torch.device | str,
    ) -> AttentionMask:
        """Make a mask that `build` would make as a tensor."""
        mask: AttentionMask
        device = torch.device(device)
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.band, mask.padding, mask._build = band, padding, build
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
        return f"AttentionMask({tuple(self.shape)}, {band}{padding})"


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

    Causality, windows and padding stay numbers and a (B, S) array, so that a kernel skips the
    keys that they exclude. Other masks, such as those of packed sequences, become the tensor
    (B, 1, L, S) that they are for "sdpa". DeepSeek-V4 and NLLB-MoE get the floats that "eager"
    gets, because these models use a mask for more than attention.

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
    band = None if torch.compiler.is_compiling() else _find_band(mask_function, local_size)
    if of_floats or band is None or (attention_mask is not None and attention_mask.dim() != 2):
        return dense(**kwargs)
    padding = None
    if attention_mask is not None:
        padding = attention_mask[:, kv_offset : kv_offset + kv_length]
        padding = torch.nn.functional.pad(padding, (0, kv_length - padding.shape[1]))
        padding = None if padding.all() else padding
    kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return AttentionMask(
        (batch_size, 1, q_length, kv_length),
        band._replace(query_offset=int(q_offset) - kv_offset),
        padding,
        partial(dense, **kwargs),
        device,
    )


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
