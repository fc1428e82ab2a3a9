# SPDX-License-Identifier: MIT
"""The gallery of mods, written for torch, beside torch's own FlexAttention.

torch runs eagerly, on float64. The same functions with the same tensors run in clattn's kernels.
"""

import clattn
import numpy as np
import pytest
from references.flex import flex
from support.helpers import assert_close, draw, qkv
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
