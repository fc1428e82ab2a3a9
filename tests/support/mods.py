# SPDX-License-Identifier: MIT
"""Mods that the tests of flex_attention share, and the check against references/flex.py.

They are written for symbols and for arrays of positions alike.
"""

import clattn
import numpy as np
from references.attention import compute_dtype
from references.flex import flex
from support.checks import assert_close
from support.data import draw, qkv
from support.forced import weights_are_rounded

lookup, where = clattn.lookup, np.where
INF = np.inf
MOST = 400  # positions that tables of positions have

# ---- the gallery ----

SLOPES = np.exp2(-np.arange(1, 9, dtype=np.float32))
DOCUMENTS = np.repeat(np.arange(40, dtype=np.int32), np.arange(1, 41))[:MOST]
BUCKETS = draw((8, 32), seed=1)
RELATIVE = draw((8, 2 * MOST), np.float16)
SWIN = draw((8, 13, 13), seed=2)
WIDTH = 7  # of pictures, in pixels


def alibi_of(slopes):
    """The mod of some slopes, one for each head: all of them are one program."""

    def mod(score, b, h, q_idx, kv_idx):
        return score + lookup(slopes, h) * (kv_idx - q_idx)

    return mod


alibi = alibi_of(SLOPES)


def t5(score, b, h, q_idx, kv_idx):
    """Sixteen buckets for either side: eight of a distance each, the others in logarithms."""
    distance = kv_idx - q_idx
    far = np.maximum(abs(distance), 1)
    # Half a bucket beside the edges, where rounding would decide.
    log = (np.log2(far + 0.37) - 3.0) * 2.0
    bucket = where(far < 8, abs(distance), np.minimum(8 + log.astype(np.int32), 15))
    return score + lookup(BUCKETS, h, bucket + where(distance > 0, 16, 0))


def relative(score, b, h, q_idx, kv_idx):
    return score + lookup(RELATIVE, h, q_idx - kv_idx + MOST)


def capped(score, b, h, q_idx, kv_idx):
    return 3.0 * np.tanh(score / 3.0)


def swin(score, b, h, q_idx, kv_idx):
    y = q_idx // WIDTH % WIDTH - kv_idx // WIDTH % WIDTH
    x = q_idx % WIDTH - kv_idx % WIDTH
    return score + lookup(SWIN, h, y + WIDTH - 1, x + WIDTH - 1)


def excluding(score, b, h, q_idx, kv_idx):
    return where((kv_idx % 3 == b) | (kv_idx > q_idx + 40), -INF, score * 2)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):
    return abs(q_idx - kv_idx) <= 16


def documents(b, h, q_idx, kv_idx):
    return lookup(DOCUMENTS, q_idx) == lookup(DOCUMENTS, kv_idx)


def neighbourhood(b, h, q_idx, kv_idx):
    """As NATTEN: the 5 x 5 pixels around one, or those at the edge."""
    y = np.clip(q_idx // WIDTH, 2, WIDTH - 3) - kv_idx // WIDTH
    x = np.clip(q_idx % WIDTH, 2, WIDTH - 3) - kv_idx % WIDTH
    return (abs(y) <= 2) & (abs(x) <= 2)


def dilated(b, h, q_idx, kv_idx):
    distance = q_idx - kv_idx
    return (distance % (h + 2) == 0) & (abs(distance) < 60)


def prefix(b, h, q_idx, kv_idx):
    return (kv_idx < 20 + b) | (q_idx >= kv_idx)


# Pairs, since each is a program of its own.
GALLERY = {
    "alibi, causal": (alibi, causal),
    "t5, documents": (t5, documents),
    "relative, dilated": (relative, dilated),
    "capped, prefix": (capped, prefix),
    "swin, neighbourhood": (swin, neighbourhood),
    "excluding, window": (excluding, window),
}

# ---- one mod with tables and operations of each type ----

FLAGS = draw((8, 11)) > -1
PERIODS = np.array([[3, 5, 2**40 + 7], [7, 4, 9]])
LEVELS = draw((3, 40), np.float32)[:, ::-2]  # columns backwards, and apart
DEAD_KEYS = 4, 9  # that the mod of scores, and that of the mask, exclude for all rows
EMPTY_ROW, EMPTY_HEAD = 2, 1


def composite(score, b, h, q_idx, kv_idx):
    distance = q_idx - kv_idx
    period = lookup(PERIODS, h % 2, kv_idx % 3)
    phase = (distance.astype(np.int64) * (1 << 33) // 3 % period).astype(np.float64)
    level = lookup(LEVELS, -1 - b % 3, (q_idx + 3 * h) % 20)
    wave = np.sin(phase / period) + np.exp(-abs(distance) * 0.25) - np.log(kv_idx + 2.5)
    near = lookup(FLAGS, h, kv_idx % 11) ^ (distance & 4 == 4)
    result = where(near, np.tanh(score) * 2.0, score * level) + 0.5 * wave - (b + h / 4)
    return where(kv_idx == DEAD_KEYS[0], -INF, result)


def composite_mask(b, h, q_idx, kv_idx):
    some = ((kv_idx * 5 + q_idx - h) // 3 % (b + 4) != 1) & lookup(FLAGS, h, -1 - q_idx % 7)
    return some & (kv_idx != DEAD_KEYS[1]) & (q_idx != EMPTY_ROW)


def places(score, b, h, q_idx, kv_idx):
    """A shorter one, that tells every place from the others."""
    result = score * lookup(LEVELS, b % 3, (q_idx + 3 * h) % 20) + (kv_idx % 7 - b) * 0.25
    return where(kv_idx == DEAD_KEYS[0], -INF, result)


def places_mask(b, h, q_idx, kv_idx):
    """Blocks of 32 keys are empty, full or partial in turn."""
    kind = (kv_idx // 32 + q_idx // 32 + h + b) % 3
    some = (kind == 1) | (kind == 2) & ((kv_idx + q_idx) % 3 != b)
    return some & (kv_idx != DEAD_KEYS[1]) & ((q_idx != EMPTY_ROW) | (h != EMPTY_HEAD))


COMPOSITE = {"score_mod": composite, "mask_mod": composite_mask}
PLACES = {"score_mod": places, "mask_mod": places_mask}

# ---- calls ----


def call(*arrays, device, **options):
    return clattn.flex_attention(*arrays, device=device, **options)


def check_mods(q, k, v, *, mods, blocks=False, **options):
    """Numbers of keys that no row sees, and of rows without a key, change nothing.

    With `blocks`, the mask comes as blocks of 32.
    """
    options |= mods | {"enable_gqa": True}
    if blocks:
        B, H, L, S = *q.shape[:3], k.shape[2]
        mask = options.pop("mask_mod")
        options["block_mask"] = clattn.create_block_mask(mask, B, H, L, S, options["device"], 32)
    check_flex(q, k, v, **options)
    dead = [key for key in DEAD_KEYS if key < k.shape[-2]]
    k[..., dead, :], v[..., dead, 1:] = np.nan, np.inf
    q[..., EMPTY_HEAD, EMPTY_ROW : EMPTY_ROW + 1, :] = np.nan
    assert np.isfinite(check_flex(q, k, v, **options).astype(np.float32)).all()


def check_flex(query, key, value, *, device, right=None, block_mask=None, **options):
    """Call clattn, with the lse; compare with the oracle. Returns the result.

    `right` are mods in place of the call's, for the oracle.
    """
    known = options | (right or {})
    known = {name: option for name, option in known.items() if name != "out"}
    if block_mask is not None:
        known["mask_mod"] = block_mask.mask_mod
    if block_mask is not None:
        options["block_mask"] = block_mask

    def attend(**more):
        return call(query, key, value, device=device, return_lse=True, **options | more)

    result, lse = attend()
    rounds = weights_are_rounded(result, lambda: attend(out=None)[0])
    wanted, wanted_lse = flex(query, key, value, rounds_weights=rounds, **known)
    assert type(result) is np.ndarray and result.dtype == query.dtype
    assert lse.dtype == compute_dtype(query.dtype)
    assert_close(result, *wanted)
    assert not result[np.isneginf(wanted_lse[0])].any(), "rows without a key have to be zero"
    assert_close(lse, *wanted_lse, "lse")
    return result


# ---- indexes outside a table ----


def outside_mods(row, element, flags, start, of_row, of_key, look=lookup):
    """A score_mod and a mask_mod whose indexes, 64 bits wide, rise with rows and keys."""

    def place(q_idx, kv_idx):
        return q_idx.astype(np.int64) * of_row + kv_idx.astype(np.int64) * of_key + start

    def score(score, b, h, q_idx, kv_idx):
        index = place(q_idx, kv_idx)
        bias = look(row, q_idx.astype(np.int64) * of_row + start) + look(element, h, index)
        return np.where(kv_idx > 30, score + bias, score - bias)

    def mask(b, h, q_idx, kv_idx):
        allowed = look(flags, kv_idx.astype(np.int64) * of_key + start)
        return (kv_idx > 20 + h) | (allowed & (kv_idx >= 0))

    return score, mask


def look_with_care(table, *indexes):
    """NumPy's lookup, with NaN for an element outside, False for a flag."""
    table, indexes = np.asarray(table), np.broadcast_arrays(*indexes)
    inside = np.ones(indexes[0].shape, bool)
    for index, size in zip(indexes, table.shape, strict=True):
        inside &= (index >= -size) & (index < size)
    found = np.full(inside.shape, False if table.dtype == bool else np.nan, table.dtype)
    found[inside] = table[tuple(index[inside] for index in indexes)]
    return found, inside


def check_outside(sizes, start, of_row, of_key, *, device, L=9, S=37, E=8):
    N, M = sizes
    tables = draw((N,)), draw((3, M)), np.arange(N) % 3 > 0
    score, mask = outside_mods(*tables, start, of_row, of_key)
    masks_outside = []

    def careful(table, *indexes):
        found, inside = look_with_care(table, *indexes)
        if table.dtype == bool:
            masks_outside.append(~inside)
        return found

    right_score, right_mask = outside_mods(*tables, start, of_row, of_key, careful)

    def whole_mask(b, h, q_idx, kv_idx):
        allowed = right_mask(b, h, q_idx, kv_idx)
        return allowed & ~masks_outside.pop()

    check_flex(*qkv((2, 3), L, S, E), device=device, score_mod=score, mask_mod=mask,
               right={"score_mod": right_score, "mask_mod": whole_mask})  # fmt: skip
