"""Models by their names on the Hugging Face hub, and fields of a `config.json`, as presets and keys of ours."""

from collections.abc import Mapping
from typing import Any

from gpt_pretrain.translate.translation import ANOTHER_MODEL, WINDOW, Becomes, NoNeed, NotHere, Row, becomes, table

_QWEN3_SIZES = ("0.6b", "1.7b", "4b", "8b", "14b", "32b")
# The last part of a repository's name, in lower case.
PRESETS: Mapping[str, str] = {
    "gpt2": "gpt2_124m",
    "gpt2-medium": "gpt2_355m",
    "gpt2-xl": "gpt2_1_5b",
    "llama-2-7b-hf": "llama2_7b",
    "meta-llama-3-8b": "llama3_8b",
    "meta-llama-3-70b": "llama3_70b",
    "llama-3-8b": "llama3_8b",
    "llama-3-70b": "llama3_70b",
    "llama-3.1-8b": "llama3_1_8b",
    "meta-llama-3.1-8b": "llama3_1_8b",
    "mistral-7b-v0.3": "mistral_7b",
    "mistral-nemo-base-2407": "mistral_nemo_12b",
    "mixtral-8x7b-v0.1": "mixtral_8x7b",
    "phi-4": "phi4",
    "qwen2.5-7b": "qwen2_5_7b",
    **{f"qwen3-{size}{base}": f"qwen3_{size.replace('.', '_')}" for size in _QWEN3_SIZES for base in ("", "-base")},
    "qwen3-30b-a3b": "qwen3_30b_a3b",
    "qwen3-30b-a3b-base": "qwen3_30b_a3b",
    "smollm3-3b": "smollm3_3b",
    "smollm3-3b-base": "smollm3_3b",
}


def preset_named(name: str) -> str | None:
    """The preset that has the architecture of a repository; None if none has."""
    return PRESETS.get(name.rpartition("/")[2].lower())


# Of Llama's, Mistral's, Qwen's and Mixtral's classes.
_TABLE: Mapping[str, Row] = {
    **becomes("""
    num_hidden_layers=model.num_layers hidden_size=model.hidden_size intermediate_size=model.ffn_hidden_size
    moe_intermediate_size=model.moe_ffn_hidden_size num_attention_heads=model.num_attention_heads
    num_key_value_heads=model.num_query_groups head_dim=model.kv_channels vocab_size=model.vocab_size
    max_position_embeddings=model.max_position_embeddings rms_norm_eps=model.layernorm_epsilon
    tie_word_embeddings=model.share_embeddings_and_output_weights initializer_range=model.init_method_std
    attention_dropout=model.attention_dropout attention_bias=model.qkv_bias num_local_experts=model.num_moe_experts
    num_experts=model.num_moe_experts num_experts_per_tok=model.moe_router_topk
    router_aux_loss_coef=model.moe_aux_loss_coeff
    """),
    "rope_theta": Becomes("model.rotary_base", int),
    "hidden_act": Becomes("model.activation", {"silu": "swiglu"}, there="the MLP's activation", here=ANOTHER_MODEL),
    "rope_scaling": NotHere("rope was stretched", "model.rope_scaling_factor stretches it as Llama 3.1 does"),
    "sliding_window use_sliding_window": WINDOW,
    """
    architectures max_window_layers bos_token_id eos_token_id use_cache _target_ torch_dtype
    """: NoNeed("training does not read it"),
}
FIELDS = table(_TABLE)


def is_inline(values: Mapping[str, Any], section: str) -> bool:
    """Whether a section has a model's sizes and not only its name."""
    return f"{section}.num_hidden_layers" in values
