"""The config.json of a model of ours; fields have the names that `transformers` 4 and 5 read."""

from typing import Any

from gpt_pretrain.config.choices import Activation
from gpt_pretrain.config.derived import ffn_hidden_size, kv_channels, moe_ffn_hidden_size, num_query_groups
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.huggingface.architectures import FIXED_HEADS, PLAIN_ACTIVATIONS, Architecture

# Fixed in megatron-core's rescaling of rope (RotaryEmbedding._apply_scaling): Llama 3.1's.
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

# Of a layer without a window, and of one with it.
LAYER_TYPES = ("full_attention", "sliding_attention")


def to_hf_config(
    model: ModelConfig, architecture: Architecture, *, torch_dtype: str, end_token_id: int | None
) -> dict[str, Any]:
    """The content of a model's config.json."""
    common = {
        "architectures": [architecture.value],
        "model_type": architecture.name,
        "torch_dtype": torch_dtype,
        "vocab_size": model.vocab_size,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": model.share_embeddings_and_output_weights,
        "bos_token_id": None,
        "eos_token_id": end_token_id,
        "use_cache": True,
    }
    if architecture is Architecture.gpt2:
        return {
            **common,
            "n_layer": model.num_layers,
            "n_embd": model.hidden_size,
            "n_head": model.num_attention_heads,
            "n_inner": ffn_hidden_size(model),
            "n_positions": model.max_position_embeddings,
            "activation_function": PLAIN_ACTIVATIONS[model.activation],
            "layer_norm_epsilon": model.layernorm_epsilon,
            "embd_pdrop": model.hidden_dropout,
            "resid_pdrop": model.hidden_dropout,
            "attn_pdrop": model.attention_dropout,
        }
    decoder = {
        **common,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": ffn_hidden_size(model),
        "num_attention_heads": model.num_attention_heads,
        "max_position_embeddings": model.max_position_embeddings,
        "rope_scaling": _rope_scaling(model),
        "attention_dropout": model.attention_dropout,
    }
    if architecture is Architecture.gpt_neox:
        return {
            **decoder,
            "hidden_act": PLAIN_ACTIVATIONS[model.activation],
            "layer_norm_eps": model.layernorm_epsilon,
            "rotary_emb_base": float(model.rotary_base),
            "rotary_pct": model.rotary_percentage,
            "hidden_dropout": model.hidden_dropout,
            "use_parallel_residual": False,
            "attention_bias": True,
        }
    window, layer_types = sliding_window(model)
    decoder |= {"num_key_value_heads": num_query_groups(model), "rope_theta": float(model.rotary_base)}
    if architecture is Architecture.starcoder2:
        tanh = model.activation is Activation.gelu_tanh
        return {
            **decoder,
            "hidden_act": "gelu_pytorch_tanh" if tanh else PLAIN_ACTIVATIONS[model.activation],
            "norm_epsilon": model.layernorm_epsilon,
            "use_bias": model.bias,
            "sliding_window": window,
            "residual_dropout": model.hidden_dropout,
            "embedding_dropout": model.hidden_dropout,
        }
    llama = {**decoder, "hidden_act": "silu", "rms_norm_eps": model.layernorm_epsilon}
    head_dim = {} if architecture in FIXED_HEADS else {"head_dim": kv_channels(model)}
    own: dict[Architecture, dict[str, Any]] = {
        Architecture.llama: {"attention_bias": model.bias, "mlp_bias": model.bias},
        Architecture.mistral: {"sliding_window": window},
        Architecture.qwen2: layer_types,
        Architecture.qwen3: {**layer_types, "attention_bias": False},
        # The class's default padding token lies beyond smaller vocabularies.
        Architecture.phi3: {
            "partial_rotary_factor": model.rotary_percentage,
            "sliding_window": window,
            "pad_token_id": None,
        },
        # The load-balancing loss is left out: it belongs to training, and theirs differs, a mean over all layers.
        Architecture.mixtral: {
            "intermediate_size": moe_ffn_hidden_size(model),
            "num_local_experts": model.num_moe_experts,
            "num_experts_per_tok": model.moe_router_topk,
            "sliding_window": window,
        },
        Architecture.qwen3_moe: {
            "moe_intermediate_size": moe_ffn_hidden_size(model),
            "num_experts": model.num_moe_experts,
            "num_experts_per_tok": model.moe_router_topk,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "attention_bias": False,
        },
        Architecture.smollm3: {
            "no_rope_layers": rotating_layers(model.num_layers, model.no_rope_freq),
            # The list decides; the class would not take null.
            "no_rope_layer_interval": model.no_rope_freq or 4,
            **layer_types,
            "attention_bias": model.bias,
            "mlp_bias": model.bias,
            "pad_token_id": None,
        },
    }
    return {**llama, **head_dim, **own[architecture]}


def _rope_scaling(model: ModelConfig) -> dict[str, Any] | None:
    factor, original = model.rope_scaling_factor, model.yarn_original_max_position_embeddings
    if factor is None:
        return None
    if original is None:
        return {"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}


def sliding_window(model: ModelConfig) -> tuple[int | None, dict[str, Any]]:
    """The tokens of a window, itself included, and the fields of classes with a list of the layers that have it."""
    if model.window_size is None:
        return None, {"use_sliding_window": False}
    have_it = model.window_attn_skip_freq or [1] * model.num_layers
    window, first = model.window_size[0] + 1, have_it.index(1)
    return window, {
        "use_sliding_window": True,
        "sliding_window": window,
        "layer_types": [LAYER_TYPES[has_it] for has_it in have_it],
        # Older versions have no list, and give the window to all layers after the first ones.
        **({"max_window_layers": first} if all(have_it[first:]) else {}),
    }


def rotating_layers(num_layers: int, no_rope_freq: int | None) -> list[int]:
    """1 for each layer with rope and 0 for each without, as SmolLM 3 lists them."""
    return [1 if no_rope_freq is None else int((layer + 1) % no_rope_freq != 0) for layer in range(num_layers)]
