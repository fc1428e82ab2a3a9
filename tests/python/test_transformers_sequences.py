# SPDX-License-Identifier: MIT
"""Sequences of different lengths in models of transformers: packed, padded, in a static cache."""

import itertools

import numpy as np
import pytest
from support.tiny_models import (
    IDS,
    LEFT,
    generate,
    make,
    plain,
    registered,  # noqa: F401
)

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import clattn.torch  # noqa: E402
import clattn.transformers  # noqa: E402
from clattn._parts import torch_sequences  # noqa: E402

NAN = float("nan")
ENDS = [0, 3, 8, 9]
PARTS = list(itertools.starmap(slice, itertools.pairwise(ENDS)))
TOKENS = IDS[:1]
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0]])
PACKED = "clattn: packed sequences, by a ragged call"
PADDED = "clattn: padded sequences, by a ragged call"
KEYS = "clattn: padded sequences, by a mask of keys"
DENSE = "clattn: a mask of rows and keys"


@pytest.fixture
def always_ragged(monkeypatch):
    """Padding is left out of tiny batches, too."""
    monkeypatch.setattr(torch_sequences, "_PADDING", 0)
    monkeypatch.setattr(torch_sequences, "_BYTES", 0)


def counted(call):
    """Return what a call gives, and how often clattn has computed attention in which way."""
    before = clattn.torch.call_counts()
    result = call()
    return result, clattn.torch.call_counts() - before


def gradients_of(model):
    found = {name: weights.grad for name, weights in model.named_parameters()}
    model.zero_grad()
    return {name: grad for name, grad in found.items() if grad is not None}


# ---- packed ----


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma 2", "GPT-OSS"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_packed_rows_are_each_sequence_alone(first_device, family, use_cache):
    """transformers finds packed rows itself without a cache, and where the family asks it to."""
    clattn.transformers.register(first_device)
    eager, model = make(family, "eager"), make(family)
    alone = torch.cat([eager(TOKENS[:, part], use_cache=False).logits for part in PARTS], 1)
    alone.square().mean().backward()
    packed, counts = counted(
        lambda: model(TOKENS, position_ids=POSITIONS, use_cache=use_cache).logits
    )
    packed.square().mean().backward()
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-4)
    assert counts == {PACKED: 2}
    theirs = gradients_of(eager)
    for name, grad in gradients_of(model).items():
        most = 2e-4 * theirs[name].abs().max().item() + 1e-7
        torch.testing.assert_close(grad, theirs[name], rtol=0, atol=most, msg=name)


def test_what_a_collator_hands_over(first_device):
    """Positions, offsets or the numbers of sequences: the loss is the same."""
    clattn.transformers.register(first_device)
    samples = [{"input_ids": TOKENS[0, part].tolist()} for part in PARTS]
    collator = transformers.DataCollatorWithFlattening(
        return_flash_attn_kwargs=True, return_seq_idx=True, return_tensors="pt"
    )
    batch = collator(samples)
    assert batch["cu_seq_lens_q"].tolist() == ENDS
    says = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
    model, losses = make("Llama"), []
    for left_out in (says, {*says} - {"seq_idx"}, {"seq_idx"}, set()):
        given = {name: value for name, value in batch.items() if name not in left_out}
        with torch.inference_mode():
            result, counts = counted(lambda given=given: model(**given, use_cache=True))
        assert counts == {PACKED: 2}
        losses.append(result.loss.item())
    assert len(set(losses)) == 1


def test_another_sequence_does_not_matter(first_device):
    clattn.transformers.register(first_device)
    model, found = make("Mistral"), []
    for first in (3, 4):
        tokens = TOKENS.clone()
        tokens[0, :3] = first
        embedded = model.get_input_embeddings()(tokens).detach().requires_grad_()
        logits = model(inputs_embeds=embedded, position_ids=POSITIONS).logits[:, 3:8]
        logits.square().mean().backward()
        found.append((logits, embedded.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert (embedded.grad[:, :3] == 0).all()


def rows(B=1, L=9, S=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, L, 8, 4), (B, S, 2, 4), (B, S, 2, 6)
    return [torch.randn(shape, generator=generator).transpose(1, 2) for shape in shapes]


def attend(q, k, v, mask=None, **options):
    options = {"is_causal": True} | options
    return clattn.transformers.attend(torch.nn.Identity(), q, k, v, mask, **options)[0]


def tril(L=9, S=9):
    return torch.ones(L, S, dtype=torch.bool).tril()


def apart(ends):
    """Which rows are of one sequence."""
    return torch.block_diag(*[torch.ones(n, n) for n in np.diff(ends)]).bool()


BLOCKS = apart(ENDS)


def test_which_positions_pack_rows():
    """Those that do not grow, of one row of positions; an image's patches share their first one."""
    image = torch.tensor([
        [0, 1, 2, 2, 2, 2, 4, 5, 6], [0, 1, 2, 2, 3, 3, 4, 5, 6], [0, 1, 2, 3, 2, 3, 4, 5, 6]
    ])  # fmt: skip
    odd = torch.tensor([7, 8, 8, 5, 9, 12, 1, 2, 2])
    together = [0, 9]
    for B, positions, ends in [
        (1, POSITIONS[0], ENDS), (1, POSITIONS, ENDS), (3, POSITIONS[0], ENDS),
        (3, POSITIONS, ENDS), (1, POSITIONS.expand(3, 1, 9), ENDS), (1, odd, [0, 2, 3, 6, 8, 9]),
        (1, image[:, None], together), (2, POSITIONS.expand(2, 9), together),
        (2, POSITIONS.expand(3, 2, 9), together), (1, torch.arange(9), together),
        (1, POSITIONS[:, :4], together),
    ]:  # fmt: skip
        q, k, v = rows(B)
        ours, counts = counted(lambda: attend(q, k, v, position_ids=positions))  # noqa: B023
        torch.testing.assert_close(ours, plain(None, q, k, v, tril() & apart(ends))[0])
        assert counts == {"clattn" if ends is together else PACKED: 1}


def test_a_mask_or_a_cache_leaves_rows_together():
    """What the user masks is no packed batch, nor are rows behind other keys."""
    make_mask = clattn.transformers.make_mask
    q, k, v = rows()
    for given in ({"attention_mask": torch.ones(1, 9, dtype=torch.bool)}, {}):
        mask = make_mask(1, 9, 9, **given)
        ours = attend(q, k, v, mask, position_ids=POSITIONS)
        right = tril() if given else tril() & BLOCKS
        torch.testing.assert_close(ours, plain(None, q, k, v, right)[0])
    q = q[:, :, 6:]
    ours = attend(q, k, v, make_mask(1, 3, 9, 6), position_ids=torch.tensor([[3, 4, 0]]))
    torch.testing.assert_close(ours, plain(None, q, k, v, tril()[6:])[0])


def test_offsets_of_rows_and_of_keys():
    """Rows are the last of their keys; those behind the last sequence are zeros."""
    q, k, v = rows(2, 3, 5)
    right = torch.zeros(2, 3, 8, 6)
    for row, key in [(slice(0, 2), slice(0, 4)), (slice(2, 5), slice(4, 7))]:
        flat = [one.transpose(1, 2).flatten(0, 1) for one in (q, k, v)]
        part = [
            one[None, at].transpose(1, 2) for one, at in zip(flat, (row, key, key), strict=True)
        ]
        n, m = part[0].shape[2], part[1].shape[2]
        seen = tril(m, m)[m - n :]
        right.view(6, 8, 6)[row] = plain(None, *part, seen)[0][0]
    lengths = {"cu_seq_lens_q": torch.tensor([0, 2, 5]), "cu_seq_lens_k": [0, 4, 7]}
    torch.testing.assert_close(attend(q, k, v, **lengths), right)


def test_offsets_win():
    """Over positions, and over the sequences that transformers has found."""
    q, k, v = rows()
    utils = transformers.masking_utils
    ids = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]])
    function = utils.and_masks(utils.causal_mask_function, utils.packed_sequence_mask_function(ids))
    mask = clattn.transformers.make_mask(1, 9, 9, mask_function=function)
    assert "packed" in repr(mask)
    others = {"position_ids": POSITIONS.flip(-1)}
    ours = attend(q, k, v, mask, cu_seq_lens_q=ENDS, **others)
    torch.testing.assert_close(ours, plain(None, q, k, v, tril() & BLOCKS)[0])
    ours = attend(q, k, v, mask, **others)
    torch.testing.assert_close(ours, plain(None, q, k, v, tril() & (ids[0] == ids[0][:, None]))[0])


def test_packed_rows_with_what_no_ragged_call_takes():
    """A padding or dense mask, a bias, weights, sinks of rows, dropout: by a mask of elements."""
    q, k, v = rows()
    packed, right = {"seq_idx": torch.tensor([[5, 5, 5, 1, 1, 1, 1, 1, 2]])}, tril() & BLOCKS
    generator = torch.Generator().manual_seed(3)
    bias, sinks = (
        torch.randn(shape, generator=generator) for shape in [(1, 8, 9, 9), (1, 8, 9, 1)]
    )
    keys = torch.arange(9) != 4
    padding = clattn.transformers.make_mask(1, 9, 9, attention_mask=keys[None])
    cases = [
        (None, {"position_bias": bias}, right, {"position_bias": bias}),
        (None, {"s_aux": sinks}, right, {"s_aux": sinks}),
        (None, {"output_attentions": True}, right, {}),
        (padding, {}, right & keys, {}),
        (keys.expand(1, 1, 9, 9), {}, BLOCKS & keys, {}),
        (bias, {}, BLOCKS, {"position_bias": bias}),
    ]
    for mask, options, seen, plainly in cases:
        ours, counts = counted(lambda: attend(q, k, v, mask, **packed, **options))  # noqa: B023
        torch.testing.assert_close(ours, plain(None, q, k, v, seen, **plainly)[0])
        assert counts == {DENSE: 1}
    assert (attend(q, k, v, dropout=1.0, **packed) == 0).all()
    some = {"cu_seq_lens_q": ENDS[:-1], "output_attentions": True}
    expected = plain(None, q, k, v, tril() & BLOCKS)[0]
    expected[:, 8] = 0  # of no sequence
    torch.testing.assert_close(attend(q, k, v, **some), expected)


def test_refused_offsets():
    q, k, v = rows(2, 3, 5)
    x, y, z = rows()
    refused = [
        (ValueError, "cu_seq_lens_k is not given, and there are 3 rows and 5 keys", q, k, v,
         {"cu_seq_lens_q": [0, 3]}),
        (ValueError, r"cu_seq_lens_q\[1\] is 7; expected at most 6, the rows of", q, k, v,
         {"cu_seq_lens_q": [0, 7], "cu_seq_lens_k": [0, 7]}),
        (ValueError, r"cu_seq_lens_k has shape \(3,\); expected \(2,\)", q, k, v,
         {"cu_seq_lens_q": [0, 6], "cu_seq_lens_k": [0, 3, 6]}),
        (TypeError, "cu_seq_lens_q must be integers", x, y, z,
         {"cu_seq_lens_q": torch.tensor([0.0, 9.0])}),
        (ValueError, "cu_seq_lens_q and cu_seq_lens_k differ", x, y, z,
         {"cu_seq_lens_q": [0, 9], "cu_seq_lens_k": [0, 8], "output_attentions": True}),
        (ValueError, r"seq_idx has shape \(1, 3\), for 2 x 3 rows and 5 keys", q, k, v,
         {"seq_idx": torch.zeros(1, 3, dtype=int), "is_causal": False}),
        (TypeError, r"seq_idx must be a torch\.Tensor, got list", x, y, z, {"seq_idx": [0] * 9}),
    ]  # fmt: skip
    for error, words, *tensors, options in refused:
        with pytest.raises(error, match=words):
            attend(*tensors, **options)


# ---- padded ----


def with_padding(B, L, S, offset, keys, function, size):
    """A mask, and the pairs that it allows."""
    given = {"attention_mask": keys, "mask_function": function, "local_size": size}
    mask = clattn.transformers.make_mask(B, L, S, offset, **given)
    return mask, mask.dense()


def test_padding_is_left_out(device, always_ragged):
    """Of runs of keys, whatever padded keys hold, in caches and beside each other."""
    utils = transformers.masking_utils
    at = torch.arange(9)
    left = at >= torch.tensor([0, 4, 8, 9])[:, None]  # the last sequence has no key
    right = at < torch.tensor([9, 5, 1, 3])[:, None]
    middle = (at >= 2) & right
    holes = at != torch.tensor([0, 4, 8, 5])[:, None]
    causal, window = utils.causal_mask_function, utils.sliding_window_causal_mask_function(3)
    both = utils.bidirectional_mask_function
    near = utils.sliding_window_bidirectional_mask_function(3)
    functions = [(causal, None), (window, 3), (both, None), (near, 3)]
    ragged = 0
    for (function, size), keys, (L, S) in itertools.product(
        functions, (left, right, middle, holes), ((9, 9), (1, 9), (3, 9), (9, 12))
    ):
        offset = 9 - L
        mask, seen = with_padding(4, L, S, offset, keys, function, size)
        for layout in ("BLHE", "BHLE", "odd"):
            q, k, v = rows(4, L, S)
            expected = plain(None, q, k, v, seen)[0]
            unseen = ~torch.nn.functional.pad(keys, (0, S - 9))[:, None, :, None]
            k, v = (one.masked_fill(unseen, NAN) for one in (k, v))
            if layout == "BHLE":
                k, v = k.contiguous(), v.contiguous()
            if layout == "odd":  # no whole number of keys from an entry to the next one
                k = k.new_full((4, 2 * S * 4 + 1), NAN)[:, :-1].view(4, 2, S, 4).copy_(k)
            ours, counts = counted(lambda: attend(q, k, v, mask))  # noqa: B023
            expected[expected.isnan()] = 0
            torch.testing.assert_close(ours, expected)
            ragged += counts[PADDED]
            if layout == "odd" or keys is holes or function is near:
                assert counts == {KEYS: 1}
            elif keys is left and function is not near:
                assert counts == {PADDED: 1}
    assert ragged == 2 * 4 * 2 + 2 * (4 * 3) + 2 * 2 * 2


def test_ragged_only_where_it_is_faster():
    """By the bytes of padding that rows would read, and its share of the keys."""
    shapes = [(8, 1, 2, 1024, 512, PADDED), (8, 1, 2, 1024, 700, KEYS), (8, 1, 2, 128, 8, KEYS)]
    shapes += [(8, 128, 2, 128, 8, PADDED)]
    for B, L, Hk, S, shortest, way in shapes:
        generator = torch.Generator().manual_seed(0)
        q = torch.randn(B, 8, L, 64, generator=generator)
        k, v = (torch.randn(B, Hk, S, 64, generator=generator) for _ in "kv")
        lengths = torch.linspace(shortest, S, B).int()
        padding = torch.arange(S) >= (S - lengths)[:, None]
        mask = clattn.transformers.make_mask(B, L, S, S - L, attention_mask=padding)
        ours, counts = counted(lambda: attend(q, k, v, mask))  # noqa: B023
        assert counts == {way: 1}
        right = attend(q, k, v, mask.dense())
        torch.testing.assert_close(ours, right, rtol=0, atol=1e-5)


def test_training_keeps_the_padding(always_ragged):
    q, k, v = (one.requires_grad_() for one in rows(3))
    mask = clattn.transformers.make_mask(3, 9, 9, attention_mask=LEFT)
    output, counts = counted(lambda: attend(q, k, v, mask))
    assert counts == {KEYS: 1}
    assert output.requires_grad


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "GPT-OSS"])
def test_text_of_a_padded_batch(device, always_ragged, family, cache):
    """Is that of each prompt alone, by "eager"."""
    model, eager = make(family), make(family, "eager")
    given = {"cache_implementation": cache}
    together, counts = counted(lambda: generate(model, IDS, LEFT, **given).sequences)
    assert counts[PADDED] >= 4
    # A window passes the padding. Keys and values may lie in different ways before a static cache.
    assert set(counts) <= {PADDED, KEYS, "clattn"}
    for tokens, mask, text in zip(IDS, LEFT, together, strict=True):
        prompt = tokens[mask][None]
        alone = generate(eager, prompt, torch.ones_like(prompt))
        assert torch.equal(text[9:], alone.sequences[0, prompt.shape[1] :])


def test_a_static_cache_is_read_as_far_as_it_is_filled(device, monkeypatch):
    """What lies behind, NaN here, is neither copied nor computed; no mask is made."""
    lengths = []
    attend = clattn.attention.scaled_dot_product_attention

    def watch(**options):
        lengths.append(options["key"].shape[2])
        assert options.get("attn_mask") is None
        return attend(**options)

    monkeypatch.setattr(clattn.attention, "scaled_dot_product_attention", watch)
    eager, model = make("Llama", "eager"), make("Llama")
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    cache.early_initialization(1, 2, 8, torch.float32, "cpu")
    for layer in cache.layers:
        layer.keys.fill_(NAN)
        layer.values.fill_(NAN)
    tokens, ones = TOKENS[:, :5], torch.ones(1, 5, dtype=int)
    with torch.inference_mode():
        right = eager(tokens, use_cache=False).logits
        found = [
            model(tokens[:, part], attention_mask=ones[:, : part.stop], cache=cache).logits
            for part in (slice(0, 3), slice(3, 4), slice(4, 5))
        ]
    torch.testing.assert_close(torch.cat(found, 1), right, rtol=0, atol=1e-4)
    assert lengths == [3, 3, 4, 4, 5, 5]
