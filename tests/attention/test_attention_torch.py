# SPDX-License-Identifier: MIT
"""Beside torch's own function, where torch is installed: same meaning, error at most twice its.

Both are measured against the wider reference, on the same numbers.
"""

import clattn
import numpy as np
import pytest
from references.attention import (
    DTYPES,
    attention,
    bfloat16,
    eps,
    float16,
    float32,
    float64,
    largest,
    max_error,
)
from support.checks import native
from support.data import draw, qkv, sdpa

torch = pytest.importorskip("torch")

from support.torch_calls import from_torch, to_torch  # noqa: E402
from support.variants import force  # noqa: E402

CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.25},
    "bool mask": {"attn_mask": draw((129, 129)) > -1},
    "float mask": {"attn_mask": draw((129, 129))},
    "mask and causal": {"attn_mask": draw((2, 1, 129, 129)) > -1, "is_causal": True},
    "grouped": {"enable_gqa": True},
}


def torch_sdpa(q, k, v, **options):
    """torch's function on NumPy arrays; a float mask has to have the query's dtype there."""
    options = {n: to_torch(a) if isinstance(a, np.ndarray) else a for n, a in options.items()}
    tensors = (to_torch(native(a)) for a in (q, k, v))
    return from_torch(torch.nn.functional.scaled_dot_product_attention(*tensors, **options))


# Masks take programs of their own: each of these dtypes with a mask of one kind.
MASKED_DTYPES = {"bool mask": (float32, bfloat16), "mask and causal": (float32, bfloat16),
                 "float mask": (float64, float16)}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, dtype) for case in CASES for dtype in MASKED_DTYPES.get(case, DTYPES)],
    ids=str,
)
def test_error_is_at_most_twice_torchs(device, monkeypatch, case, dtype):
    """With fully attended rows, so that both answer the same question.

    The wider reference of float64 is NumPy's long double, whose products are slow: fewer rows.
    """
    n = 65 if dtype == np.float64 else 129
    options = dict(CASES[case])
    mask = options.get("attn_mask")
    if mask is not None:
        mask = mask[..., :n, :n]
        mask = mask | np.eye(n, dtype=bool) if mask.dtype == bool else mask.astype(dtype)
        options["attn_mask"] = mask
    compare_errors(device, monkeypatch, ((2, 4), n, n, 64, 64, dtype), options)


def test_error_is_at_most_twice_torchs_with_wide_heads(device, monkeypatch):
    """A dot product of 512 terms in one chain of additions loses more than torch does."""
    compare_errors(device, monkeypatch, ((2, 2), 97, 113, 512), {})


def compare_errors(device, monkeypatch, shape, options):
    """Largest error over four draws: that of one draw hangs on a single unlucky element.

    Of the kernel that clattn chooses and of the reference kernel, against the same numbers.
    """
    ours, theirs = {None: [], "reference": []}, []
    for seed in range(4):
        q, k, v = qkv(*shape, seed=seed)
        if "enable_gqa" in options:
            k, v = k[:, ::2], v[:, ::2]
        right, _ = attention(q, k, v, **options)
        theirs.append(max_error(torch_sdpa(q, k, v, **options), right))
        for kernel, errors in ours.items():
            force(monkeypatch, kernel)
            errors.append(max_error(sdpa(q, k, v, device=device, **options), right))
    for kernel, errors in ours.items():
        assert max(errors) <= 2 * max(theirs), f"{kernel} {errors} against torch's {theirs}"


@pytest.mark.parametrize("shape", [(5, 5), (5, 7), (7, 5), (1, 7), (7, 1)], ids=str)
def test_causal_composes_with_a_mask_as_in_torch(device, shape):
    """The fused kernel's meaning: both have to allow a key. Rows with nothing are ours alone."""
    L, S = shape
    q, k, v = qkv((2, 3), L, S, 8)
    mask = draw((2, 1, L, S)) > 0
    mask[..., 0] = True
    ours = sdpa(q, k, v, mask, is_causal=True, device=device)
    theirs = torch_sdpa(q, k, v, attn_mask=mask, is_causal=True)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


EDGES = {
    "no keys": (qkv((2, 3), 5, 0, 8), {}),
    "no queries": (qkv((2, 3), 0, 5, 8), {}),
    "no batch": (qkv((0, 3), 5, 7, 8), {}),
    "no value columns": (qkv((2, 3), 5, 7, 8, 0), {}),
    "two dimensions": (qkv((), 5, 7, 8), {}),
    "three dimensions": (qkv((3,), 5, 7, 8), {}),
    "five dimensions": (qkv((2, 1, 3), 5, 7, 8), {}),
    "rows without a key": (qkv((1, 1), 5, 7, 8), {"attn_mask": np.zeros((5, 7), bool)}),
    "mask of keys": (qkv((1, 2), 5, 7, 8), {"attn_mask": np.arange(7)[None] < 4}),
    "scale 0": (qkv((1, 2), 5, 7, 8), {"scale": 0.0}),
    "more queries than keys": (qkv((1, 2), 9, 4, 8), {"is_causal": True}),
}


@pytest.mark.parametrize("case", EDGES.values(), ids=EDGES)
def test_edges_are_torchs(device, case):
    """Shape, dtype and values as torch has them, where the contract says nothing else."""
    arrays, options = case
    ours = sdpa(*arrays, device=device, **options)
    theirs = torch_sdpa(*arrays, **options)
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    allowed = 8 * eps(np.float32) * max(1.0, largest(arrays[2]))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=allowed)


def test_torch_and_clattn_in_one_process(device):
    """Their thread pools and libraries do not disturb each other, whoever runs first."""
    q, k, v = qkv((1, 2), 97, 97, 64)
    for _ in range(3):
        theirs = torch_sdpa(q, k, v)
        ours = clattn.scaled_dot_product_attention(q, k, v, device=device)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6)
