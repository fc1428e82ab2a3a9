"""Scores and masks that the user writes: their tracing, and the OpenCL C that comes out.

A score_mod is a function of (score, b, h, q_idx, kv_idx) that returns the score to use, a mask_mod
one of (b, h, q_idx, kv_idx) that says what is attended to. Each is called once, with symbols, and
what it does with them becomes OpenCL C.

Symbols know the operators ``+ - * / // % ** & | ^ ~ << >>``, comparisons, ``abs``, NumPy's and
torch's functions of the same names, ``np.where``, ``np.clip``, ``np.minimum``, ``np.maximum``,
``np.exp`` and the like; a message lists them all where one is not known. ``x.astype(dtype)``, or
``x.to(dtype)``, makes a bool, int32, int64 or float. All floats are the call's float32, or float64.

Numbers and arrays that a mod captures are data: other values need no other program. A finite float
beyond float32 becomes the largest float32, in calls that compute in float32. ``table[h]`` reads an
element of a Tensor or torch tensor, ``clattn.lookup(table, h)`` one of any array.

``explain(mod)`` prints the OpenCL C of a mod. ``flex_attention_backward`` differentiates a
score_mod, also by the arrays that it reads.
"""

from clattn.flex.attention import flex_attention
from clattn.flex.backward import FlexGradients, flex_attention_backward
from clattn.flex.blocks import BlockMask, create_block_mask
from clattn.flex.masks import and_masks, explain, lookup, or_masks

__all__ = [
    "BlockMask",
    "FlexGradients",
    "and_masks",
    "create_block_mask",
    "explain",
    "flex_attention",
    "flex_attention_backward",
    "lookup",
    "or_masks",
]
