# SPDX-License-Identifier: MIT
"""The gallery of mods, written for torch, beside torch's own FlexAttention.

torch runs eagerly, on float64. The same functions with the same tensors run in clattn's kernels.
"""

import clattn
import numpy as np
import pytest
from references.flex import flex
from support.checks import assert_close
from support.data import draw, qkv
from support.mods import BUCKETS, DOCUMENTS, GALLERY, MOST, RELATIVE, SLOPES, SWIN, WIDTH
from support.sizes import SMALL

torch = pytest.importorskip("torch", "2.9")
attention = pytest.importorskip("torch.nn.attention.flex_attention")
# torch advises to compile its function.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

slopes, documents, buckets, relative, swin = map(
    torch.from_numpy, (SLOPES, DOCUMENTS, BUCKETS, RELATIVE, SWIN)
)
COUNTS = np.array([30, 130])  # the keys of each sequence
SINKS = draw((8,), np.float32)


def t5(score, b, h, q, k):
    far = torch.maximum(torch.abs(k - q), torch.ones_like(q))
    log = (torch.log2(far + 0.37) - 3.0) * 2.0
    late = torch.clamp(8 + log.to(torch.int32), max=15)
    bucket = torch.where(far < 8, torch.abs(k - q), late)
    return score + buckets[h, bucket + torch.where(k - q > 0, 16, 0)]


def pixels(score, b, h, q, k):
    y = q // WIDTH % WIDTH - k // WIDTH % WIDTH
    x = q % WIDTH - k % WIDTH
    return score + swin[h, y + WIDTH - 1, x + WIDTH - 1]


def neighbourhood(b, h, q, k):
    y = torch.clamp(q // WIDTH, 2, WIDTH - 3) - k // WIDTH
    x = torch.clamp(q % WIDTH, 2, WIDTH - 3) - k % WIDTH
    return (torch.abs(y) <= 2) & (torch.abs(x) <= 2)


# The functions of GALLERY, in its order.
OF_TORCH = {
    "alibi, causal": (lambda s, b, h, q, k: s + slopes[h] * (k - q), lambda b, h, q, k: q >= k),
    "t5, documents": (t5, lambda b, h, q, k: documents[q] == documents[k]),
    "relative, dilated": (
        lambda s, b, h, q, k: s + relative[h, q - k + MOST],
        lambda b, h, q, k: ((q - k) % (h + 2) == 0) & (torch.abs(q - k) < 60),
    ),
    "capped, prefix": (
        lambda s, b, h, q, k: 3.0 * torch.tanh(s / 3.0),
        lambda b, h, q, k: (k < 20 + b) | (q >= k),
    ),
    "swin, neighbourhood": (pixels, neighbourhood),
    "excluding, window": (
        lambda s, b, h, q, k: torch.where((k % 3 == b) | (k > q + 40), -torch.inf, s * 2),
        lambda b, h, q, k: torch.abs(q - k) <= 16,
    ),
}


def run_both(device, mods, mods_of_torch, sinks=None):
    """Compare torch with NumPy's evaluation of the same mods, and clattn with torch."""
    arrays = qkv((2, 8), 43, 130, SMALL)
    right = {"score_mod": mods[0], "mask_mod": mods[1]}
    score_mod, mask_mod = mods_of_torch
    (_, allowed), (_, allowed_lse) = flex(*arrays, **right)
    doubles = [a.astype(np.float64) for a in arrays]
    (wanted, near), (wanted_lse, near_lse) = flex(*doubles, **right)

    blocks = attention.create_block_mask(mask_mod, 2, 8, 43, 130, device="cpu")
    expected, others = attention.flex_attention(
        *map(torch.from_numpy, doubles), score_mod, blocks,
        return_aux=attention.AuxRequest(lse=True),
    )  # fmt: skip
    lse = others.lse
    assert_close(expected.numpy(), wanted, near, "torch's result")
    assert_close(lse.numpy(), wanted_lse, near_lse, "torch's lse")
    if sinks is not None:
        logits = torch.from_numpy(sinks).double()[:, None]
        expected = expected * torch.sigmoid(lse - logits)[..., None]
        lse = torch.logaddexp(lse, logits)

    got, got_lse = clattn.flex_attention(
        *map(torch.from_numpy, arrays), score_mod, mask_mod=mask_mod, sinks=sinks,
        return_lse=True, device=device,
    )  # fmt: skip
    assert_close(got.numpy(), expected.numpy(), allowed)
    assert_close(got_lse.numpy(), lse.numpy(), allowed_lse, "lse")


@pytest.mark.full
@pytest.mark.parametrize("name", GALLERY)
def test_gallery(device, name):
    run_both(device, GALLERY[name], OF_TORCH[name])


def test_sinks_and_lengths(device):
    """torch has no sinks. Their effect follows from its log-sum-exp."""
    counts = torch.from_numpy(COUNTS)

    def padded(b, h, q, k):
        return (k <= q + 90) & (k < COUNTS[b])

    def padded_of_torch(b, h, q, k):
        return (k <= q + 90) & (k < counts[b])

    run_both(device, (None, padded), (None, padded_of_torch), SINKS)


# ---- torch's arguments ----


def causal(b, h, q, k):
    return q >= k


def of_heads(b, h, q, k):
    return (q >= k) & (q - k < 40 + 8 * h)


def tensors(L=130, S=200):
    return [torch.from_numpy(a) for a in qkv((2, 3), L, S, SMALL)]


@pytest.mark.by_turns
@pytest.mark.parametrize("size", [64, (64, 32)], ids=str)
def test_block_masks_of_torch(device, size):
    theirs = attention.create_block_mask(of_heads, None, 3, 128, 192, "cpu", size)
    ours = clattn.create_block_mask(of_heads, None, 3, 128, 192, device, size)
    for name in ("kv", "full_kv", "q", "full_q"):
        counts = getattr(theirs, f"{name}_num_blocks").numpy()
        np.testing.assert_array_equal(getattr(ours, f"{name}_num_blocks"), counts)
        columns = getattr(theirs, f"{name}_indices").numpy()
        used = np.arange(columns.shape[-1]) < counts[..., None]
        np.testing.assert_array_equal(getattr(ours, f"{name}_indices")[used], columns[used])
    theirs = attention.create_block_mask(of_heads, None, 3, 130, 200, "cpu", size)
    ours = clattn.create_block_mask(of_heads, None, 3, 130, 200, device, size)
    arrays = tensors()
    right = clattn.flex_attention(*arrays, block_mask=ours, device=device)
    got = clattn.flex_attention(*arrays, block_mask=theirs, device=device)
    torch.testing.assert_close(got, right)
    one = clattn.flex_attention(
        *[a[:, 1:2] for a in arrays], block_mask=ours[:, 1], device=device)  # fmt: skip
    torch.testing.assert_close(one, right[:, 1:2])


@pytest.mark.by_turns
def test_blocks_of_torch_decide(device):
    """Blocks that the mask_mod does not follow from."""
    counts, columns = torch.tensor([[[1, 1]]]), torch.tensor([[[[1, 0], [0, 1]]]])
    mask = attention.BlockMask.from_kv_blocks(counts, columns, BLOCK_SIZE=128)
    arrays = tensors(256, 256)
    allowed = torch.zeros(256, 256, dtype=torch.bool)
    allowed[:128, 128:] = allowed[128:, :128] = True
    right = torch.nn.functional.scaled_dot_product_attention(*arrays, allowed)
    got = clattn.flex_attention(*arrays, block_mask=mask, device=device)
    torch.testing.assert_close(got, right, atol=1e-5, rtol=0)


def test_a_device_of_torch():
    cpu = torch.device("cpu")
    mask = clattn.create_block_mask(causal, None, None, 130, 200, device=cpu, _compile=True)
    arrays = tensors()
    right = clattn.flex_attention(*arrays, block_mask=mask)
    assert torch.equal(clattn.flex_attention(*arrays, block_mask=mask, device=cpu), right)
    for function in (clattn.flex_attention, clattn.create_block_mask):
        given = arrays if function is clattn.flex_attention else (causal, 1, 1, 9, 9)
        with pytest.raises(ValueError, match=r"device is device\(type='cuda'\); expected"):
            function(*given, device=torch.device("cuda"))


def test_gradients_need_tensors():
    """Without gradients any array will do; with them the message names what is none."""
    query, key, value = qkv((1, 2), 5, 7, 8)
    tensors = [torch.from_numpy(array) for array in (query, key, value)]
    assert type(clattn.torch.flex_attention(query, key, value)) is np.ndarray
    bias = torch.zeros(2, requires_grad=True)

    def mod(score, b, h, q, k):
        return score + bias[h]

    for place, name in enumerate(("query", "key", "value")):
        given = [*tensors[:place], (query, key, value)[place], *tensors[place + 1 :]]
        with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, got ndarray"):
            clattn.torch.flex_attention(*given, mod)
    with pytest.raises(TypeError, match=r"sinks must be a torch\.Tensor, got ndarray"):
        clattn.torch.flex_attention(*tensors, mod, sinks=np.zeros(2, np.float32))


def test_kernel_options_are_said_once_to_have_no_effect(device, monkeypatch):
    monkeypatch.setattr(clattn.flex.attention, "_warned", False)
    arrays = tensors()
    right = clattn.flex_attention(*arrays, mask_mod=causal, device=device)
    options = {"mask_mod": causal, "device": device, "kernel_options": {"BLOCK_M": 64}}
    with pytest.warns(UserWarning, match="kernel_options of flex_attention has no effect") as said:
        got = [clattn.flex_attention(*arrays, **options) for _ in range(2)]
    assert all(torch.equal(one, right) for one in got)
    assert [warning.filename for warning in said] == [__file__]


@pytest.mark.by_turns
def test_auxiliary_outputs(device):
    arrays = tensors()
    right, lse = clattn.flex_attention(*arrays, mask_mod=causal, device=device, return_lse=True)
    for wanted in (True, False):
        request = attention.AuxRequest(lse=wanted)
        got, more = clattn.flex_attention(
            *arrays, mask_mod=causal, device=device, return_aux=request)  # fmt: skip
        assert torch.equal(got, right) and isinstance(more, attention.AuxOutput)
        assert more.max_scores is None
        assert torch.equal(more.lse, lse) if wanted else more.lse is None
    for request, options, exception, words in (
        (attention.AuxRequest(max_scores=True), {}, ValueError, "requests max_scores"),
        (attention.AuxRequest(lse=True), {"return_lse": True}, ValueError, "both given"),
        ({"lse": True}, {}, TypeError, "return_aux is of type dict; expected torch's AuxRequest"),
    ):
        with pytest.raises(exception, match=words):
            clattn.flex_attention(*arrays, device=device, return_aux=request, **options)


@pytest.mark.by_turns
def test_compiled(device):
    """The compiler calls both functions, and compiles what is around them."""

    def attend(q, k, v):
        mask = clattn.create_block_mask(causal, None, None, 130, 200, device)
        return clattn.flex_attention(
            q * 2, k, v, lambda s, b, h, i, j: s + i - j, mask, device=device) + 1  # fmt: skip

    arrays = tensors()
    compiled = torch.compile(attend, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(*arrays), attend(*arrays))
