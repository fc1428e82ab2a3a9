# SPDX-License-Identifier: MIT
"""clattn.torch.varlen_attn and jagged tensors: gradients beside plain ones, torch in between."""

import clattn
import numpy as np
import pytest
from support.ragged import packed, seen

torch = pytest.importorskip("torch")

import clattn.torch  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

float32, float64, bfloat16 = torch.float32, torch.float64, torch.bfloat16
NAN = float("nan")
varlen_attn = clattn.torch.varlen_attn


def draw(*shape, seed=0, dtype=float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=float64).to(dtype)


def leaves(*tensors):
    return tuple(tensor.detach().clone().requires_grad_() for tensor in tensors)


def gradients_of(tensors):
    """Their gradients, which are taken away."""
    found = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    return found


def plain(query, key, value, sinks, mask, softcap):
    """Attention of one sequence, rows first, of two query heads for each key head."""
    key, value = (array.repeat_interleave(2, 1) for array in (key, value))
    scores = torch.einsum("ihe,jhe->hij", query, key) / query.shape[-1] ** 0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    mask = torch.from_numpy(mask)
    if sinks is None:  # one that takes part in no sum, but in that of rows without a key
        sinks = torch.where(mask.any(1), -torch.inf, 0.0).to(query.dtype).expand(len(scores), -1)
    else:
        sinks = sinks[:, None].expand(-1, len(query))
    scores = torch.cat([scores.masked_fill(~mask, -torch.inf), sinks[..., None]], -1)
    weights = scores.softmax(-1)[..., :-1]
    return torch.einsum("hij,jhe->ihe", weights, value), scores.logsumexp(-1)


# Sequences without rows, without keys, with neither; two rows behind the last one.
ROWS, KEYS = [5, 0, 2, 1, 0, 3], [7, 4, 4, 0, 0, 2]
USED = [3, 1, 4, 0, 0, 1]
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "lower right": {"is_causal": "lower_right"},
    "window": {"window_size": (1, 2)},
    "window and causal": {"window_size": (2, -1), "is_causal": True},
    "window behind what causality allows": {
        "window_size": (0, 0), "is_causal": True, "sinks": True},
    "capped": {"softcap": 1.5},
    "sinks": {"is_causal": True, "sinks": True},
    "unused keys": {"is_causal": "lower_right", "seqused_k": USED, "sinks": True},
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_are_those_of_each_sequence(device, options):
    """Of output and log-sum-exp, beside torch's of a plain computation in float64.

    What no sequence uses holds NaN, and so do the gradients of its results: its own are 0.
    """
    options = dict(options)
    given = packed(ROWS, KEYS, E=8, Ev=6)
    used = options.get("seqused_k", KEYS)
    for b, count in enumerate(used):
        for array in (given.key, given.value):
            array[given.cu_seq_k[b] + count : given.cu_seq_k[b + 1]] = NAN
    sinks = draw(4, seed=9) if options.pop("sinks", False) else None
    arrays = [torch.from_numpy(array) for array in given[:3]] + ([] if sinks is None else [sinks])
    ours, right = leaves(*arrays), leaves(*(array.double() for array in arrays))
    sinks = ours[3] if sinks is not None else None
    grad, grad_lse = draw(13, 4, 6, seed=4), draw(4, 13, seed=5)
    grad[11:], grad_lse[:, 11:] = NAN, NAN

    loss = 0
    for b, count in enumerate(used):
        q0, q1, k0 = (*given.cu_seq_q[b : b + 2], given.cu_seq_k[b])
        bounds = {name: options[name] for name in ("is_causal", "window_size") if name in options}
        mask = seen(q1 - q0, count, **bounds)
        output, lse = plain(right[0][q0:q1], right[1][k0 : k0 + count], right[2][k0 : k0 + count],
                            None if sinks is None else right[3], mask,
                            options.get("softcap", 0))  # fmt: skip
        loss = loss + (output * grad[q0:q1]).sum()
        keep = torch.from_numpy(mask.any(1)) | (sinks is not None)
        loss = loss + (lse * grad_lse[:, q0:q1])[:, keep].sum()
    loss.backward()

    for _ in range(2):  # the second time in memory that held NaN, or what the first has left
        fill_memory(device)
        output, lse = varlen_attn(*ours[:3], given.cu_seq_q, given.cu_seq_k, enable_gqa=True,
                                  sinks=sinks, return_lse=True, device=device,
                                  **options)  # fmt: skip
        assert not output[11:].any() and (lse[:, 11:] == -torch.inf).all()
        torch.autograd.backward([output, lse], [grad, grad_lse])
        found = gradients_of(ours)
        for got, leaf in zip(found, right, strict=True):
            torch.testing.assert_close(got.double(), leaf.grad, rtol=2e-5, atol=2e-5)
        unused = torch.ones(len(ours[1]), dtype=bool)
        for b, count in enumerate(used):
            unused[given.cu_seq_k[b] : given.cu_seq_k[b] + (count if ROWS[b] else 0)] = False
        assert not found[0][11:].any() and not found[1][unused].any() and not found[2][unused].any()


def fill_memory(device):
    """Let torch's allocator and the device's pool have memory that holds NaN."""
    query, key, value = (torch.full(shape, NAN) for shape in ((13, 4, 8), (21, 2, 8), (21, 2, 6)))
    ends = [0, 13], [0, 21]
    assert varlen_attn(query, key, value, *ends, enable_gqa=True, device=device).isnan().all()


@pytest.fixture
def on_device(first_device):
    with clattn.use_device(first_device):
        yield


OFFSETS = [0, 3, 4, 4, 6], [0, 4, 4, 7, 8]


def operands(dtype=float64, heads=4):
    """Query, key, value and sinks of OFFSETS, with a row and a key behind."""
    shapes = (7, heads, 3), (9, 2, 3), (9, 2, 2), (heads,)
    return leaves(*(draw(*shape, seed=n, dtype=dtype) for n, shape in enumerate(shapes)))


def attend(query, key, value, sinks=None, **options):
    return varlen_attn(query, key, value, *OFFSETS, enable_gqa=True, sinks=sinks, **options)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("options", [
    {"is_causal": True}, {"window_size": (2, 1), "softcap": 1.5}, {"seqused_k": [2, 0, 3, 1]},
], ids=["causal", "window", "unused keys"])  # fmt: skip
@pytest.mark.parametrize("count", [3, 4], ids=["alone", "sinks"])
def test_gradcheck(count, options):
    def both(*tensors):
        output, lse = attend(*tensors, return_lse=True, **options)
        return output, lse.clamp(min=-50)  # -inf has no differences

    assert torch.autograd.gradcheck(both, operands()[:count], check_batched_grad=True)


@pytest.mark.usefixtures("on_device")
def test_torchs_operator_checks():
    """Schema, fake function and registration of gradients."""
    options = clattn.torch.Options(enable_gqa=True, causal="lower_right", left=1)
    offsets = [torch.tensor(numbers) for numbers in OFFSETS]
    for sinks, used in ((0, None), (1, torch.tensor([2, 0, 3, 1]))):
        tensors = (*operands()[: 3 + sinks], *[None] * (1 - sinks), *offsets, used, None)
        checks = torch.library.opcheck(
            torch.ops.clattn.varlen_attention.default, (*tensors, "NHD", *options)
        )
        assert set(checks.values()) == {"SUCCESS"}


def test_the_log_sum_exp_has_heads_first(device):
    x = torch.zeros(5, 2, 1)
    _, lse = varlen_attn(x, x, x, [0, 2, 5], [0, 2, 5], return_lse=True, device=device)
    assert lse.shape == (2, 5)
    np.testing.assert_allclose(lse[0], np.log([2, 2, 3, 3, 3]), rtol=1e-6)


@pytest.mark.parametrize("huge", [1e4, NAN])
def test_other_sequences_change_no_bit(device, huge):
    """Offsets [0, 1, 3, 6]; another query, key and value of a sequence is that sequence's alone."""
    tensors = [draw(6, 2, 8, seed=n) for n in range(3)]
    offsets = torch.tensor([0, 1, 3, 6])

    def differentiate():
        ours = leaves(*tensors)
        output, lse = varlen_attn(*ours, offsets, offsets, is_causal=True, return_lse=True,
                                  device=device)  # fmt: skip
        (output.square().sum() + lse.sum()).backward()
        return [output.detach(), *gradients_of(ours)]

    before = differentiate()
    for rows in (slice(0, 1), slice(1, 3), slice(3, 6)):
        kept = [tensor[rows].clone() for tensor in tensors]
        for tensor in tensors:
            tensor[rows] = huge
        others = torch.ones(6, dtype=bool)
        others[rows] = False
        for one, other in zip(before, differentiate(), strict=True):
            assert torch.equal(one[others], other[others])
        for tensor, own in zip(tensors, kept, strict=True):
            tensor[rows] = own


@pytest.mark.usefixtures("on_device")
def test_lists_have_gradients():
    """Those of the packed call, in each tensor of a list; in compiled programs, too."""
    packed_leaves = operands()[:3]
    query, key, value = (leaf.detach() for leaf in packed_leaves)
    rows, keys = ([*np.diff(offsets)] for offsets in OFFSETS)
    lists = [leaves(*query[:6].split(rows)), *(leaves(*x[:8].split(keys)) for x in (key, value))]

    def loss(*lists):
        output, lse = varlen_attn(*lists, enable_gqa=True, is_causal=True, return_lse=True)
        return torch.cat(output).square().sum() + torch.cat(lse, 1).clamp(min=-50).sum()

    output, lse = attend(*packed_leaves, is_causal=True, return_lse=True)
    right = output[:6].square().sum() + lse[:, :6].clamp(min=-50).sum()
    right.backward()
    for call in (loss, torch.compile(loss, backend="aot_eager")):
        found = call(*lists)
        assert torch.equal(found, right)
        found.backward()
        for leaf, of in zip(packed_leaves, lists, strict=True):
            joined = torch.cat(gradients_of(of))
            assert torch.equal(joined, leaf.grad[: len(joined)])


def test_gradients_of_sinks_are_summed_in_float32(device):
    """64 sequences add the same: sums of bfloat16 would lose a bit and more."""
    (sinks,) = leaves(torch.zeros(1, dtype=bfloat16))
    x = torch.ones(64, 1, 8, dtype=bfloat16)
    offsets = torch.arange(65)
    output = varlen_attn(x, x, x * 0.7, offsets, offsets, sinks=sinks, device=device)
    output.sum().backward()
    weight = torch.tensor(8.0).sqrt().sigmoid().item()  # of the one key of a row
    right = -64 * 8 * 0.7 * weight * (1 - weight)
    assert abs(sinks.grad.item() - right) < 2**-7 * abs(right)


@pytest.mark.usefixtures("on_device")
def test_what_needs_gradients():
    """One alone of the tensors; the others get none."""
    tensors = [leaf.detach() for leaf in operands(float32)]
    for tensor in tensors:
        tensor.requires_grad_()
        attend(*tensors).square().sum().backward()
        assert [one.grad is not None for one in tensors] == [one is tensor for one in tensors]
        assert tensor.grad.abs().sum() > 0
        tensor.grad = None
        tensor.requires_grad_(False)
    assert not attend(*tensors).requires_grad


@pytest.mark.usefixtures("on_device")
def test_modes_of_torch():
    """A compiled program, a checkpoint and torch.func give the same bits."""
    query, key, value, sinks = operands(float32)

    def loss(query, *offsets):
        output = varlen_attn(query, key, value, *(offsets or OFFSETS), enable_gqa=True,
                             window_size=(2, 0), sinks=sinks)  # fmt: skip
        return output.square().sum()

    loss(query).backward()
    (right, *_) = gradients_of([query, key, value, sinks])
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    compiled(query, *map(torch.tensor, OFFSETS)).backward()
    found = gradients_of([query])
    checkpoint(loss, query, use_reentrant=False).backward()
    found += gradients_of([query])
    found.append(torch.func.grad(loss)(query.detach()))
    for one in found:
        assert torch.equal(one, right)
    two = torch.func.vmap(lambda query: attend(query, key, value))(torch.stack([query, query + 1]))
    assert torch.equal(two[1], attend(query + 1, key, value))
    first = torch.autograd.grad(loss(query), query, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="clattn's attention has no second derivative"):
        first.sum().backward()


@pytest.mark.usefixtures("on_device")
def test_autocast():
    """Query, key and value are cast; gradients are those of the float32 leaves."""
    tensors = operands(float32)
    with torch.autocast("cpu", dtype=bfloat16):
        output = attend(*tensors)
    assert output.dtype is bfloat16
    output.float().sum().backward()
    assert {leaf.grad.dtype for leaf in tensors} == {float32}


@pytest.mark.usefixtures("on_device")
def test_calls_count():
    """As those of clattn do, with gradients and without."""
    query, key, value, _ = operands(float32)
    before = clattn.torch.call_counts()
    attend(query, key, value)
    with torch.no_grad():
        attend(query, key, value)
        with pytest.raises(ValueError, match="sinks has shape"):
            attend(query, key, value, draw(3))
    assert clattn.torch.call_counts() - before == {"clattn": 2}


def test_what_has_no_gradients(device):
    """Pages, scales, mods and `out`: as by clattn.varlen_attn, or refused with gradients."""
    query, key, value, _ = operands(float32)
    pages = {"key": key[None], "value": value[None], "block_table": [[0]] * 4}
    pages["seqused_k"] = [4, 0, 3, 1]

    def bias(score, b, h, i, j):
        return score + b * i - j

    special = {
        "block_table": pages,
        "key_scale": {"key_scale": 0.5},
        "value_scale": {"value_scale": torch.tensor([0.5, 2.0])},
        "score_mod": {"score_mod": bias},
        "mask_mod": {"mask_mod": lambda b, h, i, j: i >= j},
        "out": {"out": torch.full((7, 4, 2), NAN)},
    }
    for name, options in special.items():
        call = {"query": query, "key": key, "value": value} | options
        call |= {"cu_seq_q": OFFSETS[0], "cu_seq_k": OFFSETS[1], "enable_gqa": True}
        with pytest.raises(NotImplementedError, match=f"^{name} is given, with which"):
            varlen_attn(**call, device=device)
        with torch.no_grad():
            got = varlen_attn(**call, device=device)
        call |= {name: call[name].detach() for name in ("query", "key", "value")}
        assert torch.equal(got, clattn.varlen_attn(**call, device=device))


# ---- jagged tensors ----


def jagged(values, offsets):
    """A tensor (B, H, j, E) of values (total, H, E)."""
    return torch.nested.nested_tensor_from_jagged(values, offsets).transpose(1, 2)


def of_each(query, key, value, **options):
    """clattn's results of each sequence, joined: (total, H, Ev)."""
    pieces = zip(query.unbind(), key.unbind(), value.unbind(), strict=True)
    return [
        clattn.torch.scaled_dot_product_attention(*(x[None] for x in three), **options)[0]
        for three in pieces
    ]


@pytest.mark.parametrize("patched", [True, False])
@pytest.mark.parametrize("lengths", [([4], [4]), ([1, 2], [5, 3]), ([3, 0, 2], [1, 2, 4])], ids=str)
def test_jagged_tensors(device, lengths, patched):
    """One sequence; fewer rows than keys; none. The gradients are those of calls of each."""
    offsets = [torch.tensor([0, *np.cumsum(numbers)]) for numbers in lengths]
    values = leaves(*(draw(x[-1], 2, 8, seed=n) for n, x in enumerate((*offsets, offsets[1]))))
    query, key, value = (jagged(x, offsets[n > 0]) for n, x in enumerate(values))
    before = clattn.torch.call_counts()
    if patched:
        with clattn.torch.sdpa(device):
            result = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    else:
        with clattn.use_device(device):
            result, lse = clattn.torch.scaled_dot_product_attention(
                query, key, value, is_causal=True, return_lse=True
            )
        assert lse.shape == query.shape[:3]
    assert clattn.torch.call_counts() - before == {"clattn": 1}
    assert result.layout is torch.jagged and result.shape == query.shape
    assert result.offsets() is query.offsets()
    result.values().square().sum().backward()
    found = gradients_of(values)
    with clattn.use_device(device):
        right = of_each(query, key, value, is_causal=True, softcap=1e4)
    for one, other in zip(result.unbind(), right, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    sum(part.square().sum() for part in right).backward()
    for one, other in zip(found, gradients_of(values), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("starts", [[1, 0, 2], [0, 1, 0]], ids=str)
def test_jagged_tensors_with_holes(device, starts):
    """Rows of a padded tensor, whose padding holds NaN and gets the gradient 0."""
    padded = torch.full((3, 6, 2, 8), NAN)
    lengths = [2, 4, 3]
    for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        padded[b, start : start + length] = draw(length, 2, 8, seed=b)
    (leaf,) = leaves(padded)
    holes = torch.nested.narrow(
        leaf, 1, torch.tensor(starts), torch.tensor(lengths), layout=torch.jagged
    )
    query = holes.transpose(1, 2)
    with clattn.use_device(device):
        result = clattn.torch.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert result.shape == query.shape and result.lengths() is query.lengths()
    assert result.values().isfinite().all()
    result.values().sum().backward()
    (found,) = gradients_of([leaf])
    for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        x = leaf[b, start : start + length].transpose(0, 1)[None]
        with clattn.use_device(device):
            right = clattn.torch.scaled_dot_product_attention(x, x, x, is_causal=True, softcap=1e4)
        first = result.offsets()[b]
        got = result.values()[:, first : first + length]
        torch.testing.assert_close(got, right[0], rtol=0, atol=1e-6)
        right.sum().backward()
    torch.testing.assert_close(found, gradients_of([leaf])[0], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("on_device")
def test_jagged_tensors_in_compiled_programs():
    values = leaves(*(draw(n, 2, 8, seed=n) for n in (3, 8, 8)))
    query, key = (torch.tensor(numbers) for numbers in ([0, 1, 3], [0, 5, 8]))

    def loss(x, y, z, query, key):
        result = clattn.torch.scaled_dot_product_attention(
            jagged(x, query), jagged(y, key), jagged(z, key), is_causal=True
        )
        return result.values().square().sum()

    call = (*values, query, key)
    loss(*call).backward()
    right = gradients_of(values)
    torch.compile(loss, fullgraph=True, backend="aot_eager")(*call).backward()
    for one, other in zip(gradients_of(values), right, strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("on_device")
def test_what_jagged_tensors_do_not_take():
    x = jagged(draw(3, 2, 8), torch.tensor([0, 1, 3]))
    other = jagged(draw(3, 2, 8), torch.tensor([0, 2, 3]))
    call = clattn.torch.scaled_dot_product_attention
    mask = torch.zeros(3, 3)
    for arguments, options, message in [
        ((x, x, x, mask), {}, "Masks are not yet supported"),  # torch's words
        ((x, x, x, mask), {"softcap": 1.0}, "attn_mask is given, which jagged tensors do not take"),
        ((x, x, x), {"window": (1, 0)}, "window is given, .*clattn.torch.varlen_attn has windows"),
        ((x, x, x), {"query_offset": 1, "softcap": 1.0}, "query_offset is given"),
        ((x, x, other), {"softcap": 1.0}, "key and value with the same offsets"),
        ((x, x, draw(2, 2, 3, 8)), {"softcap": 1.0}, "expected jagged tensors"),
    ]:
        with pytest.raises(ValueError, match=message):
            call(*arguments, **options)
    for function in (clattn.scaled_dot_product_attention, clattn.varlen_attn, varlen_attn):
        with pytest.raises(ValueError, match=r"^query is a nested tensor; expected an array"):
            function(x, x, x, *[[0, 3]] * 2 * (function is not clattn.scaled_dot_product_attention))
    for flex in (clattn.flex_attention, clattn.torch.flex_attention):
        with pytest.raises(ValueError, match=r"query is a nested tensor; .*clattn\.varlen_attn"):
            flex(x, x, x)


@pytest.mark.usefixtures("on_device")
@pytest.mark.filterwarnings("ignore")  # about nested tensors being a prototype
def test_other_nested_tensors_are_torchs():
    strided = torch.nested.as_nested_tensor([draw(2, 3, 8), draw(2, 1, 8)])
    x = jagged(draw(3, 2, 8), torch.tensor([0, 1, 3]))
    before = clattn.torch.call_counts()
    with clattn.torch.sdpa():
        for tensor in (strided, x):
            dropped = 0.5 if tensor is x else 0.0  # jagged tensors only where weights are dropped
            result = F.scaled_dot_product_attention(tensor, tensor, tensor, dropout_p=dropped)
            assert result.layout is tensor.layout
    assert set(clattn.torch.call_counts() - before) == {
        "torch: tensors of other kinds, devices or dtypes"
    }
