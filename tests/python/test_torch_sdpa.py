# SPDX-License-Identifier: MIT
"""What clattn computes in the place of torch's function: numbers, dtypes, layouts, modes."""

import weakref
from functools import partial

import clattn
import numpy as np
import pytest
from references.attention import DTYPES, judged
from support.checks import assert_close
from support.data import draw, qkv
from support.forced import weights_are_rounded
from support.threads import run_together

torch = pytest.importorskip("torch")

import clattn.torch  # noqa: E402
from support.torch_calls import TORCH, close, from_torch, tensors, to_torch  # noqa: E402
from torch.nn import functional as F  # noqa: E402

pytestmark = pytest.mark.usefixtures("torch_calls")

CASES = {
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "causal, more keys": ({"L": 5, "S": 33}, {"is_causal": True}),
    "causal, more queries": ({"L": 31, "S": 5}, {"is_causal": True}),
    "scale": ({}, {"scale": 0.25}),
    "scale of an integer": ({}, {"scale": 1}),
    "bool mask": ({}, {"attn_mask": draw((17, 33)) > -1}),
    "padding mask": ({}, {"attn_mask": np.arange(33) < np.array([9, 33])[:, None, None, None]}),
    "float mask": ({}, {"attn_mask": draw((2, 3, 17, 33))}),
    "mask and causal": ({}, {"attn_mask": draw((17, 33)) > -1, "is_causal": True}),
    "rows without a key": ({}, {"attn_mask": np.zeros((17, 33), bool)}),
    "values wider than keys": ({"E": 77, "Ev": 80}, {}),
    "two dimensions": ({"lead": ()}, {}),
    "three dimensions": ({"lead": (3,)}, {}),
    "five dimensions": ({"lead": (2, 1, 3)}, {}),
    "no keys": ({"S": 0}, {}),
    "no queries": ({"L": 0}, {}),
    "no batch": ({"lead": (0, 3)}, {}),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_patched_function_computes_by_clattn(device, torch_calls, case, dtype):
    shape, options = case
    arrays = qkv(**shape, dtype=dtype)
    q, k, v = map(to_torch, arrays)
    before = [x.clone() for x in (q, k, v)]
    given = dict(options)
    if "attn_mask" in options:
        given["attn_mask"] = to_torch(options["attn_mask"])

    with clattn.torch.sdpa(device):
        result = F.scaled_dot_product_attention(q, k, v, **given)

    assert torch_calls == [device]
    assert type(result) is torch.Tensor
    assert result.dtype is q.dtype
    assert not result.requires_grad
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True))

    def again():
        with clattn.torch.sdpa(device):
            return from_torch(F.scaled_dot_product_attention(q, k, v, **given))

    result = from_torch(result)
    right = judged(*arrays, rounds_weights=weights_are_rounded(result, again), **options)
    assert_close(result, right.result, right.allowed)


@pytest.mark.parametrize("key_heads", [1, 2, 3, 6])
def test_grouped_heads(device, torch_calls, key_heads):
    q = to_torch(draw((2, 6, 17, 8)))
    k, v = (to_torch(draw((2, key_heads, 33, 8), seed=n)) for n in (1, 2))
    with clattn.torch.sdpa(device):
        ours = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    theirs = TORCH(q, k, v, enable_gqa=True)
    close(ours, theirs)
    assert ours.stride() == theirs.stride()
    assert torch_calls == [device]


BROADCASTS = {
    "batch of keys": ((2, 3, 5, 8), (1, 3, 7, 8)),
    "batch of queries": ((1, 3, 5, 8), (2, 3, 7, 8)),
    "heads of keys": ((2, 3, 5, 8), (2, 1, 7, 8)),
    "heads of queries": ((2, 1, 5, 8), (2, 3, 7, 8)),
}


@pytest.mark.parametrize("case", BROADCASTS.values(), ids=BROADCASTS)
def test_leading_dimensions_broadcast(device, torch_calls, case):
    q, k, v = (to_torch(draw(shape, seed=n)) for n, shape in enumerate((case[0], case[1], case[1])))
    with clattn.torch.sdpa(device):
        ours = F.scaled_dot_product_attention(q, k, v)
    close(ours, TORCH(q, k, v))
    assert torch_calls == [device]


def inside(B=2, Hk=4, Ev=8):
    """Heads inside rows: (B, L, H, E) transposed; keys of B batches and Hk heads."""
    shapes = (2, 5, 4, 8), (B, 7, Hk, 8), (B, 7, Hk, Ev)
    return [torch.randn(shape).transpose(1, 2) for shape in shapes]


LAYOUTS = {
    "contiguous": tensors,
    "one batch": lambda: tensors(lead=(1, 3)),
    "one head, one row": lambda: tensors(lead=(2, 1), L=1),
    "no rows": lambda: tensors(L=0),
    "three dimensions": lambda: tensors(lead=(3,)),
    "heads inside": inside,
    "heads inside, narrower values": lambda: inside(Ev=6),
    "heads inside, one of keys": lambda: inside(Hk=1),
    "heads inside, one batch of keys": lambda: inside(B=1),
    "query, key and value in one": lambda: torch.randn(2, 5, 3, 4, 8).permute(2, 0, 3, 1, 4),
    "steps": lambda: [x.repeat_interleave(2, -1)[..., ::2] for x in tensors()],
    "rows inside": lambda: [x.mT.contiguous().mT for x in tensors()],
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(device, torch_calls, make):
    """The result is laid out as torch's, so that joining heads that lie inside copies nothing.

    Its memory is torch's own, and can be resized.
    """
    q, k, v = make()
    with clattn.torch.sdpa(device):
        ours = F.scaled_dot_product_attention(q, k, v)
    theirs = TORCH(q, k, v)
    close(ours, theirs)
    assert ours.stride() == theirs.stride()
    assert torch_calls == [device]
    assert ours.resize_(40, 50).shape == (40, 50)


def test_result_is_the_callers_alone(device):
    """Of two calls, and while the inputs are gone."""
    q, k, v = tensors()
    with clattn.torch.sdpa(device):
        first = F.scaled_dot_product_attention(q, k, v)
        second = F.scaled_dot_product_attention(q, k, v)
    kept = second.clone()
    gone = [weakref.ref(x) for x in (q, k, v)]
    del q, k, v
    assert [ref() for ref in gone] == [None] * 3, "an input is kept alive"
    first.zero_()
    assert torch.equal(second, kept)


GRADS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "gradients on, none needed": torch.enable_grad,
}


@pytest.mark.parametrize("mode", GRADS.values(), ids=GRADS)
def test_without_gradients(device, torch_calls, mode):
    """Leaves that require gradients, parameters among them, are clattn's where they are off."""
    q, k, v = tensors()
    mask = to_torch(draw((17, 33)))
    if mode is not torch.enable_grad:
        q, v = torch.nn.Parameter(q), torch.nn.Parameter(v)
        k, mask = k.requires_grad_(), mask.requires_grad_()
    with clattn.torch.sdpa(device), mode():
        ours = F.scaled_dot_product_attention(q, k, v, mask)
        theirs = TORCH(q, k, v, mask)
    close(ours, theirs)
    assert ours.is_inference() == theirs.is_inference()
    assert not ours.requires_grad
    assert torch_calls == [device]


def test_tensors_made_in_inference_mode(device, torch_calls):
    with torch.inference_mode():
        q, k, v = (x.clone() for x in tensors())
    with clattn.torch.sdpa(device):
        ours = F.scaled_dot_product_attention(q, k, v)
    close(ours, TORCH(q, k, v))
    assert torch_calls == [device]


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("given", ["float32", "mixed", "low", "float64"])
def test_autocast(device, torch_calls, given, low):
    """The dtype is that of torch's function; so are the numbers, which are rounded alike."""
    q, k, v = tensors()
    if given == "mixed":
        q, k, v = q.bfloat16(), k, v.half()
    elif given != "float32":
        q, k, v = (x.to(low if given == "low" else torch.float64) for x in (q, k, v))
    with torch.autocast("cpu", low):
        theirs = TORCH(q, k, v)
        with clattn.torch.sdpa(device):
            ours = F.scaled_dot_product_attention(q, k, v)
    assert ours.dtype is theirs.dtype
    allowed = 2 * torch.finfo(ours.dtype).eps * v.abs().max().item()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=allowed)
    assert torch_calls == [device]


def test_autocast_casts_a_float_mask(device, torch_calls):
    """256.9 is 256 in bfloat16, as 256 is: the scores of all keys become equal."""
    q, k, v = tensors()
    mask = (256 + 0.9 * (torch.arange(33) % 2)).expand(17, 33)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = TORCH(torch.zeros_like(q), k, v, mask)
        with clattn.torch.sdpa(device):
            ours = F.scaled_dot_product_attention(torch.zeros_like(q), k, v, mask)
    allowed = 2 * torch.finfo(ours.dtype).eps * v.abs().max().item()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=allowed)
    mean = v.mean(-2, keepdim=True).expand_as(ours)
    torch.testing.assert_close(ours.float(), mean, rtol=0, atol=allowed)
    assert torch_calls == [device]


def test_autocast_of_another_device_is_not_the_cpus(device, torch_calls):
    q, k, v = tensors()
    with clattn.torch.sdpa(device), torch.autocast("cpu", enabled=False):
        assert F.scaled_dot_product_attention(q, k, v).dtype is torch.float32
    assert torch_calls == [device]


def test_called_by_itself(device, torch_calls):
    """Without a patch, on the default device."""
    q, k, v = tensors()
    with clattn.use_device(device):
        ours = clattn.torch.scaled_dot_product_attention(q, k, v, None, 0.0, True, 0.5, False)
    close(ours, TORCH(q, k, v, is_causal=True, scale=0.5))
    assert torch_calls == [None]


def test_calls_in_threads(device, torch_calls):
    data = [tensors(seed=seed) for seed in range(4)]
    results = [[] for _ in data]

    def work(n):
        for _ in range(20):
            results[n].append(F.scaled_dot_product_attention(*data[n]))

    with clattn.torch.sdpa(device):
        run_together(*(partial(work, n) for n in range(len(data))))
    for given, got in zip(data, results, strict=True):
        assert len(got) == 20
        close(got[0], TORCH(*given))
        assert all(torch.equal(got[0], again) for again in got)
    assert len(torch_calls) == 80
