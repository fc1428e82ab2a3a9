# SPDX-License-Identifier: MIT
"""Tiny models of transformers, their weights drawn, with attn_implementation="clattn".

The truth is a model in float64 with attention as it is defined, `plain`. In float32 a model may err
four times as much as with "eager". Parts of transformers that take seconds to import are imported
where a test needs them, so not by each process that collects the tests.
"""

import copy
import itertools
import pickle
from functools import partial

import clattn
import numpy as np
import pytest
from clattn import attention
from support.processes import run_python
from support.tiny_models import (
    FAMILIES,
    IDS,
    LEFT,
    RIGHT,
    WRITERS,
    generate,
    logits,
    make,
    plain,
    registered,  # noqa: F401
)
from support.variants import force

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
sweep_models = pytest.importorskip("sweep_models")


@pytest.fixture
def calls(monkeypatch):
    """The masks and options of the calls of clattn."""
    seen = []
    attend = attention.scaled_dot_product_attention

    def watch(**options):
        seen.append((options.get("attn_mask"), options))
        return attend(**options)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", watch)
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_logits(device, calls, family):
    """One batch without padding, and two in which a sequence is one token."""
    masks = (None, LEFT, RIGHT)
    true, eager, ours = (
        [logits(model, mask) for mask in masks]
        for model in (make(family, "plain", torch.float64), make(family, "eager"), make(family))
    )
    for right, theirs, result in zip(true, eager, ours, strict=True):
        assert result.dtype is torch.float32
        allowed = 4 * (theirs - right).abs().max()
        assert (result - right).abs().max() <= allowed
    attentions = 6 if hasattr(make(family).config, "decoder_layers") or family == "T5" else 2
    assert len(calls) == attentions * len(masks)
    assert all(options["device"] == device for _, options in calls)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {}) for family in WRITERS),
        *((family, {"cache_implementation": "static"}) for family in ("Llama", "Gemma 3", "T5")),
        ("Mistral", {"num_beams": 3}),
        ("Mistral", {"use_cache": False}),
    ],
    ids=str,
)
def test_text_is_the_same(device, family, options):
    """Prefill and steps with a cache, of a batch that is padded on the left."""
    theirs, ours = (generate(make(family, name), **options) for name in ("eager", "clattn"))
    assert torch.equal(ours.sequences, theirs.sequences)
    for n, (left, right) in enumerate(zip(ours.logits, theirs.logits, strict=True)):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-4, msg=f"token {n}")


def test_windows_and_padding_are_no_dense_masks(device, calls):
    """Steps and prefills of Mistral give clattn a window, and a mask of keys alone."""
    generate(make("Mistral"))
    assert len(calls) == 2 * 7
    for mask, options in calls:
        assert options["window"] == (2, 0)
        assert mask is None or mask.shape[:3] == (3, 1, 1)
    calls.clear()
    logits(make("BERT"))
    assert [mask for mask, _ in calls] == [None, None]


PLACES = [  # L, S, positions of the first row and the first key
    (9, 9, 0, 0), (1, 9, 8, 0), (3, 9, 6, 0), (9, 12, 0, 0), (1, 12, torch.tensor(8), 0),
    (1, 4, 8, 5), (3, 6, 6, 3),
]  # fmt: skip


def mask_of(band, L, S):
    """Which keys clattn attends to: the weights of scores that are all alike."""
    x = np.ones((1, max(L, S), 1), np.float32)
    _, weights = clattn.scaled_dot_product_attention(
        x[:, :L], x[:, :S], x[:, :S], return_weights=True, **band._asdict()
    )
    return torch.from_numpy(weights > 0)


def test_masks_are_those_of_sdpa(device):
    utils = transformers.masking_utils
    masks = [
        (utils.causal_mask_function, None),
        (utils.bidirectional_mask_function, None),
        (utils.sliding_window_causal_mask_function(4), 4),
        (utils.sliding_window_bidirectional_mask_function(4), 4),
    ]
    cases = itertools.product(masks, PLACES, (None, LEFT, RIGHT, RIGHT | True))
    for (function, size), (L, S, row, key), padding in cases:
        given = {
            "batch_size": 3, "q_length": L, "kv_length": S, "q_offset": row, "kv_offset": key,
            "mask_function": function, "attention_mask": padding, "local_size": size,
            "config": None, "dtype": torch.float32, "use_vmap": False,
        }  # fmt: skip
        mask = clattn.transformers.make_mask(**given, allow_is_causal_skip=True)
        right = utils.sdpa_mask(**given, allow_is_causal_skip=False)
        assert isinstance(mask, clattn.transformers.AttentionMask)
        assert mask.shape == right.shape
        assert mask.dtype is torch.bool
        seen = min(S, row - key + L) if mask.band.is_causal else S  # a row sees no key behind it
        assert (mask.padding is None) == bool(
            padding is None or (padding[:, key:].all() and key + seen <= padding.shape[1])
        )
        ours = mask_of(mask.band, L, S) & torch.ones(3, 1, 1, 1, dtype=torch.bool)
        if mask.padding is not None:
            ours &= mask.padding[:, None, None]
        assert torch.equal(ours, right)
        assert torch.equal(mask & True, right)
        assert torch.equal(mask[..., 1:], right[..., 1:])


def test_other_masks_are_tensors():
    """Those that are no band: packed sequences, chunks, other windows, what a user adds."""
    sequences = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2]] * 3)
    utils = transformers.masking_utils
    makers = [
        utils.and_masks(utils.causal_mask_function, lambda b, h, q, k: k != 2),
        utils.chunked_causal_mask_function(4, torch.zeros(3, dtype=int)),
        utils.sliding_window_causal_mask_function(3),
        utils.packed_sequence_mask_function(sequences),
        utils.and_masks(lambda b, h, q, k: k <= q, utils.packed_sequence_mask_function(sequences)),
        lambda b, h, q, k: k <= q,
    ]
    for function in makers:
        given = {"batch_size": 3, "q_length": 9, "kv_length": 9, "mask_function": function}
        mask = clattn.transformers.make_mask(**given, local_size=4, attention_mask=LEFT)
        assert type(mask) is torch.Tensor
        right = utils.sdpa_mask(**given, local_size=4, attention_mask=LEFT)
        assert torch.equal(mask, right)
    whole = clattn.transformers.make_mask(**given | {"mask_function": makers[1]}, local_size=10)
    assert whole is None  # causality alone


def change_elements(mask):
    mask[:, :, :, 0] = False


def change_a_view(mask):
    mask[..., 1:].detach().logical_not_()


def change_by_out(mask):
    assert torch.logical_or(mask, mask.flip(-1), out=mask) is mask


def change_in_place(mask):
    same = mask
    same &= mask.flip(-1)
    assert same is mask
    assert mask.masked_fill_(mask.flip(-2), True) is mask


@pytest.mark.parametrize("change", [change_elements, change_a_view, change_by_out, change_in_place])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_a_mask_may_be_changed(change, mode):
    with mode():
        given = {"q_offset": 1, "attention_mask": torch.arange(5) > torch.tensor([[-1], [0]])}
        mask = clattn.transformers.make_mask(2, 3, 5, **given)
        changed = transformers.masking_utils.sdpa_mask(2, 3, 5, **given)
        assert torch.equal(mask | False, changed)
        assert mask.band is not None  # reading changes nothing
        change(changed)
        change(mask)
        assert torch.equal(mask | False, changed)
        ours, reference = attend(mask)
        torch.testing.assert_close(ours, reference(changed)[0])


def test_copies_of_a_mask():
    mask = clattn.transformers.make_mask(2, 3, 5, 1)
    assert copy.copy(mask) is mask
    for twin in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask)), mask.clone()):
        assert type(twin) is torch.Tensor
        assert torch.equal(twin, mask | False)
    twice = copy.deepcopy([mask, mask])
    assert twice[0] is twice[1]
    assert mask.band is not None


def test_values_with_a_batch_of_their_own():
    x = torch.randn(3, 2, 4, 8)
    for batches in ((1, 1, 3), (1, 3, 1), (3, 1, 3)):
        q, k, v = (x[:n] for n in batches)
        ours, _ = clattn.transformers.attend(torch.nn.Identity(), q, k, v, None, is_causal=False)
        right = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        torch.testing.assert_close(ours, right.transpose(1, 2))


def test_autocast_casts_a_float_mask():
    """256.9 is 256 in bfloat16, as 256 is: the scores of all keys become equal."""
    v = torch.randn(1, 2, 5, 8)
    mask = (256 + 0.9 * (torch.arange(5) % 2)).expand(1, 1, 3, 5)
    for given in ({"attention_mask": mask}, {"attention_mask": None, "position_bias": mask}):
        with torch.autocast("cpu", torch.bfloat16):
            ours, _ = clattn.transformers.attend(
                torch.nn.Identity(), torch.zeros(1, 2, 3, 8), v, v, **given, is_causal=False
            )
        mean = v.mean(-2, keepdim=True).expand(1, 2, 3, 8).transpose(1, 2)
        torch.testing.assert_close(ours.float(), mean, rtol=0, atol=2**-6)


def test_a_mask_shows_what_it_says():
    mask = clattn.transformers.make_mask(2, 3, 5, 2)
    assert repr(mask) == (
        "AttentionMask((2, 1, 3, 5), BandOptions(is_causal=True, window=None, query_offset=2))"
    )
    mask[0].fill_(True)
    assert repr(mask) == "AttentionMask((2, 1, 3, 5), elements)"


def attend(mask=None, module=None, L=3, S=5, dtype=torch.float32, **options):
    """Attention of two sequences, and what `plain` makes of it."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, L, 8, 4, generator=generator).to(dtype).transpose(1, 2)
    k, v = (torch.randn(2, 2, S, E, generator=generator).to(dtype) for E in (4, 6))
    module = module or torch.nn.Identity()
    ours, weights = clattn.transformers.attend(module, q, k, v, mask, **options)
    assert ours.shape == (2, L, 8, 6)
    assert ours.is_contiguous()
    assert (weights is not None) == bool(options.get("output_attentions"))
    return ours, partial(plain, module, q, k, v)


def test_without_a_mask_the_module_says_whether_it_is_causal():
    causal, encoder = torch.nn.Identity(), torch.nn.Identity()
    causal.is_causal, encoder.is_causal = True, False
    tril = torch.ones(3, 5, dtype=torch.bool).tril()
    for module, said, mask in [
        (None, None, tril), (causal, None, tril), (encoder, None, None), (encoder, True, tril),
        (causal, False, None),
    ]:  # fmt: skip
        ours, reference = attend(module=module, is_causal=said)
        torch.testing.assert_close(ours, reference(mask)[0])
    ours, reference = attend(L=1, is_causal=True)  # a step sees all keys
    torch.testing.assert_close(ours, reference(None)[0])


def test_masks_of_the_user():
    """Of bools and of floats, with more keys than there are, for all heads and for each."""
    generator = torch.Generator().manual_seed(0)
    for shape in [(2, 1, 3, 7), (1, 1, 3, 5), (2, 8, 3, 5)]:
        allowed = torch.rand(shape, generator=generator) < 0.7
        ours, reference = attend(allowed)
        torch.testing.assert_close(ours, reference(allowed[..., :5])[0])
        bias = torch.randn(shape, generator=generator)
        ours, reference = attend(bias)
        torch.testing.assert_close(ours, reference(None, position_bias=bias[..., :5])[0])
        ours, reference = attend(bias, position_bias=bias)
        torch.testing.assert_close(ours, reference(None, position_bias=2 * bias[..., :5])[0])
        ours, reference = attend(allowed, position_bias=bias)
        right, _ = reference(allowed[..., :5], position_bias=bias[..., :5])
        torch.testing.assert_close(ours, right)


@pytest.mark.parametrize("name", ["s_aux", "sinks"])
def test_sinks_of_heads_rows_and_sequences(name):
    """One for each head, as Inkling 2's one for each row and head; the second row has no key."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([True, False, True])[:, None].expand(2, 1, 3, 5)
    for shape in [(8,), (1, 8, 1, 1), (2, 8, 3, 1), (1, 8, 3, 1), (2, 1, 1, 1), (1, 1, 1, 1)]:
        sinks = torch.randn(shape, generator=generator)
        ours, reference = attend(mask, **{name: sinks})
        torch.testing.assert_close(ours, reference(mask, s_aux=sinks)[0])
        _, query, key, value = reference.args
        _, weights = clattn.transformers.attend(
            None, query, key, value, mask, output_attentions=True, **{name: sinks}
        )
        right = weights @ value.repeat_interleave(4, 1)
        torch.testing.assert_close(ours, right.transpose(1, 2))
    for shape in [(8,), (2, 8, 3, 1)]:  # -inf is no sink
        ours, reference = attend(mask, **{name: torch.full(shape, -torch.inf)})
        torch.testing.assert_close(ours, reference(mask)[0])
    for shape in [(2,), (8, 1), (2, 8, 4, 1), (2, 2, 1, 1), (3, 8, 3, 1), (2, 8, 3, 5)]:
        text = ", ".join(map(str, shape))
        words = rf"{name} has shape \({text},?\); expected \(8,\), .* \(2, 8, 3, 1\)"
        with pytest.raises(ValueError, match=words):
            attend(**{name: torch.zeros(shape)})


def test_sinks_of_rows_in_half_types():
    """They are float32, and the output keeps its dtype."""
    sinks = torch.full((2, 8, 3, 1), 1.0)
    ours, _ = attend(dtype=torch.bfloat16, s_aux=sinks, is_causal=False)
    assert ours.dtype is torch.bfloat16
    right, _ = attend(is_causal=False, s_aux=sinks)
    torch.testing.assert_close(ours.float(), right, rtol=2**-6, atol=2**-6)


def test_the_sweep_of_all_families(capsys):
    """DeepSeek-V4 and NLLB-MoE need a mask of floats, Inkling 2 has sinks of rows."""
    families = ["deepseek_v4", "inkling2_text", "nllb-moe"]
    assert sweep_models.main(families) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[2:5]] == families
    assert lines[-1].endswith(": 3 agrees")


def test_a_mask_of_other_rows_is_refused():
    mask = clattn.transformers.make_mask(2, 4, 5)
    with pytest.raises(ValueError, match="attn_mask"):
        attend(mask)


def test_weights_are_returned():
    model, given = make("GPT-OSS"), {"output_attentions": True}
    with torch.inference_mode():
        ours = model(IDS, **given).attentions
        theirs = make("GPT-OSS", "eager")(IDS, **given).attentions
        exact = make("GPT-OSS", "eager").double()(IDS, **given).attentions
    assert len(ours) == 2
    for left, right, best in zip(ours, theirs, exact, strict=True):
        error, plain = ((found - best).abs().max().item() for found in (left, right))
        assert error <= 2 * plain, (error, plain)


def test_what_is_refused():
    with pytest.raises(TypeError, match=r"Tensor of shape \(2, 5\); expected .* four dimensions"):
        attend(torch.ones(2, 5, dtype=torch.bool))
    with pytest.raises(TypeError, match="attention_mask is of type list"):
        attend([])
    for name in ("cache", "indices", "block_indices"):
        with pytest.raises(ValueError, match=f"{name} is given"):
            attend(**{name: 3})
    with pytest.raises(ValueError, match="sinks"):
        attend(sinks=torch.zeros(2, 8, 3, 2))
    with pytest.raises(TypeError, match="query"):
        attend(dtype=torch.int32)


@pytest.mark.filterwarnings("error")
def test_an_unknown_argument_is_named():
    with pytest.warns(UserWarning, match="clattn ignores novelty, which this model gives"):
        attend(novelty=1)
    attend(novelty=None, use_cache=True, position_ids=torch.zeros(2, 3), sliding_window=2)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma 2", "GPT-OSS", "T5"])
def test_training(first_device, family):
    """Gradients of all weights agree with those of "eager", and the losses of a few steps."""
    clattn.transformers.register(first_device)
    models = make(family, "eager"), make(family)
    names = [name for name, _ in models[0].named_parameters()]
    labels = IDS.where(RIGHT, -100)  # no loss of padding
    gradients, losses = [], ([], [])
    for model, found in zip(models, losses, strict=True):
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):  # by torch's random numbers
                module.p = 0.0
            elif isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.0
        steps = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            steps.zero_grad()
            loss = model(IDS, attention_mask=RIGHT.long(), labels=labels).loss
            loss.backward()
            gradients.append([weights.grad for weights in model.parameters()])
            found.append(loss.item())
            steps.step()
    for name, one, other in zip(names, gradients[3], gradients[0], strict=True):
        if other is not None:
            most = 2e-4 * other.abs().max().item() + 1e-7
            torch.testing.assert_close(one, other, rtol=0, atol=most, msg=name)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)
    assert losses[1][-1] < losses[1][0]


def losses_of(model, low=None):
    """Of fifty steps, with attention in a half type if one is given."""
    steps = torch.optim.SGD(model.train().parameters(), lr=0.05)
    found = []
    for _ in range(50):
        steps.zero_grad()
        with torch.autocast("cpu", low, enabled=low is not None):
            loss = model(IDS, attention_mask=RIGHT.long(), labels=IDS.where(RIGHT, -100)).loss
        loss.backward()
        steps.step()
        found.append(loss.item())
    return np.array(found)


@pytest.mark.parametrize(
    ("kernel", "low"),
    [("", None), pytest.param("mma", torch.bfloat16, marks=pytest.mark.full(slowest=True))],
    ids=["chosen", "matrix units"],
)
def test_fifty_steps(device, monkeypatch, kernel, low):
    """The losses err no more than four times as much as with "eager"."""
    force(monkeypatch, kernel)
    true = losses_of(make("Llama", "plain", torch.float64))
    theirs, ours = (losses_of(make("Llama", name), low) for name in ("eager", "clattn"))
    assert ours[-1] < ours[0] / 2
    assert abs(ours - true).max() <= 4 * abs(theirs - true).max()


def test_weights_have_no_gradients(first_device):
    clattn.transformers.register(first_device)
    with pytest.raises(ValueError, match=r"output_attentions is True.*torch\.no_grad"):
        make("Llama")(IDS, output_attentions=True)


def test_dropout_follows_torchs_seed(device):
    model = make("BERT").train()
    results = []
    with torch.no_grad():
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            results.append(model(IDS).logits)
    assert torch.equal(*results[:2])
    assert not torch.equal(*results[1:])
    ours, _ = attend(dropout=1.0)
    assert (ours == 0).all()


def test_half_types_and_autocast(device):
    """bfloat16 errs as torch's does: 2^-8 of each of the numbers on the way."""
    model = make("Llama")
    true = logits(make("Llama", "plain", torch.float64), LEFT)
    theirs = logits(make("Llama", "eager", torch.bfloat16), LEFT)
    ours = logits(make("Llama", "clattn", torch.bfloat16), LEFT)
    assert ours.dtype is torch.bfloat16
    allowed = 4 * (theirs - true).abs().max()
    assert (ours - true).abs().max() <= allowed
    with torch.autocast("cpu", torch.bfloat16):
        ours = logits(model, LEFT)
    assert (ours - true).abs().max() <= allowed


def test_in_a_compiled_function():
    """torch compiles what makes a mask, and leaves attention out."""

    def mask_and_attend(q, padding):
        mask = clattn.transformers.make_mask(3, 9, 9, attention_mask=padding)
        return clattn.transformers.attend(None, q, q, q, mask)[0] + 1

    q = torch.randn(3, 2, 9, 4)
    compiled = torch.compile(mask_and_attend, backend="eager")
    torch.testing.assert_close(compiled(q, LEFT), mask_and_attend(q, LEFT))


def test_a_device_that_is_none():
    with pytest.raises(ValueError, match="no such device"):
        clattn.transformers.register("no such device")


def test_transformers_that_are_too_old():
    code = """
        import importlib.metadata, pytest, clattn, transformers
        importlib.metadata.version = lambda name: "5.3.0"
        with pytest.raises(ImportError, match="transformers 5.4 or later"):
            import clattn.transformers
    """
    run_python(code)


def test_without_transformers():
    code = """
        import sys, pytest
        import clattn
        assert "transformers" not in sys.modules
        sys.modules["torch"] = None
        with pytest.raises(ImportError, match='pip install "transformers>=5.4"'):
            import clattn.transformers
    """
    run_python(code)
