# SPDX-License-Identifier: MIT
"""Gradients of clattn.torch: the operator in torch's eyes. Numbers: attention/test_backward.py."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import clattn  # noqa: E402
import clattn.torch  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

float32, float64 = torch.float32, torch.float64


def draw(*shape, seed=0, dtype=float64, needs=True):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(needs)


def qkv(dtype=float64, heads=2, L=4, S=5, E=3, needs=True):
    return tuple(
        draw(1, heads, n, E, seed=seed, dtype=dtype, needs=needs)
        for seed, n in enumerate((L, S, S))
    )


def attend(*args, **options):
    """A call that only clattn computes: a soft cap of 1e4 changes nothing that a test sees."""
    return clattn.torch.scaled_dot_product_attention(*args, **{"softcap": 1e4} | options)


@pytest.fixture(autouse=True)
def on_device(first_device):
    with clattn.use_device(first_device):
        yield


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": "lower_right", "window": (1, None)}, {"softcap": 1.5, "query_offset": -2}],
)
def test_gradcheck(options):
    mask, sinks = draw(1, 1, 5, seed=5), draw(2, seed=6)

    def both(q, k, v, mask, sinks):
        return attend(q, k, v, mask, sinks=sinks, return_lse=True, **{"is_causal": True} | options)

    assert torch.autograd.gradcheck(both, (*qkv(), mask, sinks), check_batched_grad=True)


def test_torchs_operator_checks():
    """Schema, fake function and registration of gradients, with heads after rows but of keys."""
    q, v = (draw(1, n, 2, 3, seed=n).detach().transpose(1, 2) for n in (4, 6))
    k = draw(1, 2, 5, 3, seed=5)
    q, v = q.requires_grad_(), v[:, :, :5].requires_grad_()
    options = clattn.torch.Options(causal="lower_right", left=2)
    args = (q, k, v, draw(4, 5), draw(2), None, None, *options)
    checks = torch.library.opcheck(torch.ops.clattn.attention.default, args)
    assert set(checks.values()) == {"SUCCESS"}


def test_what_needs_gradients():
    """One alone of the tensors; the others get none."""
    q, k, v = qkv(needs=False)
    mask, sinks = draw(4, 5, needs=False), draw(2, needs=False)
    tensors = {"query": q, "key": k, "value": v, "attn_mask": mask, "sinks": sinks}
    for name, tensor in tensors.items():
        tensor.requires_grad_()
        result = attend(**tensors)
        assert result.requires_grad
        result.square().sum().backward()
        assert tensor.grad.abs().sum() > 0
        for other, one in tensors.items():
            assert other == name or one.grad is None
        tensor.grad = None
        tensor.requires_grad_(False)
    assert not attend(**tensors).requires_grad


def by_varlen(query, key, value):
    packed = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    offsets = ([0, tensor.shape[2]] for tensor in (query, key))
    output, lse = clattn.torch.varlen_attn(*packed, *offsets, return_lse=True)
    return output.transpose(0, 1)[None], lse[None]


def by_patch(*tensors):
    with clattn.torch.sdpa():
        return torch.nn.functional.scaled_dot_product_attention(*tensors), None


def by_model(*tensors):
    pytest.importorskip("transformers")
    import clattn.transformers

    return clattn.transformers.attend(None, *tensors, None)[0].transpose(1, 2), None


DOORS = {
    "torch's arguments": lambda *x: (clattn.torch.scaled_dot_product_attention(*x), None),
    "a keyword": lambda *x: clattn.torch.scaled_dot_product_attention(*x, return_lse=True),
    "patch": by_patch,
    "flex": lambda *x: clattn.torch.flex_attention(*x, return_lse=True),
    "varlen": by_varlen,
    "a model": by_model,
}


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_every_door(door):
    """It records one tensor alone. Its log-sum-exp is natural, with gradients and without."""
    tensors = qkv(needs=False)
    zeros = torch.zeros(1, 1, 2, 1, dtype=float64)
    for tensor in tensors:
        tensor.requires_grad_()
        output, _ = door(*tensors)
        assert output.requires_grad
        output.square().sum().backward()
        assert tensor.grad.abs().sum() > 0
        tensor.requires_grad_(False)
    for needs in (False, True):
        _, lse = door(zeros, zeros.clone().requires_grad_(needs), zeros)
        if lse is not None:
            np.testing.assert_allclose(lse.detach().ravel(), np.log([2, 2]), rtol=1e-15)


def test_layouts():
    """A slice of a longer tensor, a transposed one, and a gradient of stride 0."""
    q, whole, v = qkv(S=7)
    key = whole[:, :, :-2]
    attend(q, key, v[:, :, :5]).sum().backward()
    got = whole.grad
    assert not got[:, :, -2:].any()
    copy = key.detach().clone().requires_grad_()
    attend(q, copy, v[:, :, :5]).sum().backward()
    assert torch.equal(got[:, :, :-2], copy.grad)

    swapped = q.detach().transpose(1, 2).contiguous().requires_grad_()
    output = attend(swapped.transpose(1, 2), copy, v[:, :, :5])
    assert output.transpose(1, 2).is_contiguous()
    output.sum().backward()
    assert swapped.grad.is_contiguous()


def test_heads_after_rows(first_device):
    """Views of the same numbers; the device has a name."""
    q, k, v = qkv(S=7)
    right, right_lse = attend(q, k, v, is_causal=True, return_lse=True)
    grads = torch.autograd.grad(right.square().sum() + right_lse.sum(), (q, k, v))
    rows_first = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
    output, lse = attend(
        *rows_first, is_causal=True, return_lse=True, layout="BLHE", device=first_device
    )
    assert output.is_contiguous() and torch.equal(output.transpose(1, 2), right)
    assert torch.equal(lse, right_lse)
    (output.square().sum() + lse.sum()).backward()
    for one, other in zip(rows_first, grads, strict=True):
        assert one.grad.is_contiguous() and torch.equal(one.grad.transpose(1, 2), other)


def test_the_lse_alone():
    q, k, v = qkv()
    _, lse = attend(q, k, v, return_lse=True)
    lse.sum().backward()
    assert q.grad.abs().sum() > 0
    assert not v.grad.any()


def test_dropout_by_torchs_generator():
    """So torch.manual_seed fixes it, and activation checkpointing computes the same anew."""
    q, k, v = qkv(L=20, S=30)

    def loss(q):
        return attend(q, k, v, dropout_p=0.5).square().sum()

    found = []
    for seed, compute in ((1, loss), (1, loss), (2, loss), (1, None)):
        q.grad = None
        torch.manual_seed(seed)
        if compute is None:
            checkpoint(loss, q, use_reentrant=False).backward()
        else:
            compute(q).backward()
        found.append(q.grad)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert torch.equal(found[0], found[3])


def test_autocast():
    """Tensors are cast as torch casts them; gradients are those of the float32 leaves."""
    q, k, v = qkv(float32)
    mask = draw(4, 5, dtype=float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = attend(q, k, v, mask)
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
    assert result.dtype == theirs.dtype == torch.bfloat16
    result.float().sum().backward()
    assert {leaf.grad.dtype for leaf in (q, k, v, mask)} == {float32}


def test_transforms():
    """torch.func's grad, vmap and both."""
    q, k, v = qkv(needs=False)
    many = torch.stack([q, q + 1, q - 1])

    def loss(query, key=k, value=v):
        return attend(query, key, value).square().sum()

    one = torch.func.grad(loss)(q)
    leaf = q.clone().requires_grad_()
    loss(leaf).backward()
    torch.testing.assert_close(one, leaf.grad)
    outputs = torch.func.vmap(lambda query: attend(query, k, v))(many)
    assert torch.equal(outputs[1], attend(many[1], k, v))
    both = torch.func.vmap(torch.func.grad(loss))(many)
    assert torch.equal(both[0], one)
    one_head = k[:, :1], v[:, :1]
    of_key = torch.func.grad(lambda query, key: loss(query, key, one_head[1]), argnums=1)
    by_entry = torch.func.vmap(of_key, in_dims=(0, None))(many, one_head[0])
    assert by_entry.shape == (3, *one_head[0].shape)
    assert torch.equal(by_entry[2], of_key(many[2], one_head[0]))


@pytest.mark.parametrize("options", [
    {}, {"is_causal": True, "scale": 0.3}, {"attn_mask": True}, {"enable_gqa": True},
], ids=["plain", "causal", "mask", "groups"])  # fmt: skip
def test_patched_calls(options):
    """clattn computes both directions of torch's own calls; a mask has a gradient too."""
    q, k, v = qkv(float32, heads=4)
    if options.pop("enable_gqa", False):
        k, v = (a.detach()[:, :2].clone().requires_grad_() for a in (k, v))
        options["enable_gqa"] = True
    operands = [q, k, v]
    if "attn_mask" in options:
        operands.append(draw(4, 5, seed=4, dtype=float32))
        options["attn_mask"] = operands[-1]
    grad = draw(1, 4, 4, 3, seed=5, dtype=float32, needs=False)

    def differentiate():
        output = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
        return torch.autograd.grad(output, operands, grad)

    right = differentiate()
    before = clattn.torch.call_counts()
    with clattn.torch.sdpa():
        got = differentiate()
    assert clattn.torch.call_counts() - before == {"clattn": 1}
    for one, other in zip(got, right, strict=True):
        torch.testing.assert_close(one, other)


def test_patched_calls_that_drop():
    """With torch's generator, so a checkpoint drops the same weights again."""
    q, k, v = qkv(float32)

    def attended(q):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    before = clattn.torch.call_counts()
    with clattn.torch.sdpa():
        gradients = []
        for run in (attended, lambda q: checkpoint(attended, q, use_reentrant=False)):
            torch.manual_seed(3)
            gradients.append(torch.autograd.grad(run(q).square().sum(), q)[0])
        torch.manual_seed(3)
        alone = attended(q.detach())
        torch.manual_seed(3)
        assert torch.equal(alone, attended(q))
    assert torch.equal(*gradients)
    assert set(clattn.torch.call_counts() - before) == {"clattn"}


@pytest.mark.parametrize("dynamic", [False, True])
def test_patched_calls_that_are_compiled(dynamic):
    q, k, v = qkv(float32)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph.code)
        return graph

    def loss(q):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).square().sum()

    with clattn.torch.sdpa():
        loss(q).backward()
        right, q.grad = q.grad, None
        torch.compile(loss, fullgraph=True, dynamic=dynamic, backend=keep)(q).backward()
    assert torch.equal(q.grad, right)
    assert "clattn.attention" in graphs[0]


def test_compiled():
    """One operator without a break in the graph, in both directions."""
    q, k, v = qkv()

    def loss(q):
        return attend(q, k, v, is_causal=True).square().sum()

    loss(q).backward()
    right, q.grad = q.grad, None
    torch.compile(loss, fullgraph=True, backend="aot_eager")(q).backward()
    assert torch.equal(q.grad, right)


def test_exported():
    """torch.export sees the same operator."""

    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return attend(q, k, v, window=(2, 0))

    arrays = qkv(needs=False)
    program = torch.export.export(Module(), arrays)
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert called[0] is torch.ops.clattn.attention.default
    assert torch.equal(program.module()(*arrays), Module()(*arrays))


def test_flex_in_modes_of_torch():
    """A score_mod that computes its tensors anew; a checkpoint; autocast; torch's arguments."""
    from torch.nn.attention.flex_attention import AuxRequest

    q, k, v = qkv()
    table, gain = draw(3, 2, 5, seed=5), draw(seed=6)

    def mod(score, b, h, q_idx, kv_idx):
        return score * torch.exp(gain) + torch.tanh(table[1])[h, kv_idx] * gain + table[2][h, 0]

    def by_mod(q, k, v):
        return clattn.torch.flex_attention(q, k, v, mod)

    scores = q @ k.mT / 3**0.5 * gain.exp() + table[1].tanh()[:, None] * gain
    plain = (scores + table[2, :, :1, None]).softmax(-1) @ v
    leaves, grad = (q, k, v, table, gain), draw(*plain.shape, seed=7, needs=False)
    right = torch.autograd.grad(plain, leaves, grad)
    for result in (
        by_mod(q, k, v),
        checkpoint(by_mod, q, k, v, use_reentrant=False),
    ):
        for one, other in zip(torch.autograd.grad(result, leaves, grad), right, strict=True):
            torch.testing.assert_close(one, other)
    checkpoint(by_mod, q, k, v, use_reentrant=True).backward(grad)  # whose first pass records none
    for leaf, other in zip(leaves, right, strict=True):
        torch.testing.assert_close(leaf.grad, other)
    of_gain = torch.autograd.grad(by_mod(q, k, v), gain, grad)  # alone
    torch.testing.assert_close(of_gain, right[-1:])

    q, k, v = qkv(float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result, aux = clattn.torch.flex_attention(q, k, v, return_aux=AuxRequest(lse=True))
    assert result.dtype is torch.bfloat16 and aux.lse.dtype is float32
    (result.float().sum() + aux.lse.sum()).backward()
    assert q.grad.dtype is v.grad.dtype is float32
    with pytest.raises(NotImplementedError, match=r"no rules for torch\.func's transforms"):
        torch.func.grad(lambda q: by_mod(q, k, v).sum())(q.detach())
    many = torch.ones(2, *result.shape, dtype=float32)
    with pytest.raises(NotImplementedError, match="nor for batched gradients"):
        torch.autograd.grad(clattn.torch.flex_attention(q, k, v), q, many, is_grads_batched=True)


def test_second_derivatives_are_refused():
    q, k, v = qkv()
    (first,) = torch.autograd.grad(attend(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="clattn's attention has no second derivative"):
        first.sum().backward()


def test_it_learns():
    """Gradients of float32 agree with those of torch's attention, and a loss falls."""
    q, k, v = qkv(float32, L=9, S=9, E=8)
    optimiser = torch.optim.SGD([q, k, v], lr=20.0)
    aim = draw(1, 2, 9, 8, seed=9, dtype=float32, needs=False)
    losses = []
    for _ in range(20):
        optimiser.zero_grad()
        loss = (attend(q, k, v, is_causal=True) - aim).square().mean()
        loss.backward()
        mine = [leaf.grad.clone() for leaf in (q, k, v)]
        optimiser.zero_grad()
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        (theirs - aim).square().mean().backward()
        for one, leaf in zip(mine, (q, k, v), strict=True):
            np.testing.assert_allclose(one, leaf.grad, rtol=1e-4, atol=1e-6)
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_wrong_arguments():
    q, k, v = qkv()
    for options, kind, message in [
        ({"window": 3}, TypeError, r"window must be None or \(left, right\), got 3"),
        ({"window": (-1, 0)}, ValueError, "window has the bound -1"),
        ({"is_causal": "left"}, ValueError, "is_causal is 'left'; expected True, False or"),
        ({"key": k.detach().numpy()}, TypeError, "key must be a torch.Tensor, got ndarray"),
        ({"value": v[..., :3, :]}, ValueError, r"value has length 3 .*expected 5, that of key"),
        ({"sinks": np.zeros(2)}, TypeError, "sinks must be a torch.Tensor, got ndarray"),
        ({"attn_mask": [[True]]}, TypeError, "attn_mask must be a torch.Tensor, got list"),
        ({"sinks": draw(3)}, ValueError, r"sinks has shape \(3,\); expected \(2,\)"),
        ({"attn_mask": draw(3, 3)}, ValueError, r"attn_mask has shape \(3, 3\); expected"),
        ({"layout": "BLEH"}, ValueError, 'layout is \'BLEH\'; expected "BHLE" or "BLHE"'),
        ({"layout": "BLHE", "query": q[0, 0]}, ValueError, "query has shape .*three dimensions"),
        ({"device": "nowhere"}, ValueError, "device 'nowhere' names no OpenCL device"),
    ]:
        with pytest.raises(kind, match=message):
            attend(**{"query": q, "key": k, "value": v} | options)
