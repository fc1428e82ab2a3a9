# SPDX-License-Identifier: MIT
"""Tiny models of transformers with drawn weights, and attention as it is defined, `plain`."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers", "5.4")

import clattn.transformers  # noqa: E402

SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 8, "max_position_embeddings": 64, "pad_token_id": 0}  # fmt: skip
WRITES = SIZES | {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": None}
GPT_OSS = {"head_dim": 16, "sliding_window": 3, "num_local_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK = {"num_key_value_heads": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "n_routed_experts": 4,
            "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 24, "n_group": 2,
            "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "first_k_dense_replace": 1}  # fmt: skip
GEMMA = {"head_dim": 16, "sliding_window": 3, "query_pre_attn_scalar": 16}
T5 = {"vocab_size": 97, "d_model": 64, "d_kv": 8, "d_ff": 96, "num_layers": 2, "num_heads": 8,
      "decoder_start_token_id": 0}  # fmt: skip
LLAMA4 = {"attention_chunk_size": 4, "num_local_experts": 2, "head_dim": 16,
          "intermediate_size_mlp": 96}  # fmt: skip
BART = {"vocab_size": 97, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 8, "decoder_attention_heads": 8, "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96, "max_position_embeddings": 64}  # fmt: skip

# Windows, chunks and soft caps bind at nine tokens. The families of docs/transformers.md.
FAMILIES = {
    "Llama": ("LlamaForCausalLM", WRITES),
    "Qwen 3": ("Qwen3ForCausalLM", WRITES | {"head_dim": 16}),
    "Mistral": ("MistralForCausalLM", WRITES | {"sliding_window": 3}),
    "Gemma 2": ("Gemma2ForCausalLM", WRITES | GEMMA | {"attn_logit_softcapping": 0.5}),
    "Gemma 3": ("Gemma3ForCausalLM", WRITES | GEMMA),
    "GPT-OSS": ("GptOssForCausalLM", WRITES | GPT_OSS),
    "Llama 4": ("Llama4ForCausalLM", WRITES | LLAMA4),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", WRITES | DEEPSEEK),
    "BERT": ("BertForMaskedLM", SIZES),
    "ModernBERT": ("ModernBertForMaskedLM", SIZES | {"local_attention": 4}),
    "T5": ("T5ForConditionalGeneration", T5),
    "BART": ("BartForConditionalGeneration", BART),
}
WRITERS = [
    name for name, (_, sizes) in FAMILIES.items() if sizes is not SIZES and "BERT" not in name
]


def plain(module, query, key, value, mask, scaling=None, softcap=None, s_aux=None, **options):
    """Attention with every score in memory, in the dtype of query."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if options.get("position_bias") is not None:
        scores = scores + options["position_bias"]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    sinks = -torch.inf if s_aux is None else s_aux if s_aux.dim() == 4 else s_aux[:, None, None]
    scores = torch.cat([torch.zeros_like(scores[..., :1]) + sinks, scores], -1)
    weights = torch.nan_to_num(scores.softmax(-1))[..., 1:]  # a row without keys is NaN
    return (weights @ value).transpose(1, 2), None


def plain_mask(**options):
    return transformers.masking_utils.sdpa_mask(**options | {"allow_is_causal_skip": False})


@pytest.fixture(autouse=True)
def registered(request):
    here = "device" in request.fixturenames
    clattn.transformers.register(request.getfixturevalue("device") if here else None)
    transformers.AttentionInterface.register("plain", plain)
    transformers.AttentionMaskInterface.register("plain", plain_mask)


def make(family, implementation="clattn", dtype=torch.float32):
    """The same weights each time; of a few units, so that what a row attends to matters."""
    name, sizes = FAMILIES[family]
    kind = getattr(transformers, name)
    config = kind.config_class(**sizes)
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation=implementation)
    model.set_experts_implementation("eager")  # the others have no float64
    for name, weights in model.named_parameters():
        if weights.dim() > 1 or name.endswith("sinks"):
            torch.nn.init.normal_(weights, std=0.3)
    return model.eval().to(dtype)


IDS = torch.randint(3, 97, (3, 9), generator=torch.Generator().manual_seed(1))
LEFT = torch.arange(9) >= torch.tensor([0, 4, 8])[:, None]
RIGHT = torch.arange(9) < torch.tensor([9, 5, 1])[:, None]


def logits(model, mask=None):
    """Of the tokens that are no padding."""
    more = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    given = {} if mask is None else {"attention_mask": mask.long()}
    with torch.inference_mode():
        result = model(IDS, **given, **more).logits
    return result if more or mask is None else result[mask]


def generate(model, ids=IDS, mask=LEFT, **options):
    return model.generate(
        ids, attention_mask=mask.long(), max_new_tokens=7, min_new_tokens=7, do_sample=False,
        output_logits=True, return_dict_in_generate=True, **options,
    )  # fmt: skip
