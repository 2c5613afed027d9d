"""Reads a published model's config.json as fields of `model.`.

Fields have the published names, as `transformers` 4 and 5 write them. One that no model of ours computes is refused by
name.
"""

from collections.abc import Mapping
from typing import Any

from gpt_pretrain.config.choices import Activation, Normalization, PositionEmbedding
from gpt_pretrain.config.errors import UserError, show
from gpt_pretrain.huggingface.architectures import PLAIN_ACTIVATION_NAMES, WITH_EXPERTS, Architecture
from gpt_pretrain.huggingface.config_json import LAYER_TYPES, LLAMA3_ROPE, rotating_layers

# Default key/value heads of a config.json; other classes have as many as query heads.
_GROUPS = {Architecture.mistral: 8, Architecture.mixtral: 8, Architecture.qwen3_moe: 4, Architecture.smollm3: 4}
# Default epsilons of the norms; other classes have 1e-6.
_EPSILONS = {Architecture.phi3: 1e-5, Architecture.mixtral: 1e-5}
# Default thetas of rope; other classes have 1e4.
_THETAS = {Architecture.mixtral: 1e6, Architecture.smollm3: 2e6}
# YaRN's settings that may be left out, with values that are the paper's.
_YARN: Mapping[str, tuple[Any, ...]] = {
    "beta_fast": (None, 32),
    "beta_slow": (None, 1),
    "truncate": (None, True),
    "attention_factor": (None,),
    "mscale": (None,),
    "mscale_all_dim": (None,),
}
# Default deviations of initial weights; other classes have 0.02.
_STDS = {Architecture.starcoder2: 0.018042}
# Default windows of classes that have one; Llama's and GPT-NeoX's have none.
_WINDOWS = {
    Architecture.mistral: 4096,
    Architecture.qwen2: 4096,
    Architecture.qwen3: 4096,
    Architecture.qwen3_moe: 4096,
    Architecture.phi3: None,
    Architecture.mixtral: None,
    Architecture.starcoder2: None,
    Architecture.smollm3: None,
}
# Those whose window is off unless use_sliding_window is true, and of them those that list the layers that have it.
_SWITCHED = (Architecture.qwen2, Architecture.qwen3, Architecture.qwen3_moe, Architecture.smollm3)
_BY_LAYER = (Architecture.qwen2, Architecture.qwen3, Architecture.smollm3)
# Classes whose embeddings are tied unless their config.json says otherwise.
_TIED = (Architecture.gpt2, Architecture.smollm3, Architecture.starcoder2)
_POST_NORMS = "it normalizes what attention and MLP add, and megatron-core's layers what these read"
_PARALLEL = "its attention and MLP read one norm's output, and megatron-core's MLP reads what attention has added"
_LATENT = "it has latent attention and experts that all tokens share, which are not built here"
_ALIBI = "its attention has linear biases (ALiBi) in place of rope, which megatron-core has not"
# Known models that no layer here computes: a field of config.json or a part that says so, and why.
NOT_HERE = {
    "gemma": ("hidden_act", "GELU gates its MLP and its embeddings are scaled, which is not built here"),
    "gemma2": ("post_feedforward_layernorm", _POST_NORMS),
    "gemma3_text": ("post_feedforward_layernorm", _POST_NORMS),
    "olmo2": ("post_feedforward_layernorm", _POST_NORMS),
    "olmo3": ("post_feedforward_layernorm", _POST_NORMS),
    "granite": ("residual_multiplier", "it scales what each layer adds, and megatron-core's layers add it as it is"),
    "qwen2_moe": ("shared_expert_gate", "it has an expert that all tokens share, behind a gate, not built here"),
    "gpt_oss": ("sinks", "its attention has sinks, and its experts biases and a clamped gate, not built here"),
    "deepseek_v2": ("kv_lora_rank", _LATENT),
    "deepseek_v3": ("kv_lora_rank", _LATENT),
    "phi": ("input_layernorm", _PARALLEL),
    "falcon": ("parallel_attn", _PARALLEL),
    "gptj": ("ln_1", _PARALLEL),
    "cohere": ("input_layernorm", _PARALLEL),
    "bloom": ("word_embeddings_layernorm", _ALIBI),
    "mpt": ("attn_config", _ALIBI),
    "opt": ("activation_function", "its MLP has ReLU, which is not built here"),
}


def from_hf_config(values: Mapping[str, Any], origin: str) -> tuple[Architecture, dict[str, Any]]:
    """The architecture of a published model, and the fields of `model.` that make ours compute the same.

    A UserError names every field that is missing or asks for what no model of ours computes.
    """
    reader = _HfConfig(values, origin)
    known = Architecture.__members__
    architecture = known.get(str(values.get("model_type")))
    if architecture is None:
        kind = values.get("model_type")
        part, why = NOT_HERE.get(str(kind), ("", ""))
        why = why and f": {why} ({part})"
        raise UserError(f"{origin}: model_type={kind!r} cannot be imported{why}; known: {', '.join(known)}")
    if values.get("quantization_config") is not None:
        reader.refuse("quantization_config", "import the model's unquantized weights")
    if architecture is Architecture.gpt2:
        fields = reader.gpt2()
    elif architecture in (Architecture.starcoder2, Architecture.gpt_neox):
        fields = reader.plain(architecture)
    else:
        fields = reader.llama(architecture)
    fields |= {
        "vocab_size": reader.integer("vocab_size"),
        "share_embeddings_and_output_weights": reader.boolean("tie_word_embeddings", architecture in _TIED),
        "init_method_std": reader.number("initializer_range", _STDS.get(architecture, 0.02)),
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

    def _plain_activation(self, name: str, default: str) -> str:
        """The activation of an MLP without a gate."""
        activation = str(self._values.get(name, default))
        if activation not in PLAIN_ACTIVATION_NAMES:
            self.refuse(name, f"known are {', '.join(PLAIN_ACTIVATION_NAMES)}", default)
        return PLAIN_ACTIVATION_NAMES.get(activation, Activation.gelu_tanh).name

    def gpt2(self) -> dict[str, Any]:
        """The fields of a GPT2Config."""
        hidden = self.integer("n_embd")
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
            "activation": self._plain_activation("activation_function", "gelu_new"),
            "bias": True,
            "qkv_bias": False,
            "qk_layernorm": False,
        }

    def llama(self, architecture: Architecture) -> dict[str, Any]:
        """The fields of a configuration of Llama's family."""
        heads, hidden = self.integer("num_attention_heads"), self.integer("hidden_size")
        length = self.integer("max_position_embeddings")
        self._expect("hidden_act", "silu", "silu", "a gated MLP uses SiLU here")
        if architecture in (Architecture.qwen3, Architecture.qwen3_moe):
            self._expect("attention_bias", False, False, "its class then has biases in all of attention's projections")
        no_rope_freq = self._no_rope_freq() if architecture is Architecture.smollm3 else None
        has_biases = architecture in (Architecture.llama, Architecture.smollm3)
        bias = has_biases and self.boolean("attention_bias", False)
        if has_biases and self.boolean("mlp_bias", False) != bias:
            self.refuse("mlp_bias", "all linear layers have biases here, or none has (attention_bias differs)")
        return {
            "num_layers": self.integer("num_hidden_layers"),
            "hidden_size": hidden,
            "ffn_hidden_size": self.integer("intermediate_size"),
            "num_attention_heads": heads,
            "num_query_groups": self.integer("num_key_value_heads", _GROUPS.get(architecture, heads)),
            "kv_channels": self._head_dim(),
            "max_position_embeddings": length,
            "position_embedding_type": PositionEmbedding.rope.name,
            **self._rope(architecture),
            "no_rope_freq": no_rope_freq,
            **self._window(architecture, length, no_rope_freq),
            "normalization": Normalization.rmsnorm.name,
            "layernorm_epsilon": self.number("rms_norm_eps", _EPSILONS.get(architecture, 1e-6)),
            "activation": Activation.swiglu.name,
            "bias": bias,
            "qkv_bias": architecture is Architecture.qwen2,
            "qk_layernorm": architecture in (Architecture.qwen3, Architecture.qwen3_moe),
            **(self._experts(architecture) if architecture in WITH_EXPERTS else {}),
        }

    def _window(self, architecture: Architecture, length: int, no_rope_freq: int | None = None) -> dict[str, Any]:
        """The sliding window, and the layers that have it."""
        none = {"window_size": None, "window_attn_skip_freq": None}
        default = _WINDOWS.get(architecture)
        is_on = architecture in _WINDOWS and self.boolean("use_sliding_window", architecture not in _SWITCHED)
        if not is_on or self._values.get("sliding_window", default) is None:
            return none
        window = self.integer("sliding_window", default)
        layers = self._windowed_layers(architecture, no_rope_freq) if architecture in _BY_LAYER else None
        # One as long as the longest sequence hides nothing.
        if window >= length or (layers is not None and 1 not in layers):
            return none
        return {"window_size": [window - 1, 0], "window_attn_skip_freq": layers}

    def _windowed_layers(self, architecture: Architecture, no_rope_freq: int | None) -> list[int] | None:
        """1 for each layer that has the window and 0 for the others; None: all have it."""
        num_layers, listed = self.integer("num_hidden_layers"), self._values.get("layer_types")
        if isinstance(listed, list) and all(kind in LAYER_TYPES for kind in listed) and len(listed) == num_layers:
            layers = [LAYER_TYPES.index(kind) for kind in listed]
        elif listed is not None:
            self.refuse("layer_types", f"it has {' or '.join(LAYER_TYPES)} for each layer")
            return None
        elif architecture is Architecture.smollm3:
            layers = [1 - rotates for rotates in rotating_layers(num_layers, no_rope_freq)]
        else:
            first = self.integer("max_window_layers", 28)
            layers = [int(layer >= first) for layer in range(num_layers)]
        return None if 0 not in layers else layers

    def plain(self, architecture: Architecture) -> dict[str, Any]:
        """The fields of a class with rope, LayerNorm and an MLP without a gate."""
        is_neox = architecture is Architecture.gpt_neox
        heads, length = self.integer("num_attention_heads"), self.integer("max_position_embeddings")
        if is_neox:
            why = "here the MLP reads what attention has added; Pythia and GPT-NeoX-20B compute both from one input"
            self._expect("use_parallel_residual", True, False, why)
            self._expect("attention_bias", True, True, "all linear layers have biases here, or none has")
        return {
            "num_layers": self.integer("num_hidden_layers"),
            "hidden_size": self.integer("hidden_size"),
            "ffn_hidden_size": self.integer("intermediate_size"),
            "num_attention_heads": heads,
            "num_query_groups": None if is_neox else self.integer("num_key_value_heads", 2),
            "kv_channels": self._head_dim(),
            "max_position_embeddings": length,
            "position_embedding_type": PositionEmbedding.rope.name,
            **self._rope(architecture),
            **self._window(architecture, length),
            "normalization": Normalization.layernorm.name,
            "layernorm_epsilon": self.number("layer_norm_eps" if is_neox else "norm_epsilon", 1e-5),
            "activation": self._plain_activation("hidden_act", "gelu" if is_neox else "gelu_pytorch_tanh"),
            "bias": is_neox or self.boolean("use_bias", True),
            "qkv_bias": False,
            "qk_layernorm": False,
        }

    def _head_dim(self) -> int | None:
        return None if self._values.get("head_dim") is None else self.integer("head_dim")

    def _no_rope_freq(self) -> int | None:
        """Every how many layers one has no rope."""
        listed = self._values.get("no_rope_layers")
        if listed is None:
            return self.integer("no_rope_layer_interval", 4)
        if not isinstance(listed, list) or len(listed) < self.integer("num_hidden_layers"):
            self.refuse("no_rope_layers", "it has a number for each layer")
            return None
        freq = listed.index(0) + 1 if 0 in listed else None
        if listed != rotating_layers(len(listed), freq):
            self.refuse("no_rope_layers", "every n-th layer has no rope here, or all layers have it")
        return freq

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
        # GPTNeoXConfig has its own names, and another default.
        is_neox = architecture is Architecture.gpt_neox
        factor, theta = ("rotary_pct", "rotary_emb_base") if is_neox else ("partial_rotary_factor", "rope_theta")
        share = scaling.get("partial_rotary_factor", self._values.get(factor, 0.25 if is_neox else 1.0))
        if share != 1.0 and architecture not in (Architecture.phi3, Architecture.gpt_neox):
            self.refuse(name, "this class rotates whole heads")
        base = scaling.get("rope_theta", self._values.get(theta, _THETAS.get(architecture, 1e4)))
        stretch, original = self._stretching(name, scaling)
        if original is not None and architecture is Architecture.phi3:
            self.refuse(name, "this class has its own way to long contexts, longrope")
        return {
            "rotary_percentage": share,
            "rotary_base": int(self._number("rope_theta", base, whole=True)),
            "rope_scaling_factor": stretch,
            "yarn_original_max_position_embeddings": original,
        }

    def _stretching(self, name: str, scaling: Mapping[str, Any]) -> tuple[float | None, int | None]:
        """The factor that stretches rope, and the context from which YaRN does; `name` is the field of `scaling`."""
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind == "default":
            return None, None
        factor, fits = scaling.get("factor"), False
        if kind == "llama3":
            fits = all(scaling.get(key) == value for key, value in LLAMA3_ROPE.items())
        elif kind == "yarn":
            fits = all(scaling.get(key) in values for key, values in _YARN.items())
        if fits and isinstance(factor, int | float):
            if kind == "llama3":
                return float(factor), None
            length = scaling.get("original_max_position_embeddings", self._values.get("max_position_embeddings"))
            return float(factor), int(self._number("original_max_position_embeddings", length, whole=True))
        fixed = ", ".join(f"{key}={show(value)}" for key, value in LLAMA3_ROPE.items())
        self.refuse(
            name,
            f"rope is stretched here as in Llama 3.1 (rope_type=llama3 with a factor, and {fixed}), or by YaRN as in "
            f"its paper (rope_type=yarn with a factor, without {', '.join(_YARN)})",
        )
        return None, None
