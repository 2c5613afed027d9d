"""Megatron-LM's arguments as a checkpoint keeps them, and the keys of `model.` that describe the same model.

In one direction the table of `translate` says what each argument becomes. The other one is checked by it: what is
written has to come back as the same model.
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from gpt_pretrain.checkpoint.state import describe_weights
from gpt_pretrain.config.choices import Activation, Normalization
from gpt_pretrain.config.derived import (
    ffn_hidden_size,
    kv_channels,
    moe_ffn_hidden_size,
    num_query_groups,
    padded_vocab_size,
    uses_yarn,
)
from gpt_pretrain.config.errors import ConfigError, UserError, show, written
from gpt_pretrain.config.schema import Config, ModelConfig
from gpt_pretrain.huggingface.import_hf import BESIDE_WEIGHTS
from gpt_pretrain.rules.jobs import load_config
from gpt_pretrain.translate import megatron_lm
from gpt_pretrain.translate.megatron_arguments import megatron_parser
from gpt_pretrain.translate.megatron_options import ROWS
from gpt_pretrain.translate.translation import Source, Translation, translate_source

# Names of earlier versions.
_RENAMED = {"norm_epsilon": "layernorm_epsilon", "apply_layernorm_1p": "layernorm_zero_centered_gamma"}
# Arguments without counterpart that a training run may do without, but not weights that were trained with them.
_CHANGES_RESULTS = ("layernorm_zero_centered_gamma", "moe_router_pre_softmax", "use_mup")
_NORMS = {Normalization.layernorm: "LayerNorm", Normalization.rmsnorm: "RMSNorm"}
_VOCABULARY = "model.vocab_size"


def fields_of(arguments: Mapping[str, Any], origin: str) -> dict[str, tuple[Any, str]]:
    """The keys that describe a model, each with its value and the arguments that say so.

    Raises:
        UserError: The model does what no model here does.
    """
    known = {_RENAMED.get(name, name): value for name, value in arguments.items()}
    frequency = known.get("moe_layer_freq")
    if isinstance(frequency, list) and set(frequency) == {1}:
        known["moe_layer_freq"] = 1
    source = Source(
        program="Megatron-LM",
        values=vars(megatron_parser().parse_known_args([])[0]) | known,
        given={name: f"{name}={show(value)}" for name, value in known.items()},
    )
    translation = Translation(program="Megatron-LM", name="imported")
    try:
        translate_source(ROWS, megatron_lm.derive, source, translation)
    except ConfigError as error:
        raise UserError(f"the arguments in {origin} cannot be read: {error}") from error
    lost = [each for each in translation.lost if each.setting.partition("=")[0] in known]
    others = [each for each in lost if each.changes_model or each.setting.partition("=")[0] in _CHANGES_RESULTS]
    if others:
        raise UserError(f"{origin} holds a model that is none of this program's: {'; '.join(x.text for x in others)}")
    described = _described()
    fields = {key: (setting.value, setting.origin) for key, setting in translation.settings.items() if key in described}
    if "model.max_position_embeddings" in fields:
        fields.setdefault("model.encoder_seq_length", fields["model.max_position_embeddings"])
    return fields


def _described() -> set[str]:
    """The names of all keys that describe a model's weights."""
    keys = ["position_embedding_type=learned_absolute", "no_rope_freq=1", "window_size=[1,0]"]
    keys += ["rope_scaling_factor=2", "yarn_original_max_position_embeddings=1"]
    experts = load_config(["model=mixtral_8x7b", *(f"model.{key}" for key in keys)])
    return {*describe_weights(experts.model), *(f"model.{name}" for name in BESIDE_WEIGHTS)}


def configure(fields: Mapping[str, tuple[Any, str]] | None, overrides: Sequence[str], rows: int, origin: str) -> Config:
    """The configuration of a checkpoint's model: by its arguments, by `overrides`, or by both, which then must agree.

    `rows` are those of its embedding.

    Raises:
        UserError: They do not, or there is neither.
    """
    of_arguments = [f"{key}={written(value)}" for key, (value, _) in (fields or {}).items()]
    if fields is None and not overrides:
        raise UserError(
            f"{origin} holds no arguments of Megatron-LM; describe the model as for a run, with "
            "overrides=[experiment=…] or [model=…,model.vocab_size=…]"
        )
    if any(override.startswith(("model=", "experiment=")) for override in overrides):
        config = load_config(overrides)
    else:
        config = load_config(["model=base", *of_arguments, *overrides])
    if fields is not None:
        own = describe_weights(load_config(["model=base", *of_arguments]).model)
        ours = describe_weights(config.model)
        different = [
            f"{key}={ours.get(key, 'null')} ({fields[key][1] if key in fields else own.get(key, 'null')} there)"
            for key in sorted(own.keys() | ours.keys())
            if key != _VOCABULARY and ours.get(key) != own.get(key)
        ]
        if different:
            raise UserError(f"{origin} holds another model: {', '.join(different)}; correct overrides")
    if config.model.vocab_size > rows:
        raise UserError(
            f"model.vocab_size={config.model.vocab_size:,}, but the embedding in {origin} has {rows:,} rows; give the "
            "number of tokens that it was trained with"
        )
    return config


def arguments_of(model: ModelConfig, dtype: torch.dtype, origin: str) -> Namespace:
    """Megatron-LM's arguments for a model, as its --use-checkpoint-args reads them.

    Raises:
        UserError: There are none for it.
    """
    groups, heads, experts = num_query_groups(model), model.num_attention_heads, model.num_moe_experts
    factor, original = model.rope_scaling_factor, model.yarn_original_max_position_embeddings
    arguments = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": ffn_hidden_size(model),
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
        "kv_channels": kv_channels(model),
        "seq_length": model.encoder_seq_length,
        "max_position_embeddings": model.max_position_embeddings,
        "position_embedding_type": "yarn" if uses_yarn(model) else model.position_embedding_type.value,
        "rotary_base": model.rotary_base,
        "rotary_percent": model.rotary_percentage,
        "use_rope_scaling": factor is not None and not uses_yarn(model),
        "rope_scaling_factor": factor or 8.0,
        "rotary_scaling_factor": factor if uses_yarn(model) else 1.0,
        "yarn_original_max_position_embeddings": original if uses_yarn(model) else None,
        "no_rope_freq": model.no_rope_freq,
        "window_size": None if model.window_size is None else tuple(model.window_size),
        "window_attn_skip_freq": model.window_attn_skip_freq,
        "normalization": _NORMS[model.normalization],
        "layernorm_epsilon": model.layernorm_epsilon,
        "swiglu": model.activation is Activation.swiglu,
        "squared_relu": model.activation is Activation.squared_relu,
        "bias_gelu_fusion": model.activation is Activation.gelu_tanh,
        "add_bias_linear": model.bias,
        "add_qkv_bias": model.qkv_bias,
        "qk_layernorm": model.qk_layernorm,
        "untie_embeddings_and_output_weights": not model.share_embeddings_and_output_weights,
        "num_experts": experts,
        "moe_ffn_hidden_size": None if experts is None else moe_ffn_hidden_size(model),
        "moe_router_topk": model.moe_router_topk,
        "moe_router_dtype": "fp32",
        "make_vocab_size_divisible_by": model.make_vocab_size_divisible_by,
        "padded_vocab_size": padded_vocab_size(model),
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "ckpt_format": "torch_dist",
    }
    back = fields_of(arguments, origin)
    wrong = [
        f"{key}={text}"
        # An export has no multipliers of muP.
        for key, text in describe_weights(replace(model, use_mup=False)).items()
        if key != _VOCABULARY and (key not in back or written(back[key][0]) != text)
    ]
    if wrong:
        raise UserError(f"{origin}: Megatron-LM has no arguments for a model with {', '.join(wrong)}")
    return Namespace(**arguments)


def options_beside(model: ModelConfig) -> list[str]:
    """Options for what Megatron-LM's --use-checkpoint-args leaves to the command line (`load_args_from_checkpoint`)."""
    options = ["--use-checkpoint-args", "--norm-epsilon", show(model.layernorm_epsilon)]
    if model.qk_layernorm:
        options.append("--qk-layernorm")
    if uses_yarn(model):
        options += ["--rotary-scaling-factor", show(model.rope_scaling_factor)]
        options += ["--yarn-original-max-position-embeddings", show(model.yarn_original_max_position_embeddings)]
    elif model.rope_scaling_factor is not None:
        options += ["--use-rope-scaling", "--rope-scaling-factor", show(model.rope_scaling_factor)]
    if model.no_rope_freq is not None:
        options += ["--no-rope-freq", show(model.no_rope_freq)]
    if model.window_size is not None:
        options += ["--window-size", ",".join(map(str, model.window_size))]
    if model.window_attn_skip_freq is not None:
        options += ["--window-attn-skip-freq", written(model.window_attn_skip_freq)]
    if model.activation is Activation.gelu:
        # Fused with the bias it would be the tanh form.
        options.append("--no-bias-gelu-fusion")
    if model.num_moe_experts is not None:
        options += ["--moe-router-dtype", "fp32"]
    return options
