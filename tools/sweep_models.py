# SPDX-License-Identifier: MIT
"""Compares attn_implementation="clattn" with "eager" in every text model of transformers.

    python tools/sweep_models.py [FAMILY …]

A family is a model type, such as gpt_oss. The families are those whose code calls the attention
interface and whose configuration has a vocabulary. Each is built with small sizes and drawn
weights. Four settings are compared: a batch without padding, one padded on the left, one padded on
the right, and greedy generation with a cache from the batch padded on the left. A row of the
Markdown table has the largest difference of each setting, divided by the largest logit. Logits of
padding tokens do not count. The line behind the table counts the verdicts. A model that cannot be
built or run with "eager" says nothing about clattn, and the last column has its error.
"""

import argparse
import copy
import inspect
import sys
import warnings
from datetime import UTC, datetime

import clattn.transformers
import torch
import transformers
from transformers.models.auto import modeling_auto

# A family that has several models is tried with the last.
MAPPINGS = (
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)
SETTINGS = "no padding", "left", "right", "generation"
ALLOWED = 1e-3  # of the largest logit
LARGEST = 1e8  # weights of a model
SHORT = 9  # tokens of a sequence, more than a window

# Values of a configuration's attributes, where it has them.
SMALL = {
    97: "vocab_size unpadded_vocab_size vocab_size_per_layer_input shape_vocab_size",
    64: """hidden_size d_model n_embd dim embedding_size word_embed_proj_dim
           max_position_embeddings n_positions n_ctx max_seq_len max_source_positions
           max_target_positions""",
    96: """intermediate_size ffn_hidden_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff dff
           hidden_dim""",
    32: "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size q_lora_rank",
    16: """mamba_d_state mamba_chunk_size chunk_size ssm_state_size
           head_dim d_kv v_head_dim qk_rope_head_dim qk_nope_head_dim swa_head_dim index_head_dim
           kv_lora_rank rotary_dim linear_head_dim linear_key_head_dim linear_value_head_dim
           hidden_size_per_layer_input""",
    8: "mamba_n_heads mamba_num_heads",
    4: """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers
          num_decoder_layers num_attention_heads n_head n_heads num_heads encoder_attention_heads
          decoder_attention_heads swa_num_attention_heads index_n_heads linear_num_heads
          linear_num_value_heads num_experts num_local_experts n_routed_experts moe_num_experts""",
    3: "sliding_window sliding_window_size attention_chunk_size local_attention",
    2: """num_key_value_heads swa_num_key_value_heads linear_num_key_heads num_experts_per_tok
          num_experts_per_token moe_topk moe_k zero_expert_num index_topk
          layer_group_size attn_layer_period""",
    1: """n_group num_expert_group topk_group n_shared_experts n_input_layers n_output_layers
          num_codebooks bos_token_id""",
    0: "pad_token_id",
    None: "eos_token_id",
}
# What a family needs beside, or in the place of these.
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
FAMILIES = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}
    },
    "dory": {"n_recurrent_layers": 2},
    "esmc": {"num_key_value_heads": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_offset": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["full_attention"] * 4},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "zaya": {"num_experts_per_tok": 1},
}


def find_families(wanted):
    """The model classes by model type: of all families, or of those that are wanted."""
    names = {family: name for mapping in MAPPINGS for family, name in mapping.items()}
    found = {}
    for family in sorted(wanted or names):
        name = names[family]
        model = getattr(transformers, name if isinstance(name, str) else name[0])
        config = model.config_class
        calls = "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(sys.modules[model.__module__])
        if calls and not config.sub_configs and "vocab_size" in config().to_dict():
            found[config.model_type] = model  # a family with images may have the same
    return found


def build(family, model):
    """A small model with drawn weights, which are large enough that attention matters."""
    usual = model.config_class().to_dict()
    sizes = {
        name: value for value, names in SMALL.items() for name in names.split() if name in usual
    }
    if "kv_lora_rank" in usual:  # latent attention has a key head for each query head
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    config = model.config_class(**sizes | FAMILIES.get(family, {}))
    with torch.device("meta"):
        weights = model._from_config(copy.deepcopy(config)).num_parameters()
    if weights > LARGEST:
        raise ValueError(f"{weights:.0e} weights; expected {LARGEST:.0e} at most")
    torch.manual_seed(0)
    made = model._from_config(config)
    for name, weights in made.named_parameters():
        if weights.dim() > 1 or name.endswith("sinks"):
            torch.nn.init.normal_(weights, std=0.2)
    return made.eval()


def run(model):
    """The logits of each setting."""
    tokens = torch.randint(3, 97, (3, SHORT), generator=torch.Generator().manual_seed(1))
    left = torch.arange(SHORT) >= torch.tensor([0, 4, SHORT - 1])[:, None]
    writes = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    for mask in (None, left, left.flip(1)):
        given = {} if mask is None else {"attention_mask": mask.long()}
        logits = model(tokens, **given, **writes).logits
        yield logits if mask is None or writes else logits[mask]
    start = {"decoder_start_token_id": 0} if writes else {}
    if model.can_generate():
        made = model.generate(
            tokens, attention_mask=left.long(), max_new_tokens=6, do_sample=False,
            output_logits=True, return_dict_in_generate=True, **start,
        )  # fmt: skip
        yield torch.stack(made.logits)


def run_with(model, implementation):
    model.set_attn_implementation(implementation)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(run(model))


def compare(family, model):
    """The largest differences, and the verdict."""
    try:
        made = build(family, model)
        expected = run_with(made, "eager")
    except Exception as error:
        return [], f"not built: {describe(error)}"
    calls = []
    attend = transformers.AttentionInterface()["clattn"]
    watch = lambda *given, **options: calls.append(1) or attend(*given, **options)  # noqa: E731
    transformers.AttentionInterface.register("clattn", watch)
    try:
        found = run_with(made, "clattn")
    except Exception as error:
        return [], f"fails: {describe(error)}"
    finally:
        transformers.AttentionInterface.register("clattn", attend)
    errors = [
        ((one - other).abs().max() / other.abs().max()).item()
        for one, other in zip(found, expected, strict=True)
    ]
    agrees = all(error <= ALLOWED for error in errors)
    return errors, "differs" if not agrees else "agrees" if calls else "keeps its own attention"


def describe(error):
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__} {lines[0]}"[:72].replace("|", "/")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("family", nargs="*", help="model types; by default all")
    wanted = parser.parse_args(arguments).family
    transformers.logging.set_verbosity_error()
    clattn.transformers.register()
    families = find_families(wanted)
    verdicts = {}
    print("| family |", " | ".join(SETTINGS), "| verdict |")
    print("|---" * (len(SETTINGS) + 2) + "|")
    for family, model in families.items():
        errors, verdict = compare(family, model)
        verdicts.setdefault(verdict.partition(":")[0], []).append(family)
        cells = [f"{error:.0e}" for error in errors] + ["-"] * (len(SETTINGS) - len(errors))
        print("|", " | ".join([family, *cells, verdict]), "|", flush=True)
    print()
    print(
        f"{datetime.now(UTC):%Y-%m-%d}, transformers {transformers.__version__}, torch "
        f"{torch.__version__}: "
        + ", ".join(f"{len(names)} {verdict}" for verdict, names in verdicts.items())
    )
    return int("differs" in verdicts or "fails" in verdicts)


if __name__ == "__main__":
    torch.set_num_threads(1)  # models are small
    sys.exit(main())
