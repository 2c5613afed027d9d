"""Which class of `transformers` computes what a model of ours does.

A field that a class does not support is refused by name: nobody would notice a checkpoint that loads but computes
something else.
"""

from enum import Enum
from typing import Any

from gpt_pretrain.config.choices import Activation, Normalization, PositionEmbedding
from gpt_pretrain.config.derived import kv_channels, num_query_groups
from gpt_pretrain.config.errors import ConfigError, show
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.extend.registry import registered_choice


class Architecture(Enum):
    """A `model_type` of `transformers`; the values are the classes."""

    gpt2 = "GPT2LMHeadModel"
    llama = "LlamaForCausalLM"
    mistral = "MistralForCausalLM"
    qwen2 = "Qwen2ForCausalLM"
    qwen3 = "Qwen3ForCausalLM"
    phi3 = "Phi3ForCausalLM"
    mixtral = "MixtralForCausalLM"
    qwen3_moe = "Qwen3MoeForCausalLM"
    smollm3 = "SmolLM3ForCausalLM"
    starcoder2 = "Starcoder2ForCausalLM"
    gpt_neox = "GPTNeoXForCausalLM"


# Activations of an MLP without a gate, and their names: those to write first, then others of the same functions.
PLAIN_ACTIVATIONS = {Activation.gelu_tanh: "gelu_new", Activation.gelu: "gelu", Activation.squared_relu: "relu2"}
PLAIN_ACTIVATION_NAMES = {name: activation for activation, name in PLAIN_ACTIVATIONS.items()} | dict.fromkeys(
    ("gelu_pytorch_tanh", "gelu_fast"), Activation.gelu_tanh
)

# The fields of ours that a class restricts, with the values that it supports.
type _Fields = dict[str, tuple[Any, ...]]
_NO_EXPERTS: _Fields = {"num_moe_experts": (None,)}
_NO_QK_NORM: _Fields = {"qk_layernorm": (False,)}
_QK_NORM: _Fields = {"qk_layernorm": (True,)}
_NO_BIAS: _Fields = {"bias": (False,), "qkv_bias": (False,)}
_GPT2: _Fields = {
    "position_embedding_type": (PositionEmbedding.learned_absolute,),
    "normalization": (Normalization.layernorm,),
    "activation": tuple(PLAIN_ACTIVATIONS),
    "bias": (True,),
}
_ROTATED: _Fields = {
    "position_embedding_type": (PositionEmbedding.rope,),
    "normalization": (Normalization.rmsnorm,),
    "activation": (Activation.swiglu,),
}
_WHOLE_HEADS: _Fields = {"rotary_percentage": (1.0,)}
_ALL_ROTATE: _Fields = {"no_rope_freq": (None,)}
_NO_WINDOW: _Fields = {"window_size": (None,)}
_ONE_WINDOW: _Fields = {"window_attn_skip_freq": (None,)}
_LLAMA: _Fields = {**_ROTATED, **_WHOLE_HEADS, **_ALL_ROTATE}
_PLAIN: _Fields = {**_GPT2, "position_embedding_type": (PositionEmbedding.rope,), **_ALL_ROTATE}
FIELDS: dict[Architecture, _Fields] = {
    Architecture.gpt2: {**_NO_EXPERTS, **_GPT2, **_NO_QK_NORM, **_NO_WINDOW},
    Architecture.llama: {**_LLAMA, **_NO_EXPERTS, **_NO_QK_NORM, **_NO_WINDOW},
    Architecture.mistral: {**_LLAMA, **_NO_EXPERTS, **_NO_QK_NORM, **_NO_BIAS, **_ONE_WINDOW},
    Architecture.qwen2: {**_LLAMA, **_NO_EXPERTS, **_NO_QK_NORM, "bias": (False,), "qkv_bias": (True,)},
    Architecture.qwen3: {**_LLAMA, **_NO_EXPERTS, **_NO_BIAS, **_QK_NORM},
    Architecture.phi3: {
        **_ROTATED,
        **_ALL_ROTATE,
        **_NO_EXPERTS,
        **_NO_QK_NORM,
        **_NO_BIAS,
        **_ONE_WINDOW,
        "rope_scaling_factor": (None,),
    },
    Architecture.mixtral: {**_LLAMA, **_NO_QK_NORM, **_NO_BIAS, **_ONE_WINDOW},
    Architecture.qwen3_moe: {**_LLAMA, **_NO_BIAS, **_QK_NORM, **_ONE_WINDOW},
    Architecture.smollm3: {**_ROTATED, **_WHOLE_HEADS, **_NO_EXPERTS, **_NO_QK_NORM},
    Architecture.starcoder2: {
        **_PLAIN,
        **_WHOLE_HEADS,
        **_NO_EXPERTS,
        **_NO_QK_NORM,
        **_ONE_WINDOW,
        "bias": (True, False),
    },
    Architecture.gpt_neox: {**_PLAIN, **_NO_EXPERTS, **_NO_QK_NORM, **_NO_WINDOW},
}
WITH_EXPERTS = (Architecture.mixtral, Architecture.qwen3_moe)
# Classes whose heads are hidden_size / num_attention_heads wide.
FIXED_HEADS = (
    Architecture.gpt2,
    Architecture.qwen2,
    Architecture.phi3,
    Architecture.starcoder2,
    Architecture.gpt_neox,
)
# Classes with a bias in all of attention's projections or in none.
_ONE_BIAS = (Architecture.llama, Architecture.smollm3, Architecture.starcoder2)


def choose_architecture(model: ModelConfig, wanted: Architecture | None = None) -> Architecture:
    """The class that computes what a model of ours computes: the wanted one, or the one that its fields imply.

    Mistral without its sliding window is Llama, so it has to be asked for. A ConfigError names every unsupported field.
    """
    if (own := registered_choice("layer", model.layer)) is not None:
        raise ConfigError([f"model.layer={model.layer.name}: no class of transformers computes {own}"])
    chosen = wanted or _implied(model)
    problems = [
        f"model.{name}={show(getattr(model, name))} is not supported by {chosen.value}, {rule}"
        for name, rule in _unsupported(model, chosen).items()
    ]
    if problems:
        raise ConfigError(problems)
    return chosen


def _implied(model: ModelConfig) -> Architecture:
    is_partial, has_experts = model.rotary_percentage < 1, model.num_moe_experts is not None
    is_plain = model.normalization is Normalization.layernorm and model.activation in PLAIN_ACTIVATIONS
    implied = [
        (model.position_embedding_type is PositionEmbedding.learned_absolute, Architecture.gpt2),
        (model.no_rope_freq is not None, Architecture.smollm3),
        (is_plain and is_partial, Architecture.gpt_neox),
        (is_plain, Architecture.starcoder2),
        (has_experts and model.qk_layernorm, Architecture.qwen3_moe),
        (has_experts, Architecture.mixtral),
        (model.qk_layernorm, Architecture.qwen3),
        (model.qkv_bias and not model.bias, Architecture.qwen2),
        (is_partial, Architecture.phi3),
        (model.window_attn_skip_freq is not None, Architecture.smollm3),
        (model.window_size is not None, Architecture.mistral),
    ]
    return next((architecture for holds, architecture in implied if holds), Architecture.llama)


def _unsupported(model: ModelConfig, architecture: Architecture) -> dict[str, str]:
    """Our fields that the class does not support, with its rule."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    rules = {
        name: f"which has {' or '.join(map(show, values))}"
        for name, values in FIELDS[architecture].items()
        if getattr(model, name) not in values
    }
    if model.value_embedding_freq is not None:
        rules["value_embedding_freq"] = "which has null: no class of transformers adds them"
    if model.final_logit_softcapping is not None:
        rules["final_logit_softcapping"] = "which caps no logits"
    if architecture in _ONE_BIAS and model.qkv_bias and not model.bias:
        rules["qkv_bias"] = "which has biases in all of attention's projections or in none (model.bias=false)"
    if architecture is Architecture.llama and hidden % heads:
        # LlamaConfig of `transformers` 5 refuses it at any head_dim; Mistral's class does not.
        rules["hidden_size"] = f"which takes multiples of model.num_attention_heads={heads}"
    if architecture in WITH_EXPERTS and model.num_moe_experts is None:
        rules["num_moe_experts"] = "which has experts"
    if architecture in (Architecture.gpt2, Architecture.gpt_neox) and num_query_groups(model) != heads:
        rules["num_query_groups"] = (
            f"which has as many key/value heads as query heads (model.num_attention_heads={heads})"
        )
    if architecture in FIXED_HEADS and kv_channels(model) * heads != hidden:
        rules["kv_channels"] = (
            f"whose heads are model.hidden_size / model.num_attention_heads = {hidden} / {heads} wide"
        )
    return rules
