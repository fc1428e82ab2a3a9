# SPDX-License-Identifier: MIT
"""Packed problems whose keys and values are bytes with scales."""

import clattn
import ml_dtypes
import numpy as np
from references.attention import float32
from support.data import draw
from support.ragged import check_results, in_pages, packed

CODES = {
    "int8": np.dtype(np.int8),
    "e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
}


def codes(shape, dtype, seed):
    """Every byte but those of NaN and infinity, at random."""
    found = (
        np.random.default_rng([seed, *shape]).integers(0, 256, shape).astype(np.uint8).view(dtype)
    )
    if dtype == np.int8:
        return np.maximum(found, -127)
    return np.where(np.isfinite(found.astype(float32)), found, dtype.type(1)).astype(dtype)


def coded(rows, keys, code, scales, dtype=float32, **sizes):
    """A packed problem in bytes, the same one in float32, and the scales of keys and values."""
    given = packed(rows, keys, dtype=dtype, behind=0, **sizes)
    bits = given._replace(
        key=codes(given.key.shape, code, 1), value=codes(given.value.shape, code, 2)
    )
    Hk = given.key.shape[1]
    shape = {"one": (), "of heads": (Hk,), "of keys": given.key.shape[:2]}[scales]
    largest = float(np.abs(bits.key.astype(float32)).max())
    factors = [(np.abs(draw(shape, float32, n)) + 0.5) / largest for n in (7, 8)]
    spread = [f[:, :, None] if f.ndim == 2 else f[..., :, None] if f.ndim else f for f in factors]
    wide = given._replace(
        key=bits.key.astype(float32) * spread[0], value=bits.value.astype(float32) * spread[1]
    )
    return bits, wide, [np.asarray(f, float32) for f in factors]


def call(bits, scales, device, page_size=None, page_layout="HND", **options):
    options |= {"enable_gqa": True, "return_lse": True, "device": device}
    if page_size is None:
        return clattn.varlen_attn(*bits, key_scale=scales[0], value_scale=scales[1], **options)
    more = scales if scales[0].ndim == 2 else ()
    key, value, *paged, table = in_pages(bits, page_size, page_layout, more=more)
    key_scale, value_scale = paged or scales
    return clattn.varlen_attn(
        bits.query, key, value, bits.cu_seq_q, block_table=table,
        seqused_k=np.diff(bits.cu_seq_k), page_layout=page_layout, key_scale=key_scale,
        value_scale=value_scale, **options,
    )  # fmt: skip


def run_codes(given, **options):
    """The results of a problem of `coded`."""
    bits, _, scales = given
    return call(bits, scales, **options)


def check_codes(given, device, page_size=None, page_layout="HND", **options):
    """A problem of `coded` gives what the same one in float32 gives."""
    output, lse = run_codes(
        given, device=device, page_size=page_size, page_layout=page_layout, **options
    )
    check_results(given[1], output, lse, False, **options)
