"""Which class of `transformers` computes what a model of ours does, and its config.json, both ways.

Fields have the published names, as `transformers` 4 and 5 write them in `config.json`. A field that a class does not
support is refused by name: nobody would notice a checkpoint that loads but computes something else.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Any

from gpt_pretrain.config.choices import Activation, Normalization, PositionEmbedding
from gpt_pretrain.config.derived import ffn_hidden_size, kv_channels, moe_ffn_hidden_size, num_query_groups
from gpt_pretrain.config.errors import ConfigError, UserError, show
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


_GPT2_ACTIVATIONS = {Activation.gelu_tanh: "gelu_new", Activation.gelu: "gelu", Activation.squared_relu: "relu2"}
_GPT2_ACTIVATION_NAMES = {"gelu_pytorch_tanh": Activation.gelu_tanh} | {v: k for k, v in _GPT2_ACTIVATIONS.items()}

# The fields of ours that a class restricts, with the values that it supports.
type _Fields = dict[str, tuple[Any, ...]]
_NO_EXPERTS: _Fields = {"num_moe_experts": (None,)}
_NO_QK_NORM: _Fields = {"qk_layernorm": (False,)}
_QK_NORM: _Fields = {"qk_layernorm": (True,)}
_NO_BIAS: _Fields = {"bias": (False,), "qkv_bias": (False,)}
_GPT2: _Fields = {
    "position_embedding_type": (PositionEmbedding.learned_absolute,),
    "normalization": (Normalization.layernorm,),
    "activation": tuple(_GPT2_ACTIVATIONS),
    "bias": (True,),
}
_ROTATED: _Fields = {
    "position_embedding_type": (PositionEmbedding.rope,),
    "normalization": (Normalization.rmsnorm,),
    "activation": (Activation.swiglu,),
}
_LLAMA: _Fields = {**_ROTATED, "rotary_percentage": (1.0,)}
_FIELDS: dict[Architecture, _Fields] = {
    Architecture.gpt2: {**_NO_EXPERTS, **_GPT2, **_NO_QK_NORM},
    Architecture.llama: {**_LLAMA, **_NO_EXPERTS, **_NO_QK_NORM},
    Architecture.mistral: {**_LLAMA, **_NO_EXPERTS, **_NO_QK_NORM, **_NO_BIAS},
    Architecture.qwen2: {**_LLAMA, **_NO_EXPERTS, **_NO_QK_NORM, "bias": (False,), "qkv_bias": (True,)},
    Architecture.qwen3: {**_LLAMA, **_NO_EXPERTS, **_NO_BIAS, **_QK_NORM},
    Architecture.phi3: {**_ROTATED, **_NO_EXPERTS, **_NO_QK_NORM, **_NO_BIAS, "rope_scaling_factor": (None,)},
    Architecture.mixtral: {**_LLAMA, **_NO_QK_NORM, **_NO_BIAS},
    Architecture.qwen3_moe: {**_LLAMA, **_NO_BIAS, **_QK_NORM},
}
_WITH_EXPERTS = (Architecture.mixtral, Architecture.qwen3_moe)
# Classes whose heads are hidden_size / num_attention_heads wide.
_FIXED_HEADS = (Architecture.gpt2, Architecture.qwen2, Architecture.phi3)
# Default key/value heads of a config.json; other classes have as many as query heads.
_GROUPS = {Architecture.mistral: 8, Architecture.mixtral: 8, Architecture.qwen3_moe: 4}
# Default epsilons of the norms; other classes have 1e-6.
_EPSILONS = {Architecture.phi3: 1e-5, Architecture.mixtral: 1e-5}
# Fixed in megatron-core's rescaling of rope (RotaryEmbedding._apply_scaling): Llama 3.1's.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def choose_architecture(model: ModelConfig, wanted: Architecture | None = None) -> Architecture:
    """The class that computes what a model of ours computes: the wanted one, or the one that its fields imply.

    Mistral is Llama without its sliding window, so it has to be asked for. A ConfigError names every unsupported field.
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
    if model.position_embedding_type is PositionEmbedding.learned_absolute:
        return Architecture.gpt2
    if model.num_moe_experts is not None:
        return Architecture.qwen3_moe if model.qk_layernorm else Architecture.mixtral
    if model.qk_layernorm:
        return Architecture.qwen3
    if model.qkv_bias and not model.bias:
        return Architecture.qwen2
    return Architecture.phi3 if model.rotary_percentage < 1 else Architecture.llama


def _unsupported(model: ModelConfig, architecture: Architecture) -> dict[str, str]:
    """Our fields that the class does not support, with its rule."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    rules = {
        name: f"which has {' or '.join(map(show, values))}"
        for name, values in _FIELDS[architecture].items()
        if getattr(model, name) not in values
    }
    if architecture is Architecture.llama and model.qkv_bias and not model.bias:
        rules["qkv_bias"] = "which has biases in all of attention's projections or in none (model.bias=false)"
    if architecture is Architecture.llama and hidden % heads:
        # LlamaConfig of `transformers` 5 refuses it at any head_dim; Mistral's class does not.
        rules["hidden_size"] = f"which takes multiples of model.num_attention_heads={heads}"
    if architecture in _WITH_EXPERTS and model.num_moe_experts is None:
        rules["num_moe_experts"] = "which has experts"
    if architecture is Architecture.gpt2 and num_query_groups(model) != heads:
        rules["num_query_groups"] = (
            f"which has as many key/value heads as query heads (model.num_attention_heads={heads})"
        )
    if architecture in _FIXED_HEADS and kv_channels(model) * heads != hidden:
        rules["kv_channels"] = (
            f"whose heads are model.hidden_size / model.num_attention_heads = {hidden} / {heads} wide"
        )
    return rules


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
            "activation_function": _GPT2_ACTIVATIONS[model.activation],
            "layer_norm_epsilon": model.layernorm_epsilon,
            "embd_pdrop": model.hidden_dropout,
            "resid_pdrop": model.hidden_dropout,
            "attn_pdrop": model.attention_dropout,
        }
    factor = model.rope_scaling_factor
    llama = {
        **common,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": ffn_hidden_size(model),
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": num_query_groups(model),
        "max_position_embeddings": model.max_position_embeddings,
        "hidden_act": "silu",
        "rms_norm_eps": model.layernorm_epsilon,
        "rope_theta": float(model.rotary_base),
        "rope_scaling": None if factor is None else {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE},
        "attention_dropout": model.attention_dropout,
    }
    head_dim = {} if architecture in _FIXED_HEADS else {"head_dim": kv_channels(model)}
    own: dict[Architecture, dict[str, Any]] = {
        Architecture.llama: {"attention_bias": model.bias, "mlp_bias": model.bias},
        Architecture.mistral: {"sliding_window": None},
        Architecture.qwen2: {"use_sliding_window": False},
        Architecture.qwen3: {"use_sliding_window": False, "attention_bias": False},
        # The class's default padding token lies beyond smaller vocabularies.
        Architecture.phi3: {
            "partial_rotary_factor": model.rotary_percentage,
            "sliding_window": None,
            "pad_token_id": None,
        },
        # The load-balancing loss is left out: it belongs to training, and theirs differs, a mean over all layers.
        Architecture.mixtral: {
            "intermediate_size": moe_ffn_hidden_size(model),
            "num_local_experts": model.num_moe_experts,
            "num_experts_per_tok": model.moe_router_topk,
            "sliding_window": None,
        },
        Architecture.qwen3_moe: {
            "moe_intermediate_size": moe_ffn_hidden_size(model),
            "num_experts": model.num_moe_experts,
            "num_experts_per_tok": model.moe_router_topk,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "use_sliding_window": False,
            "attention_bias": False,
        },
    }
    return {**llama, **head_dim, **own[architecture]}


def from_hf_config(values: Mapping[str, Any], origin: str) -> tuple[Architecture, dict[str, Any]]:
    """The architecture of a published model, and the fields of `model.` that make ours compute the same.

    A UserError names every field that is missing or asks for what no model of ours computes.
    """
    reader = _HfConfig(values, origin)
    known = Architecture.__members__
    architecture = known.get(str(values.get("model_type")))
    if architecture is None:
        raise UserError(
            f"{origin}: model_type={values.get('model_type')!r} cannot be imported; known: {', '.join(known)}"
        )
    if values.get("quantization_config") is not None:
        reader.refuse("quantization_config", "import the model's unquantized weights")
    fields = reader.gpt2() if architecture is Architecture.gpt2 else reader.llama(architecture)
    fields |= {
        "vocab_size": reader.integer("vocab_size"),
        "share_embeddings_and_output_weights": reader.boolean("tie_word_embeddings", architecture is Architecture.gpt2),
        "init_method_std": reader.number("initializer_range", 0.02),
    }
    if reader.problems:
        raise UserError("\n".join(reader.problems))
    return architecture, fields


class _HfConfig:
    """A config.json, read field by field; `problems` collects the mistakes. Defaults are those of the classes."""

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self._values = values
        self._origin = origin
        self.problems: list[str] = []

    def refuse(self, name: str, why: str, default: Any = None) -> None:
        """Adds a problem; `default` is what a missing field means."""
        is_given = name in self._values
        told = f"{name}={show(self._values[name])}" if is_given else f"{name}, left out, is {show(default)} and"
        self.problems.append(f"{self._origin}: {told} cannot be imported: {why}")

    def integer(self, name: str, default: float | None = None) -> int:
        return int(self._number(name, self._given(name, default), whole=True))

    def number(self, name: str, default: float) -> float:
        return float(self._number(name, self._given(name, default), whole=False))

    def _given(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        return default if value is None else value

    def _number(self, name: str, value: Any, *, whole: bool) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or (whole and value != int(value)):
            what = " is missing" if value is None else f"={show(value)} is not a {'whole ' * whole}number"
            self.problems.append(f"{self._origin}: {name}{what}")
            return 1
        return value

    def boolean(self, name: str, default: bool) -> bool:
        return bool(self._values.get(name, default))

    def _expect(self, name: str, default: Any, expected: Any, why: str) -> None:
        if self._values.get(name, default) != expected:
            self.refuse(name, why, default)

    def gpt2(self) -> dict[str, Any]:
        """The fields of a GPT2Config."""
        hidden = self.integer("n_embd")
        activation = str(self._values.get("activation_function", "gelu_new"))
        if activation not in _GPT2_ACTIVATION_NAMES:
            self.refuse("activation_function", f"known are {', '.join(_GPT2_ACTIVATION_NAMES)}")
        self._expect("scale_attn_weights", True, True, "scores are divided by the root of a head's width here")
        self._expect("scale_attn_by_inverse_layer_idx", False, False, "all layers scale attention alike here")
        self._expect("add_cross_attention", False, False, "there is no cross attention here")
        return {
            "num_layers": self.integer("n_layer"),
            "hidden_size": hidden,
            "ffn_hidden_size": self.integer("n_inner", 4 * hidden),
            "num_attention_heads": self.integer("n_head"),
            "num_query_groups": None,
            "kv_channels": None,
            "max_position_embeddings": self.integer("n_positions"),
            "position_embedding_type": PositionEmbedding.learned_absolute.name,
            "normalization": Normalization.layernorm.name,
            "layernorm_epsilon": self.number("layer_norm_epsilon", 1e-5),
            "activation": _GPT2_ACTIVATION_NAMES.get(activation, Activation.gelu_tanh).name,
            "bias": True,
            "qkv_bias": False,
            "qk_layernorm": False,
        }

    def llama(self, architecture: Architecture) -> dict[str, Any]:
        """The fields of a configuration of Llama's family."""
        heads, hidden = self.integer("num_attention_heads"), self.integer("hidden_size")
        length = self.integer("max_position_embeddings")
        self._expect("hidden_act", "silu", "silu", "a gated MLP uses SiLU here")
        # MistralConfig's default is the window of Mistral 7B v0.1; Phi3Config and MixtralConfig default to none.
        default = 4096 if architecture not in (Architecture.phi3, Architecture.mixtral) else None
        has_no_switch = architecture in (Architecture.mistral, Architecture.phi3, Architecture.mixtral)
        is_window_on = self.boolean("use_sliding_window", has_no_switch)
        window = self._values.get("sliding_window", default)
        # One as long as the longest sequence hides nothing.
        if is_window_on and window is not None and self.integer("sliding_window", default) < length:
            self.refuse("sliding_window", "attention sees the whole sequence here, as in Mistral 7B v0.3", default)
        if architecture in (Architecture.qwen3, Architecture.qwen3_moe):
            self._expect("attention_bias", False, False, "its class then has biases in all of attention's projections")
        bias = architecture is Architecture.llama and self.boolean("attention_bias", False)
        if architecture is Architecture.llama and self.boolean("mlp_bias", False) != bias:
            self.refuse("mlp_bias", "all linear layers have biases here, or none has (attention_bias differs)")
        return {
            "num_layers": self.integer("num_hidden_layers"),
            "hidden_size": hidden,
            "ffn_hidden_size": self.integer("intermediate_size"),
            "num_attention_heads": heads,
            "num_query_groups": self.integer("num_key_value_heads", _GROUPS.get(architecture, heads)),
            "kv_channels": None if self._values.get("head_dim") is None else self.integer("head_dim"),
            "max_position_embeddings": length,
            "position_embedding_type": PositionEmbedding.rope.name,
            **self._rope(architecture),
            "normalization": Normalization.rmsnorm.name,
            "layernorm_epsilon": self.number("rms_norm_eps", _EPSILONS.get(architecture, 1e-6)),
            "activation": Activation.swiglu.name,
            "bias": bias,
            "qkv_bias": architecture is Architecture.qwen2,
            "qk_layernorm": architecture in (Architecture.qwen3, Architecture.qwen3_moe),
            **(self._experts(architecture) if architecture in _WITH_EXPERTS else {}),
        }

    def _experts(self, architecture: Architecture) -> dict[str, Any]:
        # `transformers` knows the count by two names.
        count = "num_experts" if "num_experts" in self._values else "num_local_experts"
        fields = {"num_moe_experts": self.integer(count), "moe_router_topk": self.integer("num_experts_per_tok")}
        if architecture is Architecture.mixtral:
            self._expect("router_jitter_noise", 0.0, 0.0, "routers add no noise to their input here")
            return fields
        self._expect("norm_topk_prob", False, True, "the weights of a token's experts add up to 1 here")
        self._expect("decoder_sparse_step", 1, 1, "every layer has experts here, or none has")
        if self._values.get("mlp_only_layers"):
            self.refuse("mlp_only_layers", "every layer has experts here, or none has")
        return fields | {"moe_ffn_hidden_size": self.integer("moe_intermediate_size", 768)}

    def _rope(self, architecture: Architecture) -> dict[str, Any]:
        """From `rope_parameters`, which `transformers` 5 writes, or `rope_theta` and `rope_scaling` before it."""
        written = self._values.get("rope_parameters")
        name = "rope_parameters" if isinstance(written, dict) else "rope_scaling"
        scaling = self._values.get(name)
        scaling = scaling if isinstance(scaling, dict) else {}
        share = scaling.get("partial_rotary_factor", self._values.get("partial_rotary_factor", 1.0))
        if share != 1.0 and architecture is not Architecture.phi3:
            self.refuse(name, "this class rotates whole heads")
        default = 1e6 if architecture is Architecture.mixtral else 1e4
        base = scaling.get("rope_theta", self._values.get("rope_theta", default))
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        rescaled = {key: scaling.get(key) for key in _LLAMA3_ROPE}
        is_llama3 = kind == "llama3" and rescaled == _LLAMA3_ROPE and isinstance(scaling.get("factor"), int | float)
        if kind != "default" and not is_llama3:
            only = ", ".join(f"{key}={show(value)}" for key, value in _LLAMA3_ROPE.items())
            self.refuse(name, f"the only rescaled rope here is Llama 3.1's: rope_type=llama3 with a factor, and {only}")
        return {
            "rotary_percentage": share,
            "rotary_base": int(self._number("rope_theta", base, whole=True)),
            "rope_scaling_factor": float(scaling["factor"]) if is_llama3 else None,
        }
