# SPDX-License-Identifier: MIT
"""Arguments of clattn.onnx.attention, and its calls, compared with the oracle."""

import clattn
import numpy as np
from references.attention import float32
from references.onnx import (
    chosen,
    joined_heads,
    overflowed,
    right_stages,
    split_heads,
    tolerances,
)
from support.checks import assert_close, native
from support.data import draw
from support.forced import weights_are_rounded

B, HQ, HK, L, S, E, P = 2, 4, 2, 17, 33, 8, 13


def inputs(L=L, S=S, heads=(HQ, HK), Ev=E, E=E, B=B, dtype=float32, v_dtype=None, seed=0):
    """Q, K, V with four dimensions."""
    hq, hk = heads
    K, V = draw((B, hk, S, E), dtype, seed + 1), draw((B, hk, S, Ev), v_dtype or dtype, seed + 2)
    return draw((B, hq, L, E), dtype, seed), K, V


def cache(P=P, heads=HK, Ev=E, E=E, B=B, dtype=float32, v_dtype=None):
    """past_key and past_value that belong to `inputs`."""
    return draw((B, heads, P, E), dtype, 5), draw((B, heads, P, Ev), v_dtype or dtype, 6)


def flat(arrays, heads=(HQ, HK)):
    """The same call with three dimensions: (arguments, options)."""
    Q, K, V, *rest = arrays
    options = {"q_num_heads": heads[0], "kv_num_heads": heads[1]}
    return [*(joined_heads(a) for a in (Q, K, V)), *rest], options


def mask_of(dtype, shape, seed=9):
    """True or False, small integers, or floats with -inf in a quarter of the places."""
    numbers = draw(shape, seed=seed)
    if dtype.kind == "b":
        return numbers > 0
    if dtype.kind in "iu":
        return np.abs(np.rint(2 * numbers)).astype(dtype) * (1 if dtype.kind == "u" else -1)
    return np.where(draw(shape, seed=seed + 1) > 0.7, -np.inf, numbers).astype(dtype)


def check_onnx(*args, device, **options):
    """Call clattn, compare every output with the oracle; inputs stay as they were.

    Returns clattn's answer.
    """
    known = {n: o for n, o in options.items() if n != "return_qk"}
    arrays = tuple(native(a) for a in args)
    stages = right_stages(*arrays, **known)
    right = chosen(stages, known.get("qk_matmul_output_mode", 0))
    before = [None if a is None else a.tobytes() for a in args]

    def call():
        return clattn.onnx.attention(*args, device=device, **options)

    got = call()
    rounds = weights_are_rounded(got.Y, lambda: call().Y)
    allowed = tolerances(*arrays, stages=stages, rounds_weights=rounds, **known)

    assert before == [None if a is None else a.tobytes() for a in args], "an input was modified"
    assert type(got.Y) is np.ndarray
    assert got.Y.dtype == arrays[0].dtype
    assert_close(got.Y, right.Y, allowed.Y, "Y")
    Y = got.Y if got.Y.ndim == 4 else split_heads(got.Y, options["q_num_heads"])
    empty = ~chosen(stages, 3).qk_matmul_output.any(axis=-1)  # all weights are 0; a NaN is not
    assert not Y[empty].any(), "rows without a key have to be zero"
    check_present(got, right, with_past=len(args) > 4 and args[4] is not None)

    assert (got.qk_matmul_output is not None) == bool(options.get("return_qk"))
    if got.qk_matmul_output is not None:
        assert got.qk_matmul_output.dtype == arrays[0].dtype
        right_qk = overflowed(right.qk_matmul_output, arrays[0].dtype)
        assert_close(got.qk_matmul_output, right_qk, allowed.qk, "qk_matmul_output")
        if options.get("qk_matmul_output_mode") == 3:
            assert not got.qk_matmul_output[empty].any(), "mode 3: empty rows have to be zero"
    return got


def check_present(got, right, with_past):
    """Bit for bit the concatenation; nothing without a past."""
    for name in ("present_key", "present_value"):
        present, wanted = getattr(got, name), getattr(right, name)
        if not with_past:
            assert present is None, f"{name} without a past"
            continue
        assert type(present) is np.ndarray
        assert present.dtype == wanted.dtype, f"{name}: {present.dtype}"
        assert present.shape == wanted.shape, f"{name}: {present.shape}"
        assert present.tobytes() == wanted.tobytes(), f"{name} is not past followed by new"
